"""A policy of LeRobot as a :class:`~rlt_gym.vla.base.FrozenVLA`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlt_gym.core.gripper import Gripper
from rlt_gym.vla.base import ORIENTATIONS, TOKEN_KINDS, VLAObs, VLAOutput, VLASpec, fingerprint
from rlt_gym.vla.lerobot.checkpoint import find_backbone, find_checkpoint, load_policy, made_from, read_config
from rlt_gym.vla.lerobot.gradients import gradients_of_type
from rlt_gym.vla.lerobot.policies import READERS, HookReader, Reader, random_numbers
from rlt_gym.vla.lerobot.processors import load_processors, precision, reads_language, see_picture
from rlt_gym.vla.normalization import to_chunk

#: Camera of the environment -> how LeRobot's datasets of LIBERO call its pictures.
CAMERAS: dict[str, tuple[str, ...]] = {
    "agentview": ("images.image", "image", "images.agentview", "images.agentview_image", "images.front"),
    "wrist": ("images.image2", "images.wrist_image", "wrist_image", "images.wrist", "images.eye_in_hand"),
}
#: Entries of a configuration that say where or how it was trained, not what the policy does.
_NO_MATTER = ("device", "push_to_hub", "repo_id", "private", "tags", "license", "vlm_model_name", "load_vlm_weights")


class LeRobotVLA:
    """
    A checkpoint of LeRobot.

    :param name: The folder, or ``owner/name`` of the model hub.
    :param device: Where it runs; the weights are read onto it.
    :param dtype: In which type it calculates: ``"float32"``, ``"bfloat16"`` or ``"float16"``; ``None`` = as the
        checkpoint says.
    :param cameras: Camera of the environment -> feature of the policy, e.g. ``{"wrist": "observation.images.hand"}``;
        ``None`` = by the names that LeRobot's datasets of LIBERO have.
    :param orientation: What is done with the environment's pictures, a name of
        :data:`~rlt_gym.vla.base.ORIENTATIONS`. LeRobot's datasets of LIBERO have them ``"turned"`` by 180 degrees.
    :param gripper: What the gripper's number in the actions means, a name of :class:`~rlt_gym.core.gripper.Gripper`.
    :param max_batch: Most rows of one forward pass; ``None`` = any number.
    :param control_frequency: Control steps per second of its chunks; the checkpoint does not say it. LIBERO makes 20.
    :param render: How the pictures of its dataset were drawn, ``"exact"`` or ``"fast"``, and ...
    :param assets: ... with which meshes (``"embedded"``, ``"official"``); ``None`` = what ``provenance.json`` in the
        checkpoint says, which ``examples/lerobot/pack.py`` writes: LeRobot itself does not store it.
    :param backbone: Folder or hub name of the language model and tokenizer, if they are not where the checkpoint says.
    :param config: Other values for entries of the policy's configuration, e.g. ``{"num_inference_steps": 10}``.
    :param hook: For policies beyond ACT, Diffusion, SmolVLA, PI0 and PI05, or to read other tokens: path of the module
        whose output the tokens are (:class:`~rlt_gym.vla.lerobot.policies.HookReader`).
    :param layout: How this output is laid out, a pattern of einops, e.g. ``"m b h -> b m h"``.
    :param kind: Kind of these tokens.
    :param revision: Branch, tag or commit on the model hub.
    :param trust_image_stats: Accept a checkpoint whose statistics of pictures cannot be right.
    :raises ValueError: If there is no such checkpoint, or something does not fit.
    """

    learner = "rlt_gym.vla.lerobot.learner:LeRobotLearner"

    def __init__(
        self,
        name: str,
        device: torch.device | str = "cpu",
        dtype: str | None = None,
        cameras: Mapping[str, str] | None = None,
        orientation: str = "turned",
        gripper: str = "env",
        max_batch: int | None = None,
        control_frequency: float | None = None,
        render: str | None = None,
        assets: str | None = None,
        backbone: str | None = None,
        config: Mapping[str, Any] | None = None,
        hook: str | None = None,
        layout: str | None = None,
        kind: str = "image",
        revision: str | None = None,
        trust_image_stats: bool = False,
    ) -> None:
        arguments = {key: value for key, value in locals().items() if key not in ("self", "name", "device", "revision")}
        if orientation not in ORIENTATIONS:
            raise ValueError(f"orientation may be {', '.join(ORIENTATIONS)}, got {orientation!r}.")
        if gripper not in list(Gripper):
            raise ValueError(f"gripper may be {', '.join(Gripper)}, got {gripper!r}.")
        self.folder = find_checkpoint(name, revision)
        self._device = torch.empty(0, device=device).device
        self._config = read_config(self.folder, self._device, dtype, config)
        self._features = _features(self._config, cameras)
        self._sizes = {camera: _size(self._config, key) for camera, key in self._features.items()}
        if hasattr(self._config, "vlm_model_name"):
            self._config.vlm_model_name = find_backbone(self.folder, self._config.vlm_model_name, backbone)
        self._backbone, self._trust = backbone, trust_image_stats
        self._pre, self._post = load_processors(self.folder, self._config, backbone, trust_image_stats)
        #: What LeRobot's trainer trains of the policy: names of parameters.
        self.trained: frozenset[str]
        self.policy, self.trained = load_policy(self.folder, self._config, dtype)
        self._dtype, self._hook, self._arguments = dtype, hook, arguments
        self._settings = {"features": self._features, "orientation": orientation, "gripper": gripper, "hook": hook}
        self._settings |= {"layout": layout, "kind": kind, "dtype": dtype}
        #: What a copy needs beside files and weights, plain data (:mod:`rlt_gym.vla.lerobot.gradients`).
        self.copied: dict[str, Any] = {key: self._settings[key] for key in ("features", "orientation", "gripper")}
        self.copied |= {"dtype": dtype, "config": dict(config or {}), "trust_image_stats": trust_image_stats}
        self._orientation, self._gripper = orientation, Gripper(gripper)
        self._digest: str | None = None
        self._max_tokens: int | None = None
        self._grids: tuple[tuple[int, int], ...] | None = None
        self._reader = _reader(self.policy, self._config, hook, layout, kind)
        made = made_from(self.folder)
        self.spec = replace(
            self._probe(max_batch),
            control_frequency=control_frequency,
            render=render or made.get("render"),
            assets=assets or made.get("assets"),
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device

    @property
    def dtype(self) -> str | None:
        """In which type it calculates, if the caller said it."""
        return self._dtype

    @property
    def config(self) -> Any:
        """LeRobot's configuration of the policy."""
        return self._config

    @property
    def gradients(self) -> type:
        """
        Class of a copy with gradients, for ``train_vla`` of RLT.

        :raises ValueError: If the policy cannot learn by RL.
        """
        return gradients_of_type(self._config, self._dtype, self._hook)

    def again(self, folder: Path) -> LeRobotVLA:
        """
        Load a checkpoint of the same policy with the same arguments.

        :param folder: The checkpoint.
        :return: The policy, on the same device.
        """
        return LeRobotVLA(str(folder), self._device, **self._arguments)

    def to(self, device: torch.device | str) -> LeRobotVLA:
        """
        Move the policy and its processors.

        :param device: Where to.
        :return: The VLA itself.
        """
        self._device = torch.empty(0, device=device).device
        self._config.device = str(self._device)
        self.policy.to(self._device)
        self._pre, self._post = load_processors(self.folder, self._config, self._backbone, self._trust)
        return self

    def fingerprint(self) -> str:
        """
        Identify the policy.

        :return: Hash of its weights, configuration, statistics, and of the arguments that change what it gives.
        """
        if self._digest is None:
            config = {key: value for key, value in asdict(self._config).items() if not _only_training(key)}
            state = dict(self.policy.state_dict())
            for name, pipeline in (("before", self._pre), ("after", self._post)):
                for number, step in enumerate(pipeline.steps):
                    for key, value in step.state_dict().items():
                        state[f"{name}.{number}.{key}"] = value
            self._digest = fingerprint({"type": self._config.type, "config": config, **self._settings}, state)
        return self._digest

    def frames(self, obs: VLAObs) -> dict[str, np.ndarray]:
        """
        Give the pictures as the checkpoint's pre-processor gets them.

        :param obs: Raw observations.
        :return: For each camera (B, h, w, 3) in [0, 1].
        """
        pictures = self._pictures(obs, len(obs["state"]))
        return {camera: pictures[key].permute(0, 2, 3, 1).cpu().numpy() for camera, key in self._features.items()}

    def forward(self, obs: VLAObs, tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> VLAOutput:
        """
        Run the policy.

        :param obs: Raw observations of B rows.
        :param tasks: One instruction per row.
        :param seed: One number per row, from which its noise follows; ``None`` = 0 for each.
        :return: Tokens and chunk.
        :raises ValueError: If an observation does not fit.
        """
        batch = self._batch(obs, tasks)
        seeds = [0] * len(tasks) if seed is None else [int(value) for value in seed]
        with torch.no_grad(), precision(self._config, self._dtype, self._device):
            reading = self._reader.read(self._pre(batch), seeds)
        self._max_tokens, self._grids = reading.max_tokens, reading.grids
        chunk, again = self._chunk(reading.actions), reading.from_noise

        def from_noise(noise: torch.Tensor) -> torch.Tensor:
            assert again is not None
            with torch.no_grad(), precision(self._config, self._dtype, self._device):
                actions = again(noise)
            return self._chunk(actions)

        return VLAOutput(reading.tokens, reading.mask, reading.kind, chunk, None if again is None else from_noise)

    def imitation_loss(
        self, obs: VLAObs, tasks: Sequence[str], chunk: np.ndarray, real: np.ndarray, seed: int
    ) -> torch.Tensor:
        """
        Compute the loss with which LeRobot's trainer trains this policy, in training mode.

        :param obs: Raw observations of B rows.
        :param tasks: One instruction per row.
        :param chunk: Demonstrated actions (B, T, d) as the environment takes them, T = the policy's ``chunk_size``.
        :param real: bool (B, T), False = the demonstration has ended.
        :param seed: Of dropout, and of the noise and times of a flow.
        :return: The loss, with gradients for parameters that require them.
        """
        actions = torch.tensor(chunk, dtype=torch.float32, device=self._device)
        actions[..., -1] = self._gripper.from_env(actions[..., -1])
        pads = torch.tensor(~real, device=self._device)
        batch = {**self._batch(obs, tasks), "action": actions, "action_is_pad": pads}
        self.policy.train()
        try:
            with random_numbers(seed, self._device), precision(self._config, self._dtype, self._device):
                loss, _ = self.policy.forward(self._pre(batch))
        finally:
            self.policy.eval()
        return loss

    def _batch(self, obs: VLAObs, tasks: Sequence[str]) -> dict[str, Any]:
        """Make of observations what the pre-processor takes."""
        rows, state = len(tasks), self._config.robot_state_feature
        batch: dict[str, Any] = {**self._pictures(obs, rows), "task": list(tasks)}
        if state is not None:
            values = np.ascontiguousarray(obs["state"], dtype=np.float32)
            if values.shape != (rows, *state.shape):
                raise ValueError(f"state has the shape {values.shape}; {self._name} reads {(rows, *state.shape)}.")
            batch["observation.state"] = torch.from_numpy(values.copy()).to(self._device)
        return batch

    def _chunk(self, actions: torch.Tensor) -> torch.Tensor:
        return to_chunk(self._post(actions.float()), gripper=self._gripper).to(self._device)

    @property
    def _name(self) -> str:
        return f"lerobot-{self._config.type}"

    def _pictures(self, obs: VLAObs, rows: int) -> dict[str, torch.Tensor]:
        """Turn, pool to the size of the dataset, round to whole levels as its pictures are: (B, 3, h, w) in [0, 1]."""
        pictures = {}
        for camera, key in self._features.items():
            frame, size = np.asarray(obs[camera]), self._sizes[camera]
            square = frame.ndim == 4 and frame.shape[1] == frame.shape[2] >= size
            if frame.dtype != np.uint8 or not square or len(frame) != rows or frame.shape[3] != 3:
                raise ValueError(
                    f"{camera} is {frame.dtype} {frame.shape}; {self._name} reads uint8 ({rows}, S, S, 3) with S >= "
                    f"{size}."
                )
            pixels = torch.tensor(np.ascontiguousarray(frame), device=self._device)
            pictures[key] = see_picture(pixels, self._orientation, size)
        return pictures

    def _probe(self, max_batch: int | None) -> VLASpec:
        """Run the policy once, and a policy that is not known a few times, to see what it gives."""
        rng = np.random.default_rng(0)
        obs = {camera: rng.integers(0, 256, (1, size, size, 3), dtype=np.uint8) for camera, size in self._sizes.items()}
        state = self._config.robot_state_feature
        obs["state"] = np.zeros((1, *(state.shape if state else (8,))), dtype=np.float32)
        output = self.forward(obs, ["pick up the cup"], seed=[0])
        language, stochastic = reads_language(self._pre), self._reader.stochastic
        if isinstance(self._reader, HookReader):
            others = [self.forward(obs, ["pick up the cup"], seed=[seed]) for seed in (1, 2)]
            stochastic = any(not torch.equal(other.chunk, output.chunk) for other in others)
            self._reader.one_row = stochastic or language
            max_batch = 1 if self._reader.one_row else max_batch
            output = self.forward(obs, ["pick up the cup"], seed=[0])
        kinds = set(output.kind[output.mask].unique().tolist())
        return VLASpec(
            name=self._name,
            token_dim=output.tokens.shape[2],
            horizon=output.chunk.shape[1],
            action_dim=output.chunk.shape[2],
            max_tokens=self._max_tokens,
            stochastic=bool(stochastic),
            cameras=tuple(self._features),
            image_size=max(self._sizes.values(), default=None),
            state_dim=None if state is None else int(state.shape[0]),
            max_batch=max_batch,
            dtype=str(output.tokens.dtype).removeprefix("torch."),
            kinds=tuple(name for name, number in TOKEN_KINDS.items() if number in kinds),
            language=language,
            orientation=self._orientation,
            picture_grids=self._picture_grids(),
            noise=self._reader.noise_shape,
        )

    def _picture_grids(self) -> tuple[tuple[str, int, int], ...] | None:
        """Name the cameras of the grids that the last forward pass had; empty cameras come last."""
        if self._grids is None:
            return None
        cameras = {key: camera for camera, key in self._features.items()}
        names = [cameras[key] for key in self._config.image_features if key in cameras]
        return tuple((name, *grid) for name, grid in zip(names, self._grids, strict=False))


def _reader(policy: Any, config: Any, hook: str | None, layout: str | None, kind: str) -> Reader:
    if hook is not None:
        return HookReader(policy, config, hook, layout, kind)
    if config.type not in READERS:
        raise ValueError(
            f"Where the tokens of a {config.type} policy are is not known (known are {', '.join(READERS)}): name the "
            "module that gives them with vla_kwargs {hook: model.encoder}."
        )
    return READERS[config.type](policy, config)


def _features(config: Any, cameras: Mapping[str, str] | None) -> dict[str, str]:
    """Match cameras with the policy's features, all of which must be given: LeRobot passes over missing ones."""
    wanted = [key for key in config.image_features if "empty_camera" not in key]
    if cameras is not None:
        found = dict(cameras)
    else:
        found = {
            camera: key
            for camera, names in CAMERAS.items()
            for key in wanted
            if key.removeprefix("observation.") in names
        }
    unknown = sorted(set(found.values()) - set(wanted))
    missing = [key for key in wanted if key not in found.values()]
    if unknown or missing:
        raise ValueError(
            f"A {config.type} policy with the pictures {', '.join(wanted) or 'none'} has no camera for "
            f"{', '.join(missing) or 'none'} and is given {', '.join(unknown) or 'no others'}: name them with "
            "vla_kwargs {cameras: {agentview: FEATURE, wrist: FEATURE}}."
        )
    if not config.action_feature or config.env_state_feature:
        raise ValueError(f"A {config.type} policy without actions, or with the state of a simulator, is no VLA.")
    return found


def _size(config: Any, key: str) -> int:
    """Edge of the square pictures that the policy was trained on."""
    shape = tuple(config.image_features[key].shape)
    if len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]:
        raise ValueError(
            f"The {config.type} policy was trained on {key} of the shape {shape}; the pictures of the environment are "
            "square, (3, S, S)."
        )
    return int(shape[1])


def _only_training(key: str) -> bool:
    return key in _NO_MATTER or key.startswith(("pretrained", "optimizer_", "scheduler_"))
