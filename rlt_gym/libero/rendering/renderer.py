"""Off-screen pictures of one MuJoCo model, without robosuite's per-step look-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import mujoco
import numpy as np

if TYPE_CHECKING:
    from rlt_gym.libero.rendering.culling import Culling, GeomCulling
    from rlt_gym.libero.rendering.look import Look

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}

#: What a scene is drawn from, and what proprioception is read from (xquat, qpos).
KINEMATICS = (
    "xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos",
    "cam_xmat", "light_xpos", "light_xdir", "qpos",
)  # fmt: skip


class Renderer:
    """
    Draws pictures of a model with one GL context and one scene.

    Use the renderers of a process from one thread. A renderer makes its context current before it draws, unless it was
    the last one that drew. It does not notice a context that other code (robosuite's) has made current. What each
    quality does:

    - ``"stock"`` draws as robosuite does: the simulator's own model, its scene options and multisampling, MuJoCo's
      plain ``mjv_updateScene`` and ``mjr_render``. None of this folder's other modules is imported.
    - ``"exact"`` gives the same pictures, bit for bit, from a copy of the model: what cannot reach the picture is left
      out (:mod:`rlt_gym.libero.rendering.culling`).
    - ``"fast"`` is for training on a CPU, where drawing is bound by triangles: multisampling is off, and meshes are
      coarser (:mod:`rlt_gym.libero.rendering.decimate`). Where nothing but the robot has meshes, as with the embedded
      assets, the robot is drawn by its collision hulls instead, and small boxes are drawn as one
      (:mod:`rlt_gym.libero.rendering.merged_boxes`). Reflections stay, since without them colors change.

    :param model: The simulator's model. Fixture poses (``body_pos``) may change between calls of :meth:`render`.
    :param size: Side of the square pictures in pixels.
    :param quality: ``"exact"``, ``"fast"`` or ``"stock"``.
    """

    #: The renderer whose GL context is current; ``None``: no renderer's is.
    _current: ClassVar[Renderer | None] = None

    def __init__(self, model: mujoco.MjModel, size: int, quality: str = "exact"):
        self.size = size
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0
        self._source = self._viz = model
        self._colors: dict[str, np.ndarray] = {}  # before the first change of the look
        if quality != "stock":
            from rlt_gym.libero.rendering import shortcuts

            self._viz = shortcuts.viewer_model(model, size, quality, self._option)
        width, height = self._viz.vis.global_.offwidth, self._viz.vis.global_.offheight
        self._room = min(width, height)
        self._data = mujoco.MjData(self._viz)
        self._gl = mujoco.GLContext(width, height)
        self._make_current()
        self._perturb = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = 0
        self._scene = mujoco.MjvScene(self._viz, maxgeom=1000)
        self._context: mujoco.MjrContext | None = None
        self._culling: Culling | GeomCulling | None = None
        if quality == "stock":
            self._context = self._plain_context()
        else:
            mujoco.mj_kinematics(self._viz, self._data)
            mujoco.mj_camlight(self._viz, self._data)
            self._update_scene()
            self._context, self._culling = shortcuts.culled_context(self._viz, self._scene, self._plain_context)

    def _make_current(self) -> None:
        if Renderer._current is not self:
            self._gl.make_current()
            Renderer._current = self

    def show(self, look: Look) -> None:
        """
        Change brightness, colors and textures of all pictures from now on.

        :param look: Factors of those of the model that the renderer was made of; textures that replace its own.
        """
        for name, factors in (("light_diffuse", look.lights[:, None]), ("light_specular", look.lights[:, None]),
                              ("mat_rgba", look.materials), ("geom_rgba", look.geoms)):  # fmt: skip
            colors = self._colors.setdefault(name, getattr(self._viz, name).copy())
            getattr(self._viz, name)[:, :3] = np.clip(colors[:, :3] * factors, 0.0, 1.0)
        self._make_current()
        for number, texture in look.textures.items():
            first = self._viz.tex_adr[number]
            self._viz.tex_data[first : first + texture.size] = texture
            mujoco.mjr_uploadTexture(self._viz, self._context, number)

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
        Draw one picture.

        :param kinematics: State to draw: copies of the fields :data:`KINEMATICS` of an ``MjData``.
        :param camera: Name of a camera of the model.
        :param size: Side in pixels; ``None`` for the size given to the constructor.
        :return: uint8 (size, size, 3) in OpenGL's convention, i.e. upside down, as LIBERO gives its pictures.
        """
        self._make_current()
        side = self.size if size is None else size
        if side > self._room:
            mujoco.mjr_resizeOffscreen(side, side, self._context)
            self._room = side
        self._camera.fixedcamid = self._viz.camera(camera).id
        for name, value in kinematics.items():
            getattr(self._data, name)[:] = value
        if self._viz is not self._source:
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
            self._make_current()  # other contexts have objects with the same numbers
            if self._culling is not None:
                self._culling.close()
            self._context.free()
            self._gl.free()
            self._context = Renderer._current = None
