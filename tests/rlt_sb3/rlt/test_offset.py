"""The search for an offset of the VLA's chunks: what is tried, what counts, where the offset goes, and who plays it."""

import numpy as np
import pytest
import torch as th
from rlt_models import fast, make_model, make_venv, random_obs
from stable_baselines3.common.callbacks import BaseCallback

from rlt_sb3 import RLT
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.schedules import ChunkSchedule
from rlt_sb3.rlt.offset import OffsetSearch

GRIPPER = 6
OTHERS = np.arange(6)


def search_of(n_envs=2, n_dims=7, gripper=GRIPPER, n_tasks=1, **settings) -> OffsetSearch:
    search = OffsetSearch(**settings)
    search.begin(n_tasks, n_dims, gripper)
    search.restart(n_envs)
    return search


def outcome(success=True, offset=None, **told) -> ChunkOutcome:
    told = {"searching": offset is not None} | told
    return ChunkOutcome.complete(np.zeros((4, 7), np.float32), 0.0, success=success, offset=offset, **told)


def model_of(num_envs=2, offset_search=True, **kwargs) -> RLT:
    if isinstance(offset_search, dict):
        offset_search = {"opening": 0} | offset_search
    policy_kwargs = {"net_arch": [32, 32], "offset_search": offset_search} | kwargs.pop("policy_kwargs", {})
    return make_model(num_envs, **(fast(policy_kwargs=policy_kwargs) | kwargs))


# ---------------------------------------------------------------- what is tried


def test_an_episode_tries_one_offset_from_its_first_chunk_to_its_last():
    np.random.seed(0)
    search, centers = search_of(400, share=0.5, std=0.1, opening=0), np.full((400, 2, 7), 0.3)
    centers[..., GRIPPER] = 0.0
    noisy, others = np.arange(400) % 4 != 0, np.full((400, 2, 7), np.nan)
    others[::8] = 0.7
    tries = search.draw(noisy, centers, others)
    assert not tries[~noisy].any() and 0.4 < tries[noisy].mean() < 0.6
    np.testing.assert_array_equal(search.tried[~noisy], others[~noisy])
    assert np.isnan(search.tried[noisy & ~tries]).all()
    tried = search.tried[tries]
    assert (tried[..., GRIPPER] == 0.0).all()
    assert abs((tried[..., OTHERS] - 0.3).std() - 0.1) < 0.01 and abs(tried[..., OTHERS].mean() - 0.3) < 0.01
    # the actor's offset moves meanwhile; episodes that end draw anew, all others go on as they began
    first = search.tried.copy()
    dones = np.arange(400) < 200
    search.end(dones)
    search.draw(noisy, centers + 1.0, others)
    same = np.array([np.array_equal(a, b, equal_nan=True) for a, b in zip(first, search.tried, strict=True)])
    assert same[~dones].all() and not same[dones & tries].any()
    search.draw(np.ones(400, bool), centers, others)  # practice takes over episodes that were played without noise
    assert np.isnan(search.tried[::8][25:]).all() and not np.isnan(search.tried[~dones & tries]).any()


@pytest.mark.parametrize("gripper", [GRIPPER, None])
def test_the_offset_depends_on_the_command_to_the_gripper(gripper):
    search = search_of(3, gripper=gripper)
    assert search.shape == ((2, 7) if gripper else (1, 7)) and len(search.free) == (6 if gripper else 7)
    references = np.zeros((3, 4, 7), np.float32)
    references[:, :, GRIPPER] = [[1, 1, 1, -1], [-1, -1, -1, 1], [0, 0, 0, 0]]
    offsets = np.arange(3 * search.shape[0] * 7.0).reshape(3, -1, 7)
    found = search.of_chunks(offsets, references)
    expected = [offsets[0, 1], offsets[1, 0], offsets[2, 0]] if gripper else offsets[:, 0]
    np.testing.assert_array_equal(found[:, 0], expected)


class Watch(BaseCallback):
    """What is played, and what the training actor would play without noise."""

    def _on_training_start(self) -> None:
        self.rows = []

    def _on_step(self) -> bool:
        model = self.model
        seen = model.policy.obs_to_tensor(model._last_obs)[0]
        with th.no_grad():
            chunks = model.policy.training_actor(seen).numpy().reshape(self.locals["actions"].shape)
        tried = np.where(model.search.searching[:, None, None], model.search.tried, np.nan)
        now = model.policy.training_actor.offset[0].numpy().copy()
        references = model._last_obs["vla_ref"].clip(-1, 1)
        self.rows.append((model.search_opens, references, chunks, self.locals["actions"], tried, now))
        return True


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_episodes_of_the_search_play_the_actor_and_the_offset_and_noise(noise):
    unit = np.array([0.5] * 6 + [1.0])
    model = model_of(
        offset_search={"opening": 12, "share": 0.5, "std": 0.05},
        action_scale=unit.tolist(),
        learning_starts=40,
        correction_range=(1.0, 1.0),
        exploration_std=noise,
    )
    model.search.FIRST, model.search.EVERY = 4, 2  # moves soon
    watch = Watch()
    model.learn(500, callback=watch)
    further, others, corrected = {True: [], False: []}, 0, 0.0
    for opens, references, chunks, played, tried, now in watch.rows[:-1]:
        for env, reference in enumerate(references):
            phase = int(reference[:, GRIPPER].mean() > 0)
            if np.isnan(tried[env]).any():
                others += not np.allclose(played[env], chunks[env], atol=1e-6)
                continue
            correction = chunks[env] - np.clip(reference + now[phase], -1, 1)
            expected = np.clip(reference + tried[env, phase] * unit, -1, 1) + correction
            inside = np.abs(expected) < 0.7
            further[opens].extend(((played[env] - expected) / unit)[inside])
            corrected = max(corrected, np.abs(correction).max())
    assert len(further[True]) > 200 and len(further[False]) > 200 and corrected > 1e-3
    assert (others > 20) == (noise > 0.0)
    for found in further.values():
        assert abs(np.mean(found)) < 1e-6 + noise / 10 and abs(np.std(found) - noise) < 1e-6 + noise / 5
    assert np.abs(watch.rows[-1][-1]).max() > 0.0  # it has moved
    assert all(np.isnan(tried).all() for *_, tried, _ in watch.rows[:20])  # not in the warm-up


def test_chunks_with_noise_have_the_whole_offset_and_a_part_of_the_correction():
    model = model_of(1, exploration_std=0.0, correction_range=(0.5, 0.5), offset_search={"share": 0.0})
    model.learn(40)
    table = np.linspace(-0.1, 0.1, 14).reshape(2, 7)
    table[:, GRIPPER] = 0.0
    model.policy.set_offset(0, table)
    model._last_obs = random_obs(model, 1)
    played, _ = model._sample_action(0, None, 1)
    with th.no_grad():
        chunk = model.policy.training_actor(model.policy.obs_to_tensor(model._last_obs)[0]).numpy().reshape(1, 4, 7)
    reference = model._last_obs["vla_ref"]
    base = np.clip(reference + table[int(reference[0, :, GRIPPER].mean() > 0)], -1, 1)
    np.testing.assert_allclose(played, np.clip(base + 0.5 * (chunk - base), -1, 1), atol=1e-6)
    assert np.abs(chunk - base).max() > 1e-3


# ---------------------------------------------------------------- what counts, and where the offset goes


def test_whole_undisturbed_episodes_count():
    search, one, two = search_of(2), np.full((2, 7), 0.1), np.full((2, 7), 0.2)
    nobody, someone = np.zeros(4, bool), np.array([False, True, False, False])
    tasks, going, over = np.zeros(2, int), np.zeros(2, bool), np.ones(2, bool)
    search.count([outcome(offset=one), outcome(offset=two, intervention=someone)], going, tasks)
    assert search.count([outcome(offset=one), outcome(offset=two, intervention=nobody)], over, tasks) == []
    search.count([outcome(offset=one, broken=True), outcome()], over, tasks)
    search.count([outcome(False, offset=two), outcome(offset=one)], np.array([True, False]), tasks)
    assert search.counted == [2] and search.ended == {0: 4}  # the opening ends wherever someone always takes over
    assert [(vector.tolist(), success) for vector, success in search.samples[0]] == [
        ([0.1] * 12, True),
        ([0.2] * 12, False),
    ]


def test_it_opens_with_episodes_of_its_own_and_the_network_learns_afterwards():
    model = model_of(offset_search={"opening": 24, "share": 0.0})
    counted, searching, weights = [], [], []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            counted.append(model.search.counted[0])
            searching.append(bool(model.search.searching.any()))
            weights.append(model.actor.mu[-1].weight.abs().max().item())
            return True

    model.learn(600, callback=Look())
    over = int(np.argmax(np.array(counted) >= 24))
    begun = next(step for step, found in enumerate(searching) if found)
    assert begun * 2 >= model.learning_starts and counted[-1] <= 24 + 1
    assert all(searching[begun + 8 : over]) and not any(searching[over + 10 :])
    assert not any(weights[:over]) and weights[-1] > 0.0


def test_the_gate_has_half_of_its_share_meanwhile():
    shares = {}

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            shares.setdefault(model.search_opens, set()).add(model.gate.share_now)
            return True

    model = model_of(gate={"share": 0.6, "window": 2}, offset_search={"opening": 10})
    model.learn(400, callback=Look())
    assert shares == {True: {0.3}, False: {0.6}}


@pytest.mark.parametrize("tasks", [None, 3])
def test_the_pulls_schedule_begins_when_the_network_learns(tasks):
    """With several tasks, for each of them by its own chunks."""
    kwargs = {} if tasks is None else {"venv": make_venv(2, task_ids=range(tasks), show_task=True)}
    model = model_of(offset_search={"opening": 4}, bc_coef=ChunkSchedule(10.0, 0.0, chunks=200), **kwargs)
    opens, counts, pulls = [], [], []

    class Look(BaseCallback):
        def _on_step(self) -> bool:  # the step's chunks are counted, those of tasks and of the search not yet
            opens.append(model.search_opens)
            counts.append([model.num_timesteps - 2] if tasks is None else model.task_chunks.tolist())
            pulls.append(np.ravel(model._pull({} if tasks is None else {"task": th.eye(tasks)})))
            return True

    model.learn(500, callback=Look())
    begins = opens.index(False)
    assert 10 < begins < 200 and not any(opens[begins:])
    later = 2 if tasks is None else 0
    for count, pull in zip(counts[begins:], pulls[begins:], strict=True):
        since = np.array(count) - np.array(counts[begins]) + later
        np.testing.assert_allclose(pull, np.maximum(10.0 - 10.0 * since / 200, 0.0), atol=0.11)
    assert all((pull > 9.8).all() for pull in pulls[:begins]) and pulls[-1].max() < 8.0
    model.learn(60, reset_num_timesteps=True, callback=Look())
    assert abs(pulls[-1][0] - max(10.0 - 10.0 * (counts[-1][0] + later) / 200, 0.0)) < 0.11


def test_all_tasks_have_their_opening():
    search = search_of(2, n_tasks=5, opening=3)  # three of the suite's tasks are not played
    for number, tasks in enumerate(([0, 0], [0, 1], [1, 0], [1, 0])):
        assert search.opens
        search.count([outcome(offset=np.zeros((2, 7)))] * 2, np.ones(2, bool), np.array(tasks))
        assert search.counted[0] == [2, 3, 4, 5][number]
    assert not search.opens


def test_a_task_that_is_practiced_less_needs_less_of_an_opening():
    """Once over it stays over, whatever the shares become."""
    search = search_of(2, n_tasks=3, opening=8)
    search.shares = np.array([1.0, 0.25, 0.5])

    def play(*tasks):
        search.count([outcome(offset=np.zeros((2, 7)))] * 2, np.ones(2, bool), np.array(tasks))

    for tasks, over in ((0, 1), set()), ((0, 1), {1}), ((0, 2), {1}), ((2, 2), {1}), ((0, 2), {1, 2}), ((0, 0), {1, 2}):
        assert search.opens
        play(*tasks)
        assert search.opened == over
    play(0, 0)
    assert not search.opens and search.ended == {0: 8, 1: 2, 2: 4}
    search.shares[:] = 1.0
    play(1, 2)
    assert not search.opens


def test_it_moves_after_sixteen_episodes_and_then_after_every_eight():
    search, moves = search_of(1), []
    for number in range(1, 50):
        if search.count([outcome(offset=np.zeros((2, 7)))], np.ones(1, bool), np.zeros(1, int)):
            moves.append(number)
    assert moves == [16, 24, 32, 40, 48]


def test_each_task_has_its_own_episodes():
    search = search_of(2, n_tasks=3, memory=20)
    for number in range(30):
        search.count([outcome(offset=np.full((2, 7), float(number)))] * 2, np.ones(2, bool), np.array([0, 2]))
    assert [len(samples) for samples in search.samples] == [20, 0, 20]
    assert search.samples[2][0][0][0] == 10.0  # the latest twenty


def test_episodes_without_noise_are_samples_and_nothing_else():
    search = search_of(1, opening=3)
    for number in range(40):
        vector, over, task = np.full((2, 7), float(number)), np.ones(1, bool), np.zeros(1, int)
        assert not search.count([outcome(number % 2 == 0, offset=vector, searching=False)], over, task)
    assert search.counted == [0] and search.opens and len(search.samples[0]) == 40
    for _ in range(3):
        search.count([outcome(offset=np.zeros((2, 7)))], np.ones(1, bool), np.zeros(1, int))
    assert search.counted == [3] and not search.opens


class WhoPlayed(BaseCallback):
    """Whose offset the search takes for that of each episode."""

    def _on_training_start(self) -> None:
        self.begins, self.opened, self.seen = [True, True], [True, True], {}

    def _on_step(self) -> bool:
        model, played = self.model, self.locals["actions"]
        observations = model.policy.obs_to_tensor(model._last_obs)[0]
        with th.no_grad():
            of_copy = model.policy.actor_on_trial(observations).numpy().reshape(played.shape)
        for env in range(2):
            self.opened[env] = model.search_opens if self.begins[env] else self.opened[env]
            tried, player = model.search.tried[env], model.gate.player[env]
            if model.search.searching[env]:
                kind = "search"
                assert not model.gate.noise_free[env]
            elif player == "actor":
                kind = "copy"
                np.testing.assert_array_equal(tried * model.action_unit, model.policy.actor_on_trial.offset[0].numpy())
                np.testing.assert_array_equal(played[env], of_copy[env])
            elif model.gate.noise_free[env]:
                kind = "VLA, opening" if self.opened[env] else "VLA"
                assert (tried == 0.0).all() if self.opened[env] else np.isnan(tried).all()
                np.testing.assert_array_equal(played[env], np.clip(model._last_obs["vla_ref"][env], -1, 1))
            else:
                kind = "noise"
                assert np.isnan(tried).all()
            self.seen[kind] = self.seen.get(kind, 0) + 1
        self.begins = list(self.locals["dones"])
        return True


def test_the_offset_of_an_episode_is_that_of_its_player():
    model = model_of(gate={"share": 0.5, "window": 5}, offset_search={"opening": 6, "share": 0.5}, exploration_std=0.2)
    model.search.FIRST, model.search.EVERY = 4, 2
    watch = WhoPlayed()
    model.learn(500, callback=watch)
    assert min(watch.seen[kind] for kind in ("search", "copy", "VLA, opening", "VLA", "noise")) > 20
    assert model.policy.actor_on_trial.offset.any()
    counted = [vector for vector, _ in model.search.samples[0]]
    assert model.search.counted[0] < len(counted) and not all(vector.any() for vector in counted)


def posterior_means(tried, success, vectors, std):
    """The means of a Gaussian process, by the joint covariance, in the notation of a textbook."""

    def covariance(a, b):
        return OffsetSearch.AMPLITUDE**2 * np.exp(-np.sum((a - b) ** 2) / (2 * (OffsetSearch.LENGTH * std) ** 2))

    n = len(tried)
    joint = np.array([[covariance(a, b) for b in tried] for a in tried]) + OffsetSearch.NOISE * np.eye(n)
    weights = np.linalg.inv(joint) @ (success - np.mean(success))
    return np.mean(success) + np.array([[covariance(vector, a) for a in tried] for vector in vectors]) @ weights


def test_it_goes_to_the_largest_mean_within_reach():
    rng = np.random.default_rng(0)
    search = search_of(std=0.05, reach=0.04)
    tried = rng.normal(size=(60, 12)) * 0.05
    success = rng.random(60) < 1 / (1 + np.exp(-tried @ np.linspace(-60, 60, 12)))
    search.samples[0].extend(zip(tried, success.tolist(), strict=True))
    start = np.zeros((2, 7))
    start[:, OTHERS] = 0.01
    moved = search.move(0, start)
    assert (moved[:, GRIPPER] == 0.0).all()
    here, there = start[:, OTHERS].ravel(), moved[:, OTHERS].ravel()
    assert np.linalg.norm(there - here) <= 0.04 + 1e-9
    others = here + 0.04 * (lambda v: v / np.linalg.norm(v, axis=1, keepdims=True))(rng.normal(size=(2000, 12)))
    besides = []
    for step in (*np.eye(12), *-np.eye(12)):  # on the border of the ball no direction along it is better
        beside = there + 1e-3 * step
        besides.append(here + (beside - here) * min(1.0, 0.04 / np.linalg.norm(beside - here)))
    best, at_start, *means = posterior_means(tried, success, [there, here, *others[:300], *besides], 0.05)
    assert best > at_start + 0.02
    assert best >= max(means[:300]) and best >= max(means[300:]) - 1e-6


def test_it_finds_a_better_offset():
    """Success is certain at a place four standard deviations away, and falls off about it to 0.35 at zero."""
    gained = []
    for seed in range(5):
        np.random.seed(seed)
        rng = np.random.default_rng(seed)
        search, offset = search_of(1, share=1.0, std=0.015), np.zeros((1, 2, 7))
        sharp = rng.permutation(12) < 4
        place = rng.normal(size=12) * sharp
        place *= 0.06 / np.linalg.norm(place)

        def rate(found, place=place, sharp=sharp):
            return float(np.exp(np.log(0.35) * (((found[..., OTHERS].ravel() - place) ** 2)[sharp]).sum() / 0.06**2))

        for _ in range(160):
            search.draw(np.ones(1, bool), offset, offset)
            success = rng.random() < rate(search.tried[0])
            for task in search.count(
                [outcome(success, offset=search.tried[0].copy())], np.ones(1, bool), np.zeros(1, int)
            ):
                offset[0] = search.move(task, offset[0])
            search.end(np.ones(1, bool))
        gained.append(rate(offset) - 0.35)
    assert np.mean(gained) > 0.25 and min(gained) > 0.0


# ---------------------------------------------------------------- who plays it


@pytest.mark.parametrize("gripper", [GRIPPER, None])
def test_the_actor_adds_it_to_the_chunk(gripper):
    model = model_of(policy_kwargs={"gripper": gripper} if gripper is None else {})
    actor = (
        model.policy.make_actor()
        if gripper
        else type(model.actor)(
            **model.policy._update_features_extractor(model.policy.actor_kwargs | {"gripper": None}, None)
        )
    )
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 20).items()}
    table = th.randn_like(actor.offset) * 0.3
    with th.no_grad():
        actor.mu[-1].bias.uniform_(-0.1, 0.1)
        plain = actor(obs)
        raw = obs["vla_ref"].flatten(1) + actor.mu[-1].bias
        actor.offset.copy_(table)
        chunks = actor(obs).view(20, 4, 7)
    assert th.equal(plain, raw.clamp(-1, 1))
    for row in range(20):
        phase = int(obs["vla_ref"][row, :, GRIPPER].mean() > 0) if gripper else 0
        expected = (raw[row].view(4, 7) + table[0, phase]).clamp(-1, 1)
        assert th.allclose(chunks[row], expected, atol=1e-6)


def test_the_pull_is_towards_the_chunk_with_the_offset():
    model = model_of(offset_search={}, reference_dropout=0.0, bc_coef=1.0)
    model.learn(60)
    model.policy.set_offset(0, np.full((2, 7), 0.1))
    with th.no_grad():
        for parameter in model.actor.mu[-1].parameters():
            parameter.zero_()
    batch = model.replay_buffer.sample(32)
    stats = model._update_actor(batch)
    assert float(stats[2]) == 0.0 and float(stats[6]) == 0.0  # no distance, nothing reversed
    # where someone else chose the chunk, it is the target
    batch = model.replay_buffer.sample(32)._replace(bc_target=th.full((32, 28), 0.5))
    with th.no_grad():
        for parameter in model.actor.mu[-1].parameters():
            parameter.zero_()
    reference = batch.observations["vla_ref"].flatten(1)
    expected = ((reference + 0.1).clamp(-1, 1) - 0.5).pow(2).mean()
    assert float(model._update_actor(batch)[2]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("n_tasks", [None, 3])
def test_a_gradient_without_what_the_offset_could_follow(n_tasks):
    """Row by row: the mean over the rows of the same task and gripper, and over their control steps, is taken away."""
    model = model_of()
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 40).items()}
    if n_tasks:
        obs["task"] = th.eye(n_tasks)[th.arange(40) % 2]  # the third one is not in the batch
        model.actor.offset = th.zeros(n_tasks, 2, 7)
    gradient = th.randn(40, 28)
    rest = model.actor.without_constants(gradient, obs).view(40, 4, 7)
    groups = {}
    for row in range(40):
        closes = bool(obs["vla_ref"][row, :, GRIPPER].mean() > 0)
        groups.setdefault((row % 2 if n_tasks else 0, closes), []).append(row)
    assert len(groups) == (4 if n_tasks else 2)
    for rows in groups.values():
        of_group = gradient.view(40, 4, 7)[rows]
        expected = of_group - of_group.mean((0, 1))
        expected[..., GRIPPER] = of_group[..., GRIPPER]
        assert th.allclose(rest[rows], expected, atol=1e-6)


@pytest.mark.parametrize("actor_std", [0.0, 0.01])
@pytest.mark.parametrize(
    ("search", "ignores"), [({"owns_constants": True}, True), ({"owns_constants": False}, False), (False, False)]
)
def test_the_network_does_not_follow_a_slope_that_is_the_same_everywhere(search, ignores, actor_std, monkeypatch):
    """Only the search finds out what a constant is worth."""
    kwargs = {"optimizer_class": th.optim.SGD, "actor_std": actor_std}
    model = model_of(offset_search=search, bc_coef=0.0, reference_dropout=0.0, policy_kwargs=kwargs)
    model.learn(60)
    batch = model.replay_buffer.sample(32)
    batch.observations["vla_ref"].clamp_(-0.5, 0.5)  # limited chunks would make the slope uneven

    def moved_by(values) -> th.Tensor:
        monkeypatch.setattr(model.critic, "actor_q", lambda obs, actions: values(obs, actions.view(32, 4, 7)))
        before = model.actor.mu[-1].bias.detach().clone()
        model._update_actor(batch)
        return (model.actor.mu[-1].bias.detach() - before).view(4, 7).abs().amax(0)

    same = moved_by(lambda obs, chunks: chunks.sum((1, 2)))
    assert same[GRIPPER] > 1e-4 and (same[:GRIPPER] < 1e-7).all() == ignores
    of_step = moved_by(lambda obs, chunks: chunks[:, 0].sum(1))  # the first control step alone
    assert (of_step > 1e-5).all()


def test_trials_keep_their_offset_and_files_keep_everything(tmp_path):
    model = model_of(gate={"share": 0.5, "window": 2}, offset_search={"share": 1.0})
    model.search.FIRST, model.search.EVERY = 2, 1
    model.learn(300)
    present = model.actor.offset.clone()
    assert present.abs().max() > 0 and th.equal(present, model.actor_target.offset)
    model.gate.start_trial(model.policy)
    model.policy.set_offset(0, np.zeros((2, 7)))
    assert th.equal(model.policy.actor_on_trial.offset, present)
    model.gate.pass_trial(model.policy)
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", env=make_venv(2), device="cpu")
    assert th.equal(loaded.policy.actor_deployed.offset, present) and not loaded.actor.offset.any()
    ours, theirs = model.search.samples[0], loaded.search.samples[0]
    assert len(ours) == len(theirs) > 10 and loaded.search.counted == model.search.counted
    assert all(np.array_equal(a, b) and x == y for (a, x), (b, y) in zip(ours, theirs, strict=True))


def test_training_twice_is_the_same():
    def trained():
        model = model_of(gate={"share": 0.5, "window": 2}, offset_search={"share": 0.7})
        model.search.FIRST, model.search.EVERY = 2, 1
        return model.learn(200)

    first, second = (model.policy.state_dict() for model in (trained(), trained()))
    assert first["actor.offset"].any() and all(th.equal(first[name], second[name]) for name in first)


def test_without_the_search_there_is_no_offset():
    for kwargs in ({"offset_search": False}, {"actor_mode": "direct"}):
        model = model_of(policy_kwargs=kwargs).learn(100)
        assert model.search is None and not model.actor.offset.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"opening": -1}, r"offset_search\.opening must be an integer >= 0 \(episodes\), got -1"),
        ({"share": 2.0}, r"offset_search\.share must be in \[0, 1\]"),
        ({"std": 0.0}, r"offset_search\.std must be > 0 \(units of action\), got 0"),
        ({"reach": -1.0}, r"offset_search\.reach must be > 0"),
        ({"memory": 3}, r"offset_search\.memory must be an integer >= 16 \(episodes\), got 3"),
        ({"owns_constants": 1}, r"offset_search\.owns_constants must be True or False, got 1"),
        ({"shares": 0.5}, r"offset_search.shares"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        model_of(offset_search=settings)
