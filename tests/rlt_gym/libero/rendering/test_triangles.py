"""Which triangles are drawn, and how coarse meshes are, without a simulator."""

import numpy as np
import pytest

WINDOW = np.array([-0.4, 0.4, -0.4, 0.4, 1.0, 100.0])  # left, right, bottom, top at the near plane, near, far
AHEAD = np.hstack([np.eye(3), [[0.0], [0.0], [2.0]]])


def chosen_triangles(vertices, faces, size, samples, facing=1.0):
    """:return: Numbers of the triangles to draw, the parts they are drawn in, and the corners in pixels."""
    from rlt_gym.libero.rendering.triangles import BATCH, select_triangles

    screen, chosen = np.empty((len(vertices), 4)), np.empty(len(faces) + 1, dtype=np.int32)
    parts = np.empty(len(faces) // BATCH + 3, dtype=np.int64)
    count, number = select_triangles(
        vertices, faces, AHEAD, WINDOW, float(size), samples, facing, screen, chosen, parts
    )  # fmt: skip
    return chosen[:count].copy(), np.split(chosen[:count].copy(), parts[1:number]), screen


def small_triangles(rng, count, spread):
    """Small triangles, every other one a sliver, that look everywhere."""
    middle = rng.uniform(-spread, spread, (count, 1, 3)) * [1, 1, 0.3]
    corners = middle + rng.uniform(-1, 1, (count, 3, 3)) * rng.uniform(0.001, 0.03, (count, 1, 1))
    corners[::2, 2] = corners[::2, 1] + 0.02 * (corners[::2, 2] - corners[::2, 1])
    return corners.reshape(-1, 3), np.arange(3 * count, dtype=np.int32).reshape(-1, 3)


@pytest.mark.parametrize("facing", [1.0, -1.0])
def test_a_triangle_is_left_out_only_if_no_sample_can_see_it(facing):
    """Even after OpenGL has moved its corners by a fraction of a pixel. Checked by intersection at each sample."""
    rng = np.random.default_rng(0)
    vertices, faces = small_triangles(rng, 2000, 0.9)
    samples = np.array([(0.375, 0.125), (0.875, 0.375), (0.125, 0.625), (0.625, 0.875)])
    chosen, _, screen = chosen_triangles(vertices, faces, 32, samples, facing)
    assert np.all(np.diff(chosen) > 0)
    assert 100 < len(chosen) < 1000
    grid = np.stack(np.meshgrid(np.arange(32), np.arange(32)), axis=-1).reshape(-1, 1, 2)
    points = (grid + samples).reshape(-1, 2)
    for left_out in np.setdiff1d(np.arange(len(faces)), chosen):
        for _ in range(3):
            corners = screen[faces[left_out], :2] + rng.uniform(-1, 1, (3, 2)) / 256
            away = [corner - points for corner in corners]
            turns = [
                facing * (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) for a, b in zip(away, away[1:] + away[:1], strict=True)
            ]
            assert not (np.array(turns) > 0).all(axis=0).any(), left_out


def test_clipped_batches_stay_so_and_unmixed():
    """OpenGL must draw what is left of a batch of triangles in the way it would draw all of it."""
    from rlt_gym.libero.rendering.triangles import BATCH

    rng = np.random.default_rng(1)
    inside, faces = small_triangles(rng, 3 * BATCH, 0.3)
    partly, more = small_triangles(rng, 2 * BATCH, 1.2)
    vertices = np.concatenate([inside, partly, inside])
    faces = np.concatenate([faces, more + len(inside), faces + len(inside) + len(partly)])
    chosen, parts, screen = chosen_triangles(vertices, faces, 64, np.full((1, 2), 0.5))
    outside = (screen[faces, 3] < 0).any(axis=1)
    assert len(parts) >= 3 and np.array_equal(np.concatenate(parts), chosen)
    clipped = {int(batch) for batch in np.flatnonzero(outside) // BATCH}
    assert clipped == {3, 4}
    for part in parts:
        kinds = {int(index) // BATCH in clipped for index in part}
        assert len(kinds) == 1
        if kinds == {True}:
            assert outside[part].any() and len(part) <= BATCH


def test_coarse_meshes_stay_close_and_keep_their_orientation():
    from rlt_gym.libero.rendering.decimate import cluster_vertices, kept_faces

    # a sphere of radius 0.1 from a grid of latitudes and longitudes, triangles facing outwards
    rings, around = 60, 120
    polar, azimuth = np.linspace(0.01, np.pi - 0.01, rings), np.linspace(0, 2 * np.pi, around, endpoint=False)
    polar, azimuth = (grid.ravel() for grid in np.meshgrid(polar, azimuth, indexing="ij"))
    vertices = 0.1 * np.stack([np.sin(polar) * np.cos(azimuth), np.sin(polar) * np.sin(azimuth), np.cos(polar)], 1)
    ring, turn = (grid.ravel() for grid in np.meshgrid(np.arange(rings - 1), np.arange(around), indexing="ij"))
    a, b = ring * around + turn, ring * around + (turn + 1) % around
    faces = np.concatenate([np.stack([a, a + around, b], 1), np.stack([b, a + around, b + around], 1)])

    number, moved = cluster_vertices(vertices, 0.01)
    assert np.linalg.norm(moved - vertices, axis=1).max() < 0.01 * np.sqrt(3)
    for cell in np.unique(number)[:20]:
        assert np.allclose(moved[number == cell], vertices[number == cell].mean(axis=0))
    keep = kept_faces(number[faces])
    assert len(keep) < 0.35 * len(faces)
    corners = moved[faces[keep]]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    outwards = np.einsum("ni,ni->n", normals, corners.mean(axis=1)) > 0
    assert outwards.mean() > 0.97
    kinds = {tuple(np.roll(c, -int(np.argmin(c)))) for c in number[faces].tolist() if len(set(c)) == 3}
    assert len(kinds) == len(keep)
