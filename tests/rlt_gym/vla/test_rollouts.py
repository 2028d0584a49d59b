"""play_episodes: what ended, when, and what was seen; on the fake, whose pictures count control steps."""

import pytest
from gymnasium.vector import AutoresetMode

from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_gym.vla.rollouts import play_episodes


class Fragile(FakeLiberoVectorEnv):
    """Loses the simulator of env 1 in its third chunk."""

    chunks = 0

    def _play(self, chunks):
        played = super()._play(chunks)
        self.chunks += 1
        if self.chunks == 3:
            del played[1]
        return played


@pytest.mark.parametrize("kind", [FakeLiberoVectorEnv, Fragile])
def test_each_episode_counts_once_with_all_its_chunks_and_pictures(kind):
    env = kind(2, task_ids=[0, 3], chunk_length=4, max_episode_steps=18, image_size=16)
    vla = FakeVLA()
    episodes = list(play_episodes(vla, env, [(3, 1), (0, 4), (3, 2), (0, 1)], frames=True))
    found = {(e.task_id, e.init_index): (e.instruction, e.success, e.steps, e.chunks) for e in episodes}
    assert len(episodes) == 4 and found == {
        (3, 1): ("fake task 3", False, 18, 5), (0, 4): ("fake task 0", True, 13, 4),
        (3, 2): ("fake task 3", True, 13, 4), (0, 1): ("fake task 0", False, 18, 5),
    }  # fmt: skip
    for episode in episodes:
        shown = [int(frame[0, 0, 0]) for frame in episode.frames]
        assert shown == [*range(0, episode.steps, 4), episode.steps]
    assert set(vla.calls) == {2}  # one forward pass for all simulators, always as large


def test_pictures_are_upright_and_only_kept_if_asked_for():
    class Marked(FakeLiberoVectorEnv):
        def _observe(self, env):
            obs = super()._observe(env)
            obs["agentview"][:8] = 200  # the lower half of the scene: the picture is upside down
            return obs

    (episode,) = play_episodes(FakeVLA(), Marked(1), [(0, 0)], frames=True)
    assert all((frame[8:] == 200).all() and (frame[:8] < 200).all() for frame in episode.frames)
    assert not any(episode.frames for episode in play_episodes(FakeVLA(), Marked(1), [(0, 0)]))


def test_it_can_be_stopped_after_a_chunk():
    chunks = []

    def stop():
        chunks.append(1)
        if len(chunks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(play_episodes(FakeVLA(), FakeLiberoVectorEnv(1), [(0, 1), (0, 3)], on_chunk=stop))
    assert len(chunks) == 3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="chunks of 9 control steps; the VLA 'fake' gives 8"):
        next(play_episodes(FakeVLA(), FakeLiberoVectorEnv(1, chunk_length=9), [(0, 0)]))
    with pytest.raises(ValueError, match="under SAME_STEP"):
        next(play_episodes(FakeVLA(), FakeLiberoVectorEnv(1, autoreset_mode=AutoresetMode.DISABLED), [(0, 0)]))

    class Deaf(FakeLiberoVectorEnv):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed, options={"init_states": "eval"})

    with pytest.raises(ValueError, match="which is none of the episodes"):
        list(play_episodes(FakeVLA(), Deaf(1), [(0, 7)]))
