"""SAC on corrections of the VLA's chunk, after a warm-up on the frozen VLA's own rollouts."""

from typing import Any, ClassVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from rlt_sb3.common.chunk_off_policy import ChunkOffPolicyAlgorithm
from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.common.schedules import lowest_value
from rlt_sb3.residual_sac.policies import ResidualSACPolicy
from rlt_sb3.rlt.settings import check_spaces


class ResidualSAC(ChunkOffPolicyAlgorithm, SAC):
    """
    Soft actor-critic on bounded corrections of the VLA's chunk, in the manner of PLD's first stage (probe, then learn).

    The frozen VLA plays ``learning_starts`` chunks. Then the critics alone learn from them
    (``critic_warmup_updates``), and from there on the actor as well. The updates are Stable-Baselines3's own; rows,
    discounts per control step and updates per row are those of :class:`~rlt_sb3.rlt.rlt.RLT`. Unlike PLD there is no
    calibrated critic loss, and the rows of the warm-up are not sampled apart.

    :param policy: :class:`~rlt_sb3.residual_sac.policies.ResidualSACPolicy` or a subclass
    :param env: environment whose action is a chunk
    :param learning_rate: learning rate of actor, critics and entropy coefficient, also as a schedule
    :param buffer_size: slots of the replay buffer
    :param learning_starts: chunks of the warm-up, which the VLA plays
    :param batch_size: rows per update
    :param tau: weight of the critics in each update of their targets
    :param gamma: discount per control step
    :param utd: updates per stored row
    :param n_steps: chunks per return
    :param critic_warmup_updates: updates of the critics alone, done at once after the warm-up
    :param ent_coef: entropy coefficient; "auto" learns it, "auto_0.005" from this value on
    :param target_entropy: of the corrections, with a learned coefficient; "auto": minus one for each of their numbers
    :param replay_buffer_class: a subclass of ``ChunkReplayBuffer``
    :param replay_buffer_kwargs: further arguments of it
    :param stats_window_size: episodes over which rollout statistics are averaged
    :param tensorboard_log: folder of TensorBoard logs
    :param policy_kwargs: further arguments of the policy
    :param verbose: 0 nothing, 1 information, 2 debug
    :param seed: seed of NumPy, torch and the environment
    :param device: torch device
    :param _init_setup_model: build the networks now
    :raises ValueError: for spaces or settings that do not fit
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"MultiInputPolicy": ResidualSACPolicy}
    policy: ResidualSACPolicy
    q_bounds = None  # the critics' values have the entropy in them

    def __init__(
        self,
        policy: str | type[ResidualSACPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        buffer_size: int = 50_000,
        learning_starts: int = 500,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        utd: float = 2.0,
        n_steps: int = 3,
        critic_warmup_updates: int = 500,
        ent_coef: str | float = "auto_0.005",
        target_entropy: str | float = "auto",
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
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
            buffer_size=buffer_size,
            learning_starts=learning_starts,
            batch_size=batch_size,
            tau=tau,
            gamma=gamma,
            gradient_steps=-1,  # the number of updates that collect_rollouts returns
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=replay_buffer_kwargs,
            ent_coef=ent_coef,
            target_entropy=target_entropy,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=dict(policy_kwargs or {}),
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )
        self.utd, self.n_steps, self.critic_warmup_updates = utd, n_steps, critic_warmup_updates
        self._begin_counting(False)
        del self.policy_kwargs["gated"]
        check(vars(self))
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        check_spaces(self.observation_space, self.action_space)
        if self.replay_buffer_class is None:
            self.replay_buffer_class = ChunkReplayBuffer
        if self.replay_buffer is None:
            self.replay_buffer = self.replay_buffer_class(  # type: ignore[assignment]
                self.buffer_size,
                self.observation_space,
                self.action_space,
                device=self.device,
                n_envs=self.n_envs,
                **(self._buffer_settings() | self.replay_buffer_kwargs),
            )
        if self.target_entropy == "auto":
            assert isinstance(self.action_space, spaces.Box)
            self.target_entropy = -float(self.policy_kwargs.get("parts", 1) * self.action_space.shape[-1])
        # the buffer already has n_steps; Stable-Baselines3 would warn that it ignores the argument
        n_steps, self.n_steps = self.n_steps, 1
        super()._setup_model()
        self.n_steps = n_steps

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Choose the chunks to execute: the VLA's own ones during warm-up, else drawn ones.

        :param learning_starts: length of the warm-up in chunks
        :param action_noise: not used
        :param n_envs: number of environments
        :return: chunks (n_envs, C, d), and the same for the buffer
        """
        if self.num_timesteps >= learning_starts:
            return super()._sample_action(learning_starts, action_noise, n_envs)
        assert isinstance(self._last_obs, dict)
        reference = np.clip(np.asarray(self._last_obs["vla_ref"], dtype=np.float32), -1.0, 1.0)
        return reference, reference.copy()

    def train(self, gradient_steps: int, batch_size: int = 256) -> None:
        """
        Update critics, actor and entropy coefficient as SAC does; at first the critics alone.

        :param gradient_steps: number of updates
        :param batch_size: rows per update
        """
        assert self.replay_buffer is not None
        if self.replay_buffer.size() == 0:  # every chunk so far was broken
            return
        alone = min(gradient_steps, max(self.critic_warmup_updates - self._n_updates, 0))
        if alone:
            coefficient = None if self.log_ent_coef is None else self.log_ent_coef.detach().clone()
            try:
                self.actor.requires_grad_(False)
                super().train(alone, batch_size)
            finally:  # also after Ctrl-C: learn() can be called again
                self.actor.requires_grad_(True)
                if coefficient is not None and self.log_ent_coef is not None:
                    self.log_ent_coef.data.copy_(coefficient)
        if gradient_steps > alone:
            super().train(gradient_steps - alone, batch_size)


def check(settings: dict[str, Any]) -> None:
    """
    Check settings of ResidualSAC.

    :param settings: some of its keyword arguments, other entries are ignored
    :raises ValueError: names the setting, what is allowed and what was given
    """
    lowest = {"buffer_size": 1, "learning_starts": 0, "batch_size": 1, "n_steps": 1, "critic_warmup_updates": 0}
    for name, low in lowest.items():
        if name in settings and not settings[name] >= low:
            raise ValueError(f"{name} must be >= {low}, got {settings[name]!r}.")
    for name in ("utd", "tau"):
        if name in settings and not settings[name] > 0.0:
            raise ValueError(f"{name} must be > 0, got {settings[name]!r}.")
    if not 0.0 <= settings.get("gamma", 0.0) <= 1.0:
        raise ValueError(f"gamma must be in [0, 1] (discount per control step), got {settings['gamma']!r}.")
    rate = settings.get("learning_rate", 0.0)
    if lowest_value(rate) < 0.0:
        raise ValueError(f"learning_rate must be >= 0, got {rate!r}.")
