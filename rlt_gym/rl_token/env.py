"""A vector environment whose observations are a frozen VLA's RL tokens and reference chunks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.chunk_vector_env import ChunkVectorEnv
from rlt_gym.core.judging import Judged
from rlt_gym.core.members import MemberAccess
from rlt_gym.core.pickling import PickledByArguments
from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.core.split_step import SplitStepWrapper, real_chunks
from rlt_gym.rl_token.shown import picture_boxes, shown_pictures, shown_tokens, tokens_shape
from rlt_gym.vla.base import forward_seed
from rlt_gym.vla.batches import run_vla
from rlt_gym.workers.named import is_integer

if TYPE_CHECKING:
    from rlt_gym.reward.model import RewardModel
    from rlt_gym.rl_token.base import Encoder
    from rlt_gym.rl_token.trainable import TrainableToken
    from rlt_gym.rl_token.trainable_vla import TrainableVLA
    from rlt_gym.vla.base import FrozenVLA, VLAOutput, VLASpec

#: What the raw environment's infos say of each episode besides its instruction.
NUMBERS = ("noise_seed", "episode_steps", "task_id")


class RLTokenVectorEnv(PickledByArguments, MemberAccess, SplitStepWrapper):
    """
    Turns the pictures of a raw vector environment into RL tokens and the VLA's reference chunks.

    Observations are what stage 2 of the RL-token method reads: ``z_rl`` (D,), ``vla_ref`` (C, d), the first C actions
    of the VLA's chunk, and raw ``proprio`` (P,), all float32.

    ``env.metadata["robot"]`` (:class:`~rlt_gym.core.robot_spec.RobotSpec`) says which cameras there are, how many
    numbers ``proprio`` has and how many an action has; the VLA gets the pictures that its own specification names.
    Each row of a forward pass gets a seed computed from the episode's ``noise_seed`` and its control steps
    (:func:`~rlt_gym.vla.base.forward_seed`).

    The step has two parts (``step_async``, ``step_wait``). Between them the simulators play; VLA and encoder run in the
    second one, when the pictures are there.

    VLA and encoder run once per vector step, on one batch that holds the N observations and the final observations of
    the episodes that ended in this step. Actions, rewards and infos pass through. The mode of autoreset is the raw
    environment's.

    If the raw environment observes inside the chunks (``obs_stride``), those observations go into the same batch, and
    ``info["inner_obs"]`` has them in this environment's form: ``z_rl`` (N, n, D), ``vla_ref`` (N, n, C, d), ``proprio``
    (N, n, P), zeros beyond ``info["inner_count"]``.

    If the raw environment's infos have ``critical_phase``, the VLA's own chunk is played instead of the action until
    ``critical_phase`` is true.

    With ``show_tokens`` observations also have ``vla_tokens`` (M, H), float16: the VLA's tokens that the encoder reads,
    valid ones first, zeros where there is none; M is the VLA's ``max_tokens``. They are for policies that train the
    encoder further (``train_token`` of RLT).

    With ``show_pictures`` observations also have what the VLA reads, all uint8: ``pictures`` (cameras, S, S, 3) as the
    simulator gives them, ``instruction`` (:data:`~rlt_gym.rl_token.shown.INSTRUCTION`,), its letters in UTF-8 and
    then zeros, and ``vla_seed`` (4,), the seed of this forward pass. With ``proprio`` they give the VLA's output again:
    they are for policies that train a copy of the VLA (``train_vla`` of RLT).

    With ``show_task`` observations also have ``task`` (T,), float32: 1 at the place of the episode's task among the
    suite's T tasks, else 0. Policies that play several tasks in one scene read it.

    With a ``reward_model`` its verdict about the VLA's tokens after a chunk replaces the simulator's in training
    episodes (:class:`~rlt_gym.core.judging.Judging`), for one more forward pass of the VLA.

    ``metadata["fingerprint"]`` has the hashes of ``"vla"`` and ``"rl_token"``: runs compare them with what they were
    trained on.

    :param env: Raw environment with pictures and ``proprio`` as observation, a ``robot`` in its metadata, action
        (C, d), and ``instruction``, ``noise_seed``, ``episode_steps`` in its infos, e.g. ``LIBERO-v0``.
    :param vla: The frozen VLA.
    :param encoder: The RL-token encoder that was trained on this VLA's tokens.
    :param device: Where both run.
    :param show_tokens: Whether observations have ``vla_tokens``.
    :param show_pictures: Whether observations have ``pictures``, ``instruction`` and ``vla_seed``.
    :param show_task: Whether observations have ``task``. The raw environment says in ``metadata["n_tasks"]`` how many
        there are, and in its infos ``task_id``, from 0.
    :param reward_model: Decides about success in training episodes; ``None``: the simulator does.
    :raises ValueError: If VLA, encoder and environment do not fit together.
    """

    #: Gymnasium reads this before there is an environment, whose own metadata have more entries.
    metadata: dict[str, Any] = ChunkVectorEnv.metadata

    def __init__(
        self,
        env: VectorEnv,
        vla: "FrozenVLA",
        encoder: "Encoder",
        device: str = "cpu",
        show_tokens: bool = False,
        show_pictures: bool = False,
        show_task: bool = False,
        reward_model: "RewardModel | None" = None,
    ) -> None:
        from rlt_gym.rl_token.io import frozen_fingerprint, load_rl_token
        from rlt_gym.vla.registry import load_vla

        single, shape = env.single_observation_space, env.single_action_space.shape
        loaded = load_vla(vla, device)  # once: a VLA that is on the device is not moved
        self._cameras = _check_environment(env, loaded.spec)
        if shape is None or len(shape) != 2:
            raise ValueError(f"The raw environment's action has shape {shape}; it must be (chunk_length, action_dim).")
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ValueError(f"The raw environment's autoreset_mode must be an AutoresetMode, got {mode!r}.")
        self.chunk_length = check_chunk_length(shape[0], loaded)
        super().__init__(env)
        self.vla = loaded
        self.encoder = load_rl_token(encoder, self.vla, device)
        self.metadata = {**env.metadata, "fingerprint": frozen_fingerprint(self.vla, self.encoder)}
        self.reward_model = reward_model
        if reward_model is not None:
            raw: Any = env.unwrapped
            raw.judge_success(self._judge)
        #: The raw environment's.
        self.autoreset_mode = mode
        self.device, self.show_tokens, self.show_pictures = device, show_tokens, show_pictures
        self.show_task = show_task
        assert isinstance(single, spaces.Dict)
        boxes = {
            # RLTokenEncoder normalizes z_rl, but an encoder of another class may give any numbers
            "z_rl": spaces.Box(-np.inf, np.inf, (self.encoder.z_dim,), np.float32),
            "vla_ref": spaces.Box(-1.0, 1.0, shape, np.float32),
            "proprio": single["proprio"],
        }
        if show_tokens:
            boxes["vla_tokens"] = spaces.Box(-np.inf, np.inf, tokens_shape(self.vla), np.float16)
        if show_pictures:
            boxes |= picture_boxes(single, self._cameras)
        if show_task:
            boxes["task"] = spaces.Box(0.0, 1.0, (int(env.metadata["n_tasks"]),), np.float32)
        self.single_observation_space = spaces.Dict(boxes)
        self.single_action_space = spaces.Box(-1.0, 1.0, shape, np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        # what the last info of each env reported; a partial reset reports on some envs only
        self._instruction = [""] * self.num_envs
        self._numbers = np.zeros((self.num_envs, len(NUMBERS)), dtype=np.int64)
        self._critical = np.ones(self.num_envs, dtype=bool)
        self._seen: VLAOutput | None = None
        self._reference = np.zeros(self.action_space.shape or (), dtype=np.float32)
        self._unseen = False  # whether simulators have played what was not shown
        #: What the simulators were asked to play last (N, C, d): before the critical phase the VLA's own chunks
        self.asked = self._reference

    @property
    def obs_stride(self) -> int | None:
        """Stride in control steps of the observations inside the chunks, ``None`` without them."""
        return getattr(self.env.unwrapped, "obs_stride", None)

    @property
    def trainable_token(self) -> "TrainableToken":
        """A copy of the encoder with gradients, and its decoder, for an algorithm that reads ``vla_tokens``."""
        from rlt_gym.rl_token.trainable import TrainableToken

        return TrainableToken.of(self.encoder)

    def trainable_vla(self, part: str, rank: int) -> "TrainableVLA":
        """
        Copy VLA and encoder, the VLA with gradients, for an algorithm that reads ``pictures``.

        :param part: What learns: ``"head"``, ``"lora"`` or ``"all"``.
        :param rank: Of the LoRA matrices.
        :return: The copy.
        :raises ValueError: If the VLA gives no gradients.
        """
        from rlt_gym.rl_token.trainable_vla import TrainableVLA

        return TrainableVLA.of(self.vla, self.encoder, part, rank)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """
        Reset the raw environment and show its observations.

        :param seed: As the raw environment takes it.
        :param options: As the raw environment takes them, e.g. ``reset_mask``.
        :return: Observations and infos of all environments.
        """
        mask = (options or {}).get("reset_mask")
        if self._unseen and mask is not None and not np.all(mask):
            raise RuntimeError("an interrupt lost observations: reset all environments, got a reset_mask of some")
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        with self._shown():
            self._remember(infos)
            features = self._features([obs], self._instruction, self._numbers)
            self._reference = features["vla_ref"].copy()
        return features, infos

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Demand a reset if the VLA is interrupted: the simulators are then ahead of what anybody has seen."""
        self._unseen = True
        yield
        self._unseen = False

    def step_async(self, actions: np.ndarray) -> None:
        """
        Begin to play one chunk in every environment.

        :param actions: Chunks (N, C, d) in environment units; values beyond [-1, 1] are clipped by the raw environment.
        :raises ValueError: As :func:`~rlt_gym.core.split_step.real_chunks`; nothing has been executed then.
        """
        actions = real_chunks(actions, self.action_space.shape or ()).astype(np.float32)
        if self._unseen:
            raise RuntimeError("an interrupt lost observations: call reset() before step()")
        self.asked = np.where(self._critical[:, None, None], actions, self._reference)
        super().step_async(self.asked)

    def step_wait(self) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Wait until the chunks have been played, and show the new observations to the VLA.

        :return: Observations, rewards (sum over the executed steps), terminations, truncations, infos; ``final_obs``
            holds observations of this environment's form.
        """
        played, began = list(self._instruction), self._numbers.copy()
        step = super().step_wait()
        with self._shown():
            return self._with_features(step, played, began)

    def _with_features(
        self, step: tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]], played: list[str], began: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Show the VLA what a step of the raw environment returned.

        :param step: Observations, rewards, terminations, truncations, infos.
        :param played: Instructions of the episodes that were played.
        :param began: Their :data:`NUMBERS` before the step.
        :return: As of :meth:`step_wait`.
        """
        obs, rewards, terminations, truncations, infos = step
        ended = [i for i in range(self.num_envs) if "final_obs" in infos and infos["_final_obs"][i]]
        final = [infos["final_obs"][i] for i in ended]
        final_info = infos.get("final_info", {})
        # an ended episode's own instruction and step count, before its successor's replace them
        tasks, numbers = list(self._instruction), self._numbers.copy()
        _read_infos(final_info, tasks, numbers)
        ended_tasks, ended_numbers = [tasks[i] for i in ended], numbers[ended]
        self._remember(infos)
        batches: list[Mapping[str, np.ndarray]] = [obs]
        if ended:
            batches.append({key: np.stack([row[key] for row in final]) for key in (*self._cameras, "proprio")})
        all_tasks, all_numbers = self._instruction + ended_tasks, [self._numbers, ended_numbers]
        inner_of, inner_at = np.zeros(0, dtype=int), np.zeros(0, dtype=int)
        if "inner_obs" in infos:
            valid = np.arange(infos["inner_obs"]["proprio"].shape[1]) < np.asarray(infos["inner_count"])[:, None]
            inner_of, inner_at = np.nonzero(valid)
            batches.append({key: infos["inner_obs"][key][valid] for key in (*self._cameras, "proprio")})
            all_tasks = all_tasks + [played[i] for i in inner_of]
            steps = (inner_at + 1) * (self.obs_stride or 0)
            inner_numbers = began[inner_of]
            inner_numbers[:, NUMBERS.index("episode_steps")] += steps
            all_numbers.append(inner_numbers)
        all_features = self._features(batches, all_tasks, np.concatenate(all_numbers))
        features = {key: value[: self.num_envs] for key, value in all_features.items()}
        self._reference = features["vla_ref"].copy()
        if ended:
            features = {key: value.copy() for key, value in features.items()}
            rows = np.full(self.num_envs, None, dtype=object)
            for offset, i in enumerate(ended):
                rows[i] = {key: value[self.num_envs + offset].copy() for key, value in all_features.items()}
            infos = {**infos, "final_obs": rows}
        if "inner_obs" in infos:
            features = {key: value.copy() for key, value in features.items()}
            inner = {}
            for key, value in all_features.items():
                inner[key] = np.zeros((*valid.shape, *value.shape[1:]), dtype=value.dtype)
                inner[key][valid] = value[self.num_envs + len(ended) :]
            infos = {**infos, "inner_obs": inner}
        return features, rewards, terminations, truncations, infos

    def chunks_of_noise(self, noise: np.ndarray) -> np.ndarray:
        """
        Make the chunks that the VLA's flow makes of given noise, for the observations that were returned last.

        The VLA's tokens are not computed again. Nothing is played.

        :param noise: (N, m, n), n numbers as ``vla.spec.noise`` says, m a divisor of its steps: each of the m rows is
            repeated for as many steps of the flow.
        :return: Chunks (N, C, d), as ``vla_ref``.
        :raises ValueError: If the VLA takes no noise, or the noise has another shape or values that are not finite.
        :raises gymnasium.error.ResetNeeded: Before the first reset.
        """
        import torch

        steps, size = self.vla.spec.check_noise()
        given = np.asarray(noise, dtype=np.float32)
        fits = given.ndim == 3 and given.shape[::2] == (self.num_envs, size) and given.shape[1] > 0
        if not fits or steps % given.shape[1] or not np.isfinite(given).all():
            raise ValueError(
                f"noise must be finite numbers of the shape ({self.num_envs}, m, {size}), m a divisor of {steps}, got "
                f"the shape {given.shape}."
            )
        if self._seen is None:
            raise ResetNeeded("chunks_of_noise() needs observations: call reset() first.")
        # the VLA saw more rows in the same batch, such as the last ones of episodes, after those of the environments
        rows = np.zeros((len(self._seen.chunk), steps, size), dtype=np.float32)
        rows[: self.num_envs] = given.repeat(steps // given.shape[1], axis=1)
        chunks = self._seen.chunk_of(torch.from_numpy(rows), self.vla.spec)
        return chunks[: self.num_envs, : self.chunk_length].cpu().numpy().copy()

    def look(self, seen: Mapping[int, Judged]) -> "VLAOutput":
        """
        Show the VLA what environments show after a chunk.

        :param seen: By environment, see :mod:`rlt_gym.core.judging`.
        :return: What the VLA makes of it, in the same order.
        """
        rows = list(seen.values())
        obs = {key: np.stack([row.observation[key] for row in rows]) for key in (*self._cameras, "proprio")}
        obs["state"] = obs.pop("proprio").astype(np.float32)
        seeds = [forward_seed(row.noise_seed, row.episode_steps) for row in rows]
        return run_vla(self.vla, obs, [row.instruction for row in rows], seeds)

    def _judge(self, seen: Mapping[int, Judged]) -> dict[int, bool]:
        """Ask the reward model about the observations after a chunk."""
        assert self.reward_model is not None
        return dict(zip(seen, self.reward_model.verdicts(self.look(seen)).tolist(), strict=True))

    def _remember(self, infos: Mapping[str, Any]) -> None:
        _read_infos(infos, self._instruction, self._numbers)
        if "critical_phase" in infos:
            present = infos.get("_critical_phase", np.ones(self.num_envs, dtype=bool))
            self._critical = np.where(present, infos["critical_phase"], self._critical)

    def _features(
        self, batches: Sequence[Mapping[str, np.ndarray]], tasks: Sequence[str], numbers: np.ndarray
    ) -> dict[str, np.ndarray]:
        """One forward pass (of the VLA's ``max_batch``, more) over all rows; the arrays are new ones."""
        joined = {key: np.concatenate([batch[key] for batch in batches]) for key in (*self._cameras, "proprio")}
        proprio = joined.pop("proprio").astype(np.float32)
        seeds = [forward_seed(noise_seed, step) for noise_seed, step, _ in numbers.tolist()]
        self._seen = None  # its memory is needed now
        output = run_vla(self.vla, {**joined, "state": proprio}, tasks, seeds)
        if self.vla.spec.noise is not None:
            self._seen = output
        z_rl = self.encoder(output)
        chunk = output.chunk[:, : self.chunk_length]
        features = {
            "z_rl": z_rl.float().cpu().numpy().copy(),
            "vla_ref": chunk.cpu().numpy().copy(),
            "proprio": proprio.copy(),
        }
        if self.show_tokens:
            features["vla_tokens"] = shown_tokens(output, self.encoder, self.vla)
        if self.show_pictures:
            features |= shown_pictures(joined, self._cameras, tasks, seeds)
        if self.show_task:
            count = self.single_observation_space["task"].shape[0]  # type: ignore[index]
            features["task"] = np.eye(count, dtype=np.float32)[numbers[:, NUMBERS.index("task_id")]]
        return features


def _check_environment(env: VectorEnv, spec: "VLASpec") -> tuple[str, ...]:
    """
    Refuse an environment that does not fit a VLA.

    :param env: Raw environment.
    :param spec: Of the VLA that is to see its pictures.
    :return: Keys of the cameras that the VLA needs.
    :raises ValueError: The environment has no robot, lacks an observation, or does not fit the VLA.
    """
    robot: RobotSpec | None = env.metadata.get("robot")
    if robot is None:
        raise ValueError("The raw environment's metadata lack 'robot', an rlt_gym.core.robot_spec.RobotSpec.")
    single = env.single_observation_space
    boxes = dict(single.spaces) if isinstance(single, spaces.Dict) else {}
    missing = {*robot.camera_keys, "proprio"} - set(boxes)
    if missing:
        raise ValueError(f"The raw environment's observations lack {sorted(missing)}; use LIBERO-v0 or one like it.")
    spec.check_robot(robot)
    spec.check_render(env.metadata.get("render"))
    for camera in spec.cameras:
        for edge in (boxes[camera].shape or ())[:2]:
            spec.check_frame_size(edge)
    return tuple(spec.cameras)


def _read_infos(infos: Mapping[str, Any], tasks: list[str], numbers: np.ndarray) -> None:
    """Copy instruction and :data:`NUMBERS` of those environments that ``infos`` describes."""
    if "instruction" not in infos:
        return
    missing = [key for key in NUMBERS if key not in infos]
    if missing:
        raise ValueError(
            f"The raw environment's infos lack {missing}; see rlt_gym.core.chunk_vector_env.ChunkVectorEnv."
        )
    present = infos.get("_instruction", np.ones(len(tasks), dtype=bool))
    for i in np.flatnonzero(present):
        tasks[i] = str(infos["instruction"][i])
        numbers[i] = [infos[key][i] for key in NUMBERS]


def check_chunk_length(chunk_length: int, vla: "FrozenVLA") -> int:
    """
    Check the length of a chunk against the horizon of a VLA.

    :param chunk_length: Wanted length C in control steps.
    :param vla: The VLA whose chunk must be at least as long.
    :return: ``chunk_length``.
    :raises ValueError: If it is no integer in 1..horizon.
    """
    if not is_integer(chunk_length) or not 1 <= chunk_length <= vla.spec.horizon:
        raise ValueError(
            f"chunk_length is {chunk_length!r}; with the VLA {vla.spec.name!r} it must be an integer from 1 to its "
            f"horizon {vla.spec.horizon}."
        )
    return int(chunk_length)
