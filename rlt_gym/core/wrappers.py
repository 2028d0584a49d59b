"""Wrappers of the chunked vector environments: the size of the reward, and further terms of it."""

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.core.split_step import SplitStepWrapper

GRIPPER_SIGNALS = ("fingers", "command")


class RewardScale(SplitStepWrapper):
    """
    Multiplies the reward of every control step, also in ``step_rewards`` of the infos, which chunked learners read.

    ``metadata["reward_coef"]`` says by what.

    :param env: Vector environment with ``step_rewards`` in its infos.
    :param reward_coef: The factor, above 0.
    :raises ValueError: A factor out of range.
    """

    def __init__(self, env: VectorEnv, reward_coef: float):
        self.check_arguments(reward_coef)
        super().__init__(env)
        self.reward_coef = float(reward_coef)
        self.metadata = {**env.metadata, "reward_coef": self.reward_coef}

    @staticmethod
    def check_arguments(reward_coef: float) -> None:
        """
        Check the factor before there is an environment.

        :param reward_coef: The factor.
        :raises ValueError: It is out of range.
        """
        if not isinstance(reward_coef, int | float) or not 0.0 < reward_coef < np.inf:
            raise ValueError(f"reward_coef must be a number above 0, got {reward_coef!r}")

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Wait for the end of the step and multiply the rewards.

        :return: What the environment returned, with its rewards times ``reward_coef``.
        """
        obs, rewards, terminations, truncations, infos = super().step_wait()
        infos = {**infos, "step_rewards": infos["step_rewards"] * np.float32(self.reward_coef)}
        if "final_info" in infos:
            final = infos["final_info"]
            infos["final_info"] = {**final, "step_rewards": final["step_rewards"] * np.float32(self.reward_coef)}
        return obs, rewards * self.reward_coef, terminations, truncations, infos


class GripperPenalty(SplitStepWrapper):
    """
    Subtracts a penalty from the reward each time the gripper goes from open to closed or back.

    A policy that is rewarded at success only may learn to open and close all the time. The penalty falls on the control
    step of the transition. It counts executed actions (``infos["executed_actions"]`` where someone took over).

    The infos get ``reward_terms``: ``success`` (what the environment gave) and ``gripper`` (the penalties, 0 or
    negative), float32 (num_envs, C) each, whose sum is the new ``step_rewards``. Terms of an environment that has some
    already are kept.

    RLT's ``q_bounds`` must leave room for the lowest return.

    :param env: Vector environment with chunks as actions and ``step_rewards``, ``chunk_steps`` in its infos.
    :param penalty: What each transition costs, >= 0.
    :param signal: ``"fingers"``: where the commands lead the fingers, at the speed that the robot's specification says
        (robosuite's need 8 control steps from open to closed); a command too short to move them past the threshold
        costs nothing. ``"command"``: the sign of the command itself; the first of an episode is free.
    :param threshold: The signal counts as closed above it and as open below its negative; between them the gripper
        keeps its state. In [0, 1).
    :param index: Place of the gripper in the action; ``None``: the one that ``env.metadata["robot"]`` names.
    :raises ValueError: A value out of range, an environment without chunks, or a robot without a gripper.
    """

    def __init__(
        self,
        env: VectorEnv,
        penalty: float = 0.02,
        signal: str = "fingers",
        threshold: float = 0.5,
        index: int | None = None,
    ):
        shape = env.single_action_space.shape
        if shape is None or len(shape) != 2:
            raise ValueError(f"GripperPenalty needs chunks (C, d) as actions, got the shape {shape}")
        self.check_arguments(shape[1], penalty, signal, threshold, index)
        robot: RobotSpec | None = env.metadata.get("robot")
        if robot is None and (index is None or signal == "fingers"):
            raise ValueError(
                "GripperPenalty reads env.metadata['robot'] (rlt_gym.core.robot_spec), which is missing: add it, or "
                "pass signal='command' and index"
            )
        if index is None and robot is not None:
            index = robot.gripper_index
        if index is None:
            raise ValueError(f"the robot {robot.name!r} has no gripper (gripper_index is None): pass index")  # type: ignore[union-attr]
        super().__init__(env)
        self.penalty, self.signal, self.threshold, self.index = float(penalty), signal, float(threshold), index
        #: Sign of the command that closes, speed of the fingers, and where they are when an episode begins: -1 is open.
        self._closes, self._speed, self._start = 1.0, 2.0, -1.0
        if robot is not None:
            self._closes, self._speed = -robot.gripper_opens, robot.gripper_speed
            self._start = -1.0 if robot.gripper_starts_open else 1.0
        self._state = np.zeros(self.num_envs, dtype=np.int64)  # -1 open, 1 closed, 0 unknown
        # Followed, not measured: fingers that hold something stop in between, and are closed all the same.
        self._fingers = np.full(self.num_envs, self._start)
        self._forget(np.ones(self.num_envs, dtype=bool))

    @staticmethod
    def check_arguments(
        action_size: int,
        penalty: float = 0.02,
        signal: str = "fingers",
        threshold: float = 0.5,
        index: int | None = None,
    ) -> None:
        """
        Check the arguments before there is an environment.

        :param action_size: Numbers in the action of a control step; for the others see the class.
        :param penalty: See the class.
        :param signal: See the class.
        :param threshold: See the class.
        :param index: See the class.
        :raises ValueError: A value out of range.
        """
        if not 0.0 <= penalty < np.inf:
            raise ValueError(f"penalty must be >= 0 (it is taken off the reward), got {penalty!r}")
        if signal not in GRIPPER_SIGNALS:
            raise ValueError(f"signal must be one of {GRIPPER_SIGNALS}, got {signal!r}")
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"threshold must be in [0, 1), got {threshold!r}")
        if index is not None and index not in range(-action_size, action_size):
            raise ValueError(f"index must be the place of the gripper among {action_size} numbers, got {index!r}")

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """
        Reset the environment and forget the last gripper commands of the episodes that end.

        :param seed: As the environment takes it.
        :param options: As the environment takes them.
        :return: Its observations and infos.
        """
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        mask = (options or {}).get("reset_mask")
        self._forget(np.ones(self.num_envs, dtype=bool) if mask is None else mask)
        self._list_terms(infos, np.zeros_like(infos["step_rewards"]))
        return obs, infos

    def step_async(self, actions: np.ndarray) -> None:
        """
        Begin a step.

        :param actions: (num_envs, C, d).
        """
        super().step_async(actions)
        self._chunks = np.asarray(actions)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Wait for the end of the step and subtract the penalty from the rewards.

        :return: What the environment returned, with the penalty in rewards and infos.
        """
        obs, rewards, terminations, truncations, infos = super().step_wait()
        done = np.logical_or(terminations, truncations)
        # where an episode ended and the next one has begun, the chunk is described by final_info
        final = infos.get("_final_info", np.zeros(self.num_envs, dtype=bool))
        penalties = np.zeros(self._chunks.shape[:2], dtype=np.float32)
        for env in range(self.num_envs):
            info = infos["final_info"] if final[env] else infos
            chunk = info["executed_actions"][env] if "executed_actions" in info else self._chunks[env]
            for step in range(int(info["chunk_steps"][env])):
                if self._switches(env, float(np.clip(chunk[step, self.index], -1.0, 1.0))):
                    penalties[env, step] = -self.penalty
        infos = {**infos}
        if final.any():
            infos["final_info"] = {**infos["final_info"]}
            self._list_terms(infos["final_info"], np.where(final[:, None], penalties, 0))
        self._list_terms(infos, np.where(final[:, None], 0, penalties))
        self._forget(done)
        return obs, rewards + penalties.sum(1), terminations, truncations, infos

    def _switches(self, env: int, command: float) -> bool:
        """Whether the gripper of an env changes its state in a control step with this command."""
        level = command = self._closes * command
        if self.signal == "fingers":
            level = float(np.clip(self._fingers[env] + self._speed * np.sign(command), -1.0, 1.0))
            self._fingers[env] = level
        if abs(level) <= self.threshold:
            return False
        before, self._state[env] = self._state[env], int(np.sign(level))
        return before != 0 and before != self._state[env]

    def _forget(self, envs: np.ndarray) -> None:
        """Where the fingers are when an episode begins is known; which command holds them there is not."""
        self._state[envs] = int(self._start) if self.signal == "fingers" else 0
        self._fingers[envs] = self._start

    def _list_terms(self, infos: dict[str, Any], penalties: np.ndarray) -> None:
        present = infos.get("_step_rewards", np.ones(self.num_envs, dtype=bool))
        given = infos["step_rewards"]
        terms = {key: value for key, value in infos.get("reward_terms", {"success": given}).items()}
        terms["gripper"] = np.asarray(penalties, dtype=np.float32)
        for key in list(terms):
            if not key.startswith("_"):
                terms["_" + key] = present.copy()
        infos["reward_terms"], infos["_reward_terms"] = terms, present.copy()
        infos["step_rewards"] = (given + penalties).astype(np.float32)
