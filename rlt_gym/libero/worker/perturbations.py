"""Changes of a scene from episode to episode: lights, colors, textures, camera, friction, where objects lie.

They train policies for, and test them on, scenes that the VLA was not trained on (as LIBERO-plus does in kind). What is
drawn follows from the episode's seed and the kind alone: the same episode looks the same in every process, for every
policy, and whatever other kinds are switched on.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_gym.libero.rendering.look import Look

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mujoco

#: Kinds, with what a strength of 1 does.
KINDS = {
    "light": "each light up to 50 % brighter or darker, and moved by up to 0.5 m along each axis",
    "color": "red, green and blue of each material or body up to 25 % stronger or weaker",
    "texture": "each texture of the room, the table and fixtures becomes by 25 % a mosaic of random colors",
    "camera": "the agentview camera moved by up to 5 cm along, and turned by up to 3 degrees about, each axis",
    "friction": "sliding friction of all contacts multiplied by a factor from 0.5 to 2",
    "placement": "each object that can move displaced by up to 2 cm along x and y",
}
#: The largest strength: beyond it lights would be black.
STRONGEST = 2.0
#: The camera that is moved; the other one is fixed to the hand.
_CAMERA = "agentview"
#: Tiles of a mosaic along each side of a texture.
_TILES = 8


def check_perturbations(given: Mapping[str, Any] | None) -> dict[str, float]:
    """
    Check what an environment was given.

    :param given: Strength by kind, see :data:`KINDS`; ``None``: none.
    :return: Those that are not 0.
    :raises ValueError: An unknown kind, or a strength out of range.
    """
    found: dict[str, float] = {}
    if given is None:
        return found
    if not hasattr(given, "items"):
        raise ValueError(f"perturbations must be a dict of strengths for {', '.join(KINDS)}, got {given!r}")
    for kind, strength in given.items():
        if kind not in KINDS:
            raise ValueError(f"perturbations must have keys of {', '.join(KINDS)}, got {kind!r}")
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength <= STRONGEST:
            raise ValueError(f"perturbations[{kind!r}] must be a number from 0 to {STRONGEST:g}, got {strength!r}")
        if strength:
            found[kind] = float(strength)
    return found


def drawn(kind: str, strength: float, seed: int, *shape: int) -> np.ndarray:
    """
    Draw the numbers of one kind for an episode.

    :param kind: One of :data:`KINDS`.
    :param strength: Half the width of their uniform distribution.
    :param seed: Seed of the episode.
    :param shape: How many.
    :return: Numbers in [-strength, strength].
    """
    return np.random.default_rng([seed, zlib.crc32(kind.encode())]).uniform(-strength, strength, shape)


def friction_factor(strength: float, seed: int) -> float:
    """
    Draw the factor of all frictions of an episode.

    :param strength: Of the kind ``"friction"``.
    :param seed: Seed of the episode.
    :return: A number in [2**-strength, 2**strength].
    """
    return float(2.0 ** drawn("friction", strength, seed, 1)[0])


def perturbation_values(strengths: Mapping[str, float], seed: int) -> dict[str, Any]:
    """
    Compute those changes of an episode that are a few numbers in all scenes.

    :param strengths: Of :func:`check_perturbations`.
    :param seed: Seed of the episode.
    :return: By kind. ``"light"``: factors of the brightness of the first two lights (2,). ``"camera"``: displacement
        along x, y, z in meters, then rotation vector in degrees (6,). ``"friction"``: factor.
    """
    values: dict[str, Any] = {}
    for kind, strength in strengths.items():
        if kind == "light":  # each of LIBERO's scenes has at least two
            values[kind] = _light(strength, seed, 2)[0]
        elif kind == "camera":
            values[kind] = np.concatenate(_camera(strength, seed))
        elif kind == "friction":
            values[kind] = friction_factor(strength, seed)
    return values


def _light(strength: float, seed: int, lights: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors of brightness (lights,), displacements in meters (lights, 3)."""
    numbers = 0.5 * drawn("light", strength, seed, lights, 4)
    return 1.0 + numbers[:, 0], numbers[:, 1:]


def _camera(strength: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Displacement in meters (3,), rotation vector in degrees (3,)."""
    numbers = drawn("camera", strength, seed, 2, 3)
    return 0.05 * numbers[0], 3.0 * numbers[1]


class Perturbations:
    """
    Changes one simulator's model at the start of each episode.

    :param model: The simulator's model, as it was loaded.
    :param strengths: Of :func:`check_perturbations`.
    """

    def __init__(self, model: mujoco.MjModel, strengths: Mapping[str, float]):
        self._model, self._strengths = model, dict(strengths)
        self._camera = model.camera(_CAMERA).id
        self._original = {
            name: getattr(model, name).copy() for name in ("light_pos", "cam_pos", "cam_quat", "geom_friction")
        }
        self._textures = _textures_at_rest(model) if "texture" in self._strengths else {}

    def apply(self, seed: int) -> Look:
        """
        Change the model for an episode; what was changed before is undone.

        :param seed: Seed of the episode.
        :return: What the pictures change.
        """
        model, original = self._model, self._original
        look = Look(np.ones(model.nlight), np.ones((model.nmat, 3)), np.ones((model.ngeom, 3)))
        for kind, strength in self._strengths.items():
            if kind == "light":
                look.lights, moved = _light(strength, seed, model.nlight)
                model.light_pos[:] = original["light_pos"] + moved
            elif kind == "color":
                numbers = 1.0 + 0.25 * drawn(kind, strength, seed, model.nmat + model.nbody, 3)
                look.materials = numbers[: model.nmat]
                plain = model.geom_matid < 0
                look.geoms[plain] = numbers[model.nmat + model.geom_bodyid[plain]]
            elif kind == "texture":
                mosaics = 0.5 + 0.5 * drawn(kind, 1.0, seed, model.ntex, _TILES, _TILES, 3)
                for number, picture in self._textures.items():
                    look.textures[number] = _blend(picture, 255.0 * mosaics[number], 0.25 * strength)
            elif kind == "camera":
                moved, turned = _camera(strength, seed)
                model.cam_pos[self._camera] = original["cam_pos"][self._camera] + moved
                turn = _quaternion(np.deg2rad(turned))
                model.cam_quat[self._camera] = _product(original["cam_quat"][self._camera], turn)
            elif kind == "friction":
                model.geom_friction[:, 0] = original["geom_friction"][:, 0] * friction_factor(strength, seed)
        return look

    def displacement(self, seed: int, objects: int) -> np.ndarray:
        """
        Draw by how much the objects of an episode are displaced.

        :param seed: Seed of the episode.
        :param objects: How many there are.
        :return: Meters (objects, 2), along x and y.
        """
        return 0.02 * drawn("placement", self._strengths.get("placement", 0.0), seed, objects, 2)


def _textures_at_rest(model: mujoco.MjModel) -> dict[int, np.ndarray]:
    """Copy the textures of what is fixed to the world, uint8 (height, width, channels), by their number."""
    fixed = (model.body_weldid[model.geom_bodyid] == 0) & (model.geom_matid >= 0)
    numbers = {int(number) for number in model.mat_texid[model.geom_matid[fixed]].flat if number >= 0}
    found = {}
    for number in sorted(numbers):
        shape = model.tex_height[number], model.tex_width[number], model.tex_nchannel[number]
        first = model.tex_adr[number]
        found[number] = model.tex_data[first : first + np.prod(shape)].reshape(shape).copy()
    return found


def _blend(picture: np.ndarray, mosaic: np.ndarray, weight: float) -> np.ndarray:
    """Put a mosaic of colors (tiles, tiles, 3) over a picture; return all bytes of the new one."""
    rows, columns = (np.arange(side) * len(mosaic) // side for side in picture.shape[:2])
    out = picture.copy()
    tiles = (weight * mosaic).astype(np.uint8)[rows][:, columns]
    out[..., :3] = ((1.0 - weight) * np.arange(256)).astype(np.uint8)[picture[..., :3]] + tiles
    return out.ravel()


def _quaternion(rotation: np.ndarray) -> np.ndarray:
    """Rotation vector (rad) as a quaternion w, x, y, z."""
    angle = float(np.linalg.norm(rotation))
    axis = rotation / angle if angle else rotation
    return np.concatenate([[np.cos(angle / 2)], np.sin(angle / 2) * axis])


def _product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Quaternion of the rotation ``second`` in the axes of ``first``."""
    w, v, u, x = first[0], first[1:], second[0], second[1:]
    return np.concatenate([[w * u - v @ x], w * x + u * v + np.cross(v, x)])
