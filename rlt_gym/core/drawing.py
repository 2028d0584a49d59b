"""Frames of chunked vector environments, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rlt_gym.core.split_step import StepGuard


class Drawing(StepGuard):
    """Adds ``render`` and ``film`` to a vector environment that implements :meth:`_draw`."""

    num_envs: int
    render_mode: str | None
    #: Environments that are drawn at every control step, see :meth:`film`.
    _filmed: frozenset[int] = frozenset()

    def _draw(self, envs: Sequence[int]) -> dict[int, np.ndarray]:
        """
        Draw some of the environments.

        :param envs: Indices of the environments.
        :return: By environment, an upright uint8 (H, W, 3) frame.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no frames")

    def film(self, envs: Iterable[int] = ()) -> None:
        """
        Draw environments also inside the next chunks, after each control step: ``inner_frames`` in their infos.

        :param envs: Indices of the environments, by default none. The others cost no time.
        :raises ValueError: There is no ``render_mode``.
        """
        self._filmed = frozenset(int(env) for env in envs)
        if self._filmed and self.render_mode is None:
            raise ValueError("film needs an environment with render_mode='rgb_array', got None")

    def render(self) -> tuple[np.ndarray, ...] | None:
        """
        Draw every environment.

        :return: One upright uint8 (H, W, 3) frame per env, or ``None`` without ``render_mode="rgb_array"``.
        """
        self._check_open()
        if self.render_mode is None:
            return None
        self._check_no_step("render")
        frames = self._draw(range(self.num_envs))
        return tuple(frames[env] for env in range(self.num_envs))
