"""What RLT stores and learns from where someone takes over, and before the critical phase."""

import numpy as np
import pytest
from intervention_runs import SMALL, C, learn

from rlt_gym.core.wrappers import GripperPenalty
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.value_bias import ValueBias


def rows_of(model):
    """Stored rows in the order of their slots: (slots, actions, masks)."""
    rows = model.replay_buffer.storage
    slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
    return slots, rows.actions[slots], rows.intervention[slots]


def someone(simulator, proposed, step):
    """Takes over at every other pair of control steps."""
    return np.full(7, 0.125) * (step + 1) / 16 if step % 4 >= 2 else None


# ---------------------------------------------------------------- interventions


@pytest.mark.parametrize("reference", ["replace", "target"])
def test_executed_actions_are_stored_and_imitated(reference):
    # the last chunk of an episode has 3 steps
    model, steps = learn(
        intervention=someone, rlt={"replay_buffer_kwargs": {"intervention_ref": reference}}, max_episode_steps=15
    )
    slots, actions, masks = rows_of(model)
    expected = [(info, obs["vla_ref"][i]) for obs, _, _, infos in steps for i, info in enumerate(infos)]
    assert len(slots) == len(expected) == 60
    batch = model.replay_buffer._gather(slots)
    targets = batch.bc_target.numpy().reshape(-1, C, 7)
    references = batch.observations["vla_ref"].numpy()
    taken, shares = 0, []
    order = {tuple(action.ravel().tolist()): row for row, action in enumerate(actions)}
    for info, vla_ref in expected:
        executed, k = info["executed_actions"], info["chunk_steps"]
        row = order[tuple(executed.ravel().tolist())]
        human = info["intervention"] & (np.arange(C) < k)
        np.testing.assert_array_equal(masks[row], human)
        np.testing.assert_array_equal(targets[row], np.where(human[:, None], executed, vla_ref))
        np.testing.assert_array_equal(references[row], targets[row] if reference == "replace" else vla_ref)
        taken += human.sum()
        shares.append(human[:k].mean())
    assert 30 < taken < 150
    # the commanded action is not what happened where someone took over
    commanded = np.concatenate([step[1] for step in steps])
    assert not np.array_equal(np.sort(commanded.ravel()), np.sort(actions.ravel()))
    assert model.logger.name_to_value["rollout/intervention"] == pytest.approx(np.mean(shares))


def test_unknown_reference():
    with pytest.raises(ValueError, match="intervention_ref must be one of"):
        learn(rlt={"replay_buffer_kwargs": {"intervention_ref": "keep"}})


def test_interventions_rescue_and_teach():
    """Someone who goes straight to the goal at the end of each episode: more successes, and targets that show how."""

    def guide(simulator, proposed, step):
        env, i = simulator.env, simulator.index
        move = (env._goal[i] - env._position[i]) / env.SPEED
        return np.array([*np.clip(move, -1, 1), 0, 0, 0, 0, -1]) if step >= 8 else None

    frozen = {"learning_starts": 200}
    rates = []
    for hook in (None, guide):
        _, steps = learn(160, intervention=hook, rlt=frozen, max_episode_steps=16)
        ended = [info["is_success"] for *_, infos in steps for info in infos if "terminal_observation" in info]
        rates.append(np.mean(ended))
    assert rates[0] < 0.8 and rates[1] == 1.0


# ---------------------------------------------------------------- critical phase


def late(simulator):
    """True at control step 4 in even episodes, 8 in odd ones, false again at 12."""
    env, i = simulator.env, simulator.index
    begin = 4 if env.episodes[i].init_index % 2 == 0 else 8
    return begin <= env._steps[i] < 12


def test_only_the_critical_phase_is_acted_in_and_stored():
    model, steps = learn(80, critical_phase=late, max_episode_steps=16)
    stored = []
    for index in range(2):
        episode_step, init_index = 0, steps[0][3][index]["init_index"]
        for obs, commanded, new_obs, infos in steps:
            info, vla_ref = infos[index], obs["vla_ref"][index]
            init_index = info["init_index"]
            critical = episode_step >= (4 if init_index % 2 == 0 else 8)  # also after 12: it stays so
            assert info["critical_chunk"] == critical
            executed = commanded[index] if critical else vla_ref
            after = info["terminal_observation"] if "terminal_observation" in info else {
                key: value[index] for key, value in new_obs.items()
            }  # fmt: skip
            k = info["chunk_steps"]
            moved = obs["proprio"][index][:2] + 0.1 * executed[:k, :2].sum(0)
            np.testing.assert_allclose(after["proprio"][:2], moved, atol=1e-5)
            if critical:
                stored.append((commanded[index], k, info["step_rewards"], after["z_rl"]))
            episode_step = 0 if "terminal_observation" in info else episode_step + k
    assert 10 < len(stored) < 70
    assert model.logger.name_to_value["rollout/critical_phase"] == pytest.approx(len(stored) / 80)
    slots, actions, _ = rows_of(model)
    assert len(slots) == len(stored) == model.replay_buffer.rows_stored
    rows = model.replay_buffer.storage
    found = {tuple(action.ravel().tolist()): slot for slot, action in zip(slots, actions, strict=True)}
    for action, k, rewards, z_after in stored:
        slot = found[tuple(action.ravel().tolist())]
        assert rows.chunk_steps[slot] == k
        np.testing.assert_array_equal(rows.step_rewards[slot], rewards)
        np.testing.assert_array_equal(rows.obs["z_rl"][rows.next_slot[slot]], z_after)


def test_the_gate_holds_in_evaluations_too():
    env = FakeRLTokenVectorEnv(1, chunk_length=C, critical_phase=lambda simulator: False, init_states="eval")
    obs, _ = env.reset()
    after, *_, infos = env.step(np.zeros((1, C, 7)))
    assert not infos["critical_phase"].any()
    moved = obs["proprio"][0, :2] + 0.1 * obs["vla_ref"][0, :, :2].sum(0)
    np.testing.assert_allclose(after["proprio"][0, :2], moved, atol=1e-5)


def test_without_a_critical_phase_nothing_is_learned():
    model, _ = learn(40, critical_phase=lambda simulator: False)
    assert model.replay_buffer.size() == 0 and model._n_updates == 0 and model.num_timesteps == 40


def test_updates_per_row_count_stored_rows_only():
    model, steps = learn(80, critical_phase=late, rlt={"utd": 3.0, "critic_warmup_updates": 0})
    # rows after the warm-up
    due = 3 * sum(info["critical_chunk"] for *_, infos in steps[SMALL["learning_starts"] // 2 :] for info in infos)
    model._train_meanwhile()  # the updates that it still owes
    assert model._n_updates == due > 0


def test_the_promise_is_made_where_the_critical_phase_begins():
    tracker = ValueBias(1, gamma=0.5)
    quiet = ChunkOutcome(2, np.zeros(2), np.zeros((2, 1)), critical_chunk=False)
    last = ChunkOutcome(2, np.array([0.0, 1.0]), np.zeros((2, 1)), critical_chunk=True)
    for outcome, done, q in ((quiet, False, 9.0), (last, True, 0.75), (quiet, True, 9.0), (last, True, 0.5)):
        tracker.step([outcome], np.array([done]), lambda q=q: np.array([q]))
    assert list(tracker.gaps) == [0.75 - 0.5, 0.5 - 0.5] and tracker.control_steps == 8


# ---------------------------------------------------------------- reward terms


def test_penalties_are_learned_from_and_logged():
    def flips(simulator, proposed, step):
        return np.array([0, 0, 0, 0, 0, 0, (-1.0) ** step])

    model, steps = learn(
        24,
        intervention=flips,
        wrap=lambda env: GripperPenalty(env, 0.125, signal="command"),
        rlt={"q_bounds": (-2.0, 1.0)},
    )
    slots, _, _ = rows_of(model)
    total = sum(info["reward_terms"]["gripper"].sum() for *_, infos in steps for info in infos)
    # every control step but the first of each episode
    begun = 2 + sum("terminal_observation" in info for *_, infos in steps[:-1] for info in infos)
    assert total == -0.125 * (24 * C - begun)
    assert model.replay_buffer.storage.step_rewards[slots].sum() == pytest.approx(total)
    logged = model.logger.name_to_value
    assert logged["rollout/reward_gripper"] == pytest.approx(total / 24)
    assert logged["rollout/reward_success"] == 0.0 and logged["rollout/intervention"] == 1.0
    assert "rollout/critical_phase" not in logged
