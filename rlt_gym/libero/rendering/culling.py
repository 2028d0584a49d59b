"""Leave out of a MuJoCo scene what cannot reach the picture, without changing a pixel.

Software rendering is bound by triangles: a LIBERO scene has 200 k of them for a picture of 16 k pixels. Most lie
outside the picture, turn their back to the camera or fall between the points at which OpenGL samples the picture, and
one in ten is left (:mod:`rlt_gym.libero.rendering.triangles`). Those are compiled into a display list by MuJoCo itself,
by showing it a mesh that has these faces only, in their order: of two triangles at equal depth the later is seen. Such
a list is good until its mesh has moved by a fraction of a pixel in that camera's view: what stands still costs nothing.

MuJoCo draws at most one mirror, the first reflective geom of the scene, by drawing everything a second time, however
little of it the mirror shows (``mjr_render``). A mesh's list therefore only says "call number i", and the number
counts from OpenGL's list base: the list that draws the mirror into the stencil buffer, with which the second drawing
begins, moves the base to the lists of what the mirror shows; an empty last geom, with which it ends, moves it back.
When the mirror itself is outside the picture, there is no second drawing at all.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import mujoco
import numpy as np
from OpenGL import GL
from OpenGL.error import GLError, NullFunctionError

from rlt_gym.libero.rendering.camera_geometry import camera_of, mirror_images, planes_around, touches, view_in_mirror
from rlt_gym.libero.rendering.display_lists import compile_list, forget_errors
from rlt_gym.libero.rendering.merged_boxes import MergedBoxes
from rlt_gym.libero.rendering.triangles import BATCH, NEAREST, select_triangles

#: ``mjvGeom`` of MuJoCo 3.2 and newer (``mjvisualize.h``). :func:`geom_records` checks it before it is relied on.
GEOM = np.dtype(
    [
        ("type", "i4"), ("dataid", "i4"), ("objtype", "i4"), ("objid", "i4"), ("category", "i4"), ("matid", "i4"),
        ("texcoord", "i4"), ("segid", "i4"), ("size", "f4", 3), ("pos", "f4", 3), ("mat", "f4", (3, 3)),
        ("rgba", "f4", 4), ("emission", "f4"), ("specular", "f4"), ("shininess", "f4"), ("reflectance", "f4"),
        ("label", "S100"), ("camdist", "f4"), ("modelrbound", "f4"), ("transparent", "i4"),
    ]
)  # fmt: skip

#: Pixels by which a mesh may move in the picture before its triangles are chosen again. What triangles are chosen with
#: (:data:`rlt_gym.libero.rendering.triangles.SLACK`) is more than this and OpenGL's rounding together.
STILL = 1 / 512

#: After this many pictures all lists are emptied and all triangles are chosen again: Mesa keeps lists in large blocks,
#: and a single list that never changes, or that nothing shows any more, would keep a whole block.
RENEWAL = 64

#: Below this total number of triangles there is nothing to gain.
FEWEST_TRIANGLES = 1000

_GEOM = int(mujoco.mjtObj.mjOBJ_GEOM)
_PLANE, _BOX, _MESH = (int(getattr(mujoco.mjtGeom, f"mjGEOM_{name}")) for name in ("PLANE", "BOX", "MESH"))

#: ``mjr_render`` takes geoms with a smaller alpha for transparent.
_OPAQUE = 0.995


def geom_records(scene: mujoco.MjvScene) -> np.ndarray | None:
    """
    View the scene's geoms as one structured array that shares their memory.

    :param scene: A scene with at least two geoms.
    :return: Records of type :data:`GEOM`, one per geom the scene can hold; ``None`` when this MuJoCo lays
        them out in another way.
    """
    geoms = scene.geoms
    field = {name: GEOM.fields[name][1] for name in GEOM.names}  # type: ignore[index, union-attr]
    base = geoms[0].pos.ctypes.data - field["pos"]
    for index in (0, 1, len(geoms) - 1):
        for name in ("size", "pos", "mat", "rgba"):
            if getattr(geoms[index], name).ctypes.data != base + index * GEOM.itemsize + field[name]:
                return None
    buffer = (ctypes.c_char * (GEOM.itemsize * len(geoms))).from_address(base)
    records = np.frombuffer(buffer, GEOM)
    for index in range(min(scene.ngeom, 8)):
        for name in ("type", "dataid", "matid", "objid", "reflectance", "modelrbound"):
            if getattr(geoms[index], name) != records[index][name]:
                return None
    return records


class _View:
    """
    The display lists of one camera's pictures: for each geom one for the picture and one for the mirror.

    :param room: Largest number of geoms.
    :param context: MuJoCo's, whose list of planes is called by the view's.
    :param own_planes: Number of MuJoCo's first list of planes.
    """

    def __init__(self, room: int, context: Any, own_planes: int):
        # MuJoCo counts lists of meshes in twos: the mesh and its hull.
        self.lists = [GL.glGenLists(2 * room), GL.glGenLists(2 * room)]
        self.poses = [np.full((room, 3, 4), np.inf), np.full((room, 3, 4), np.inf)]
        self.counts = [np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)]
        self.parts: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
        self.age = 0
        self.end = GL.glGenLists(1)
        compile_list(self.end, partial(GL.glListBase, self.lists[0]))
        self.planes = GL.glGenLists(context.rangePlane)

        def mirror() -> None:
            GL.glListBase(self.lists[1])
            GL.glCallList(own_planes)

        compile_list(self.planes, mirror)
        for plane in range(1, context.rangePlane):
            compile_list(self.planes + plane, partial(GL.glCallList, own_planes + plane))

    def grow_older(self) -> None:
        """Count a picture, and now and then empty all lists and choose all triangles again."""
        self.age += 1
        if self.age > RENEWAL:
            self.age = 1
            for which in (0, 1):
                self.clear(which, np.arange(len(self.counts[which])))
                self.poses[which][:] = np.inf
                for numbers in self.parts[which].values():
                    for number in numbers:
                        GL.glDeleteLists(number, 2)
                self.parts[which].clear()

    def more_lists(self, which: int, geom: int, count: int) -> list[int]:
        """Numbers of the display lists of a geom that is drawn in several parts."""
        found = self.parts[which].setdefault(geom, [])
        if len(found) < count:
            more = count - len(found)
            start = GL.glGenLists(2 * more)
            found += [start + 2 * index for index in range(more)]
        return found[:count]

    def clear(self, which: int, geoms: np.ndarray) -> None:
        """Clear the display lists of geoms that only the other drawing shows (0 the picture, 1 the mirror)."""
        for number in geoms[self.counts[which][geoms] > 0].tolist():
            compile_list(self.lists[which] + 2 * number, _nothing)
            self.poses[which][number], self.counts[which][number] = np.inf, 0


class GeomCulling:
    """
    Scenes without large meshes: leaves out invisible geoms, and draws the small boxes of one body and color as one.

    :param model: The viewer's model.
    :param context: Made from it; must be current.
    :param scene: The scene after a first ``mjv_updateScene``.
    """

    def __init__(self, model: Any, context: Any, scene: Any):
        records = geom_records(scene)
        if records is None:
            raise NotImplementedError("check geom_records first")
        self._records, self._scene = records, scene
        self._merged = MergedBoxes(model, context)
        boxes = model.geom_aabb.astype(np.float64)
        self._middle, self._half = boxes[:, :3], boxes[:, 3:] * 1.001 + 1e-3

    def apply(self, camera: int, size: int) -> None:
        """
        As :meth:`Culling.apply`. A mirror may show what lies outside: with one, everything is drawn.

        :param camera: Number of the camera.
        :param size: Side of the picture in pixels.
        """
        geoms = self._records[: self._scene.ngeom]
        self._merged.apply(geoms)
        if _mirror_of(geoms) is not None:
            return
        planes = planes_around(*camera_of(self._scene))
        numbers = np.where(geoms["objtype"] == _GEOM, geoms["objid"], 0)
        rotations = geoms["mat"].astype(np.float64)
        middles = geoms["pos"] + (rotations @ self._middle[numbers][:, :, None])[:, :, 0]
        # How far a box reaches along a plane's normal.
        reach = (np.abs(planes[:, :3] @ rotations) * self._half[numbers][:, None, :]).sum(axis=2)
        endless = (geoms["objtype"] != _GEOM) | (geoms["type"] == _PLANE)  # sites have no box
        seen = (middles @ planes[:, :3].T + planes[:, 3] > -reach).all(axis=1) | endless
        drawn = geoms[seen & (geoms["rgba"][:, 3] > 0)]
        self._records[: len(drawn)] = drawn
        self._scene.ngeom = len(drawn)

    def close(self) -> None:
        """Nothing to give back."""


class Culling:
    """
    What to draw of one scene. All calls need the context to be current.

    :param model: The viewer's model, which must be used for nothing but drawing: its triangles are rearranged.
    :param context: Made from a model whose meshes :func:`without_meshes` had emptied.
    :param scene: The scene after a first ``mjv_updateScene``, with room for one more geom.
    """

    def __init__(self, model: Any, context: Any, scene: Any):
        records = geom_records(scene)
        if records is None:
            raise NotImplementedError("check geom_records first")
        self._model, self._records, self._scene, self._context = model, records, scene, context
        forget_errors()
        self._samples = _sample_positions()
        self._arrays = (model.mesh_face, model.mesh_facenormal, model.mesh_facetexcoord)
        self._originals = tuple(array.copy() for array in self._arrays)
        self._first, self._count = model.mesh_faceadr.copy(), model.mesh_facenum.copy()
        model.mesh_graphadr[:] = -1  # no lists of convex hulls: only those made with the context are drawn
        self._corners: dict[int, np.ndarray] = {}
        self._radius = np.zeros(model.nmesh)
        self._screen = np.empty((int(model.mesh_vertnum.max()), 4))
        most = int(self._count.max())
        self._chosen, self._parts = np.empty(most + 1, dtype=np.int32), np.empty(most // BATCH + 3, dtype=np.int64)
        self._room = scene.ngeom + 64
        self._wrappers = GL.glGenLists(self._room)
        for index in range(self._room):
            compile_list(self._wrappers + index, partial(_call, 2 * index))
        self._own_planes = context.basePlane
        self._views: dict[tuple[int, int], _View] = {}
        self._key = b""

    # ------------------------------------------------------------------ per picture

    def apply(self, camera: int, size: int) -> None:
        """
        Reduce the scene, as ``mjv_updateScene`` left it, to what can be seen.

        :param camera: Number of the camera the scene was made for.
        :param size: Side of the picture in pixels.
        """
        forget_errors()
        geoms = self._records[: self._scene.ngeom].copy()
        view = self._view_of(camera, size, geoms)
        eye, axes, window = camera_of(self._scene)
        split = _is_mesh(geoms)
        for mesh in set((geoms["dataid"][split] // 2).tolist()) - set(self._corners):
            self._measure(mesh)
        # 0 for an endless plane
        radius = np.where(geoms["modelrbound"] > 0, geoms["modelrbound"].astype(np.float64), np.inf)
        radius[split] = self._radius[geoms["dataid"][split] // 2]
        place = geoms["pos"].astype(np.float64)
        poses = np.concatenate([geoms["mat"].astype(np.float64), (place - eye)[:, :, None]], axis=2)
        # robosuite hides its sites by an alpha below 0, which OpenGL takes for 0; one is a cylinder of 20 m.
        visible = geoms["rgba"][:, 3] > 0
        shown = touches(planes_around(eye, axes, window), place, radius) & visible
        reflected, mirrored = None, np.zeros_like(shown)
        mirror = _mirror_of(geoms)
        if mirror is not None:
            if shown[mirror]:
                reflected = view_in_mirror(geoms[mirror], eye)
            else:  # outside the picture: without any reflectance there is no second drawing
                geoms["reflectance"] = 0.0
        if reflected is not None:
            mirrored = touches(reflected[1], place, radius) & visible
        meshes = np.flatnonzero(split)
        counts = self._choose(view, 0, geoms, meshes[shown[meshes]], axes @ poses, 1.0, window, size)
        shown[meshes] &= counts[meshes] > 0
        if reflected is not None:
            images = axes @ mirror_images(geoms[mirror], eye, poses)
            counts = self._choose(view, 1, geoms, meshes[mirrored[meshes]], images, -1.0, window, size)
            mirrored[meshes] &= counts[meshes] > 0
        keep = shown | mirrored
        if mirror is not None:
            keep[mirror] |= geoms["reflectance"][mirror] > 0
        view.clear(0, meshes[mirrored[meshes] & ~shown[meshes]])
        view.clear(1, meshes[shown[meshes] & ~mirrored[meshes]])
        GL.glListBase(view.lists[0])
        self._context.basePlane = view.planes
        geoms["dataid"][meshes] = self._wrappers + meshes - self._context.baseMesh
        drawn = geoms[keep]
        count = len(drawn)
        self._records[:count] = drawn
        if mirror is not None and count:
            self._records[count] = drawn[-1]
            last = self._records[count : count + 1]
            last["type"], last["dataid"], last["matid"] = _MESH, view.end - self._context.baseMesh, -1
            last["rgba"], last["reflectance"] = 1.0, 0.0
            count += 1
        self._scene.ngeom = count

    def _view_of(self, camera: int, size: int, geoms: np.ndarray) -> _View:
        """Return a camera's lists; make new ones if they are old or were made for other geoms."""
        key = geoms["dataid"].tobytes() + geoms["type"].tobytes() + geoms["objid"].tobytes()
        if key != self._key:  # something came into sight, such as a burner's glow
            if len(geoms) > self._room:
                raise RuntimeError(f"a scene of {len(geoms)} geoms, made for at most {self._room}")
            self._key = key
            for known in self._views.values():
                known.age = RENEWAL
        if (camera, size) not in self._views:
            self._views[camera, size] = _View(self._room, self._context, self._own_planes)
        view = self._views[camera, size]
        view.grow_older()
        return view

    def _measure(self, mesh: int) -> None:
        first = int(self._model.mesh_vertadr[mesh])
        corners = self._model.mesh_vert[first : first + int(self._model.mesh_vertnum[mesh])].astype(np.float64)
        self._corners[mesh] = corners
        self._radius[mesh] = np.linalg.norm(corners, axis=1).max() + 1e-3  # a scene's floats have 24 bits

    def _choose(
        self,
        view: _View,
        which: int,
        geoms: np.ndarray,
        chosen: np.ndarray,
        pose: np.ndarray,
        facing: float,
        window: np.ndarray,
        size: int,
    ) -> np.ndarray:
        """
        Make the lists of some geoms, unless they are still good.

        :param which: 0 for the picture, 1 for the mirror.
        :param chosen: Numbers of the geoms.
        :param pose: Of all geoms in the camera's axes (n, 3, 4).
        :param facing: -1 for mirror images.
        :return: Number of triangles of each geom (n,).
        """
        counts = view.counts[which]
        meshes = geoms["dataid"][chosen] // 2
        radius = self._radius[meshes]
        change = np.sqrt(((pose[chosen] - view.poses[which][chosen]) ** 2).sum(axis=1))
        meters = np.linalg.norm(change[:, :3], axis=1) * radius + change[:, 3]
        pixels = 2 * size * window[4] / (window[3] - window[2])  # of a meter at a meter's distance, and some
        depth = np.maximum(pose[chosen, 2, 3] - radius, NEAREST)
        still = meters * pixels < STILL * depth
        for number, mesh in zip(chosen[~still].tolist(), meshes[~still].tolist()):
            first, total = int(self._first[mesh]), int(self._count[mesh])
            faces, corners = self._originals[0][first : first + total], self._corners[mesh]
            count, parts = select_triangles(
                corners, faces, pose[number], window, float(size), self._samples, facing, self._screen, self._chosen,
                self._parts,
            )  # fmt: skip
            view.poses[which][number], counts[number] = pose[number], count
            pieces = np.split(self._chosen[:count] + first, self._parts[1:parts])
            own = view.lists[which] + 2 * number
            if len(pieces) == 1:
                self._compile(mesh, pieces[0], own)
                continue
            numbers = view.more_lists(which, number, len(pieces))
            for piece, at in zip(pieces, numbers):
                self._compile(mesh, piece, at)
            compile_list(own, partial(_call_in_order, numbers))
        return counts

    def _compile(self, mesh: int, triangles: np.ndarray, number: int) -> None:
        """Let MuJoCo make the display list of some triangles, by showing it a mesh that has no others."""
        first = int(self._first[mesh])
        for array, original in zip(self._arrays, self._originals):
            array[first : first + len(triangles)] = original[triangles]
        self._model.mesh_facenum[mesh] = len(triangles)
        context, base = self._context, self._context.baseMesh
        context.baseMesh = number - 2 * mesh
        try:
            mujoco.mjr_uploadMesh(self._model, context, mesh)
        finally:
            context.baseMesh = base

    def close(self) -> None:
        """Give the context its own lists of planes back, which it frees itself."""
        self._context.basePlane = self._own_planes


def _is_mesh(geoms: np.ndarray) -> np.ndarray:
    """Opaque meshes, no convex hulls. Transparent triangles must keep their order: such meshes stay in one piece."""
    return (
        (geoms["type"] == _MESH)
        & (geoms["dataid"] >= 0)
        & (geoms["dataid"] % 2 == 0)
        & (geoms["rgba"][:, 3] >= _OPAQUE)
    )


def can_cull(model: Any, scene: Any) -> bool:
    """
    Whether culling can help.

    :param model: The ``mjModel``.
    :param scene: The scene after a first ``mjv_updateScene``.
    :return: Whether there is something to gain (meshes of many triangles) and MuJoCo lays its geoms out as expected.
    """
    records = geom_records(scene) if scene.ngeom > 1 else None
    if records is None or any(camera.orthographic for camera in scene.camera):
        return False
    geoms = records[: scene.ngeom]
    mirror = _mirror_of(geoms)
    if mirror is not None and geoms["type"][mirror] == _PLANE:  # drawn by the same list in both rounds
        return False
    meshes = geoms["dataid"][_is_mesh(geoms)] // 2
    return int(model.mesh_facenum[meshes].sum()) > FEWEST_TRIANGLES


def without_meshes(model: Any, scene: Any) -> Any:
    """
    Empty the meshes that :class:`Culling` compiles itself, and those not drawn, while a context is made.

    :param model: The ``mjModel``.
    :param scene: The scene after a first ``mjv_updateScene``.
    :return: A function that puts them back.
    """
    records = geom_records(scene)
    assert records is not None
    geoms = records[: scene.ngeom]
    meshes = (geoms["type"] == _MESH) & (geoms["dataid"] >= 0)
    whole = {int(g) // 2 for g in geoms["dataid"][meshes & ~_is_mesh(geoms)]}
    saved = [array.copy() for array in (model.mesh_facenum, model.mesh_graphadr)]
    for mesh in set(range(model.nmesh)) - whole:
        model.mesh_facenum[mesh], model.mesh_graphadr[mesh] = 0, -1

    def restore() -> None:
        model.mesh_facenum[:], model.mesh_graphadr[:] = saved

    return restore


def _mirror_of(geoms: np.ndarray) -> int | None:
    """Find the one geom that MuJoCo's ``mjr_render`` takes for a mirror."""
    flat = (geoms["type"] == _PLANE) | (geoms["type"] == _BOX)
    found = np.flatnonzero(flat & (geoms["reflectance"] > 0) & (geoms["rgba"][:, 3] >= _OPAQUE))
    return int(found[0]) if len(found) else None


def _call(number: int) -> None:
    """Call a list by its distance from the list base in force when this is drawn."""
    GL.glCallLists(1, GL.GL_INT, np.array([number], dtype=np.int32))


def _call_in_order(numbers: list[int]) -> None:
    for number in numbers:
        GL.glCallList(number)


def _nothing() -> None:
    pass


def _sample_positions() -> np.ndarray:
    """Where in a pixel OpenGL samples the buffer it draws to, float (n, 2); none where it cannot tell."""
    count = int(GL.glGetIntegerv(GL.GL_SAMPLES))
    if count == 0:
        return np.full((1, 2), 0.5)
    position, found = (ctypes.c_float * 2)(), []
    try:
        for index in range(count):
            GL.glGetMultisamplefv(GL.GL_SAMPLE_POSITION, index, position)
            found.append(tuple(position))
    except (GLError, NullFunctionError):
        return np.empty((0, 2))
    return np.array(found, dtype=np.float64)
