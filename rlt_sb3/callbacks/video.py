"""Films training episodes while they are played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.common.chunk_outcome import outcomes_of
from rlt_sb3.common.films import real_time, write_video
from rlt_sb3.common.vec_env import metadata_of


class VideoCallback(StatefulCallback):
    """
    Films every n-th training episode in ``videos/train-<episode>-<success|failure>.mp4``.

    A film has the first picture and one after every control step. An environment without ``film``
    (:meth:`rlt_gym.core.chunk_vector_env.ChunkVectorEnv.film`) gives one picture before each chunk and one of the end.

    Only environments whose episode is filmed draw inside their chunks, and none draws while no film is taken. An
    episode that is cut off from outside (evaluation, checkpoint, end of training) gives no film. The callback's state
    is the number of episodes begun.

    :param folder: where films go
    :param every: films the episodes 0, every, 2 * every, ...
    """

    def __init__(self, folder: Path, every: int):
        super().__init__()
        self.folder = folder
        self.every = every
        self.episodes = 0
        self.films: dict[int, tuple[int, list[np.ndarray]]] = {}  # env -> (episode, pictures)
        self._fresh: np.ndarray | None = None
        self._told: set[int] | None = None  # which environments were told to draw inside their chunks
        self._every_step = False  # whether they do

    def restart(self) -> None:
        """Drop the films of episodes that a reset of all environments has cut off."""
        self.films.clear()
        self._fresh = None
        self._told = None  # an evaluation may have changed it

    def _on_rollout_start(self) -> None:
        # a vector step that begins episodes; with train_freq > 1 step, those inside a rollout are seen in _on_step
        if self._fresh is None:
            self._begin(np.ones(self.training_env.num_envs, dtype=bool))
            self._shoot()

    def _begin(self, new: np.ndarray) -> None:
        self._fresh = new
        for index in np.flatnonzero(new).tolist():
            if self.episodes % self.every == 0:
                self.films[index] = (self.episodes, [])
            self.episodes += 1
        self._tell(set(self.films))

    def _tell(self, envs: set[int]) -> None:
        if envs == self._told:
            return
        self._told = envs
        try:
            self.training_env.env_method("film", sorted(envs))
        except (AttributeError, NotImplementedError):  # another environment: a picture for each chunk
            pass

    def _shoot(self) -> None:
        if not self.films:
            return
        pictures = self.training_env.get_images()
        for index, (_, frames) in self.films.items():
            if pictures[index] is not None:
                frames.append(np.array(pictures[index], copy=True))

    def _on_step(self) -> bool:
        dones, infos = self.locals["dones"], self.locals["infos"]
        outcomes = outcomes_of(infos, self.locals["actions"], self.locals["rewards"])
        for index, (_, frames) in self.films.items():
            self._every_step |= "inner_frames" in infos[index]
            frames += infos[index].get("inner_frames", [])
        for index in np.flatnonzero(dones).tolist():
            if index not in self.films:
                continue
            episode, frames = self.films.pop(index)
            if "final_frame" in infos[index]:
                frames.append(np.array(infos[index]["final_frame"], copy=True))
            if frames:
                self.folder.mkdir(exist_ok=True)
                fps = real_time(metadata_of(self.training_env), self._every_step)
                end = "success" if outcomes[index].success else "failure"
                write_video(self.folder / f"train-{episode:06d}-{end}.mp4", frames, fps, hold=0)
        self._begin(np.asarray(dones, dtype=bool))
        self._shoot()
        return True

    def _on_training_end(self) -> None:
        self._tell(set())

    def state_dict(self) -> dict[str, Any]:
        """
        Return what a resumed run needs to know.

        :return: how many training episodes have begun
        """
        return {"episodes": self.episodes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Continue counting where the saved run stopped.

        :param state: from :meth:`state_dict`
        """
        self.restart()
        self.episodes = state["episodes"]
