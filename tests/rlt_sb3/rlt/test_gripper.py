"""The gripper's command: reversed in a few chunks with noise, and learned where critics prefer the opposite."""

import numpy as np
import pytest
import torch as th
from rlt_models import Numpy, make_model, make_venv, oracle_model, random_obs, to_numpy
from scipy.stats import fisher_exact
from stable_baselines3.common.callbacks import BaseCallback

from rlt_sb3 import RLT
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.rlt.gripper import MARGIN, GripperTrial, pull_gripper, reverse_gripper

GRIPPER = 6
ONE = np.zeros(1, dtype=int)  # the task of one environment, where there is one task


def test_whole_chunks_are_reversed():
    chunks = np.random.default_rng(0).uniform(-1, 1, (4, 8, 7)).astype(np.float32)
    chunks[:, :, GRIPPER] = np.array([[1.0] * 8, [-1.0] * 8, [-1.0] * 3 + [0.9] * 5, [1.0] * 8])
    before = chunks.copy()
    reverse_gripper(chunks, GRIPPER, np.array([True, True, True, False]))
    assert chunks[:3, :, GRIPPER].tolist() == [[-1.0] * 8, [1.0] * 8, [-1.0] * 8]
    assert np.array_equal(chunks[3], before[3]) and np.array_equal(chunks[..., :GRIPPER], before[..., :GRIPPER])


def test_only_chunks_with_noise_are_reversed():
    """A share of them; trials, the baseline and robots without a gripper never."""

    def reversed_share(flip, gate=False, without_gripper=False):
        kwargs = {"gripper_flip": flip}
        model = make_model(num_envs=50, learning_starts=1, exploration_std=0.0, gate=gate, policy_kwargs=kwargs)
        assert model.gripper == GRIPPER
        model.gripper = None if without_gripper else GRIPPER
        model._setup_learn(1)
        model._last_obs["vla_ref"][:] = 0.5
        played = np.concatenate([model._sample_action(0, None, 50)[0] for _ in range(60)])
        moved = (played != 0.5).reshape(len(played), -1, 7).any(1)
        assert not moved[:, :GRIPPER].any()
        assert (played[moved[:, GRIPPER], :, GRIPPER] == -1.0).all()
        return moved[:, GRIPPER].mean()

    assert reversed_share(0.1) == pytest.approx(0.1, abs=0.02)
    assert reversed_share(1.0) == 1.0
    assert reversed_share(0.0) == reversed_share(1.0, without_gripper=True) == 0.0
    assert reversed_share(1.0, gate={"share": 1.0, "window": 100}) == 0.0  # all of them are the VLA's baseline


@pytest.mark.parametrize("foreign", [False, True])
def test_the_pull_is_reversed_where_critics_prefer_it_against_numpy(foreign):
    model, batch = oracle_model()
    weights = model.critic.ensemble.weights[0]  # (members, inputs, width): the chunk comes last
    with th.no_grad():  # members that agree on what the gripper's command is worth
        weights[:] = weights[:1] + 0.1 * (weights - weights[:1])
        weights[:, -4 * 7 + GRIPPER :: 7] *= 5.0
        for name, others in model.critic.ensemble.named_parameters():
            if name != "weights.0":
                others[:] = others[:1] + 0.02 * (others - others[:1])
    oracle = Numpy(model)
    obs, _, _ = to_numpy(batch)
    reference = obs["vla_ref"]
    target = batch.observations["vla_ref"].flatten(1)
    if foreign:  # someone else has chosen the chunks of the even rows
        target = target.clone()
        target[::2] += 0.25
    actions = model.actor(batch.observations)
    found = (
        pull_gripper(model.critic, batch.observations, actions, target, GRIPPER, np.ones(1, bool))
        .numpy()
        .reshape(reference.shape)
    )
    expected = target.numpy().reshape(reference.shape).copy()
    own = actions.detach().double().numpy().reshape(reference.shape).copy()
    own[..., GRIPPER] = reference[..., GRIPPER]
    opposite = own.copy()
    command = np.where(reference[..., GRIPPER].mean(1) > 0, -1.0, 1.0)
    opposite[..., GRIPPER] = command[:, None]
    flat = (len(own), -1)
    gain = oracle.q("critic", obs, opposite.reshape(flat)).min(0) - oracle.q("critic", obs, own.reshape(flat)).mean(0)
    better = gain > MARGIN
    assert 0 < better.sum() < len(better) and np.abs(gain - MARGIN).min() > 1e-4
    if foreign:
        better[::2] = False
    expected[better, :, GRIPPER] = command[better, None]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_pull_reverses_the_gripper_in_some_tasks():
    """Critics that always prefer the opposite of the VLA's command, which is 1; two of three tasks may reverse it."""
    model = make_model(venv=make_venv(2, task_ids=range(3), show_task=True), policy_kwargs={"gripper_flip": 0.02})
    model.critic.q_values = lambda obs, actions: -actions.view(len(actions), -1, 7)[..., GRIPPER].mean(1).expand(3, -1)
    obs = random_obs(model, 30) | {"task": np.eye(3, dtype=np.float32)[np.arange(30) % 3]}
    obs["vla_ref"][..., GRIPPER] = 1.0
    observations, _ = model.policy.obs_to_tensor(obs)
    target = observations["vla_ref"].flatten(1)
    found = pull_gripper(model.critic, observations, target, target, GRIPPER, np.array([True, False, True]))
    commands = found.view_as(observations["vla_ref"])[..., GRIPPER]
    assert commands.mean(1).tolist() == [-1.0, 1.0, -1.0] * 10


def test_the_actor_learns_to_reverse_the_gripper():
    """Critics that like the opposite of the VLA's command where z_rl is positive; nothing else is worth anything."""
    model = make_model(num_envs=2, learning_rate=3e-3, bc_coef=15.0, policy_kwargs={"gripper_flip": 0.02})
    model.learn(200)
    model.critic.q_values = lambda obs, actions, members=None: (
        -0.25 * actions.view(len(actions), -1, 7)[..., GRIPPER].mean(1) * (obs["z_rl"][:, 0] > 0)
    ).expand(3, -1)
    model.critic.actor_q = lambda obs, actions: model.critic.q_values(obs, actions).mean(0)
    for flip in (0.0, 0.02):
        model.gripper_trial = GripperTrial(flip)
        rng = np.random.default_rng(0)
        for _ in range(300):
            batch = model.replay_buffer.sample(64)
            batch.observations.pop("features", None)
            batch.observations["z_rl"] = th.as_tensor(rng.normal(size=batch.observations["z_rl"].shape)).float()
            batch.observations["vla_ref"][..., GRIPPER] = 1.0
            batch.bc_target.view_as(batch.observations["vla_ref"])[..., GRIPPER] = 1.0
            model._update_actor(batch)
        chunks = model.actor(batch.observations).detach().view_as(batch.observations["vla_ref"])
        wants = batch.observations["z_rl"][:, 0] > 0
        opened = (chunks[..., GRIPPER] < 0).float().mean(1)
        if flip == 0.0:
            assert opened.max() == 0.0  # the pull forbids it
    assert opened[wants].mean() > 0.8 and opened[~wants].mean() < 0.2


def test_the_share_is_kept_in_files(tmp_path):
    model = make_model(policy_kwargs={"gripper_flip": 0.3})
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip")
    assert loaded.policy.gripper_flip == loaded.gripper_trial.flip == 0.3 and loaded.gripper == GRIPPER
    for wrong in (2.0, "always"):
        with pytest.raises(ValueError, match=r"gripper_flip must be 'auto' or in \[0, 1\]"):
            make_model(policy_kwargs={"gripper_flip": wrong})


# -------------------------------------------------------------------- the trial: does reversing help?


def outcome(success=False, **told):
    return ChunkOutcome.complete(np.zeros((8, 7)), 0.0, success=success, **told)


def test_whole_episodes_are_drawn_for_the_trial():
    """In a quarter of the episodes with noise, a few chunks are reversed; in the others none is."""
    np.random.seed(0)
    trial = GripperTrial("auto")
    trial.restart(400)
    noisy = np.arange(400) < 300
    reversed_chunks, tasks = np.zeros(400, dtype=int), np.zeros(400, dtype=int)
    for _ in range(50):
        chunks = np.full((400, 8, 7), 0.5)
        trial.reverse(chunks, GRIPPER, noisy, tasks)
        reversed_chunks += chunks[:, 0, GRIPPER] == -1.0
        trial.step([outcome()] * 400, np.zeros(400, dtype=bool), tasks)
    drawn = reversed_chunks > 0
    assert not drawn[300:].any() and not trial.corrects
    assert drawn[:300].mean() == pytest.approx(trial.SHARE, abs=0.08)
    assert reversed_chunks[drawn].mean() == pytest.approx(50 * trial.RATE, abs=0.6)
    trial.step([outcome(success=True)] * 400, np.arange(400) % 2 == 0, tasks)
    assert len(trial.ended[0]) == 150 and not trial.counts[::2].any() and trial.counts[1:300:2].all()


def test_an_episode_that_began_without_noise_is_not_compared():
    trial = GripperTrial("auto")
    trial.restart(3)
    tasks = np.zeros(3, dtype=int)
    trial.step([outcome()] * 3, np.array([True, False, False]), tasks)  # of the warm-up
    trial.reverse(np.zeros((3, 8, 7)), GRIPPER, np.ones(3, dtype=bool), tasks)
    assert trial.counts.tolist() == [True, False, False]
    trial.step([outcome(broken=True), outcome(), outcome()], np.ones(3, dtype=bool), tasks)
    assert not trial.ended[0]


@pytest.mark.parametrize("told", [{"broken": True}, {"intervention": np.ones(8, dtype=bool)}])
def test_an_episode_with_a_broken_simulator_or_a_person_is_not_compared(told):
    trial = GripperTrial("auto")
    for outcomes, done in ([outcome(**told)], False), ([outcome(success=True)], True), ([outcome(success=True)], True):
        trial.reverse(np.zeros((1, 8, 7)), GRIPPER, np.ones(1, dtype=bool), ONE)
        trial.step(outcomes, np.array([done]), ONE)
    assert len(trial.ended[0]) == 1


@pytest.mark.parametrize(("rates", "seed"), [((0.0, 0.4), 0), ((0.1, 0.5), 1), ((0.3, 0.1), 0)])
def test_the_correction_begins_when_reversed_episodes_succeed_more_often(rates, seed):
    """Against scipy's exact test after each episode; where they succeed less often, it never begins."""
    rng = np.random.default_rng(seed)
    np.random.seed(seed)
    trial = GripperTrial("auto")
    ended: list[tuple[bool, bool]] = []
    for _ in range(trial.EPISODES):
        trial.reverse(np.zeros((1, 8, 7)), GRIPPER, np.ones(1, dtype=bool), ONE)
        drawn = bool(trial.drawn[0])
        success = bool(rng.random() < rates[drawn])
        ended.append((drawn, success))
        trial.step([outcome(success=success)], np.ones(1, dtype=bool), ONE)
        table = [
            [sum(s == wanted and d == kind for d, s in ended) for wanted in (True, False)] for kind in (True, False)
        ]
        significant = fisher_exact(table, alternative="greater").pvalue <= trial.LEVEL
        assert trial.corrects == significant
        if significant:
            break
    assert trial.corrects == (rates[1] > rates[0])
    assert trial.flip == (trial.FLIP if trial.corrects else 0.0)


def test_each_task_has_a_trial_of_its_own():
    """Two of five tasks are practiced: in task 3 reversed chunks help, in task 1 they do not."""
    np.random.seed(0)
    trial = GripperTrial("auto", 5)
    trial.restart(2)
    tasks, noisy, over = np.array([1, 3]), np.ones(2, bool), np.ones(2, bool)
    assert not trial.reverses.any()  # no task is practiced yet
    counts = {1: 0, 3: 0}
    for _ in range(trial.EPISODES):
        trial.reverse(np.zeros((2, 8, 7)), GRIPPER, noisy, tasks)
        for task in tasks:
            counts[task] += trial.trying[task]
        outcomes = [outcome(success=bool(task == 3 and drawn)) for task, drawn in zip(tasks, trial.drawn, strict=True)]
        trial.step(outcomes, over, tasks)
        tasks = tasks[::-1].copy()
    assert trial.corrects.tolist() == [False, False, False, True, False]
    assert trial.flip.tolist() == [0.0, 0.0, 0.0, trial.FLIP, 0.0]
    assert (
        [len(ended) for ended in trial.ended] == [0, counts[1], 0, counts[3], 0] == [0, trial.EPISODES, 0, counts[3], 0]
    )
    assert counts[3] < trial.EPISODES and trial.trying.tolist() == [True, False, True, False, True]
    assert trial.reverses.tolist() == [False, False, False, True, False]
    reversed_chunks = np.zeros(2)
    for _ in range(2000):
        trial.reverse(chunks := np.full((2, 8, 7), 0.5), GRIPPER, noisy, np.array([1, 3]))
        reversed_chunks += chunks[:, 0, GRIPPER] < 0.0
    assert reversed_chunks[0] == 0 and reversed_chunks[1] == pytest.approx(2000 * trial.FLIP, rel=0.5)


def test_an_episode_that_runs_when_the_trial_of_its_task_ends_is_not_compared():
    np.random.seed(0)
    trial = GripperTrial("auto", 2)
    trial.restart(2)
    tasks = np.zeros(2, dtype=int)
    trial.reverse(np.zeros((2, 8, 7)), GRIPPER, np.ones(2, bool), tasks)
    trial.trying[0] = False
    trial.step([outcome(), outcome()], np.array([True, False]), tasks)
    assert trial.ended == [[], []] and not trial.counts.any()


def test_the_trial_goes_on_in_a_saved_model(tmp_path):
    model = make_model(num_envs=2, learning_starts=4, gate=False, policy_kwargs={"gripper_flip": "auto"})
    model.learn(60)
    assert model.gripper_trial.ended[0] and not model.corrects_gripper
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip")
    assert loaded.gripper_trial.ended == model.gripper_trial.ended
    loaded.gripper_trial = GripperTrial(1.0)
    loaded.save(tmp_path / "model.zip")
    assert RLT.load(tmp_path / "model.zip").corrects_gripper


@pytest.mark.parametrize(("rates", "least", "most"), [((0.0, 0.4), 0.88, 1.0), ((0.5, 0.5), 0.0, 0.08)])
def test_how_often_a_trial_finds_a_fault(rates, least, most):
    """Of success rates without and with reversed chunks: a fault, and no difference, seen after every episode."""
    rng = np.random.default_rng(0)
    np.random.seed(0)
    found = 0
    for _ in range(200):
        trial = GripperTrial("auto")
        for _ in range(trial.EPISODES):
            trial.reverse(np.zeros((1, 8, 7)), GRIPPER, np.ones(1, dtype=bool), ONE)
            trial.step([outcome(success=bool(rng.random() < rates[int(trial.drawn[0])]))], np.ones(1, dtype=bool), ONE)
            if not trial.trying:
                break
        found += trial.corrects
    assert least <= found / 200 <= most, found


def test_a_trial_in_vain_ends():
    """After its episodes nothing is reversed, although they would be better from then on."""
    np.random.seed(0)
    trial = GripperTrial("auto")
    for number in range(trial.EPISODES + 100):
        trial.reverse(chunks := np.full((1, 8, 7), 0.5), GRIPPER, np.ones(1, dtype=bool), ONE)
        reversed_chunk = chunks[0, 0, GRIPPER] < 0.0
        if trial.trying:
            trial.step([outcome(success=not trial.drawn[0])], np.ones(1, dtype=bool), ONE)
        assert trial.trying == (number + 1 < trial.EPISODES) and not trial.corrects
        assert number < trial.EPISODES or not reversed_chunk
    assert len(trial.ended[0]) == trial.EPISODES and any(drawn for drawn, _ in trial.ended[0])


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_reversed_episodes_of_the_trial_say_nothing_about_the_offset(monkeypatch, rate):
    """All drawn episodes have reversed chunks, or none. They are stored; the search counts those without."""
    monkeypatch.setattr(GripperTrial, "RATE", rate)
    settings = {"gripper_flip": "auto", "offset_search": {"opening": 10**6}}
    model = make_model(
        num_envs=2, venv=make_venv(2, max_episode_steps=8), learning_starts=4, gate=False, policy_kwargs=settings
    )
    seen = []

    class Look(BaseCallback):
        def _on_step(self):
            trial, search = model.gripper_trial, model.search
            seen.extend(zip(trial.drawn & trial.counts, np.isnan(search.tried).all((1, 2)), strict=True))
            assert (search.searching | trial.reversed | ~trial.counts).all()
            return True

    model.learn(100, callback=Look())
    assert model.gripper_trial.trying and model.replay_buffer.size() == 100
    drawn, given_up = np.array(seen[4:]).T
    assert 0 < drawn.sum() < len(drawn) and (given_up == (drawn & (rate == 1.0))).all()
    n_drawn = sum(was_drawn for was_drawn, _ in model.gripper_trial.ended[0])
    assert n_drawn > 2
    assert model.search.counted[0] == len(model.gripper_trial.ended[0]) - (n_drawn if rate == 1.0 else 0)
