"""Off-screen pictures of one MuJoCo model, without robosuite's per-step look-ups.

``quality="exact"`` draws what LIBERO draws, bit for bit: the same scene, options, multisampling and camera, less what
cannot reach the picture (:mod:`rlt_gym.libero.rendering.culling`).
``quality="fast"`` is for training on a CPU, where drawing is bound by triangles: multisampling is off, and meshes are
coarser (:mod:`rlt_gym.libero.rendering.decimate`). Where nothing but the robot has meshes, as with the embedded assets,
the robot is drawn by its collision hulls instead. Reflections stay, since without them colours change. States are not
touched: all this is done in a copy of the model that only the viewer sees.
"""

from __future__ import annotations

import copy
import warnings

import mujoco
import numpy as np
from OpenGL.error import GLError

from rlt_gym.libero.rendering.culling import Culling, GeomCulling, can_cull, geom_records, without_meshes
from rlt_gym.libero.rendering.decimate import decimate

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}

#: What a scene is drawn from, and what proprioception is read from (xquat, qpos).
KINEMATICS = (
    "xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos",
    "cam_xmat", "light_xpos", "light_xdir", "qpos",
)  # fmt: skip

_ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_LINK_COLOUR = (0.92, 0.92, 0.94, 1.0)
_HAND_COLOUR = (0.25, 0.25, 0.28, 1.0)


def _robot_drawn_by_hulls(model: mujoco.MjModel) -> None:
    """Hide the robot's visual meshes (group 1) and show its collision geoms (group 0) in plain colours."""
    for geom in range(model.ngeom):
        body = model.body(model.geom_bodyid[geom]).name
        if not body.startswith(_ROBOT_PREFIXES):
            continue
        if model.geom_group[geom] == 1:
            model.geom_group[geom] = 5
        elif model.geom_group[geom] == 0:
            model.geom_group[geom] = 1
            model.geom_matid[geom] = -1
            model.geom_rgba[geom] = _HAND_COLOUR if body.startswith("gripper0_") else _LINK_COLOUR


def _in_fewer_pieces(model: mujoco.MjModel) -> None:
    """The floor in squares of 1 m, a cylinder's side in 4 rings: MuJoCo takes 2,300 squares and 16 rings."""
    planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    model.geom_size[planes, 2] = np.maximum(model.geom_size[planes, 2], 1.0)
    model.vis.quality.numstacks = 4


def _visual_meshes(model: mujoco.MjModel) -> tuple[list[int], bool]:
    """
    :return: Ids of the meshes that are drawn, and whether they are all the robot's.
    """
    meshes, robot_only = set(), True
    for geom in range(model.ngeom):
        if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH and model.geom_group[geom] in (1, 2):
            meshes.add(int(model.geom_dataid[geom]))
            robot_only &= model.body(model.geom_bodyid[geom]).name.startswith(_ROBOT_PREFIXES)
    return sorted(meshes), bool(robot_only)


class Renderer:
    """
    Owns one GL context and one scene. Use from one thread; one per process is the safe number, since robosuite's and
    MuJoCo's contexts do not know of each other.

    :param model: The simulator's model. Fixture poses (``body_pos``) may change between calls of :meth:`render`.
    :param size: Side of the square pictures in pixels.
    :param quality: ``"exact"`` or ``"fast"``.
    """

    def __init__(self, model: mujoco.MjModel, size: int, quality: str = "exact"):
        self.size = size
        self._viz = copy.copy(model)
        self._viz.vis.global_.offwidth = self._viz.vis.global_.offheight = self._room = size
        hulls = False
        if quality == "fast":
            self._viz.vis.quality.offsamples = 0
            meshes, hulls = _visual_meshes(self._viz)
            if hulls:
                _robot_drawn_by_hulls(self._viz)
                _in_fewer_pieces(self._viz)
            else:
                decimate(self._viz, meshes)
        self._source = model
        self._data = mujoco.MjData(self._viz)
        self._gl = mujoco.GLContext(size, size)
        self._gl.make_current()
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0
        if hulls:  # one link's collision mesh has 12.5 k triangles, its hull 300
            self._option.flags[mujoco.mjtVisFlag.mjVIS_CONVEXHULL] = 1
        self._perturb = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = 0
        self._scene = mujoco.MjvScene(self._viz, maxgeom=1000)
        mujoco.mj_kinematics(self._viz, self._data)
        mujoco.mj_camlight(self._viz, self._data)
        self._update_scene()
        self._culling: Culling | GeomCulling | None = None
        self._context = self._make_context()

    def _make_context(self) -> mujoco.MjrContext:
        if not can_cull(self._viz, self._scene):
            context = self._plain_context()
            if self._scene.ngeom > 1 and geom_records(self._scene) is not None:
                self._culling = GeomCulling(self._viz, context, self._scene)
            return context
        restore = without_meshes(self._viz, self._scene)  # what can be seen of them becomes display lists, per picture
        context = self._plain_context()
        restore()
        try:
            self._culling = Culling(self._viz, context, self._scene)
        except GLError as error:
            warnings.warn(f"pictures are drawn in full, without culling: {error}", stacklevel=2)
            context.free()
            return self._plain_context()
        return context

    def _plain_context(self) -> mujoco.MjrContext:
        context = mujoco.MjrContext(self._viz, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        return context

    def _update_scene(self) -> None:
        mujoco.mjv_updateScene(
            self._viz, self._data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )

    def render(self, kinematics: dict[str, np.ndarray], camera: str, size: int | None = None) -> np.ndarray:
        """
        :param kinematics: State to draw: copies of the fields :data:`KINEMATICS` of an ``MjData``.
        :param camera: Name of a camera of the model.
        :param size: Side in pixels; ``None`` for the size given to the constructor.
        :return: uint8 (size, size, 3) in OpenGL's convention, i.e. upside down, as LIBERO gives its pictures.
        """
        side = self.size if size is None else size
        if side > self._room:
            mujoco.mjr_resizeOffscreen(side, side, self._context)
            self._room = side
        self._camera.fixedcamid = self._viz.camera(camera).id
        for name, value in kinematics.items():
            getattr(self._data, name)[:] = value
        # LIBERO shows a hot stove by the alpha of a site, in the simulator's model.
        self._viz.site_rgba[:] = self._source.site_rgba
        self._update_scene()
        if self._culling is not None:
            self._culling.apply(self._camera.fixedcamid, side)
        viewport = mujoco.MjrRect(0, 0, side, side)
        mujoco.mjr_render(viewport, self._scene, self._context)
        picture = np.zeros((side, side, 3), dtype=np.uint8)  # stays so if the GL context is lost
        mujoco.mjr_readPixels(picture, None, viewport, self._context)
        return picture

    def close(self) -> None:
        """Free the context. Safe to call twice."""
        if self._context is not None:
            if self._culling is not None:
                self._culling.close()
            self._context.free()
            self._gl.free()
            self._context = None
