"""Recording inside chunks, on an environment whose observations count control steps."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rlt_gym.core.recording import RecordEpisodes
from rlt_gym.testing import FakeLiberoVectorEnv


def fourth(simulator, proposed, step):
    return np.full(7, 0.5) if step % 4 == 3 else None


@pytest.mark.parametrize("chunk_length, stride", [(3, 1), (1, None)])
def test_each_row_is_the_observation_before_its_action(chunk_length, stride):
    """Episodes of 7 and of 10 control steps, none a multiple of the chunk; actions tell which chunk they are of."""
    env = RecordEpisodes(
        FakeLiberoVectorEnv(
            2, chunk_length=chunk_length, max_episode_steps=10, success_step=7, obs_stride=stride, intervention=fourth
        )
    )
    env.reset(seed=0)
    found, asked = [], [[], []]
    for number in range(40):
        chunk = np.arange(chunk_length * 7).reshape(chunk_length, 7) / 1000 + number / 100
        _, _, terminations, truncations, infos = env.step(np.stack([chunk, -chunk]))
        assert "inner_obs" not in infos and "inner_count" not in infos
        for index, done in enumerate(terminations | truncations):
            steps = (infos["final_info"] if done else infos)["chunk_steps"][index]
            asked[index].extend([chunk, -chunk][index][:steps])
        found += env.take()
    assert len(found) > 6 and env.take() == [] and {episode.success for episode in found} == {True, False}
    for episode in found:
        length = 7 if episode.init_index % 2 == 0 else 10
        assert episode.success == (length == 7) and len(episode.actions) == length
        assert episode.observations["proprio"][:, 0].tolist() == list(range(length))
        assert episode.observations["agentview"][:, 0, 0, 0].tolist() == list(range(length))
        assert set(episode.observations["proprio"][:, 1].tolist()) == {episode.init_index}
        assert episode.intervention.tolist() == [step % 4 == 3 for step in range(length)]
        assert (episode.task_id, episode.instruction) == (0, "fake task 0")
        index = int(episode.observations["proprio"][0, 2])
        played, asked[index] = np.array(asked[index][:length]), asked[index][length:]
        expected = np.where(episode.intervention[:, None], 0.5, np.clip(played, -1, 1))
        np.testing.assert_allclose(episode.actions, expected, atol=1e-6)


def test_environments_that_cannot_be_recorded():
    with pytest.raises(ValueError, match="chunks of 4 with obs_stride=2: make it with obs_stride=1"):
        RecordEpisodes(FakeLiberoVectorEnv(1, chunk_length=4, obs_stride=2))
    with pytest.raises(ValueError, match="needs SAME_STEP"):
        RecordEpisodes(FakeLiberoVectorEnv(1, chunk_length=1, autoreset_mode=AutoresetMode.DISABLED))


class Breaks(FakeLiberoVectorEnv):
    """The simulator is lost once, in the second chunk."""

    chunks = 0

    def _play(self, chunks):
        self.chunks += 1
        return {} if self.chunks == 2 else super()._play(chunks)


def test_an_episode_whose_simulator_was_lost_is_recorded_once_and_whole():
    env = RecordEpisodes(Breaks(1, chunk_length=3, max_episode_steps=8, obs_stride=1))
    env.reset(seed=0)
    restarts = 0
    for _ in range(5):
        *_, infos = env.step(np.zeros((1, 3, 7)))
        restarts += int("final_info" in infos and bool(infos["final_info"]["worker_restarted"][0]))
    (episode,) = env.take()
    assert restarts == 1 and episode.observations["proprio"][:, 0].tolist() == list(range(8))
