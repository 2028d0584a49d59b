"""GRPO on action chunks: no critic, advantages within groups of episodes, a pull to the starting policy."""

from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv

from rlt_sb3.common.chunk_outcome import outcomes_of
from rlt_sb3.grpo.groups import GroupCollector, GroupEpisode, group_advantages
from rlt_sb3.ppo.policies import VLACenteredPolicy
from rlt_sb3.rlt.features import TensorDict

SelfGRPO = TypeVar("SelfGRPO", bound="GRPO")


def clipped_loss(log_prob: th.Tensor, old_log_prob: th.Tensor, advantages: th.Tensor, clip: float) -> th.Tensor:
    """
    Compute PPO's clipped loss.

    :param log_prob: of the present policy (B,)
    :param old_log_prob: when the chunks were drawn (B,)
    :param advantages: (B,)
    :param clip: how far the ratio may be from 1
    :return: mean over the rows
    """
    ratio = th.exp(log_prob - old_log_prob)
    return -th.min(advantages * ratio, advantages * ratio.clamp(1.0 - clip, 1.0 + clip)).mean()


def k3(log_prob: th.Tensor, start_log_prob: th.Tensor) -> th.Tensor:
    """
    Estimate the divergence from the starting policy: ``r - 1 - log r`` with r = start / present (Schulman's k3).

    :param log_prob: of the present policy (B,)
    :param start_log_prob: of the starting policy (B,)
    :return: mean over the rows, never negative
    """
    log_ratio = start_log_prob - log_prob
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


class GRPO(OnPolicyAlgorithm):
    """
    Group-relative policy optimization (Shao et al., DeepSeekMath, 2024, arXiv 2402.03300) on action chunks.

    ``group_size`` episodes begin at the same initial state. The advantage of all chunks of an episode is its return,
    undiscounted, minus the mean of its group, over the group's standard deviation. A group whose episodes all have the
    same return is skipped. The loss is PPO's clipped one, averaged over the chunks of all groups, plus the k3 estimate
    of the divergence from the starting policy, which is the VLA.

    An update takes place when ``groups`` groups are complete. Episodes of groups that are not complete yet stay for the
    next one, with the log-densities of the policy that drew them.

    :param policy: :class:`~rlt_sb3.ppo.policies.VLACenteredPolicy` or a subclass
    :param env: environment whose training episodes come in groups: made with the same ``group_size``
    :param learning_rate: learning rate, also as a schedule
    :param group_size: episodes from each initial state
    :param groups: complete groups per update, those without signal included
    :param n_epochs: passes over the chunks of an update
    :param batch_size: chunks per gradient step
    :param clip_range: how far the ratio of the densities may be from 1
    :param kl_coef: weight of the divergence from the starting policy
    :param max_grad_norm: limit of the gradient's norm
    :param stats_window_size: episodes over which rollout statistics are averaged
    :param tensorboard_log: folder of TensorBoard logs
    :param policy_kwargs: further arguments of the policy
    :param verbose: 0 nothing, 1 information, 2 debug
    :param seed: seed of NumPy, torch and the environment
    :param device: torch device
    :param _init_setup_model: build the networks now
    :raises ValueError: for settings out of range, or an environment with another ``group_size``
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"MultiInputPolicy": VLACenteredPolicy}
    policy: VLACenteredPolicy

    def __init__(
        self,
        policy: str | type[VLACenteredPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        group_size: int = 8,
        groups: int = 4,
        n_epochs: int = 4,
        batch_size: int = 64,
        clip_range: float = 0.2,
        kl_coef: float = 0.01,
        max_grad_norm: float = 0.5,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=1,  # of a rollout buffer that is not used
            gamma=1.0,
            gae_lambda=1.0,
            ent_coef=0.0,
            vf_coef=0.0,
            max_grad_norm=max_grad_norm,
            use_sde=False,
            sde_sample_freq=-1,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            supported_action_spaces=(spaces.Box,),
            _init_setup_model=False,
        )
        self.group_size, self.groups = group_size, groups
        self.n_epochs, self.batch_size = n_epochs, batch_size
        self.clip_range, self.kl_coef = clip_range, kl_coef
        check(vars(self))
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        if self.env is not None:
            try:
                found = self.env.get_attr("group_size")[0]
            except AttributeError:
                found = 1
            if found != self.group_size:
                raise ValueError(
                    f"group_size is {self.group_size}, but the environment plays each initial state {found} times: "
                    f"make it with group_size={self.group_size}."
                )
        super()._setup_model()
        self.collector = GroupCollector(self.n_envs, self.group_size)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps or self._last_obs is None:  # else the episodes go on where the last call left them
            self.end_trajectories()
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)

    def end_trajectories(self) -> None:
        """Give up the groups that are not complete, because the environments are about to be reset from outside."""
        self.collector.restart()

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """
        Play until enough groups are complete.

        A rollout that does not come to its end gives up the running groups: the next :meth:`learn` resets the
        environments.

        :param env: environment
        :param callback: called at each step
        :param rollout_buffer: not used
        :param n_rollout_steps: not used
        :return: False if the callback wants training to stop
        """
        whole = False
        try:
            whole = self._play(env, callback)
        finally:
            if not whole:  # the last step was played, but its observation is not known here
                self._last_obs = None
        return whole

    def _play(self, env: VecEnv, callback: BaseCallback) -> bool:
        self.policy.set_training_mode(False)
        callback.on_rollout_start()
        assert isinstance(self.action_space, spaces.Box)
        while len(self.collector.complete) < self.groups:
            assert isinstance(self._last_obs, dict)
            with th.no_grad():
                tensors, _ = self.policy.obs_to_tensor(self._last_obs)
                drawn, _, log_probs = self.policy(tensors)
            actions = drawn.cpu().numpy()
            played = np.clip(actions, self.action_space.low, self.action_space.high)
            new_obs, rewards, dones, infos = env.step(played)
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            self._update_info_buffer(infos, dones)
            outcomes = outcomes_of(infos, played, rewards)
            self.collector.step(self._last_obs, actions, log_probs.cpu().numpy(), outcomes, dones, infos)
            self._last_obs, self._last_episode_starts = new_obs, dones  # type: ignore[assignment]
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def train(self) -> None:
        """Update the policy with the complete groups."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        groups = self.collector.take()
        judged = [group_advantages([episode.reward for episode in group]) for group in groups]
        self.logger.record("rollout/groups_with_signal", float(np.mean([found is not None for found in judged])))
        rows = [
            (episode, float(advantage))
            for group, found in zip(groups, judged, strict=True)
            if found is not None
            for episode, advantage in zip(group, found, strict=True)
        ]
        losses: list[list[float]] = []
        for obs, (actions, old_log_prob, advantages) in self._batches(rows):
            _, log_prob, _ = self.policy.evaluate_actions(obs, actions)
            policy_loss = clipped_loss(log_prob, old_log_prob, advantages, self.clip_range)
            divergence = k3(log_prob, self.policy.start_log_prob(obs, actions))
            loss = policy_loss + self.kl_coef * divergence
            self.policy.optimizer.zero_grad()
            loss.backward()
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            with th.no_grad():
                clipped = ((log_prob - old_log_prob).exp() - 1.0).abs() > self.clip_range
                old = k3(old_log_prob, log_prob)  # Stable-Baselines3's approx_kl
            numbers = (policy_loss, divergence, clipped.float().mean(), old, loss)
            losses.append([float(number.item()) for number in numbers])
            self._n_updates += 1
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/std", th.exp(self.policy.log_std).mean().item())
        names = ("policy_gradient_loss", "kl_to_start", "clip_fraction", "approx_kl", "loss")
        for name, value in zip(names, np.mean(losses, axis=0) if losses else (), strict=False):
            self.logger.record(f"train/{name}", value)

    def _batches(self, episodes: list[tuple[GroupEpisode, float]]) -> Iterator[tuple[TensorDict, list[th.Tensor]]]:
        """Yield observations, and flat chunks, log-densities and advantages; ``n_epochs`` times all rows."""
        if not episodes:
            return
        seen = [obs for episode, _ in episodes for obs in episode.observations]
        obs = {key: np.stack([one[key] for one in seen]) for key in seen[0]}
        actions = np.stack([action.ravel() for episode, _ in episodes for action in episode.actions])
        log_probs = np.concatenate([episode.log_probs for episode, _ in episodes])
        advantages = np.concatenate([np.full(len(episode.log_probs), value) for episode, value in episodes])
        numbers = (actions, log_probs, advantages)
        arrays = [th.as_tensor(array, dtype=th.float32, device=self.device) for array in numbers]
        tensors = {key: th.as_tensor(value, device=self.device) for key, value in obs.items()}
        for _ in range(self.n_epochs):
            order = np.random.permutation(len(seen))
            for start in range(0, len(order), self.batch_size):
                chosen = th.as_tensor(order[start : start + self.batch_size], device=self.device)
                yield {key: value[chosen] for key, value in tensors.items()}, [array[chosen] for array in arrays]

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "collector"]

    def learn(
        self: SelfGRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "GRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfGRPO:
        """Collect at least ``total_timesteps`` chunks and learn from them, see Stable-Baselines3."""
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)


def check(settings: dict[str, Any]) -> None:
    """
    Check settings of GRPO.

    :param settings: some of its keyword arguments, other entries are ignored
    :raises ValueError: names the setting, what is allowed and what was given
    """
    lowest: dict[str, float] = {"group_size": 2, "groups": 1, "n_epochs": 1, "batch_size": 1, "kl_coef": 0.0}
    for name, low in lowest.items():
        if name in settings and not settings[name] >= low:
            raise ValueError(f"{name} must be >= {low}, got {settings[name]!r}.")
    if not 0.0 < settings.get("clip_range", 0.2) < 1.0:
        raise ValueError(f"clip_range must be in (0, 1), got {settings['clip_range']!r}.")
    if not settings.get("max_grad_norm", 0.5) > 0.0:
        raise ValueError(f"max_grad_norm must be > 0, got {settings['max_grad_norm']!r}.")
    rate = settings.get("learning_rate", 0.0)
    if min(FloatSchedule(rate)(remaining) for remaining in (1.0, 0.5, 0.0)) < 0.0:
        raise ValueError(f"learning_rate must be >= 0, got {rate!r}.")
