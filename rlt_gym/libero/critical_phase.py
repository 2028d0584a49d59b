"""Predicates that tell when the critical phase of an episode begins (RL Token paper: the part that practice improves).

``LIBERO-v0`` and ``RLToken-LIBERO-v0`` take ``critical_phase="module:function"`` and ``critical_phase_kwargs``. The
function is called in the worker, ``function(simulator, **kwargs) -> bool``, at the start of an episode and after each
chunk; once it was true, it is not asked again in this episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def gripper_near_object(simulator: Any, distance: float = 0.1, objects: Sequence[str] | None = None) -> bool:
    """
    Tell whether the point between the finger tips has come close to an object of the task.

    :param simulator: The worker's :class:`~rlt_gym.libero.worker.simulator.LiberoSimulator`.
    :param distance: How close to the origin of the object, meters.
    :param objects: BDDL names of objects, fixtures or regions; ``None``: those that the task's goals are to move.
    :return: Whether it is that close to any of them.
    :raises ValueError: An object that the scene does not have.
    """
    from rlt_gym.libero.experts.scene import Scene

    scene = Scene(simulator.problem)
    problem = simulator.problem
    names = [str(goal[1]) for goal in problem.parsed_problem["goal_state"]] if objects is None else list(objects)
    known = [*problem.obj_body_id, *problem.object_sites_dict]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"objects must be of this scene ({', '.join(sorted(known))}), got {unknown}")
    hand = scene.hand_position
    return any(float(np.linalg.norm(hand - scene.position(name))) <= distance for name in names)
