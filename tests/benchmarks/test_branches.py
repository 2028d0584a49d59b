"""benchmarks/branches.py: branches are what a plain loop plays, and rankings are counted right."""

import json
import sys

import numpy as np
import pytest
import torch as th
from benchmark_helpers import import_benchmark, run_benchmark
from run_helpers import quick, textbook_wilson

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3.experiment.report import read_evaluations
from rlt_sb3.experiment.train import train
from tests.helpers.rlt_models import make_model

STATES = [(0, state) for state in range(6)]


@pytest.fixture
def branches():
    return import_benchmark("branches")


@pytest.fixture
def tables():
    return import_benchmark("branch_tables")


@pytest.fixture
def model():
    """Its actor moves to the side: it solves some of the states, and some of those that the VLA solves it does not."""
    model = make_model(gamma=0.9)
    with th.no_grad():
        model.policy.training_actor.mu[-1].bias.view(4, 7)[:, 0] -= 0.2
    return model


def by_hand(state, at):
    """One environment, the VLA's chunk at ``at`` and the actor's everywhere else."""
    env = FakeRLTokenVectorEnv(1)
    obs, _ = env.reset(options={"init_states": "selection", "episodes": [(0, state)]})
    rewards, done, k = [], False, 0
    while not done:
        chunk = obs["vla_ref"].copy()
        chunk[..., 0] -= 0.2 * (k != at)
        obs, _, terminated, truncated, infos = env.step(chunk)
        done = bool(terminated[0] or truncated[0])
        info = infos["final_info"] if done else infos
        if k >= at:
            rewards += info["step_rewards"][0][: info["chunk_steps"][0]].tolist()
        k += 1
    return bool(terminated[0]), sum(0.9**step * reward for step, reward in enumerate(rewards)), k


def test_branches_are_what_a_plain_loop_plays(branches, model):
    rows = branches.branch(model, FakeRLTokenVectorEnv(2), STATES, [0, 2], candidates=1)
    found = {(row["state"][1], row["at"], row["plays"]): row for row in rows}
    stems = [by_hand(state, -1) for _, state in STATES]
    assert len({solved for solved, *_ in stems}) == 2
    for at in (0, 2):
        lasting = [state for _, state in STATES if stems[state][2] > at]
        assert lasting
        assert sorted(key for key in found if key[1] == at) == sorted(
            (state, at, plays) for state in lasting for plays in ("actor", "noise", "vla")
        )
        for state in lasting:
            solved, returned, _ = by_hand(state, at)
            row = found[state, at, "vla"]
            assert row["success"] == solved and row["return"] == pytest.approx(returned)
            assert found[state, at, "actor"]["success"] == stems[state][0]
    assert {found[state, 0, "vla"]["return"] == found[state, 0, "actor"]["return"] for _, state in STATES} == {
        True,
        False,
    }


def test_values_are_those_of_the_slow_critics(branches, model):
    rows = branches.branch(model, FakeRLTokenVectorEnv(1), STATES[:1], [0], candidates=0)
    obs, _ = FakeRLTokenVectorEnv(1).reset(options={"init_states": "selection"})
    tensors, reference = model.policy.obs_to_tensor(obs)[0], th.as_tensor(obs["vla_ref"]).flatten(1)
    with th.no_grad():
        for row, chunk in zip(rows, (model.policy.training_actor(tensors), reference), strict=True):
            values = [critic.item() for critic in model.policy.critic_target(tensors, chunk)]
            assert (row["mean"], row["min"]) == pytest.approx((np.mean(values), min(values)), abs=1e-6)
    assert rows[0]["mean"] != rows[1]["mean"]


def test_chunks_with_noise_are_drawn_as_in_practice(branches):
    """A share of the network's correction around the VLA's chunk with its offset, and noise in units of action."""
    model = make_model(exploration_std=0.05, correction_range=(0.5, 0.5), action_scale=[0.5] * 6 + [1.0])
    actor = model.policy.training_actor
    with th.no_grad():
        actor.mu[-1].bias += 0.04
        actor.offset += 0.03
    obs = {"z_rl": np.zeros(16), "proprio": np.zeros(8), "vla_ref": np.full((4, 7), 0.1)}
    obs["proprio"][3] = 1.0
    chunks = branches.noisy_chunks(
        model, {key: value.astype(np.float32) for key, value in obs.items()}, 4000, np.random.default_rng(0)
    )
    np.testing.assert_allclose(chunks.mean(0), 0.1 + 0.03 + 0.5 * 0.04, atol=0.005)
    np.testing.assert_allclose(chunks.std(0), np.tile([0.025] * 6 + [0.05], (4, 1)), rtol=0.06)


def test_another_observation_at_the_branch_point_is_refused(branches, model):
    class Drifting(FakeRLTokenVectorEnv):
        begun = 0

        def _begin(self, env):
            super()._begin(env)
            self.begun += 1
            self._goal[env] += 1e-5 * self.begun

    with pytest.raises(RuntimeError, match=r"before chunk 0 of \(task, initial state\) \(0, 0\): z_rl"):
        branches.branch(model, Drifting(1), STATES[:2], [1], candidates=0)


def row(state, plays, success, returned, mean, low):
    return {
        "state": [0, state],
        "at": 4,
        "plays": plays,
        "success": success,
        "return": returned,
        "mean": mean,
        "min": low,
    }


def test_ranking_by_hand(tables):
    rows = [
        row(0, "actor", True, 0.9, 0.5, 0.3), row(0, "vla", False, 0.0, 0.4, 0.4),  # mean right, minimum wrong
        row(1, "actor", False, 0.0, 0.5, 0.1), row(1, "vla", True, 0.6, 0.2, 0.2),  # mean wrong, minimum right
        row(2, "actor", True, 0.8, 0.6, 0.5), row(2, "vla", True, 0.7, 0.4, 0.3),  # both solve; right
        row(3, "actor", False, 0.0, 0.1, 0.1), row(3, "vla", False, 0.0, 0.0, 0.0),
        row(3, "noise", True, 0.5, 0.9, 0.9),
    ]  # fmt: skip
    pairs = tables.pairs_of(rows, ("actor", "vla"))
    assert [pair["success"] for pair in pairs] == [1, -1, 0, 0]
    assert [pair["mean"] for pair in pairs] == pytest.approx([0.1, 0.3, 0.2, 0.1])
    assert [pair["return"] for pair in pairs] == pytest.approx([0.9, -0.6, 0.1, 0.0])
    by_mean, by_min = tables.ranking(pairs[:3], "mean"), tables.ranking(pairs[:3], "min")
    assert (by_mean["preferred"], by_mean["differ"]) == (by_min["preferred"], by_min["differ"]) == (1, 2)
    assert by_mean["interval"] == pytest.approx(textbook_wilson(1, 2))
    # both directions of three pairs: values rank 4, 6, 5 (and 3, 1, 2), returns rank 6, 2, 4 (and 1, 5, 3)
    distance = (4 - 6) ** 2 + (6 - 2) ** 2 + (5 - 4) ** 2 + (3 - 1) ** 2 + (1 - 5) ** 2 + (2 - 3) ** 2
    assert by_mean["correlation"] == pytest.approx(1 - 6 * distance / (6 * 35))
    # a bootstrap of three states: at worst the wrong one alone, at best the right ones
    assert by_mean["bootstrap"] == pytest.approx([-1.0, 1.0])
    every = tables.pairs_of(rows, ("actor", "vla", "noise"))
    assert len(every) == 6 and tables.ranking(every, "mean")["preferred"] == 3 and every[-1]["success"] == -1
    assert np.isnan(tables.ranking([], "mean")["correlation"])


def test_a_run_from_its_folder(branches, tmp_path, monkeypatch, capsys):
    """The actor solves what it solved when the run evaluated it last."""
    run = train(quick(tmp_path)).run
    words = [str(run), "--n-states", "4", "--at", "0,1", "--candidates", "2", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["branches.py", *words])
    branches.main()
    last = read_evaluations(run)["selection"][-1]
    solved = (last.get("candidate") or last["evaluation"])["successes"]
    found = json.loads((tmp_path / "found.json").read_text())
    actor = [row["success"] for row in found["branches"] if row["at"] == 0 and row["plays"] == "actor"]
    assert found["chunks"] == last["chunks"] and len(actor) == 4 and sum(actor) == solved
    pairs = {(entry["at"], entry["kinds"]): entry["pairs"] for entry in found["rankings"]}
    assert pairs[0, "actor, vla"] == 4 and pairs[0, "actor, vla, noise"] == 24
    assert f"| 0 | actor | {solved}/4 (" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path):
    done = run_benchmark("branches", tmp_path)
    assert done.returncode == 2 and str(tmp_path) in done.stderr.splitlines()[-1]
