"""The files of the embedded asset pack: shapes, textures, masses and collision masks, without a simulator."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("libero")
from rlt_gym.libero.assets import embedded_assets
from rlt_gym.libero.assets.builder import build_files
from rlt_gym.libero.assets.catalog import CATALOG
from rlt_gym.libero.assets.paints import PAINTS, TEXTURES
from rlt_gym.libero.assets.schema import Asset, Texture
from rlt_gym.libero.assets.shapes import UPRIGHT, Box, Cylinder, Prism, Ring, quat_multiply, rotate, slab, turn, turned
from rlt_gym.libero.assets.textures import render_texture
from rlt_gym.libero.suites.folders import libero_root


def test_prism_sides_touch_the_apothem() -> None:
    geoms = list(Prism("black", apothem=0.02, height=0.1, sides=8).geoms())
    assert len(geoms) == 4
    for geom in geoms:
        assert geom.size == pytest.approx((0.02, 0.02 * np.tan(np.pi / 8), 0.05))
        assert geom.pos == pytest.approx((0, 0, 0.05))
    with pytest.raises(ValueError, match="even number"):
        Prism("black", sides=7)


def test_ring_has_no_gap_and_keeps_its_edges() -> None:
    ring = Ring("black", low=(0.03, 0.0), high=(0.05, 0.02), thickness=0.004, segments=12)
    for i, geom in enumerate(ring.geoms()):
        angle = 2 * np.pi * i / 12
        up = _rotation(geom.quat)[:, 2] * geom.size[2]
        radial = np.array([np.cos(angle), np.sin(angle), 0])
        for sign, (radius, z) in ((-1, ring.low), (1, ring.high)):
            edge = np.array(geom.pos) + sign * up
            assert edge @ radial == pytest.approx(radius)
            assert edge[2] == pytest.approx(z)
        # At the outer face neighbors meet: half width = outer radius * tan(half the angle between them).
        assert geom.size[1] >= (0.05 + 0.002) * np.tan(np.pi / 12) - 1e-12


def test_slab_rejects_swapped_corners() -> None:
    with pytest.raises(ValueError, match="low < high"):
        slab("black", (0, 0, 0), (1, -1, 1))


def _rotation(quat: tuple[float, ...]) -> np.ndarray:
    w, x, y, z = quat
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def test_turn_applies_x_first() -> None:
    expected = _rotation(turn(z=90)) @ _rotation(turn(y=40)) @ _rotation(turn(x=30))
    np.testing.assert_allclose(_rotation(turn(30, 40, 90)), expected, atol=1e-12)


def test_turned_design_moves_as_one() -> None:
    quat, shift = turn(20, 40, 60), (0.1, -0.2, 0.3)
    design = (
        Box("black", (0.02, 0.03, 0.04), turn(x=10)),
        Prism("black", (0.01, 0.0, -0.05), apothem=0.02, height=0.1),
        Ring("black", (0.0, 0.02, 0.0), low=(0.03, 0.0), high=(0.05, 0.02)),
    )
    placed = [geom for shape in turned(design, quat, shift) for geom in shape.geoms()]
    upright = [geom for shape in design for geom in shape.geoms()]
    for geom, original in zip(placed, upright, strict=True):
        np.testing.assert_allclose(geom.pos, _rotation(quat) @ original.pos + shift, atol=1e-12)
        np.testing.assert_allclose(_rotation(geom.quat), _rotation(quat) @ _rotation(original.quat), atol=1e-12)
        assert geom.size == original.size


def test_upright_changes_no_bit() -> None:
    assert rotate(UPRIGHT, (0.1, -0.2, 1e-17)) == (0.1, -0.2, 1e-17)
    assert quat_multiply(UPRIGHT, turn(1, 2, 3)) == turn(1, 2, 3)


def test_cylinder_volume() -> None:
    (geom,) = Cylinder("black", radius=0.1, half_height=0.5).geoms()
    assert geom.volume == pytest.approx(np.pi * 0.01)


def test_textures_are_reproducible_and_checked() -> None:
    name, texture = next(iter(TEXTURES.items()))
    assert render_texture(name, texture) == render_texture(name, texture)
    with pytest.raises(ValueError, match="unknown pattern"):
        render_texture("x", Texture("plaid", (0, 0, 0), 0.1))


def test_a_prism_with_feet_stands_on_two_crossed_boxes() -> None:
    plain = list(Prism("steel", apothem=0.03, height=0.08, sides=12).geoms())
    boxes = list(Prism("steel", apothem=0.03, height=0.08, sides=12, feet=0.001).geoms())
    heights = [box.size[2] for box in boxes]
    assert [round(height, 6) for height in heights] == [0.04, 0.039, 0.039, 0.04, 0.039, 0.039]
    assert [box.size[:2] for box in boxes] == [box.size[:2] for box in plain]
    assert [(box.pos, box.quat) for box in boxes] == [(box.pos, box.quat) for box in plain]
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        Prism("steel", sides=6, feet=0.001)


def test_parts_that_joints_keep_apart_do_not_collide() -> None:
    files = build_files()
    for name, apart in (("white_cabinet", True), ("wooden_cabinet", False)):
        geoms = ET.fromstring(files[f"articulated_objects/{name}.xml"]).findall(".//geom[@group='0']")
        masks = {(int(geom.get("contype", "1")), int(geom.get("conaffinity", "1"))) for geom in geoms}
        assert len(masks) == 1
        (ours,) = masks

        def touch(a: tuple[int, int], b: tuple[int, int]) -> bool:
            return bool(a[0] & b[1] or b[0] & a[1])

        assert touch(ours, ours) == (not apart)
        assert touch(ours, (1, 1)) and touch(ours, (0, 1))  # things, and the gripper's fingers


def test_every_geom_has_a_group_and_no_mesh_is_used() -> None:
    files = build_files()
    for entry in CATALOG:
        root = ET.fromstring(files[entry.path])
        assert not root.findall(".//mesh")
        for geom in root.iter("geom"):
            group, name = geom.get("group"), geom.get("name", "")
            assert group in ("0", "1") or (group == "5" and name.startswith("table_leg"))  # 5: not drawn
            assert geom.get("type") in ("box", "cylinder", "plane")
            if group != "0" and geom.get("type") != "plane":
                assert geom.get("contype") == geom.get("conaffinity") == "0"
        for texture in root.iter("texture"):
            file = texture.get("file")
            if file is not None:
                assert os.path.normpath(os.path.join(os.path.dirname(entry.path), file)) in files


def test_paints_and_textures_are_all_known() -> None:
    assert {paint.texture for paint in PAINTS.values()} - {None} <= set(TEXTURES)


def test_mass_is_what_the_catalog_says() -> None:
    files = build_files()
    for entry in CATALOG:
        if isinstance(entry, Asset) and entry.mass is not None:
            masses = [float(geom.get("mass", "nan")) for geom in ET.fromstring(files[entry.path]).iter("geom")]
            assert sum(masses) == pytest.approx(entry.mass, rel=1e-4)


def test_style_files_of_libero_exist() -> None:
    """LIBERO's arenas swap the floor's and the wall's texture for files with these names."""
    source = (libero_root() / "envs" / "arenas" / "style.py").read_text()
    names = {word for word in source.split('"') if word.endswith(".png")}
    assert names
    assert {name.removesuffix(".png") for name in names} <= set(TEXTURES)


def test_build_is_idempotent_and_repairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLT_CACHE", str(tmp_path))
    folder = embedded_assets()
    assert folder.parent == tmp_path
    victim = folder / CATALOG[0].path
    content = victim.read_bytes()
    victim.unlink()
    assert embedded_assets() == folder
    assert victim.read_bytes() == content
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]
