"""What :class:`~rlt_gym.libero.rendering.renderer.Renderer` prepares for ``"exact"`` and ``"fast"`` pictures.

All of it is done in a copy of the model that only the viewer sees: states are not touched.
"""

from __future__ import annotations

import copy
import warnings
from typing import Callable

import mujoco
import numpy as np
from OpenGL.error import GLError

from rlt_gym.libero.rendering.culling import Culling, GeomCulling, can_cull, geom_records, without_meshes
from rlt_gym.libero.rendering.decimate import decimate

_ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_LINK_COLOR = (0.92, 0.92, 0.94, 1.0)
_HAND_COLOR = (0.25, 0.25, 0.28, 1.0)


def viewer_model(model: mujoco.MjModel, size: int, quality: str, option: mujoco.MjvOption) -> mujoco.MjModel:
    """
    Copy the simulator's model into one that is quicker to draw.

    :param model: The simulator's model.
    :param size: Side of the pictures in pixels.
    :param quality: ``"exact"`` or ``"fast"``.
    :param option: Changed: what the scene is to show.
    :return: The copy of the model that is drawn.
    """
    viewer = copy.copy(model)
    viewer.vis.global_.offwidth = viewer.vis.global_.offheight = size
    if quality == "fast":
        viewer.vis.quality.offsamples = 0
        meshes, robot_only = _visual_meshes(viewer)
        if robot_only:
            _robot_drawn_by_hulls(viewer)
            _in_fewer_pieces(viewer)
            # one link's collision mesh has 12.5 k triangles, its hull 300
            option.flags[mujoco.mjtVisFlag.mjVIS_CONVEXHULL] = 1
        else:
            decimate(viewer, meshes)
    return viewer


def culled_context(
    model: mujoco.MjModel, scene: mujoco.MjvScene, make_context: Callable[[], mujoco.MjrContext]
) -> tuple[mujoco.MjrContext, Culling | GeomCulling | None]:
    """
    Make MuJoCo's context, and the culling that goes with it.

    :param model: Of :func:`viewer_model`.
    :param scene: Its scene after a first ``mjv_updateScene``.
    :param make_context: Makes MuJoCo's context of the model; GL is current.
    :return: The context, and what leaves out things that cannot be seen, where there is something to gain.
    """
    if not can_cull(model, scene):
        context = make_context()
        if scene.ngeom > 1 and geom_records(scene) is not None:
            return context, GeomCulling(model, context, scene)
        return context, None
    restore = without_meshes(model, scene)  # what can be seen of them becomes display lists, per picture
    context = make_context()
    restore()
    try:
        return context, Culling(model, context, scene)
    except GLError as error:
        warnings.warn(f"pictures are drawn in full, without culling: {error}", stacklevel=3)
        context.free()
        return make_context(), None


def _visual_meshes(model: mujoco.MjModel) -> tuple[list[int], bool]:
    """
    Which meshes are drawn.

    :return: Their ids, and whether they are all the robot's.
    """
    meshes, robot_only = set(), True
    for geom in range(model.ngeom):
        if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH and model.geom_group[geom] in (1, 2):
            meshes.add(int(model.geom_dataid[geom]))
            robot_only &= model.body(model.geom_bodyid[geom]).name.startswith(_ROBOT_PREFIXES)
    return sorted(meshes), bool(robot_only)


def _robot_drawn_by_hulls(model: mujoco.MjModel) -> None:
    """Hide the robot's visual meshes (group 1) and show its collision geoms (group 0) in plain colors."""
    for geom in range(model.ngeom):
        body = model.body(model.geom_bodyid[geom]).name
        if not body.startswith(_ROBOT_PREFIXES):
            continue
        if model.geom_group[geom] == 1:
            model.geom_group[geom] = 5
        elif model.geom_group[geom] == 0:
            model.geom_group[geom] = 1
            model.geom_matid[geom] = -1
            model.geom_rgba[geom] = _HAND_COLOR if body.startswith("gripper0_") else _LINK_COLOR


def _in_fewer_pieces(model: mujoco.MjModel) -> None:
    """Cut the floor into squares of 1 m and a cylinder's side into 4 rings; MuJoCo takes 2,300 squares and 16 rings."""
    planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    model.geom_size[planes, 2] = np.maximum(model.geom_size[planes, 2], 1.0)
    model.vis.quality.numstacks = 4
