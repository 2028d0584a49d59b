"""
openpi's messages for LIBERO: one observation per request, ``actions`` in the reply.

Pictures are 180 degrees turned against those of the environment (``LIBERO-v0`` gives them as OpenGL draws them), and of
any size, 224 pixels in openpi's own clients. This module is the one place that knows it, for both directions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: Camera of LIBERO-v0 -> its entry in a request.
CAMERAS = {"agentview": "observation/image", "wrist": "observation/wrist_image"}
STATE, PROMPT, SEED = "observation/state", "prompt", "seed"
#: Edge in pixels of the frames that openpi's LIBERO client renders, and of the pictures that it sends.
FRAME_SIZE, PICTURE_SIZE = 256, 224


def read_observation(
    request: Mapping[str, Any], cameras: Sequence[str], state_dim: int | None, frame_size: int | None = None
) -> tuple[dict[str, np.ndarray], str, int | None]:
    """
    Turn a request into what a VLA of this package reads.

    :param request: With the entries of :data:`CAMERAS`, :data:`STATE` (P,), :data:`PROMPT`, and perhaps :data:`SEED`,
        which openpi does not have: the seed of a stochastic VLA's noise.
    :param cameras: Cameras that the VLA needs.
    :param state_dim: Numbers P of the state; ``None`` = any.
    :param frame_size: Edge in pixels to which pictures are resized; ``None`` = as they are.
    :return: Observation of one row, instruction, and seed.
    :raises ValueError: If an entry is missing or has another form.
    """
    foreign = [camera for camera in cameras if camera not in CAMERAS]
    if foreign:
        raise ValueError(f"openpi's observations of LIBERO have no picture for the cameras {foreign}.")
    entries = [*(CAMERAS[camera] for camera in cameras), STATE, PROMPT]
    missing = [entry for entry in entries if entry not in request]
    if missing:
        raise ValueError(f"The observation lacks {missing}; openpi's form for LIBERO has {entries}.")
    obs = {camera: _frame(request[CAMERAS[camera]], CAMERAS[camera], frame_size)[None] for camera in cameras}
    state, prompt, seed = np.asarray(request[STATE]), request[PROMPT], request.get(SEED)
    if state.dtype.kind not in "fiu" or state.ndim != 1 or state_dim not in (None, len(state)):
        raise ValueError(f"{STATE} must be {state_dim or 'some'} numbers, got {state.dtype} {state.shape}.")
    if not np.isfinite(state).all():
        raise ValueError(f"{STATE} has NaN or infinite values.")
    if not isinstance(prompt, str):
        raise ValueError(f"{PROMPT} must be a text, got {type(prompt).__name__}.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0):
        raise ValueError(f"{SEED} must be an integer from 0 on, got {str(seed)[:40]}.")
    return {**obs, "state": state.astype(np.float32)[None]}, prompt, None if seed is None else int(seed)


def write_observation(
    obs: Mapping[str, np.ndarray], task: str, row: int = 0, size: int | None = PICTURE_SIZE, seed: int | None = None
) -> dict[str, Any]:
    """
    Turn a row of an environment's observation into a request.

    :param obs: As :data:`~rlt_gym.vla.base.VLAObs`.
    :param task: Instruction.
    :param row: Which row.
    :param size: Edge in pixels of the pictures; ``None`` = as they are.
    :param seed: See :func:`read_observation`; ``None`` = leave it out, as openpi does.
    :return: The request.
    """
    pictures = {
        entry: _resized(np.ascontiguousarray(obs[camera][row][::-1, ::-1]), size)
        for camera, entry in CAMERAS.items()
        if camera in obs
    }
    state = np.array(obs["state"][row], dtype=np.float32)
    return {**pictures, STATE: state, PROMPT: task, **({} if seed is None else {SEED: seed})}


def reply(actions: np.ndarray, obs: Mapping[str, np.ndarray], began: float) -> dict[str, Any]:
    """
    Make a reply.

    :param actions: Float32 (T, d).
    :param obs: What :func:`read_observation` gave.
    :param began: When the policy began, by ``time.perf_counter()``.
    :return: What openpi's clients read.
    """
    timing = {"infer_ms": 1000.0 * (time.perf_counter() - began)}
    return {"actions": np.array(actions, dtype=np.float32), "state": obs["state"][0], "policy_timing": timing}


def read_actions(message: Mapping[str, Any], server: str) -> np.ndarray:
    """
    Read the actions of a reply.

    :param message: The reply.
    :param server: Address, for messages.
    :return: Float32 (T, d), limited to [-1, 1] as the environment's are.
    :raises ValueError: If there are none, or they are not finite.
    """
    actions = message.get("actions")
    if not isinstance(actions, np.ndarray) or actions.dtype.kind != "f" or actions.ndim != 2 or not actions.size:
        raise ValueError(f"{server} gave no actions (T, d), but the entries {sorted(map(str, message))[:8]}.")
    if not np.isfinite(actions).all():
        raise ValueError(f"{server} gave actions that are NaN or infinite.")
    return np.clip(actions, -1.0, 1.0).astype(np.float32)


def _frame(picture: Any, entry: str, size: int | None) -> np.ndarray:
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        have = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise ValueError(f"{entry} must be uint8 (height, width, 3), got {have}.")
    if size is not None and picture.shape[0] != picture.shape[1]:
        raise ValueError(f"{entry} must be as high as it is wide, got {picture.shape}: pad or crop it.")
    if not picture.size:
        raise ValueError(f"{entry} is empty, {picture.shape}.")
    return np.ascontiguousarray(_resized(picture, size)[::-1, ::-1])


def _resized(picture: np.ndarray, size: int | None) -> np.ndarray:
    """Resize to a square as openpi's clients do: bilinear, with PIL."""
    if size is None or picture.shape[:2] == (size, size):
        return picture
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR))
