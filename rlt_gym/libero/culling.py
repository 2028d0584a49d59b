"""Leave out of a MuJoCo scene what cannot reach the picture, without changing a pixel.

Software rendering is bound by triangles: a LIBERO scene has 200 k of them in some 90 geoms, of which most lie outside
the picture or on the far side of what they belong to. The meshes are therefore cut once into clusters, runs of
neighbouring triangles that look the same way, each a display list of its own, compiled by MuJoCo itself. Per picture,
clusters and geoms are dropped whose bounding sphere lies outside the view, and clusters that turn their back to the
camera, which OpenGL would drop too, triangle by triangle, after having transformed and lit them.

MuJoCo draws at most one mirror, the first reflective geom of the scene, by drawing everything a second time, however
little of it the mirror shows (``mjr_render``). A mesh's list therefore only says "call number i", and the number
counts from OpenGL's list base: the list that draws the mirror into the stencil buffer, with which the second drawing
begins, moves the base to the lists of what the mirror shows; an empty last geom, with which it ends, moves it back.
When the mirror itself is outside the picture, there is no second drawing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mujoco
import numpy as np
from OpenGL import GL

#: ``mjvGeom`` of MuJoCo 3.2 and newer (``mjvisualize.h``). :func:`geom_records` checks it before it is relied on.
GEOM = np.dtype(
    [
        ("type", "i4"), ("dataid", "i4"), ("objtype", "i4"), ("objid", "i4"), ("category", "i4"), ("matid", "i4"),
        ("texcoord", "i4"), ("segid", "i4"), ("size", "f4", 3), ("pos", "f4", 3), ("mat", "f4", (3, 3)),
        ("rgba", "f4", 4), ("emission", "f4"), ("specular", "f4"), ("shininess", "f4"), ("reflectance", "f4"),
        ("label", "S100"), ("camdist", "f4"), ("modelrbound", "f4"), ("transparent", "i4"),
    ]
)  # fmt: skip

#: Triangles per cluster: smaller ones are culled better, but each costs a draw call.
CLUSTER_FACES = 128

#: How much (sine of the angle) a cluster must be turned away before it is dropped. Rasterisers snap vertices to
#: 1/256 pixel, so a triangle seen edge-on may count as a front although its normal says otherwise.
BACK_MARGIN = 0.1

_PLANE, _BOX, _MESH = (int(getattr(mujoco.mjtGeom, f"mjGEOM_{name}")) for name in ("PLANE", "BOX", "MESH"))

#: ``mjr_render`` takes geoms with a smaller alpha for transparent.
_OPAQUE = 0.995


def geom_records(scene: mujoco.MjvScene) -> np.ndarray | None:
    """
    The scene's geoms as one structured array that shares their memory.

    :param scene: A scene with at least two geoms.
    :return: Records of type :data:`GEOM`, one per geom the scene can hold; ``None`` when this MuJoCo lays
        them out in another way.
    """
    import ctypes

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


def split_faces(centres: np.ndarray, normals: np.ndarray, size: int) -> list[np.ndarray]:
    """
    Cut a sequence of triangles, where it changes most, into runs that lie together and face the same way. Their order
    stays, for it shows: of two triangles at equal depth in one sample of the picture, the later is seen.

    :param centres: float (n, 3): middles of the triangles; ``normals`` their unit normals (n, 3).
    :param size: Largest number of triangles in a run.
    :return: Indices of each run, ascending, and the runs in order.
    """
    spread = max(float(np.ptp(centres, axis=0).max()), 1e-9)
    features = np.concatenate([centres / spread, normals], axis=1)
    sums = np.concatenate([np.zeros((1, 6)), np.cumsum(features, axis=0)])
    done, todo = [], [(0, len(centres))]
    while todo:
        start, stop = todo.pop()
        if stop - start <= size:
            done.append(np.arange(start, stop))
            continue
        least = max(1, size // 4)
        cuts = np.arange(start + least, stop - least + 1)
        before, after = sums[cuts] - sums[start], sums[stop] - sums[cuts]
        # The least scatter within both parts is the most between them.
        gain = (before**2).sum(axis=1) / (cuts - start) + (after**2).sum(axis=1) / (stop - cuts)
        cut = int(cuts[np.argmax(gain)])
        todo += [(cut, stop), (start, cut)]
    return done


def cluster_bounds(corners: np.ndarray, normals: np.ndarray) -> tuple[np.ndarray, float, np.ndarray, float]:
    """
    :param corners: float (n, 3, 3): corners of the triangles; ``normals`` their unit normals (n, 3).
    :return: Centre (3,) and radius of a sphere around them, axis (3,) and sine of the half-angle of a cone around
        the normals (2 where they spread over more than a half-space, so that no view is from behind).
    """
    points = corners.reshape(-1, 3)
    centre = 0.5 * (points.min(axis=0) + points.max(axis=0))
    radius = float(np.linalg.norm(points - centre, axis=1).max())
    axis = normals.sum(axis=0)
    length = np.linalg.norm(axis)
    if length < 1e-9:
        return centre, radius, np.array([0.0, 0.0, 1.0]), 2.0
    axis = axis / length
    cosine = float((normals @ axis).min())
    return centre, radius, axis, float(np.sqrt(max(0.0, 1.0 - cosine * cosine))) if cosine > 0.05 else 2.0


class Culling:
    """
    What to draw of one scene. All calls need the context to be current.

    :param model: The viewer's model. Its meshes are read.
    :param context: Made from a model whose meshes :func:`without_meshes` had emptied.
    :param scene: The scene after a first ``mjv_updateScene``, with room for one more geom.
    :param size: Largest number of triangles in a cluster.
    """

    def __init__(self, model: Any, context: Any, scene: Any, size: int = CLUSTER_FACES):
        records = geom_records(scene)
        if records is None:
            raise NotImplementedError("check geom_records first")
        self._records, self._scene, self._context = records, scene, context
        geoms = records[: scene.ngeom]
        _forget_errors()
        self._clusters = {
            mesh: self._compile(model, mesh, size) for mesh in {int(g) // 2 for g in geoms["dataid"][_is_mesh(geoms)]}
        }
        self._make_lists(len(geoms) + 64)
        self._collect(geoms)

    # ------------------------------------------------------------------ once

    def _compile(self, model: Any, mesh: int, size: int) -> tuple[np.ndarray, ...]:
        """Let MuJoCo compile each cluster into a display list, by showing it a mesh that has these faces only."""
        arrays = (model.mesh_face, model.mesh_facenormal, model.mesh_facetexcoord)
        context, base_mesh = self._context, self._context.baseMesh
        start, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        rows = slice(start, start + count)
        first, graph = int(model.mesh_vertadr[mesh]), int(model.mesh_graphadr[mesh])
        vertices = model.mesh_vert[first : first + model.mesh_vertnum[mesh]].astype(np.float64)
        corners = vertices[model.mesh_face[rows]]
        normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        area = np.linalg.norm(normals, axis=1)
        normals /= np.maximum(area, 1e-300)[:, None]
        groups = split_faces(corners.mean(axis=1), normals, size)
        lists = GL.glGenLists(2 * len(groups) + 2)
        saved = [array[rows].copy() for array in arrays]
        at = start
        try:
            model.mesh_graphadr[mesh] = -1  # no list of the convex hull
            context.baseMesh = lists - 2 * mesh
            mujoco.mjr_uploadMesh(model, context, mesh)  # in one piece: the first list, before those of its clusters
            for number, group in enumerate(groups):
                for array, original in zip(arrays, saved):
                    array[at : at + len(group)] = original[group]
                model.mesh_faceadr[mesh], model.mesh_facenum[mesh] = at, len(group)
                context.baseMesh = lists + 2 + 2 * number - 2 * mesh
                mujoco.mjr_uploadMesh(model, context, mesh)
                at += len(group)
        finally:
            context.baseMesh = base_mesh
            model.mesh_faceadr[mesh], model.mesh_facenum[mesh], model.mesh_graphadr[mesh] = start, count, graph
            for array, original in zip(arrays, saved):
                array[rows] = original
        bounds = [cluster_bounds(corners[group], normals[group][area[group] > 0]) for group in groups]
        return (lists + 2 + 2 * np.arange(len(groups)), *(np.array(values) for values in zip(*bounds)))

    def _make_lists(self, ngeom: int) -> None:
        """The lists that choose at drawing time between what the picture and what the mirror shows."""
        context = self._context
        self._room = ngeom
        self._shown, self._mirrored = GL.glGenLists(ngeom), GL.glGenLists(ngeom)
        self._wrappers = GL.glGenLists(ngeom)
        for index in range(ngeom):
            _compile_list(self._wrappers + index, partial(_call, [index]))
        self._end = GL.glGenLists(1)
        _compile_list(self._end, lambda: GL.glListBase(self._shown))
        self._planes = GL.glGenLists(context.rangePlane)
        self._own_planes = context.basePlane

        def mirror() -> None:
            GL.glListBase(self._mirrored)
            GL.glCallList(self._own_planes)

        _compile_list(self._planes, mirror)
        for plane in range(1, context.rangePlane):
            _compile_list(self._planes + plane, partial(GL.glCallList, self._own_planes + plane))
        context.basePlane = self._planes

    def _collect(self, geoms: np.ndarray) -> None:
        """Bounds of all that can be left out, in the frame of the geom it belongs to."""
        self._key = self._key_of(geoms)
        self._split = _is_mesh(geoms)
        nothing, origin, upwards = np.zeros(1, dtype=np.int64), np.zeros((1, 3)), np.array([[0.0, 0.0, 1.0]])
        parts = []
        for geom, split in zip(geoms, self._split):
            if split:
                parts.append(self._clusters[int(geom["dataid"]) // 2])
            else:
                radius = float(geom["modelrbound"]) or np.inf  # 0 for an endless plane
                parts.append((nothing, origin, np.array([radius]), upwards, np.array([2.0])))
        self._source = np.repeat(np.arange(len(geoms)), [len(part[0]) for part in parts])
        self._lists, self._centre, self._radius, self._axis, self._sine = (
            np.concatenate(values) for values in zip(*parts)
        )
        self._starts = np.searchsorted(self._source, np.arange(len(geoms) + 1))
        self._radius = self._radius + 1e-3  # floats of a scene have 24 bits: a millimetre of slack
        self._sine = self._sine + BACK_MARGIN

    @staticmethod
    def _key_of(geoms: np.ndarray) -> bytes:
        return geoms["dataid"].tobytes() + geoms["type"].tobytes() + geoms["objid"].tobytes()

    # ------------------------------------------------------------------ per picture

    def apply(self) -> None:
        """Reduce the scene, as ``mjv_updateScene`` left it, to what can be seen."""
        _forget_errors()
        geoms = self._records[: self._scene.ngeom].copy()
        if self._key_of(geoms) != self._key:  # something came into sight, such as a burner's glow
            if len(geoms) > self._room:
                raise RuntimeError(f"a scene of {len(geoms)} geoms, made for at most {self._room}")
            self._collect(geoms)
        rotation = geoms["mat"].astype(np.float64)[self._source]
        centre = np.einsum("nij,nj->ni", rotation, self._centre) + geoms["pos"][self._source]
        axis = np.einsum("nij,nj->ni", rotation, self._axis)
        bounds = (centre, self._radius, axis, self._sine)
        eye, planes = _view(self._scene)
        shown = seen(eye, planes, *bounds)
        mirrored = np.zeros_like(shown)
        mirror = _mirror_of(geoms)
        if mirror is not None:
            reflected = None
            if shown[self._starts[mirror]]:
                reflected = _reflected_view(geoms[mirror], eye)
                shown[self._starts[mirror]] = True
            else:  # outside the picture: without any reflectance there is no second drawing
                geoms["reflectance"] = 0.0
            if reflected is not None:
                mirrored = seen(*reflected, *bounds)
                if geoms["type"][mirror] == _PLANE:  # its list is drawn in both rounds and cannot tell them apart
                    shown = mirrored = shown | mirrored
        GL.glListBase(self._shown)
        both = shown | mirrored
        keep = np.logical_or.reduceat(both, self._starts[:-1])
        if mirror is not None:
            keep[mirror] |= geoms["reflectance"][mirror] > 0
        # OpenGL treats what it draws in one go another way once a part of it must be clipped, which shows in the last
        # bit of depths: meshes that are not wholly inside the view, and mirrored ones, are drawn in one piece.
        inside = np.logical_and.reduceat(_unclipped(self._scene, planes, centre, self._radius), self._starts[:-1])
        for index in np.flatnonzero(keep & self._split):
            part = slice(self._starts[index], self._starts[index + 1])
            lists = self._lists[part]
            whole = lists[:1] - 2
            for base, chosen, cut in (
                (self._shown, shown[part], inside[index]),
                (self._mirrored, mirrored[part], False),
            ):
                drawn_lists = lists[chosen] if cut or not chosen.any() else whole
                _compile_list(base + int(index), partial(_call, drawn_lists - base))
        geoms["dataid"][self._split] = self._wrappers + np.flatnonzero(self._split) - self._context.baseMesh
        drawn = geoms[keep]
        count = len(drawn)
        self._records[:count] = drawn
        if mirror is not None and count:
            self._records[count] = drawn[-1]
            last = self._records[count : count + 1]
            last["type"], last["dataid"], last["matid"] = _MESH, self._end - self._context.baseMesh, -1
            last["rgba"], last["reflectance"] = 1.0, 0.0
            count += 1
        self._scene.ngeom = count

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
    :param scene: The scene after a first ``mjv_updateScene``.
    :return: Whether there is something to gain (meshes of many triangles) and MuJoCo lays its geoms out as expected.
    """
    records = geom_records(scene) if scene.ngeom > 1 else None
    if records is None:
        return False
    geoms = records[: scene.ngeom]
    meshes = geoms["dataid"][_is_mesh(geoms)] // 2
    return int(model.mesh_facenum[meshes].sum()) > 10 * CLUSTER_FACES


def without_meshes(model: Any, scene: Any) -> Any:
    """
    Empty the meshes that :class:`Culling` compiles itself, and those not drawn, while a context is made.

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
    """The one geom that MuJoCo's ``mjr_render`` takes for a mirror."""
    flat = (geoms["type"] == _PLANE) | (geoms["type"] == _BOX)
    found = np.flatnonzero(flat & (geoms["reflectance"] > 0) & (geoms["rgba"][:, 3] >= _OPAQUE))
    return int(found[0]) if len(found) else None


def _forget_errors() -> None:
    """PyOpenGL would blame its next call for what MuJoCo's own calls left behind."""
    while GL.glGetError():
        pass


def _compile_list(number: int, draw: Callable[[], Any]) -> None:
    GL.glNewList(number, GL.GL_COMPILE)
    draw()
    GL.glEndList()


def _call(ids: Any) -> None:
    """Call lists by their distance from the list base in force when this is drawn."""
    numbers = np.ascontiguousarray(ids, dtype=np.int32)
    if len(numbers):
        GL.glCallLists(len(numbers), GL.GL_INT, numbers)


def _view(scene: mujoco.MjvScene) -> tuple[np.ndarray, np.ndarray]:
    """
    :return: Position of the camera (3,) and the five planes (5, 4) around what it sees, normals inwards.
    """
    left, right = scene.camera[0], scene.camera[1]  # the same, an eye's distance apart: mjr_render takes the middle
    eye = 0.5 * (left.pos.astype(np.float64) + right.pos)
    forward = left.forward.astype(np.float64) + right.forward
    forward /= np.linalg.norm(forward)
    up = left.up.astype(np.float64) + right.up
    up /= np.linalg.norm(up)
    side = np.cross(forward, up)
    height = 0.5 * (left.frustum_top - left.frustum_bottom)  # pictures are square
    near = left.frustum_near
    normals = [forward]
    for direction in (side, -side, up, -up):
        normal = near * direction + height * forward
        normals.append(normal / np.linalg.norm(normal))
    planes = np.array([[*n, -n @ eye] for n in normals])
    return eye, planes


def seen(eye, planes, centre, radius, axis, sine) -> np.ndarray:
    """Which spheres touch the view and do not turn their back to it, bool (n,)."""
    inside = (centre @ planes[:, :3].T + planes[:, 3] > -radius[:, None]).all(axis=1)
    ray = centre - eye
    distance = np.linalg.norm(ray, axis=1)
    back = np.einsum("ni,ni->n", ray, axis) >= sine * distance + radius
    return inside & ~back


def _unclipped(scene: mujoco.MjvScene, planes: np.ndarray, centre: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Which spheres lie wholly inside the view, between its near and its far plane, bool (n,)."""
    distance = centre @ planes[:, :3].T + planes[:, 3]
    near, far = scene.camera[0].frustum_near, scene.camera[0].frustum_far
    inside = (distance > radius[:, None]).all(axis=1)
    return inside & (distance[:, 0] > near + radius) & (distance[:, 0] < far - radius)


def _reflected_view(mirror: np.ndarray, eye: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """
    :return: The camera's mirror image and the planes around what it sees through the mirror; ``None`` where the
        camera is behind the mirror.
    """
    rotation = mirror["mat"].astype(np.float64)
    normal = rotation[:, 2]
    middle = mirror["pos"] + (mirror["size"][2] * normal if mirror["type"] == _BOX else 0.0)
    height = float((eye - middle) @ normal)
    if height < 0:
        return None
    image = eye - 2.0 * height * normal
    inward = [[*normal, -normal @ middle]]
    half = mirror["size"][:2].astype(np.float64)
    if (half > 0).all():  # through the sides of the mirror's rectangle
        for along, across, size in ((0, 1, half[1]), (1, 0, half[0])):
            for sign in (1.0, -1.0):
                edge = middle + sign * size * rotation[:, across]
                plane = np.cross(rotation[:, along], edge - image)
                plane /= max(np.linalg.norm(plane), 1e-12)
                if plane @ (middle - image) < 0:
                    plane = -plane
                inward.append([*plane, -plane @ image])
    return image, np.array(inward)
