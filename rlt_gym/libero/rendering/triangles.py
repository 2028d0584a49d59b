"""Which triangles of a mesh can reach a picture, without drawing them.

Official LIBERO scenes have 200 k triangles for 16 k pixels: most of those that face the camera lie between the points
at which OpenGL samples the picture and draw nothing, yet software OpenGL lights and rasterizes each of them.
"""

from __future__ import annotations

import numba
import numpy as np

#: Pixels, across and up, by which OpenGL's idea of where a corner is may differ from ours: it computes with 24 bits and
#: rounds to 1/256, and meshes may have moved a little (:data:`rlt_gym.libero.rendering.culling.STILL`).
SLACK = 1 / 128

#: Meters from the camera below which nothing is left out, since rounding shows the more the closer things are.
NEAREST = 0.03

#: Mesa's software OpenGL takes triangles in batches of this size and draws a whole batch another way once a part of it
#: must be clipped, which shows in the last bit of depths.
BATCH = 341


@numba.njit(cache=True)
def select_triangles(vertices, faces, pose, window, size, samples, facing, screen, chosen, parts):
    """
    Choose the triangles of a mesh that can reach a sample of the picture.

    :param vertices: float (n, 3): corners in the mesh's frame (m).
    :param faces: int32 (m, 3): numbers of each triangle's corners.
    :param pose: Rotation and position (3, 4) of the mesh in the camera's axes right, up, forward.
    :param window: Left, right, bottom, top at the near plane, near and far distance (m).
    :param size: Side of the picture in pixels.
    :param samples: float (s, 2): where in a pixel the picture is sampled; none if that is not known.
    :param facing: 1 where triangles with corners counter-clockwise are seen, -1 in a mirror.
    :param screen: Written, float (>= n, 4): corners in pixels, their distance, and -1 if surely outside the view, 1 if
        surely inside.
    :param chosen: Written, int32 (>= m,): numbers of the triangles to draw, ascending.
    :param parts: Written, int64 (>= m / BATCH + 2,): where in ``chosen`` parts begin that must be drawn in one go each.
    :return: How many triangles and how many parts.
    """
    _project(vertices, pose, window, size, screen)
    first, last = max(window[4] * 1.001, NEAREST), window[5] * 0.999
    count, number, status_before = 0, 0, -1
    for start in range(0, faces.shape[0], BATCH):
        stop = min(start + BATCH, faces.shape[0])
        before, inside, outside, marked = count, True, -1, False
        for index in range(start, stop):
            a, b, c = faces[index]
            out = screen[a, 3] < 0 or screen[b, 3] < 0 or screen[c, 3] < 0
            inside = inside and screen[a, 3] > 0 and screen[b, 3] > 0 and screen[c, 3] > 0
            if out and outside < 0:
                outside = index
            if _reaches_picture(screen, a, b, c, first, last, size, samples, facing):
                chosen[count] = index
                count += 1
                marked = marked or out
        if count == before:
            continue
        status = 0 if inside else 1 if outside >= 0 else 2
        if status == 1 and not marked:  # one that is clipped must be among them, in its place
            place = count
            while place > before and chosen[place - 1] > outside:
                chosen[place] = chosen[place - 1]
                place -= 1
            chosen[place] = outside
            count += 1
        elif status == 2:  # nobody can tell whether a part of it is clipped
            for index in range(start, stop):
                chosen[before + index - start] = index
            count = before + stop - start
        if status != status_before or status == 2 or (status == 1 and count - parts[number - 1] > BATCH):
            parts[number] = before
            number += 1
        status_before = status
    parts[number] = count
    return count, number


def warm_up() -> None:
    """Compile, or load what was compiled before: a process that forks does it once for all its children."""
    corners, faces = np.eye(3), np.arange(3, dtype=np.int32).reshape(1, 3)
    window = np.array([-1.0, 1.0, -1.0, 1.0, 1.0, 10.0])
    chosen, parts = np.empty(2, dtype=np.int32), np.empty(3, dtype=np.int64)
    pose, samples, screen = np.eye(3, 4), np.full((1, 2), 0.5), np.empty((3, 4))
    select_triangles(corners, faces, pose, window, 8.0, samples, 1.0, screen, chosen, parts)


@numba.njit(cache=True)
def _project(vertices, pose, window, size, screen):
    left, right, bottom, top, near, far = window
    across, along = size / (right - left), size / (top - bottom)
    for index in range(vertices.shape[0]):
        x, y, z = vertices[index]
        depth = pose[2, 0] * x + pose[2, 1] * y + pose[2, 2] * z + pose[2, 3]
        screen[index, 2] = depth
        if depth < 0.5 * near:
            screen[index, 0] = screen[index, 1] = 0.0
            screen[index, 3] = -1.0
            continue
        scale = near / depth
        column = ((pose[0, 0] * x + pose[0, 1] * y + pose[0, 2] * z + pose[0, 3]) * scale - left) * across
        row = ((pose[1, 0] * x + pose[1, 1] * y + pose[1, 2] * z + pose[1, 3]) * scale - bottom) * along
        screen[index, 0], screen[index, 1] = column, row
        least = min(min(column, size - column), min(row, size - row))
        least = min(least, min(depth / near - 1.0, 1.0 - depth / far))
        screen[index, 3] = 1.0 if least > SLACK else -1.0 if least < -SLACK else 0.0


@numba.njit(cache=True)
def _reaches_picture(screen, a, b, c, first, last, size, samples, facing):
    nearest = min(screen[a, 2], screen[b, 2], screen[c, 2])
    farthest = max(screen[a, 2], screen[b, 2], screen[c, 2])
    if nearest < first or farthest > last:
        return True
    ax, ay, bx, by, cx, cy = screen[a, 0], screen[a, 1], screen[b, 0], screen[b, 1], screen[c, 0], screen[c, 1]
    x0, x1 = min(ax, bx, cx) - SLACK, max(ax, bx, cx) + SLACK
    y0, y1 = min(ay, by, cy) - SLACK, max(ay, by, cy) + SLACK
    if x1 < 0 or y1 < 0 or x0 > size or y0 > size:
        return False
    area = facing * ((bx - ax) * (cy - ay) - (by - ay) * (cx - ax))
    if area < -SLACK * 4 * ((x1 - x0) + (y1 - y0)):  # more than moving all corners can do to it
        return False
    if samples.shape[0] and x1 - x0 < 4 and y1 - y0 < 4:
        return _sampled(ax, ay, bx, by, cx, cy, x0, x1, y0, y1, samples, facing)
    return True


@numba.njit(cache=True)
def _sampled(ax, ay, bx, by, cx, cy, x0, x1, y0, y1, samples, facing):
    """Whether a sample of the picture may lie in a small triangle."""
    for number in range(samples.shape[0]):
        sx, sy = samples[number]
        py = np.ceil(y0 - sy) + sy
        while py <= y1:
            px = np.ceil(x0 - sx) + sx
            while px <= x1:
                # Edge functions, and what moving an edge's ends can do to them: with a sliver, that is not the edge's
                # length times the movement, since a short edge may turn round.
                ax_, ay_, bx_, by_, cx_, cy_ = ax - px, ay - py, bx - px, by - py, cx - px, cy - py
                a_, b_, c_ = abs(ax_) + abs(ay_) + SLACK, abs(bx_) + abs(by_) + SLACK, abs(cx_) + abs(cy_) + SLACK
                if (
                    facing * (ax_ * by_ - ay_ * bx_) >= -SLACK * (a_ + b_)
                    and facing * (bx_ * cy_ - by_ * cx_) >= -SLACK * (b_ + c_)
                    and facing * (cx_ * ay_ - cy_ * ax_) >= -SLACK * (c_ + a_)
                ):
                    return True
                px += 1.0
            py += 1.0
    return False
