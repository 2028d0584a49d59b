"""The embedded asset pack: builds, loads in LIBERO's unmodified code, settles, and makes LIBERO's predicates true."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("libero")

from rlt_gym.libero.assets import embedded_assets, resolve, resolve_assets
from rlt_gym.libero.assets.builder import build_files
from rlt_gym.libero.assets.catalogue import CATALOGUE
from rlt_gym.libero.assets.groceries import CREAM_CHEESE
from rlt_gym.libero.assets.paints import PAINTS, TEXTURES
from rlt_gym.libero.assets.schema import Asset, Scene, Texture
from rlt_gym.libero.assets.shapes import UPRIGHT, Box, Cylinder, Prism, Ring, quat_multiply, rotate, slab, turn, turned
from rlt_gym.libero.assets.textures import render_texture
from rlt_gym.libero.suites.folders import libero_root
from rlt_gym.libero.worker.libero_import import prepare_libero

OBJECTS = ("akita_black_bowl_1", "cream_cheese_1", "wine_bottle_1", "plate_1")
OFFICIAL = os.environ.get("RLT_LIBERO_ASSETS")
GOAL_TASKS = (
    "open_the_middle_drawer_of_the_cabinet",
    "put_the_bowl_on_the_stove",
    "put_the_wine_bottle_on_top_of_the_cabinet",
    "open_the_top_drawer_and_put_the_bowl_inside",
    "put_the_bowl_on_top_of_the_cabinet",
    "push_the_plate_to_the_front_of_the_stove",
    "put_the_cream_cheese_in_the_bowl",
    "turn_on_the_stove",
    "put_the_bowl_on_the_plate",
    "put_the_wine_bottle_on_the_rack",
)


# --- shapes, textures, files ---


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
        # At the outer face neighbours meet: half width = outer radius * tan(half the angle between them).
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


def test_parts_that_joints_keep_apart_collide_with_everything_but_each_other() -> None:
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
    for entry in CATALOGUE:
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


def test_mass_is_what_the_catalogue_says() -> None:
    files = build_files()
    for entry in CATALOGUE:
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
    victim = folder / CATALOGUE[0].path
    content = victim.read_bytes()
    victim.unlink()
    assert embedded_assets() == folder
    assert victim.read_bytes() == content
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


# --- choosing a folder ---


@pytest.fixture
def no_official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLT_LIBERO_ASSETS", raising=False)
    monkeypatch.setattr(resolve, "libero_root", lambda: tmp_path / "package")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    resolve._say_embedded.cache_clear()
    return tmp_path


def _fake_official(folder: Path) -> Path:
    for entry in CATALOGUE:
        (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry.path).touch()
    return folder


def test_auto_falls_back_and_says_so_once(no_official: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rlt_gym.libero.assets.resolve"):
        info = resolve_assets()
        resolve_assets("auto")
    assert info.kind == "embedded"
    assert (info.path / CATALOGUE[0].path).is_file()
    assert len([r for r in caplog.records if "embedded" in r.getMessage()]) == 1


@pytest.mark.parametrize("where", ["package/assets", "home/.cache/libero/assets"])
def test_auto_takes_official_ones(no_official: Path, where: str) -> None:
    folder = _fake_official(no_official / where)
    for assets in ("auto", "official"):
        info = resolve_assets(assets)
        assert (info.path, info.kind) == (folder.resolve(), "official")
    assert resolve_assets("embedded").kind == "embedded"


def test_environment_variable_comes_first(no_official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_official(no_official / "package/assets")
    monkeypatch.setenv("RLT_LIBERO_ASSETS", str(_fake_official(no_official / "mine")))
    assert resolve_assets().path == (no_official / "mine").resolve()
    monkeypatch.setenv("RLT_LIBERO_ASSETS", str(no_official / "typo"))
    with pytest.raises(ValueError, match=r"RLT_LIBERO_ASSETS.*typo.*does not exist"):
        resolve_assets()
    assert resolve_assets("embedded").kind == "embedded"


def test_missing_official_says_where_it_looked(no_official: Path) -> None:
    with pytest.raises(ValueError, match=r"Looked at.*package.*RLT_LIBERO_ASSETS"):
        resolve_assets("official")


def test_own_folder(no_official: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        resolve_assets(no_official / "nothing")
    folder = _fake_official(no_official / "own")
    assert resolve_assets(folder).kind == "custom"
    assert resolve_assets(str(folder)).path == folder.resolve()
    (folder / CREAM_CHEESE.path).unlink()
    with pytest.raises(ValueError, match=r"cream_cheese\.xml"):
        resolve_assets(folder)
    shutil.rmtree(folder / "scenes")
    scenes = sum(isinstance(entry, Scene) for entry in CATALOGUE)
    with pytest.raises(ValueError, match=f"{scenes + 1} of"):
        resolve_assets(folder)


# --- inside LIBERO ---


def _initial_states(task: str) -> np.ndarray:
    with zipfile.ZipFile(libero_root() / "init_files" / "libero_goal" / f"{task}.pruned_init") as archive:
        member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return np.asarray(pickle.loads(archive.read(member)))


def _make(task: str, assets: Path | str) -> Any:
    prepare_libero(assets)
    from libero.libero.envs.env_wrapper import ControlEnv

    bddl = libero_root() / "bddl_files" / "libero_goal" / f"{task}.bddl"
    np.random.seed(0)  # LIBERO places its fixtures with numpy's global generator
    env = ControlEnv(bddl_file_name=str(bddl), has_offscreen_renderer=False, use_camera_obs=False, hard_reset=False)
    np.random.seed(0)
    env.reset()
    return env


def _idle(env: Any, steps: int) -> None:
    for _ in range(steps):
        env.step([0.0] * 6 + [-1.0])


def _positions(env: Any) -> np.ndarray:
    return np.array([env.sim.data.get_body_xpos(f"{name}_main") for name in OBJECTS])


def _put(env: Any, name: str, position: Any, quat: Any = (1, 0, 0, 0)) -> None:
    env.sim.data.set_joint_qpos(f"{name}_joint0", np.concatenate([position, quat]))
    env.sim.data.set_joint_qvel(f"{name}_joint0", np.zeros(6))
    env.sim.forward()


def _holds(env: Any, *predicate: str) -> bool:
    return bool(env.env._eval_predicate(list(predicate)))


@pytest.fixture(scope="module")
def pack() -> Path:
    return embedded_assets()


@pytest.fixture(scope="module")
def table(pack: Path) -> Iterator[Any]:
    env = _make("put_the_bowl_on_the_plate", pack)
    yield env
    env.close()


@pytest.fixture
def settled(table: Any) -> Any:
    table.set_init_state(_initial_states("put_the_bowl_on_the_plate")[0])
    _idle(table, 15)
    return table


@pytest.mark.sim
@pytest.mark.parametrize("task", GOAL_TASKS)
def test_every_goal_task_builds_and_settles(pack: Path, task: str) -> None:
    env = _make(task, pack)
    try:
        states = _initial_states(task)
        assert states.shape[1] == 1 + env.sim.model.nq + env.sim.model.nv
        env.set_init_state(states[0])
        start = _positions(env)
        assert not env.check_success()
        _idle(env, 15)
        assert not env.check_success()
        end = _positions(env)
        np.testing.assert_allclose(end[:, :2], start[:, :2], atol=2e-3)
        # Heights of the bodies' origins over the table of 0.9 m with LIBERO's own meshes.
        np.testing.assert_allclose(end[:, 2], (0.8984, 0.9089, 0.8989, 0.9025), atol=2e-3)
        assert np.abs(env.sim.data.qvel[9:]).max() < 0.05
    finally:
        env.close()


@pytest.mark.sim
def test_bowl_rests_on_plate(settled: Any) -> None:
    plate = settled.sim.data.get_body_xpos("plate_1_main").copy()
    assert not _holds(settled, "on", OBJECTS[0], "plate_1")
    _put(settled, OBJECTS[0], plate + np.array([0.005, 0, 0.03]))
    _idle(settled, 15)
    assert settled.check_success()
    assert _upright(settled, OBJECTS[0])


def _upright(env: Any, name: str) -> bool:
    return env.sim.data.get_body_xmat(f"{name}_main")[2, 2] > 0.995


@pytest.mark.sim
@pytest.mark.parametrize(
    ("name", "site", "height"),
    [
        ("akita_black_bowl_1", "flat_stove_1_cook_region", 0.06),
        ("akita_black_bowl_1", "wooden_cabinet_1_top_side", 0.02),
        ("wine_bottle_1", "wooden_cabinet_1_top_side", 0.02),
    ],
)
def test_things_stand_on_fixtures(settled: Any, name: str, site: str, height: float) -> None:
    assert not _holds(settled, "on", name, site)
    _put(settled, name, settled.sim.data.get_site_xpos(site) + np.array([0.01, 0.01, height]))
    _idle(settled, 15)
    assert _holds(settled, "on", name, site)
    assert _upright(settled, name)


@pytest.mark.sim
def test_cream_cheese_lies_in_bowl(settled: Any) -> None:
    bowl = settled.sim.data.get_body_xpos(f"{OBJECTS[0]}_main").copy()
    _put(settled, "cream_cheese_1", bowl + np.array([0, 0, 0.06]))
    _idle(settled, 20)
    assert _holds(settled, "on", "cream_cheese_1", OBJECTS[0])


@pytest.mark.sim
def test_bottle_lies_on_rack(settled: Any) -> None:
    site = settled.sim.data.get_site_xpos("wine_rack_1_top_region").copy()
    lean = np.radians(31.3)
    uphill, normal = np.array([0, np.cos(lean), np.sin(lean)]), np.array([0, -np.sin(lean), np.cos(lean)])
    rack = settled.sim.data.get_body_xmat("wine_rack_1_main").copy()
    # Along the shelf, just above the board and behind the lip, against which it rolls.
    place = site + rack @ (0.03 * uphill + 0.017 * normal + np.array([-0.06, 0, 0]))
    _put(settled, "wine_bottle_1", place, (0.7071068, 0, -0.7071068, 0))
    _idle(settled, 20)
    assert _holds(settled, "on", "wine_bottle_1", "wine_rack_1_top_region")


@pytest.mark.sim
def test_drawers_are_hollow_and_open(settled: Any) -> None:
    for level in ("top", "middle", "bottom"):
        region = f"wooden_cabinet_1_{level}_region"
        joint = f"wooden_cabinet_1_{level}_level"
        assert not _holds(settled, "open", region)
        settled.sim.data.set_joint_qpos(joint, -0.158)
        settled.sim.forward()
        assert _holds(settled, "open", region)
        if level == "top":
            _put(settled, OBJECTS[0], settled.sim.data.get_site_xpos(region))
            _idle(settled, 15)
            assert _holds(settled, "in", OBJECTS[0], region)
            assert _upright(settled, OBJECTS[0])
        settled.sim.data.set_joint_qpos(joint, 0.0)
        settled.sim.forward()


@pytest.mark.sim
def test_drawers_and_knob_move_freely(settled: Any) -> None:
    """They touch nothing of their fixture, so that a light pull opens them against the damping of 50 N s/m."""
    model, data = settled.sim.model, settled.sim.data
    joints = [f"wooden_cabinet_1_{level}_level" for level in ("top", "middle", "bottom")]
    for joint in joints:
        data.qfrc_applied[model.get_joint_qvel_addr(joint)] = -20.0
    _idle(settled, 10)
    data.qfrc_applied[:] = 0.0
    for joint in joints:
        assert data.get_joint_qpos(joint) < -0.1
        data.set_joint_qpos(joint, 0.0)
        data.set_joint_qvel(joint, 0.0)
    settled.sim.forward()
    fixtures = ("wooden_cabinet_1", "flat_stove_1", "wine_rack_1")
    for contact in data.contact[: data.ncon]:
        names = [model.body_id2name(model.geom_bodyid[geom]) for geom in (contact.geom1, contact.geom2)]
        assert not all(name.startswith(fixtures) for name in names), names


@pytest.mark.sim
def test_knob_turns_the_stove_on(settled: Any) -> None:
    settled.sim.data.set_joint_qpos("flat_stove_1_button", 0.0)
    settled.sim.forward()
    assert not _holds(settled, "turnon", "flat_stove_1")
    settled.sim.data.set_joint_qpos("flat_stove_1_button", 1.0)
    settled.sim.forward()
    assert _holds(settled, "turnon", "flat_stove_1")
    _idle(settled, 1)
    site = settled.sim.model.site_name2id("flat_stove_1_burner")
    assert settled.sim.model.site_rgba[site][3] > 0


@pytest.mark.sim
def test_bowl_holds_water(settled: Any) -> None:
    """No gap in wall or floor: rays from inside, sideways and down, all meet the bowl."""
    import mujoco

    model, data = settled.sim.model._model, settled.sim.data._data
    body = model.body(f"{OBJECTS[0]}_main").id
    inside = {body, *(i for i in range(model.nbody) if model.body_parentid[i] == body)}
    origin = data.xpos[body] + np.array([0, 0, 0.03])
    group = np.array([0, 1, 0, 0, 0, 0], dtype=np.uint8)  # solid geoms are invisible to rays; the drawn ones match
    hit = np.zeros(1, dtype=np.int32)
    for angle in np.linspace(0, 2 * np.pi, 73):
        for tilt in (0.0, -0.4, -0.8, -1.2, -1.57):
            ray = np.array([np.cos(angle) * np.cos(tilt), np.sin(angle) * np.cos(tilt), np.sin(tilt)])
            distance = mujoco.mj_ray(model, data, origin, ray, group, 1, -1, hit)
            assert 0 < distance < 0.08
            assert model.geom_bodyid[hit[0]] in inside


@pytest.mark.official
@pytest.mark.sim
@pytest.mark.parametrize("task", [GOAL_TASKS[0], GOAL_TASKS[9]])
def test_settles_like_the_official_assets(pack: Path, task: str) -> None:
    rests = []
    states = _initial_states(task)[[0, 20, 49]]
    for assets in (pack, str(OFFICIAL)):
        env = _make(task, assets)
        names = [env.sim.model.joint_id2name(i) for i in range(env.sim.model.njnt)]
        ranges = {name: tuple(env.sim.model.jnt_range[i]) for i, name in enumerate(names)}
        rest = []
        for state in states:
            env.set_init_state(state)
            _idle(env, 40)
            rest.append(_positions(env))
        rests.append((names, ranges, np.array(rest)))
        env.close()
    assert rests[0][0] == rests[1][0]
    assert rests[0][1] == rests[1][1]
    np.testing.assert_allclose(rests[0][2], rests[1][2], atol=2e-3)
