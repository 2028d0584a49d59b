"""group_size: several training episodes from one initial state; the same state and actions give the same episode."""

import numpy as np
import pytest

from rlt_gym.core.episodes import EpisodeSequence
from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.testing import FakeLiberoVectorEnv

TASKS = (1, 8, 5)


def states(num_envs, episodes, split="train", **arguments):
    """(task, initial state) of the vector's first episodes, in the order of their numbers."""
    sequence = EpisodeSequence(num_envs, len(TASKS), split, **arguments)
    seen = []
    for _ in range(-(-episodes // num_envs)):
        row = [sequence.next(env) for env in range(num_envs)]
        seen += [(TASKS[episode.task_index], episode.init_index) for episode in reversed(row)]
    return seen[:episodes]


def without_groups(episodes, seed):
    """The rule of the class: tasks in turn, from one that the seed chooses; initial state drawn from (seed, p)."""
    first = int(np.random.SeedSequence([seed]).generate_state(1)[0])
    draws = [int(np.random.SeedSequence([seed, p]).generate_state(1)[0]) % 10_000 for p in range(episodes)]
    return [(TASKS[(first + p) % 3], draw) for p, draw in enumerate(draws)]


def test_without_groups_nothing_changes():
    assert states(2, 12, seed=7) == states(2, 12, seed=7, group_size=1) == without_groups(12, 7)


@pytest.mark.parametrize("num_envs", [1, 3, 4, 8])
@pytest.mark.parametrize("group_size", [2, 4])
def test_training_states_come_g_times_for_any_number_of_envs(num_envs, group_size):
    expected = [place for place in without_groups(6, 7) for _ in range(group_size)]
    assert states(num_envs, 6 * group_size, seed=7, group_size=group_size) == expected


def test_seeding_after_every_episode_practices_all_tasks():
    """A run does so at each evaluation and checkpoint."""
    first = [states(1, 1, seed=10_007 * number)[0][0] for number in range(60)]
    assert min(first.count(task) for task in TASKS) >= 10


def test_a_round_has_as_many_episodes_of_a_task_as_its_weight():
    """As far apart as they can be; the initial states are those of the same episodes without weights."""
    sequence = EpisodeSequence(2, 3, seed=7)
    sequence.set_task_weights([1, 3, 2])
    first = int(np.random.SeedSequence([7]).generate_state(1)[0])
    episodes = [sequence.next(env) for _ in range(6) for env in (1, 0)]
    order = [0, 1, 2, 1, 2, 1]
    assert [one.task_index for one in episodes] == [order[(first + p) % 6] for p in range(12)]
    even = EpisodeSequence(2, 3, seed=7)
    assert [one.init_index for one in episodes] == [even.next(env).init_index for _ in range(6) for env in (1, 0)]
    groups = EpisodeSequence(2, 3, seed=7, group_size=4)
    groups.set_task_weights([1, 3, 2])
    tasks = [groups.next(env).task_index for _ in range(12) for env in (1, 0)]
    assert tasks == [order[(first + p) % 6] for p in range(6) for _ in range(4)]


def test_held_out_states_come_once():
    expected = [(task, turn) for turn in range(3) for task in TASKS]
    assert states(9, 9, group_size=4, split="eval") == expected


def test_an_evaluation_does_not_set_practice_back():
    """Training goes on with the episode after the last one it began; a seed starts its sequence anew."""
    sequence = EpisodeSequence(2, 3, seed=7)
    first = [sequence.next(0).number, sequence.next(1).number, sequence.next(1).number]
    sequence.restart("eval", shard=(1, 3))
    assert [sequence.next(env).number for env in (0, 1, 1)] == [4, 1, 7]
    sequence.restart("selection")
    assert sequence.next(1).number == 0
    sequence.restart("train")
    assert first == [1, 0, 2] and [sequence.next(env).number for env in (0, 1)] == [3, 4]
    sequence.repeat(1)
    assert sequence.next(1).number == 4
    sequence.restart(seed=7)
    assert [sequence.next(env).number for env in (0, 1)] == [1, 0]


def test_another_environment_goes_on_where_one_stopped():
    """The reset option ``turns``: episodes in the middle of a sequence."""
    first = FakeLiberoVectorEnv(2, task_ids=(0, 1, 2), max_episode_steps=8)
    first.reset(options={"init_states": "eval"})
    actions = np.zeros(first.action_space.shape)
    for _ in range(3):
        infos = first.step(actions)[4]
    other = FakeLiberoVectorEnv(2, task_ids=(0, 1, 2), max_episode_steps=8)
    turns = [turn - 1 for turn in first.sequence.turns]
    _, again = other.reset(options={"init_states": "eval", "turns": turns})
    assert again["init_index"].tolist() == infos["init_index"].tolist() == [7, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"shard": bad}, r"shard must be \(k, n\), integers")
            for bad in (3, "01", (0, 1.5), (False, 2), (0,), {0: 2})
        ],
        *[({"turns": bad}, "turns must be 2 integers of 0 or more") for bad in (3, [1], [0, 1.5], [0, -1], "01")],
        *[
            ({"episodes": bad}, "episodes must be one or more pairs .* a task of .0, 1. and a state from 0 to 499")
            for bad in (3, [3], [(1, 1.5)], [(1.0, 1)], [(1, True)], [(0, 1), (1,)], [(1, 1, 1)], "0", [(2, 0)])
        ],
        ({"init_states": ["eval"]}, "init_states must be one of"),
    ],
)
def test_reset_options_of_other_types_are_refused(options, message):
    """In one line, and nothing has begun."""
    env = FakeLiberoVectorEnv(2, task_ids=(0, 1), init_states="eval")
    _, infos = env.reset()
    with pytest.raises(ValueError, match=message) as caught:
        env.reset(options=options)
    assert "\n" not in str(caught.value)
    assert [episode.init_index for episode in env.episodes] == infos["init_index"].tolist()


def test_reset_options_may_be_arrays():
    env = FakeLiberoVectorEnv(2, task_ids=(0, 1), init_states="eval")
    _, infos = env.reset(options={"shard": np.array([1, 3]), "turns": np.array([2, 2])})
    _, lists = env.reset(options={"shard": [np.int64(1), 3], "turns": [2, np.int32(2)]})
    assert infos["init_index"].tolist() == lists["init_index"].tolist() != [0, 0]
    _, infos = env.reset(options={"episodes": np.array([(1, 7), (0, 9)])})
    assert (infos["task_id"].tolist(), infos["init_index"].tolist()) == ([1, 0], [7, 9])


@pytest.mark.parametrize("group_size", [0, 1.5, True])
def test_group_size_is_checked(group_size):
    with pytest.raises(ValueError, match="group_size must be an integer in 1"):
        EpisodeSequence(1, 1, group_size=group_size)


def test_the_same_state_and_actions_give_the_same_episode(tmp_path):
    """One group: twice in two workers, side by side and one after the other. Rewards, observations and the
    simulators' whole states are equal, bit for bit; other actions make another episode.
    """
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 4, 7)).astype(np.float32)
    env = LiberoVectorEnv(
        2, "libero_goal", [1], chunk_length=4, max_episode_steps=12, assets="embedded", image_size=64, group_size=6,
        critical_phase="intervention_hooks:note_state", critical_phase_kwargs={"folder": str(tmp_path)},
    )  # fmt: skip
    _, infos = env.reset(seed=3)
    first_states = [infos["init_index"].tolist()]
    rewards, shown = (
        np.zeros((3, 3, 2)),
        {key: np.zeros((3, 3, 2), dtype=object) for key in env.single_observation_space},
    )
    for episode, chunks in enumerate((actions, actions, -actions)):
        for number, chunk in enumerate(chunks):
            obs, rewards[episode, number], _, truncations, infos = env.step(np.stack([chunk, chunk]))
            for key, value in shown.items():
                for index in range(2):
                    seen = infos["final_obs"][index] if truncations[index] else {k: v[index] for k, v in obs.items()}
                    value[episode, number, index] = seen[key].tobytes()
        assert truncations.all()
        first_states.append(infos["init_index"].tolist())
    pids = env.worker_pids
    env.close()
    assert len({state for pair in first_states[:3] for state in pair}) == 1 and first_states[3] != first_states[2]
    for values in (rewards, *shown.values()):
        assert (values[0] == values[1]).all() and (values[..., 0] == values[..., 1]).all()
    assert (shown["agentview"][2] != shown["agentview"][0]).all()
    # of each worker: the first state and one after each chunk, of three episodes and the beginning of another
    states = np.stack([np.fromfile(tmp_path / str(pid)).reshape(13, -1) for pid in pids])
    assert np.array_equal(states[:, 0:4], states[:, 4:8]) and np.array_equal(states[0], states[1])
    assert np.array_equal(states[0, 8], states[0, 0]) and not np.isclose(states[0, 9:12], states[0, 1:4]).all(1).any()
    assert not np.array_equal(states[0, 12], states[0, 0])
