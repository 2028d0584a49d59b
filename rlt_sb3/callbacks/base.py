"""Base class of callbacks whose state can be saved and restored."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.callbacks import BaseCallback


class StatefulCallback(BaseCallback):
    """
    A callback of Stable-Baselines3 whose state can be kept beside the model's checkpoint.

    ``model.save`` knows nothing of callbacks. Save ``callback.state_dict()`` beside the model (as JSON, for example)
    and call :meth:`load_state_dict` on a new callback with the same arguments before ``learn``.
    """

    def _on_step(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """
        Return what a resumed run needs to know.

        :return: plain data that JSON can hold
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restore a saved state; the callback forgets what it has counted before.

        :param state: from :meth:`state_dict`, also by way of JSON
        """
