"""Plays a frozen VLA's own chunks from listed initial states, without an RL token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlt_gym.vla.base import FrozenVLA, forward_seed
from rlt_gym.vla.batches import run_vla


@dataclass(frozen=True)
class PlayedEpisode:
    """
    What a VLA did from one initial state.

    :param task_id: Its task.
    :param init_index: Its initial state.
    :param instruction: What the robot was told to do.
    :param success: Whether the task was solved.
    :param steps: Control steps played.
    :param chunks: Chunks played.
    :param frames: Upright pictures of the VLA's first camera, uint8 (H, W, 3): one before each chunk and one at the
        end; empty unless they were asked for.
    """

    task_id: int
    init_index: int
    instruction: str
    success: bool
    steps: int
    chunks: int
    frames: list[np.ndarray] = field(default_factory=list, repr=False)


def play_episodes(
    vla: FrozenVLA,
    env: VectorEnv,
    episodes: Sequence[tuple[int, int]],
    split: str = "eval",
    seed: int = 0,
    frames: bool = False,
    on_chunk: Callable[[], None] | None = None,
) -> Iterator[PlayedEpisode]:
    """
    Play listed initial states, each once; whichever simulator is free takes the next one.

    All simulators share one forward pass per chunk (of the VLA's ``max_batch``, more). It has one row per simulator
    until the end, also for simulators that have no episode any more: a batch of another size rounds differently. An
    episode whose simulator was lost is played again.

    :param vla: The policy.
    :param env: Vector environment with pictures under ``SAME_STEP``, whose reset takes ``episodes``
        (:class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv`). Its chunks are the first steps of the VLA's.
    :param episodes: (task_id, initial state) of each, no two alike.
    :param split: Set of initial states.
    :param seed: Seed for the noise of a stochastic VLA.
    :param frames: Keep pictures of the episodes: those that the VLA sees, so that they cost no time.
    :param on_chunk: Called after every chunk; it may raise, to stop.
    :return: The episodes as they end.
    :raises ValueError: If VLA and environment do not fit, or the environment plays other episodes.
    """
    robot = env.metadata["robot"]
    vla.spec.check_robot(robot)
    vla.spec.check_render(env.metadata.get("render"))
    if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        raise ValueError(f"Episodes are played under SAME_STEP, got {env.metadata.get('autoreset_mode')}.")
    length = (env.single_action_space.shape or (0,))[0]
    if not 1 <= length <= vla.spec.horizon:
        raise ValueError(
            f"The environment plays chunks of {length} control steps; the VLA {vla.spec.name!r} gives "
            f"{vla.spec.horizon}."
        )
    camera = vla.spec.cameras[0]
    upside_down = next(entry.upside_down for entry in robot.cameras if entry.key == camera)

    def upright(picture: np.ndarray) -> np.ndarray:
        return np.array(picture[::-1] if upside_down else picture)

    left = {(int(task), int(state)) for task, state in episodes}
    chunks, films = [0] * env.num_envs, [list[np.ndarray]() for _ in range(env.num_envs)]
    obs, infos = env.reset(seed=seed, options={"init_states": split, "episodes": list(episodes)})
    while left:
        keys = zip(infos["noise_seed"].tolist(), infos["episode_steps"].tolist(), strict=True)
        seeds = [forward_seed(noise_seed, step) for noise_seed, step in keys]
        if frames:
            for film, picture in zip(films, obs[camera], strict=True):
                film.append(upright(picture))
        inputs = {key: obs[key] for key in vla.spec.cameras} | {"state": obs["proprio"]}
        actions = run_vla(vla, inputs, infos["instruction"].tolist(), seeds).chunk[:, :length].cpu().numpy()
        obs, _, terminations, truncations, infos = env.step(actions)
        if on_chunk is not None:
            on_chunk()
        for index in range(env.num_envs):
            chunks[index] += 1
        for index in np.flatnonzero(terminations | truncations).tolist():
            final = infos["final_info"]
            film, films[index] = films[index], []
            played, chunks[index] = chunks[index], 0
            if final["worker_restarted"][index]:
                continue
            state = (int(final["task_id"][index]), int(final["init_index"][index]))
            if state not in left:
                raise ValueError(f"The environment plays {state}, which is none of the episodes that it was given.")
            left.remove(state)
            if frames:
                film.append(upright(infos["final_obs"][index][camera]))
            success, steps = bool(final["is_success"][index]), int(final["episode_steps"][index])
            yield PlayedEpisode(*state, str(final["instruction"][index]), success, steps, played, film)
