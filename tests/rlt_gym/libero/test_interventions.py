"""Takeovers inside the worker and the critical phase: arguments, flags, executed actions against a replay."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rlt_gym.core.chunk_info import hook_info
from rlt_gym.core.hooks import check_hook
from rlt_gym.libero.devices import GamepadTakeover, KeyboardTakeover, SpaceMouseTakeover
from rlt_gym.libero.interventions import ScriptedTakeover
from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.testing import FakeLiberoVectorEnv, check_vector_env
from rlt_gym.workers.hooks import WorkerHooks

FAST = {"assets": "embedded", "render": "fast", "image_size": 32}


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"intervention": "scripted"}, "must be 'module:name'.*'scripted'"),
        ({"intervention": "a:b:c"}, "must be 'module:name'"),
        ({"intervention": "__main__:Mine"}, "a separate module"),
        ({"intervention": "no_such_module:Mine"}, "No module named 'no_such_module'"),
        ({"intervention": "intervention_hooks:Nobody"}, "has no attribute 'Nobody'"),
        ({"intervention": "intervention_hooks:NUMBER"}, "is a int and cannot be called"),
        ({"intervention": "intervention_hooks:EveryThird", "intervention_kwargs": {"length": 1}}, "'length'"),
        (
            {"intervention": "intervention_hooks:downwards", "intervention_kwargs": {"speed": object()}},
            "sent to a worker",
        ),
        ({"intervention_kwargs": {"speed": 1}}, "intervention is None"),
        ({"intervention": "rlt_gym.libero.interventions:ScriptedTakeover", "intervention_kwargs": {"hold": 0}}, "hold"),
        ({"critical_phase": "intervention_hooks:below"}, "missing a required argument: 'height'"),
        ({"critical_phase": "intervention_hooks:NoPredicate"}, "must be a function"),
        ({"num_envs": 2, "intervention": "rlt_gym.libero.devices:KeyboardTakeover"}, "num_envs must be 1, got 2"),
    ],
)
def test_bad_hooks_raise_before_any_process_starts(arguments, message, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setitem(sys.modules, "pynput", SimpleNamespace())
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=message):
        LiberoVectorEnv(**{**FAST, **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"stall": 0}, "stall must be None or an integer >= 1"),
        ({"deadline": -1}, "deadline"),
        ({"probability": 1.5}, r"probability must be in \[0, 1\]"),
        ({"window": 0}, "window"),
        ({"least_progress": 0.0}, "least_progress"),
        ({"max_takeovers": 0}, "max_takeovers"),
        ({"stall": None}, "nothing makes this expert take over"),
    ],
)
def test_scripted_takeover_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScriptedTakeover(**arguments)


# ---------------------------------------------------------------- hooks, without a simulator


def test_flags_and_actions_follow_what_the_hook_returns():
    hooks = WorkerHooks(7, check_hook("intervention", "intervention_hooks:EveryThird", {"size": 0.25}, 3))
    simulator = SimpleNamespace(task=SimpleNamespace(suite="libero_goal"))
    draws = []
    for seed in (5, 5, 6):
        assert hooks.begin_episode(simulator, seed) == {}
        proposed = np.linspace(-1, 1, 5 * 7).reshape(5, 7)
        choose = hooks.begin_chunk()
        played = [choose(action) for action in proposed]
        reported = hooks.end_chunk()
        assert reported["intervention"].tolist() == [False, False, True, False, False]
        assert reported["executed_actions"].dtype == np.float32
        np.testing.assert_array_equal(reported["executed_actions"], np.array(played, dtype=np.float32))
        np.testing.assert_array_equal(played[2][[0, 3, 6]], [0.25, 0, 1])  # 2.0 is clipped
        np.testing.assert_array_equal(
            reported["executed_actions"][[0, 1, 3, 4]], proposed[[0, 1, 3, 4]].astype(np.float32)
        )
        hooks.begin_chunk()(proposed[0])
        assert hooks.end_chunk()["intervention"].tolist() == [True]  # step 5 of the episode, first of its chunk
        draws.append(played[2][1])
    assert draws[0] == draws[1] != draws[2]


def test_a_hook_that_returns_nonsense_is_named():
    hooks = WorkerHooks(7, check_hook("intervention", "intervention_hooks:wrong", None, 3))
    hooks.begin_episode(None, 0)
    with pytest.raises(ValueError, match="None or 7 finite numbers"):
        hooks.begin_chunk()(np.zeros(7))


def test_critical_phase_begins_once():
    heights = iter([0.5, 0.3, 0.1, 0.5, 0.5])
    simulator = SimpleNamespace(proprio=lambda: [0, 0, next(heights)])
    hooks = WorkerHooks(7, None, check_hook("critical_phase", "intervention_hooks:below", {"height": 0.2}, 1))
    assert hooks.begin_chunk() is None
    assert hooks.begin_episode(simulator, 0) == {"critical_phase": False}
    assert hooks.end_chunk() == {"critical_chunk": False, "critical_phase": False}
    assert hooks.end_chunk() == {"critical_chunk": False, "critical_phase": True}
    assert hooks.end_chunk() == {"critical_chunk": True, "critical_phase": True}  # not asked again
    assert hooks.begin_episode(simulator, 0) == {"critical_phase": False}


def test_info_keeps_its_keys_where_a_worker_was_lost():
    hooks = {"intervention": {}, "critical_phase": {}}
    asked = np.ones((4, 7), dtype=np.float32)
    lost = hook_info(hooks, (4, 7), {}, asked)
    assert set(lost) == {"executed_actions", "intervention", "critical_chunk", "critical_phase"}
    assert not lost["intervention"].any() and not lost["critical_chunk"]
    reported = {"executed_actions": np.zeros((3, 7), np.float32), "intervention": np.array([0, 1, 1], bool)}
    info = hook_info(hooks, (4, 7), reported, asked)
    np.testing.assert_array_equal(info["executed_actions"], [[0] * 7] * 3 + [[1] * 7])
    assert info["intervention"].tolist() == [False, True, True, False]
    assert hook_info({"intervention": None, "critical_phase": None}, (4, 7), {}, asked) == {}


# ---------------------------------------------------------------- on LIBERO


@pytest.mark.sim
def test_executed_actions_replay_to_the_same_bits():
    """What the infos say was executed, played without a hook, gives the same observations, rewards and flags."""
    arguments = {**FAST, "task_ids": [1], "chunk_length": 4, "max_episode_steps": 10}
    hook = {"intervention": "intervention_hooks:EveryThird", "intervention_kwargs": {"size": 0.7}}
    env = LiberoVectorEnv(2, **arguments, **hook)
    first, infos = env.reset(seed=3)
    assert not infos["intervention"].any() and infos["executed_actions"].shape == (2, 4, 7)
    rng = np.random.default_rng(0)
    asked, seen = [], []
    for _ in range(3):
        asked.append(rng.uniform(-1, 1, (2, 4, 7)).astype(np.float32))
        seen.append(env.step(asked[-1]))
    env.close()

    steps = np.arange(12).reshape(3, 4)
    for number, (*_, infos) in enumerate(seen):
        info = infos["final_info"] if number == 2 else infos
        expected = (steps[number] % 3 == 2) & (steps[number] < 10)
        np.testing.assert_array_equal(info["intervention"], [expected] * 2)
        np.testing.assert_array_equal(info["executed_actions"][:, ~expected], asked[number][:, ~expected])
        assert (info["executed_actions"][:, expected, 0] == np.float32(0.7)).all()

    plain = LiberoVectorEnv(2, **arguments)
    again, _ = plain.reset(seed=3)
    for key in first:
        np.testing.assert_array_equal(first[key], again[key])
    for number, (obs, rewards, terminations, truncations, infos) in enumerate(seen):
        info = infos["final_info"] if number == 2 else infos
        replayed = plain.step(info["executed_actions"])
        assert "intervention" not in replayed[-1]
        np.testing.assert_array_equal(rewards, replayed[1])
        np.testing.assert_array_equal(terminations, replayed[2])
        np.testing.assert_array_equal(truncations, replayed[3])
        ends = [(obs, replayed[0])]
        if number == 2:
            ends += list(zip(infos["final_obs"], replayed[-1]["final_obs"], strict=True))
        for mine, theirs in ends:
            for key in mine:
                np.testing.assert_array_equal(mine[key], theirs[key])
    plain.close()


@pytest.mark.sim
def test_the_expert_rescues_a_policy_that_does_nothing():
    """Zeros alone solve nothing; with a takeover at every stall all of these do, and the flags tell when."""
    hook = {
        "intervention": "rlt_gym.libero.interventions:ScriptedTakeover",
        "intervention_kwargs": {"stall": 20, "hold": 200},
        "critical_phase": "rlt_gym.libero.critical_phase:gripper_near_object",
        "critical_phase_kwargs": {"distance": 0.1},
    }
    env = LiberoVectorEnv(2, "libero_goal", [1], chunk_length=10, max_episode_steps=150, **FAST, **hook)
    env.reset(seed=0)
    flags, successes, phases = [[], []], [None, None], [[], []]
    while None in successes:
        _, _, terminations, truncations, infos = env.step(np.zeros((2, 10, 7)))
        for index in range(2):
            if successes[index] is not None:
                continue
            done = terminations[index] or truncations[index]
            info = infos["final_info"] if done else infos
            flags[index] += info["intervention"][index][: info["chunk_steps"][index]].tolist()
            phases[index].append(bool(info["critical_phase"][index]))
            if done:
                successes[index] = bool(info["is_success"][index])
    env.close()
    assert successes == [True, True]
    for mine in flags:
        assert mine == [False] * 20 + [True] * (len(mine) - 20)
    for mine in phases:  # far from the bowl while nothing moves, at it before it stands on the stove
        assert not any(mine[:2]) and mine[-1] and mine == sorted(mine)


def test_nobody_takes_over_in_evaluations():
    env = FakeLiberoVectorEnv(1, intervention=lambda simulator, proposed, step: -np.ones(7))
    check_vector_env(FakeLiberoVectorEnv(2, intervention=lambda *_: None, critical_phase=lambda _: True))
    for split, taken in (("train", True), ("eval", False), ("selection", False), ("train", True)):
        env.reset(options={"init_states": split})
        *_, infos = env.step(np.zeros((1, 8, 7)))
        assert (infos["intervention"] == taken).all()
        assert (infos["executed_actions"] == (-1 if taken else 0)).all()


@pytest.mark.sim
def test_takeovers_are_handed_back_and_limited():
    """Two takeovers of 5 steps at stalls of 7, then none; a function as hook; the critical phase of a falling hand."""
    env = LiberoVectorEnv(
        1, "libero_goal", [1], chunk_length=10, max_episode_steps=40, **FAST,
        intervention="rlt_gym.libero.interventions:ScriptedTakeover",
        intervention_kwargs={"stall": 7, "hold": 5, "max_takeovers": 2},
    )  # fmt: skip
    env.reset(seed=0)
    flags = []
    for _ in range(4):
        *_, infos = env.step(np.zeros((1, 10, 7)))
        flags += infos.get("final_info", infos)["intervention"][0].tolist()
    env.close()
    assert flags == [False] * 7 + [True] * 5 + [False] * 7 + [True] * 5 + [False] * 16


@pytest.mark.sim
def test_critical_phase_of_a_falling_hand():
    env = LiberoVectorEnv(
        1, "libero_goal", [1], chunk_length=2, max_episode_steps=20, **FAST,
        intervention="intervention_hooks:downwards",
        critical_phase="intervention_hooks:below", critical_phase_kwargs={"height": 1.1},
    )  # fmt: skip
    obs, infos = env.reset(seed=0)
    phases, heights = [bool(infos["critical_phase"][0])], [obs["proprio"][0, 2]]
    for _ in range(9):
        obs, *_, infos = env.step(np.zeros((1, 2, 7)))
        assert infos["critical_chunk"][0] == phases[-1] and infos["intervention"].all()
        phases.append(bool(infos["critical_phase"][0]))
        heights.append(obs["proprio"][0, 2])
    env.close()
    expected = np.maximum.accumulate(np.array(heights) < 1.1).tolist()
    assert phases == expected and not phases[0] and phases[-1]


# ---------------------------------------------------------------- devices, without one


class Stick:
    """Stands for robosuite's driver: reports what the test put in."""

    def __init__(self):
        self.started = 0
        self.state = {"dpos": np.zeros(3), "raw_drotation": np.zeros(3), "grasp": 0, "reset": 0}

    def start_control(self):
        self.started += 1
        self.state["reset"] = self.state["grasp"] = 0

    def get_controller_state(self):
        return self.state


@pytest.mark.parametrize("kind, scale", [(KeyboardTakeover, 75.0), (SpaceMouseTakeover, 125.0)])
def test_a_person_has_the_arm_while_the_device_is_used(kind, scale, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    for library in ("pynput", "hid"):
        monkeypatch.setitem(sys.modules, library, SimpleNamespace())
    stick = Stick()
    monkeypatch.setattr(kind, "_open", lambda self: stick)
    person = kind(hold=2, window=False, realtime=False)
    person.reset(None, np.random.default_rng(0))
    closed = np.array([0, 0, 0, 0, 0, 0, 1.0])
    assert person.act(None, closed, 0) is None
    stick.state["dpos"] = np.array([0.004, -1.0, 0.0])
    stick.state["raw_drotation"] = np.array([0.0, 0.0, 0.002])
    action = person.act(None, -closed, 1)
    turn = -0.002 * (1.5 if kind is KeyboardTakeover else 50.0)
    np.testing.assert_allclose(action, [0.004 * scale, -1, 0, 0, 0, turn, 1])  # the gripper stays as the policy left it
    stick.state["dpos"], stick.state["raw_drotation"] = np.zeros(3), np.zeros(3)
    np.testing.assert_array_equal(person.act(None, -closed, 2), closed)  # at rest, still the person's
    assert person.act(None, -closed, 3) is None
    stick.state["grasp"] = 1
    np.testing.assert_array_equal(person.act(None, -closed, 4), closed)  # was open: either way it closes
    stick.state["grasp"] = 0
    np.testing.assert_array_equal(person.act(None, -closed, 5), -closed)
    stick.state["reset"] = 1
    assert person.act(None, closed, 6) is None and stick.started == 2
    assert person.act(None, closed, 7) is None


@pytest.fixture
def pad(monkeypatch):
    """pygame with a gamepad of which only the events exist; gives a function that posts them."""
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(pygame.joystick, "get_count", lambda: 1)
    monkeypatch.setattr(pygame.joystick, "Joystick", lambda number: number)
    yield lambda kind, **values: pygame.event.post(pygame.event.Event(getattr(pygame, f"JOY{kind}"), **values))
    pygame.quit()


def test_a_gamepads_events_move_the_arm(pad):
    """A recorded session, replayed: what each stick, trigger and button does."""
    person = GamepadTakeover(hold=2, window=False, realtime=False, sensitivity=0.5)
    person.reset(None, np.random.default_rng(0))
    closed = np.array([0, 0, 0, 0, 0, 0, 1.0])
    assert person.act(None, closed, 0) is None
    pad("AXISMOTION", axis=0, value=0.1)  # a worn stick
    assert person.act(None, closed, 1) is None
    pad("AXISMOTION", axis=1, value=-1.0)  # left stick up: towards the robot's base, where the picture has its far end
    pad("AXISMOTION", axis=5, value=1.0)  # right trigger: up
    pad("AXISMOTION", axis=3, value=0.4)
    np.testing.assert_allclose(person.act(None, -closed, 2), [-0.5, 0, 0.5, 0, 0, -0.2, 1])
    for axis, value in ((1, 0.0), (5, -1.0), (3, 0.0), (2, 0.0)):  # all released, the left trigger half pressed
        pad("AXISMOTION", axis=axis, value=value)
    pad("BUTTONDOWN", button=4)
    np.testing.assert_allclose(person.act(None, -closed, 3), [0, 0, -0.25, -0.5, 0, 0, 1])
    pad("AXISMOTION", axis=2, value=-1.0)
    pad("BUTTONUP", button=4)
    np.testing.assert_array_equal(person.act(None, -closed, 4), closed)  # at rest, still the person's
    assert person.act(None, -closed, 5) is None
    pad("BUTTONDOWN", button=0)  # the gripper was told to open: pressed, it closes
    pad("BUTTONUP", button=0)
    np.testing.assert_array_equal(person.act(None, -closed, 6), closed)
    pad("BUTTONDOWN", button=1)
    assert person.act(None, closed, 7) is None and person.act(None, closed, 8) is None


def test_without_a_gamepad_the_error_says_so(pad, monkeypatch):
    import pygame

    monkeypatch.setattr(pygame.joystick, "get_count", lambda: 0)
    with pytest.raises(RuntimeError, match="No gamepad can be found"):
        GamepadTakeover(window=False).reset(None, np.random.default_rng(0))


def test_devices_say_what_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    devices = (("pynput", KeyboardTakeover), ("hid", SpaceMouseTakeover), ("pygame", GamepadTakeover))
    for library, kind in devices:
        monkeypatch.delitem(sys.modules, library, raising=False)
        with pytest.raises(ImportError, match=r"pip install rlt\[teleop\]"):
            kind()
        monkeypatch.setitem(sys.modules, library, SimpleNamespace())
    monkeypatch.delenv("DISPLAY", raising=False)
    if sys.platform != "darwin":
        for kind in (KeyboardTakeover, SpaceMouseTakeover, GamepadTakeover):
            with pytest.raises(RuntimeError, match="DISPLAY is not set"):
                kind()
    with pytest.raises(ValueError, match="hold must be an integer"):
        SpaceMouseTakeover(hold=0, window=False)
