"""An episode of the scripted expert, recorded inside a worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlt_gym.libero.experts.supported import make_expert


def record_demo(simulator: Any, index: int, seed: int, noise: float, speed: float, max_steps: int) -> dict[str, Any]:
    """
    One expert episode, played inside a worker.

    :param simulator: The worker's :class:`~rlt_gym.libero.worker.simulator.LiberoSimulator`.
    :param index: Initial state of the training split.
    :param seed: Seed of the expert.
    :param noise: See :class:`~rlt_gym.libero.experts.ScriptedExpert`.
    :param speed: See :class:`~rlt_gym.libero.experts.ScriptedExpert`.
    :param max_steps: Control steps before it gives up.
    :return: Row t is the observation before action t: ``agentview``, ``wrist`` uint8 (T, S, S, 3), ``proprio`` (T, 8),
        ``actions`` (T, 7), ``object_positions`` (T, n, 3) in m; and ``success``.
    """
    observation = simulator.reset("train", index)
    expert = make_expert(simulator, noise=noise, speed=speed)
    expert.reset(np.random.default_rng(seed))
    rows: dict[str, list[np.ndarray]] = {}
    success = False
    for _ in range(max_steps):
        row = {**observation, "object_positions": simulator.object_positions()}
        action = expert.act()
        row["actions"] = np.asarray(expert.clean_action, dtype=np.float32)
        for key, value in row.items():
            rows.setdefault(key, []).append(value)
        result = simulator.step_chunk(action[None])
        observation, success = result.observation, result.success
        if success:
            break
    return {**{key: np.stack(values) for key, values in rows.items()}, "success": success}
