"""``rlt serve``: a frozen VLA for training elsewhere, or the practiced policy of a run for a robot."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_gym.vla.remote import openpi
from rlt_gym.vla.remote.protocol import KEY_VARIABLE, PORT
from rlt_gym.vla.remote.server import PolicyServer, Service, VLAService
from rlt_sb3.common.fingerprint import check_run, of_run
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.config import EnvConfig, load_config
from rlt_sb3.experiment.evaluate_run import MODELS
from rlt_sb3.experiment.models import as_predictor, load_model
from rlt_sb3.experiment.report import read_evaluations

if TYPE_CHECKING:
    from rlt_gym.rl_token.base import Encoder
    from rlt_gym.vla.base import FrozenVLA
    from rlt_sb3.evaluation.evaluate import Predictor


@dataclass
class ServeConfig:
    """Serve a frozen VLA to training elsewhere, or the practiced policy of a run to openpi's clients.

    Training names the VLA by ``--env.vla rlt://host:port``.

    :param policy: frozen VLA, named as in ``--env.vla``, or the folder of a run
    :param vla_kwargs: of a VLA: further arguments of whoever makes it; a run's are in its config.yaml
    :param host: address to listen at; with another one than a loopback address, clients need the key
    :param port: port to listen at; 0: any free one
    :param key: what clients must send; None: the environment variable RLT_SERVE_KEY, which other users cannot read
    :param device: torch device of the policy; of a VLA also several, "cuda:0,cuda:1": a copy on each
    :param model: of a run: "best", "last", or the path of a saved model
    :param max_batch: of a VLA: most observations of one request, and of requests that are joined
    :param max_wait_ms: of a VLA: milliseconds that a request waits for others to join it; 0: only while it is busy;
        None: requests are never joined
    :param tokens_dtype: of a VLA: type in which tokens travel, "float16" or "float32"
    :param max_mb: most megabytes (2**20 bytes) of one request
    """

    policy: str
    vla_kwargs: dict[str, Any] | None = None
    host: str = "127.0.0.1"
    port: int = PORT
    key: str | None = None
    device: str = "cpu"
    model: str = "best"
    max_batch: int = 64
    max_wait_ms: float | None = 0.0
    tokens_dtype: str = "float16"
    max_mb: int = 64

    def check(self) -> None:
        """Refuse what cannot work, before anything is loaded.

        :raises ValueError: names the setting, what was given and what is allowed
        """
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}.")
        if self.max_mb < 1:
            raise ValueError(f"max_mb must be at least 1, got {self.max_mb}.")


def serve(config: ServeConfig) -> None:
    """
    Serve until interrupted.

    :param config: what and where
    :raises ValueError: for a policy that does not exist or does not fit, or an address that needs a key
    :raises OSError: if the port is taken
    """
    config.check()
    server = make_server(config)
    try:
        print(f"Serving {config.policy} at {server.host}:{server.port}; Ctrl-C ends it.", flush=True)
        server.serve_forever()
    finally:
        server.close()


def make_server(config: ServeConfig) -> PolicyServer:
    """
    Load what is served and open the port.

    :param config: what and where
    :return: the server; it answers once it is started
    :raises ValueError: as :func:`serve`
    """
    from rlt_gym.vla.registry import VLAS, load_vla

    service: Service
    max_bytes = config.max_mb << 20
    if Path(config.policy).is_dir():
        service = RunService(Path(config.policy), config.model, config.device)
    else:
        try:
            vla, *copies = (load_vla(config.policy, device, config.vla_kwargs) for device in config.device.split(","))
        except ValueError as error:
            if Path(config.policy).exists() or VLAS.find(config.policy) is not None:
                raise
            raise ValueError(
                f"{error} The folder of a run is allowed, too; there is none at {config.policy}."
            ) from error
        service = VLAService(vla, config.max_batch, max_bytes, config.tokens_dtype, config.max_wait_ms, copies)
    key = os.environ.get(KEY_VARIABLE) if config.key is None else config.key
    return PolicyServer(service, config.host, config.port, key, max_bytes)


class RunService:
    """
    The practiced policy of a run, VLA and RL token and actor, under openpi's protocol for LIBERO.

    It plays what ``rlt eval`` plays. If the run has ``show_task``, a request's instruction says which task that is, and
    for an instruction that the run has not practiced the frozen VLA's own chunk is played.

    :param run: folder of the run
    :param model: "best", "last", or the path of a saved model
    :param device: where VLA, RL token and actor run
    :raises ValueError: if the folder is no run, if its environment is not LIBERO seen through a VLA, if VLA or RL
        token are not those that it was trained on, or if its instructions do not tell its tasks apart
    """

    def __init__(self, run: Path, model: str = "best", device: str = "cpu") -> None:
        from rlt_gym.rl_token.io import frozen_fingerprint

        config = load_config(run / "config.yaml")
        label = get_algorithm(config.algorithm).label
        if get_algorithm(config.algorithm).wrapper is not None:
            raise ValueError(f"A run of {label} cannot be served: play it with rlt eval {run}.")
        path = run / MODELS[model] if model in MODELS else Path(model)
        if not path.is_file():
            raise ValueError(f"There is no model {path}; model is 'best', 'last' or the path of a saved model.")
        self.vla, self.encoder = _frozen(config.env, device)
        fingerprint = frozen_fingerprint(self.vla, self.encoder)
        check_run(run, of_run(run), fingerprint)
        loaded = load_model(config.algorithm, path, device=device)
        self._model: Predictor = as_predictor(config.algorithm, loaded)
        shapes = {key: box.shape for key, box in loaded.observation_space.spaces.items()}
        self.chunk_length, action_dim = shapes["vla_ref"]
        self._state_dim, self._shown = shapes["proprio"][0], {"vla_tokens", "pictures"} & set(shapes)
        self._tasks = _one_hot(run, *shapes["task"]) if "task" in shapes else None
        spec = self.vla.spec
        if shapes["z_rl"] != (self.encoder.z_dim,) or action_dim != spec.action_dim or self.chunk_length > spec.horizon:
            raise ValueError(f"{path} was trained on observations of the shapes {shapes}, which {spec.name!r} lacks.")
        self._frame_size = spec.check_frame_size(config.env.image_size)
        self._asked = 0
        self._one_at_a_time = threading.Lock()
        self.metadata = {
            "protocol": "openpi",
            "policy": f"{label} ({path.name}) of the run {run.name} on the VLA {spec.name}",
            "chunk_length": self.chunk_length,
            "action_dim": action_dim,
            "frame_size": self._frame_size,
            "fingerprint": dict(fingerprint),
        } | ({} if self._tasks is None else {"instructions": list(self._tasks)})

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """
        Play one observation.

        :param request: an observation in openpi's form for LIBERO; ``seed`` beside it repeats a stochastic VLA's noise
        :return: ``actions`` (C, d), ``state``, ``policy_timing``; of a run with ``show_task`` also ``practiced``,
            whether the run knows the instruction
        :raises ValueError: if the observation has another form
        """
        began, spec = time.perf_counter(), self.vla.spec
        obs, task, seed = openpi.read_observation(request, spec.cameras, self._state_dim, self._frame_size)
        with self._one_at_a_time:
            return self._play(obs, task, seed, began)

    def _play(self, obs: Mapping[str, np.ndarray], task: str, seed: int | None, began: float) -> dict[str, Any]:
        from rlt_gym.rl_token.shown import shown_pictures, shown_tokens
        from rlt_gym.vla.base import forward_seed

        spec = self.vla.spec
        self._asked += 1
        seeds = [forward_seed(0, self._asked) if seed is None else seed]
        output = self.vla.forward(obs, [task], seed=seeds).check(spec, 1)
        features = {
            "z_rl": self.encoder(output).float().cpu().numpy(),
            "vla_ref": output.chunk[:, : self.chunk_length].cpu().numpy(),
            "proprio": obs["state"],
        }
        if "vla_tokens" in self._shown:
            features["vla_tokens"] = shown_tokens(output, self.encoder, self.vla)
        if "pictures" in self._shown:
            features |= shown_pictures(obs, spec.cameras, [task], seeds)
        practiced = self._tasks is None or task in self._tasks
        if practiced and self._tasks is not None:
            features["task"] = self._tasks[task][None]
        actions = self._model.predict(features, deterministic=True)[0] if practiced else features["vla_ref"]
        reply = openpi.reply(np.clip(actions[0], -1.0, 1.0), obs, began)
        return reply if self._tasks is None else {**reply, "practiced": practiced}


def _one_hot(run: Path, n_tasks: int) -> dict[str, np.ndarray]:
    """Return ``task`` (T,) of each instruction that a run with ``show_task`` has practiced."""
    tasks = read_evaluations(run).get("tasks")
    if not tasks:
        raise ValueError(
            f"{run}/evaluations.json lacks the tasks' instructions, which show_task needs: the run cannot be served."
        )
    numbers = {instruction: int(number) for number, instruction in tasks.items()}
    if len(numbers) < len(tasks):
        raise ValueError(
            f"Two tasks of the run {run} have the same instruction, so a request cannot say which one it means: the "
            "run cannot be served."
        )
    return {instruction: np.eye(n_tasks, dtype=np.float32)[number] for instruction, number in numbers.items()}


def _frozen(env: EnvConfig, device: str) -> tuple[FrozenVLA, Encoder]:
    """VLA and RL token of a run's environment, without its simulators."""
    import gymnasium as gym

    import rlt_gym  # noqa: F401  (registers the ids)
    from rlt_gym.rl_token.io import load_rl_token
    from rlt_gym.vla.registry import load_vla

    given = env.make_kwargs()
    if given.get("critical_phase") is not None:
        raise ValueError("The run has a critical_phase, which only a simulator can tell: it cannot be served.")
    try:
        entry = gym.spec(env.id).vector_entry_point
        entry = resolve_name(entry) if isinstance(entry, str) else entry
        parameters = inspect.signature(entry).parameters  # type: ignore[arg-type]
    except (gym.error.Error, TypeError, ValueError) as error:
        raise ValueError(f"env.id {env.id!r} of the run cannot be found: {error}") from error
    if not {"vla", "rl_token"} <= set(parameters):
        raise ValueError(f"env.id {env.id!r} of the run has no frozen VLA and RL token of its own: nothing to serve.")
    names = {key: given.get(key, parameters[key].default) for key in ("vla", "rl_token")}
    vla = load_vla(names["vla"], device, given.get("vla_kwargs"))
    return vla, load_rl_token(names["rl_token"], vla, device)
