"""The scripted expert: its geometry, and LIBERO's own success predicate on the embedded assets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from rlt_gym.data.libero_hdf5 import DemoFile
from rlt_gym.libero.assets import embedded_assets
from rlt_gym.libero.collect import CollectConfig, collect
from rlt_gym.libero.experts import SOLVED_TASKS, NoSkillError, check_expert, make_expert
from rlt_gym.libero.experts.clearance import blocked, drawer_way, place_aside
from rlt_gym.libero.experts.evaluate import evaluate, run_episode
from rlt_gym.libero.experts.geometry import (
    clip_norm,
    hand_rotation,
    principal_horizontal_axes,
    ramp,
    rotation_vector,
    shape_points,
    surface_heights,
)
from rlt_gym.libero.experts.grasps import DOWN, category, leaning
from rlt_gym.libero.experts.scripted import ScriptedExpert, in_order
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks

MAX_STEPS = 150


@pytest.mark.parametrize("angle", [0.0, 1e-8, 0.3, 2.0, 3.1, np.pi])
@pytest.mark.parametrize("axis", [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, -2.0, 0.5)])
def test_rotation_vector_inverts_the_exponential(angle: float, axis: tuple[float, float, float]) -> None:
    vector = angle * np.array(axis) / np.linalg.norm(axis)
    rotation = Rotation.from_rotvec(vector).as_matrix()
    found = Rotation.from_rotvec(rotation_vector(rotation)).as_matrix()  # at half a turn both signs are right
    np.testing.assert_allclose(found, rotation, atol=1e-6)


def test_hand_rotation_points_palm_and_fingers() -> None:
    local = np.array([1.0, 0.0, 0.0])
    rotation = hand_rotation(np.array([0.0, 0.0, -2.0]), np.array([0.0, 3.0, 0.5]), local)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1.0)
    np.testing.assert_allclose(rotation @ [0, 0, 1], [0, 0, -1], atol=1e-12)
    np.testing.assert_allclose(rotation @ local, [0, 1, 0], atol=1e-12)


def test_narrow_side_of_a_turned_box() -> None:
    box = shape_points(6, np.zeros(3), np.array([0.04, 0.02, 0.01]))
    turned = box @ Rotation.from_euler("z", 30, degrees=True).as_matrix().T
    axis, width, across = principal_horizontal_axes(turned)
    np.testing.assert_allclose(np.abs(axis @ Rotation.from_euler("z", 30, degrees=True).apply([0, 1, 0])), 1, atol=1e-3)
    assert width == pytest.approx(0.04, abs=1e-3)
    assert across == pytest.approx(0.08, abs=1e-3)


def test_a_cylinder_is_not_as_wide_as_its_bounding_box() -> None:
    points = shape_points(5, np.zeros(3), np.array([0.03, 0.03, 0.1]))
    assert np.linalg.norm(points[:, :2], axis=1).max() == pytest.approx(0.03)


def test_surface_heights_of_turned_boxes() -> None:
    centers = np.array([[0.0, 0.0, 0.5], [0.5, 0.0, 1.0], [-0.5, 0.0, 1.0]])
    halves = np.array([[1.0, 1.0, 0.1], [0.1, 0.1, 0.1], [0.2, 0.2, 0.01]])
    rotations = np.stack([np.eye(3), Rotation.from_euler("z", 45, degrees=True).as_matrix(), np.eye(3)])
    rotations[2] = Rotation.from_euler("y", 30, degrees=True).as_matrix()
    # on the small turned box, beside it but inside its bounding box, on the slope, and beside everything
    points = np.array([[0.5, 0.05], [0.59, 0.09], [-0.45, 0.0], [3.0, 0.0]])
    slope = 1.0 + 0.01 / np.cos(np.pi / 6) - 0.05 * np.tan(np.pi / 6)
    np.testing.assert_allclose(surface_heights(centers, rotations, halves, points), [1.1, 0.6, slope, -np.inf])


def test_small_helpers() -> None:
    np.testing.assert_allclose(clip_norm(np.array([3.0, 4.0]), 1.0), [0.6, 0.8])
    np.testing.assert_allclose(clip_norm(np.array([0.3, 0.4]), 1.0), [0.3, 0.4])
    assert [ramp(x, 1.0, 3.0) for x in (0.0, 2.0, 4.0)] == [0.0, 0.5, 1.0]
    assert category("akita_black_bowl_12") == "akita_black_bowl"


def test_goals_are_ordered_so_that_none_undoes_another() -> None:
    stack, tray = ["on", "bowl_1", "bowl_2"], ["in", "bowl_2", "tray_1_contain_region"]
    close, put = ["close", "cabinet_1_top_region"], ["in", "butter_1", "cabinet_1_top_region"]
    assert in_order([stack, tray]) == [tray, stack]
    assert in_order([close, put]) == [put, close]
    assert in_order([["turnon", "stove_1"], put]) == [["turnon", "stove_1"], put]


@pytest.mark.parametrize("arguments", [{"episodes": 0}, {"split": "test"}, {"suite": "libero_gaol"}, {"tasks": [99]}])
def test_evaluate_refuses_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(arguments.values()))).strip("[]")):
        evaluate(**arguments)


def embedded_simulator(suite: str, task_id: int) -> Any:
    pytest.importorskip("libero")
    from rlt_gym.libero.worker.libero_import import prepare_libero

    prepare_libero(embedded_assets())
    import libero.libero

    # another test may have imported LIBERO for another pack before
    libero.libero._assets_path_cache = str(embedded_assets())
    from rlt_gym.libero.worker.simulator import LiberoSimulator

    return LiberoSimulator(suite, task_id)


@pytest.fixture(scope="module", params=[1, 8])
def simulator(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield embedded_simulator("libero_goal", request.param)


def lifted(simulator: Any, expert: ScriptedExpert) -> None:
    """Let the expert pick up the object and carry it for a moment."""
    for _ in range(MAX_STEPS):
        simulator.step_chunk(expert.act()[None], observe=False)
        if expert.stage == "carry" and expert.scene.points(expert.goals[0][1])[:, 2].min() > 0.93:
            return
    raise AssertionError(f"the expert never lifted the object, it is in stage {expert.stage}")


@pytest.mark.sim
def test_reaches_liberos_success_predicate(simulator: Any) -> None:
    simulator.reset("eval", 0, observe=False)
    expert = ScriptedExpert(simulator.problem)
    success, steps = run_episode(simulator, expert, np.random.default_rng(0), MAX_STEPS)
    assert success and simulator.problem._check_success()
    assert steps < MAX_STEPS


@pytest.mark.sim
def test_grasps_again_what_was_dropped(simulator: Any) -> None:
    simulator.reset("eval", 1, observe=False)
    expert = ScriptedExpert(simulator.problem)
    lifted(simulator, expert)
    simulator.step_chunk(np.tile([0, 0, 0, 0, 0, 0, -1.0], (8, 1)), observe=False)
    assert not expert.scene.holds(expert.goals[0][1])
    stages = set()
    for _ in range(MAX_STEPS):
        done = simulator.step_chunk(expert.act()[None], observe=False).success
        stages.add(expert.stage)
        if done:
            break
    assert done and {"approach", "grasp", "carry"} <= stages


@pytest.mark.sim
def test_takes_over_in_the_middle_of_an_episode(simulator: Any) -> None:
    simulator.reset("eval", 2, observe=False)
    lifted(simulator, ScriptedExpert(simulator.problem))
    successor = ScriptedExpert(simulator.problem)
    assert successor.stage == "carry"
    success, _ = run_episode(simulator, successor, np.random.default_rng(0), MAX_STEPS)
    assert success


@pytest.mark.sim
def test_actions_are_bounded_reproducible_and_labeled(simulator: Any) -> None:
    runs = []
    for _ in range(2):
        simulator.reset("eval", 3, observe=False)
        expert = ScriptedExpert(simulator.problem, noise=0.5)
        expert.reset(np.random.default_rng(7))
        pairs = []
        for _ in range(15):
            action = expert.act()
            assert action.shape == (7,) and np.all(np.abs(action) <= 1.0)
            pairs.append(np.stack([action, expert.clean_action]))
            simulator.step_chunk(action[None], observe=False)
        runs.append(np.stack(pairs))
    np.testing.assert_array_equal(runs[0], runs[1])
    played, label = runs[0][:, 0], runs[0][:, 1]
    assert np.abs(played[:, :3] - label[:, :3]).max() > 0.05
    np.testing.assert_array_equal(played[:, 3:], label[:, 3:])


@pytest.mark.sim
@pytest.mark.parametrize("arguments", [{"noise": 1.5}, {"noise": -0.1}, {"speed": 0.0}])
def test_refuses_bad_settings(simulator: Any, arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ScriptedExpert(simulator.problem, **arguments)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("suite", "task_id"),
    # a knob, a bowl in a drawer, a bottle close to the robot's base, a drawer just above the table
    [("libero_goal", 7), ("libero_spatial", 4), ("libero_90", 62), ("libero_90", 22)],
)
def test_drawers_knob_and_tight_places(suite: str, task_id: int) -> None:
    simulator = embedded_simulator(suite, task_id)
    simulator.reset("eval", 0, observe=False)
    success, _ = run_episode(simulator, make_expert(simulator), np.random.default_rng(0), 220)
    assert success and simulator.problem._check_success()


@pytest.mark.sim
def test_moves_aside_what_stands_in_a_drawers_way() -> None:
    simulator = embedded_simulator("libero_goal", 3)
    simulator.reset("eval", 0, observe=False)
    expert = make_expert(simulator)
    expert.reset(np.random.default_rng(0))
    bowl, region = expert.goals[0][1:]
    low, high = drawer_way(expert.scene, region)
    cabinet = expert.scene.points(expert.scene.owner(region))
    assert high[1] > cabinet[:, 1].max() + 0.1  # it opens along y
    assert np.linalg.norm(place_aside(expert.scene, bowl, low, high)) > 0.05
    skills = []
    for _ in range(300):
        done = simulator.step_chunk(expert.act()[None], observe=False).success
        name = type(expert._skill).__name__
        if not skills or skills[-1] != name:
            skills.append(name)
            if name == "OpenDrawer":
                assert not place_aside(expert.scene, bowl, *drawer_way(expert.scene, region)).any()
        if done:
            break
    assert done and skills == ["MoveAside", "OpenDrawer", "PickPlace"]


@pytest.mark.sim
def test_make_expert_refuses_tasks_it_does_not_solve() -> None:
    simulator = embedded_simulator("libero_90", 42)
    simulator.reset("eval", 0, observe=False)
    with pytest.raises(NoSkillError, match=r"no expert for libero_90 42\. It solves libero_spatial: 0, 1"):
        make_expert(simulator)


def test_solved_tasks_exist() -> None:
    assert set(SOLVED_TASKS) == set(SUITE_HORIZONS)
    for suite, task_ids in SOLVED_TASKS.items():
        assert task_ids == tuple(sorted(task_ids)) and [task.task_id for task in get_tasks(suite, task_ids)] == [
            *task_ids
        ]
        check_expert(suite, task_ids)
    with pytest.raises(NoSkillError, match="libero_10 9"):
        check_expert("libero_10", [0, 9])


class _Boxes:
    """As much of a scene as clearance needs: upright boxes on a table at height 0."""

    base_position = np.array([-0.6, 0.0, 0.0])

    def __init__(self, *boxes: tuple[float, ...]):
        self.low, self.high = np.array(boxes)[:, :3], np.array(boxes)[:, 3:]

    def heights(self, geoms: np.ndarray, points: np.ndarray) -> np.ndarray:
        inside = (points[:, None] >= self.low[None, :, :2]) & (points[:, None] <= self.high[None, :, :2])
        return np.where(inside.all(axis=2), self.high[:, 2], -np.inf).max(axis=1)


def test_a_leaning_hand_fits_where_an_upright_one_does_not() -> None:
    """A wall 3 cm beside the grasp point; the palm of a hand turned along it is 6.6 cm thick."""
    scene: Any = _Boxes((-0.5, -0.5, -0.1, 0.5, 0.5, 0.0), (-0.3, 0.03, 0.0, 0.3, 0.3, 0.3))
    position, axis = np.array([[0.0, 0.0, 0.03]]), np.array([[1.0, 0.0, 0.0]])
    away, towards = (leaning(np.array([[0.0, sign, 0.0]]), 0.45) for sign in (-1.0, 1.0))
    shares = [blocked(scene, np.arange(2), position, axis, palm, 0.08)[0] for palm in (np.array([DOWN]), away, towards)]
    assert shares[0] > 0.0 and shares[1] == 0.0 and shares[2] > shares[0]
    # palms look back at what they lean away from
    np.testing.assert_allclose(away, [[0.0, np.sin(0.45), -np.cos(0.45)]], atol=1e-12)


@pytest.mark.sim
def test_closes_the_drawer_it_opened() -> None:
    simulator = embedded_simulator("libero_goal", 3)
    simulator.reset("eval", 0, observe=False)
    region = "wooden_cabinet_1_top_region"
    expert = ScriptedExpert(simulator.problem)
    expert.goals = [["open", region]]
    expert.reset(np.random.default_rng(0))
    for _ in range(120):
        simulator.step_chunk(expert.act()[None], observe=False)
    assert expert.scene.satisfied(["open", region])
    expert.goals = [["close", region]]
    expert.reset(np.random.default_rng(0))
    for _ in range(150):
        simulator.step_chunk(expert.act()[None], observe=False)
        if expert.scene.satisfied(["close", region]):
            break
    assert expert.scene.satisfied(["close", region])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"demos": 0}, "demos is 0; it must be at least 1"),
        ({"noise": 1.5}, r"noise is 1.5; it must lie in \[0, 1\]"),
        ({"speed": 0.0}, r"speed is 0.0; it must lie in \(0, 1\]"),
        ({"task_ids": [99]}, "99"),
    ],
)
def test_collect_refuses_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollectConfig(**arguments)


@pytest.mark.sim
def test_demonstrations_succeed_again_and_slow_ones_take_longer(tmp_path: Path) -> None:
    simulator, lengths = embedded_simulator("libero_goal", 8), []
    for speed in (0.9, 0.5):
        settings = {"assets": "embedded", "image_size": 32, "num_envs": 1, "noise": 0.0, "demos": 1, "speed": speed}
        (path,) = collect(CollectConfig(task_ids=[8], out=str(tmp_path / str(speed)), **settings))
        with DemoFile(path) as file:
            assert file.instruction == "put the bowl on the plate"
            assert {name: file.env_args[name] for name in settings} == settings
            (demo,) = file
            actions, index = demo.actions, int(demo.attrs["init_index"])
        assert np.linalg.norm(actions[:, :3], axis=1).max() == pytest.approx(speed, abs=1e-6)
        simulator.reset("train", index)
        successes = [simulator.step_chunk(action[None], observe=False).success for action in actions]
        assert successes == [False] * (len(actions) - 1) + [True]
        lengths.append(len(actions))
    assert lengths[1] > 1.2 * lengths[0]
