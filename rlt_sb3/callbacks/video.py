"""Films of training episodes while they happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.common.chunk_outcome import outcomes_of
from rlt_sb3.common.films import write_video


class VideoCallback(StatefulCallback):
    """
    Films every n-th training episode: one picture before each chunk and one of the end, in
    ``videos/train-<episode>-<success|failure>.mp4``.

    Pictures are rendered only while a film is being taken. An episode that is cut off from outside (evaluation,
    checkpoint, end of training) gives no film. Its state is the number of episodes begun.

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

    def restart(self) -> None:
        """All environments have been reset: running films end."""
        self.films.clear()
        self._fresh = None

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
        for index in np.flatnonzero(dones).tolist():
            if index not in self.films:
                continue
            episode, frames = self.films.pop(index)
            if "final_frame" in infos[index]:
                frames.append(np.array(infos[index]["final_frame"], copy=True))
            if frames:
                self.folder.mkdir(exist_ok=True)
                end = "success" if outcomes[index].success else "failure"
                write_video(self.folder / f"train-{episode:06d}-{end}.mp4", frames, hold=0)
        self._begin(np.asarray(dones, dtype=bool))
        self._shoot()
        return True

    def state_dict(self) -> dict[str, Any]:
        """
        :return: how many training episodes have begun
        """
        return {"episodes": self.episodes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        :param state: from :meth:`state_dict`
        """
        self.restart()
        self.episodes = state["episodes"]
