"""A simulator, a frozen VLA and an RL token become one environment: what every ``RLToken-...`` id has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gymnasium.vector import VectorEnv

from rlt_gym.core.flat import FlatVectorEnv
from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.core.wrappers import GripperPenalty, RewardScale
from rlt_gym.rl_token.env import RLTokenVectorEnv, check_chunk_length
from rlt_gym.rl_token.shown import tokens_shape

if TYPE_CHECKING:
    import os

    from rlt_gym.reward.model import RewardModel
    from rlt_gym.rl_token.base import Encoder
    from rlt_gym.vla.base import FrozenVLA


def make_rl_token_vec(
    raw_env: Callable[..., VectorEnv],
    robot: RobotSpec,
    chunk_length: int = 8,
    vla: str | os.PathLike[str] | FrozenVLA = "mini",
    vla_kwargs: Mapping[str, Any] | None = None,
    rl_token: str | os.PathLike[str] | Encoder = "auto",
    device: str = "cpu",
    image_size: int | None = None,
    reward_coef: float = 1.0,
    gripper_penalty: float | Mapping[str, Any] | None = None,
    show_tokens: bool = False,
    show_pictures: bool = False,
    show_task: bool = False,
    reward_model: str | os.PathLike[str] | RewardModel | None = None,
    needs_noise: bool = False,
    flat: bool = False,
    **raw_env_kwargs: Any,
) -> RLTokenVectorEnv | FlatVectorEnv:
    """
    Load VLA and RL token, then start simulators and join them.

    :param raw_env: Makes the environment with pictures: from the loaded VLA, and by keyword from ``chunk_length``,
        ``image_size`` and the arguments that are not named here.
    :param robot: Its robot.
    :param chunk_length: Control steps per action, at most the VLA's horizon.
    :param vla: A name of ``rlt list``, the path of a file that ``rlt train-vla`` wrote (or of another registered
        format), ``"package.module:Class"`` of an allowed package, or an object that obeys
        :class:`~rlt_gym.vla.base.FrozenVLA`; see :func:`~rlt_gym.vla.registry.load_vla`.
    :param vla_kwargs: Further arguments of whoever makes a VLA that is named.
    :param rl_token: ``"auto"``, ``"mean"`` (no RL token, but the mean of the VLA's picture tokens), ``"none"`` (a
        single zero, for a VLA that gives no tokens), another name of ``rlt list``, a ``.safetensors`` path, or an
        encoder.
    :param device: Where VLA and encoder run.
    :param image_size: Edge of the pictures in pixels; ``None`` = what the VLA's specification says, 128 if it says
        nothing. Another size than the VLA needs is refused.
    :param reward_coef: What a success pays (:class:`~rlt_gym.core.wrappers.RewardScale`); the gripper's penalty comes
        on top, as it is given.
    :param gripper_penalty: Cost of each opening or closing of the gripper, or a dict of all arguments of
        :class:`~rlt_gym.core.wrappers.GripperPenalty`; ``None`` for none.
    :param show_tokens: Whether observations also have ``vla_tokens``, the tokens that the encoder reads, for a policy
        that trains the encoder further.
    :param show_pictures: Whether observations also have what the VLA reads, for a policy that trains a copy of it.
    :param show_task: Whether observations also have ``task`` (T,), which of the suite's T tasks is played: for a policy
        that plays several tasks.
    :param reward_model: Decides about success in training episodes instead of the simulator: a file of ``rlt
        train-reward``, or a model; ``None`` = the simulator decides.
    :param needs_noise: Refuse a VLA that takes no noise from outside, see
        :class:`~rlt_gym.rl_token.noise.NoiseAction`.
    :param flat: Observation and action are vectors, see :class:`~rlt_gym.core.flat.FlatVectorEnv`.
    :param raw_env_kwargs: Further arguments of ``raw_env``.
    :return: The environment.
    :raises ValueError: If an argument is wrong; ``raw_env`` has not been called then.
    """
    from rlt_gym.reward.model import load_reward_model
    from rlt_gym.rl_token.io import load_rl_token
    from rlt_gym.rl_token.trainable import TrainableToken
    from rlt_gym.rl_token.trainable_vla import gradients_of
    from rlt_gym.vla.batches import run_vla
    from rlt_gym.vla.probing import example_observations
    from rlt_gym.vla.registry import load_vla

    RewardScale.check_arguments(reward_coef)
    penalty = None if gripper_penalty is None else _penalty_arguments(gripper_penalty, robot)
    loaded = load_vla(vla, device, vla_kwargs)
    loaded.spec.check_robot(robot)
    if needs_noise:
        loaded.spec.check_noise()
    check_chunk_length(chunk_length, loaded)
    frame_size = loaded.spec.check_frame_size(image_size)
    encoder = load_rl_token(rl_token, loaded, device)
    if show_tokens:
        if flat:
            raise ValueError("show_tokens=True and flat=True: the tokens are float16, the vector is float32; drop one.")
        tokens_shape(loaded)
        TrainableToken.of(encoder)
    if show_pictures:
        if flat:
            raise ValueError("show_pictures=True and flat=True: pictures are uint8, the vector is float32; drop one.")
        gradients_of(loaded)
    judge = None if reward_model is None else load_reward_model(reward_model, loaded, device)
    # one made-up observation: what breaks the contract or does not fit into memory does so before simulators start
    example = example_observations(replace(loaded.spec, frame_size=frame_size, state_dim=robot.proprio_size), 1)
    encoder(run_vla(loaded, example, ["do nothing"], [0]))
    env = raw_env(loaded, chunk_length=chunk_length, image_size=frame_size, **raw_env_kwargs)
    try:
        scaled = env if reward_coef == 1.0 else RewardScale(env, reward_coef)
        raw = scaled if penalty is None else GripperPenalty(scaled, **penalty)
        tokens = RLTokenVectorEnv(raw, loaded, encoder, device, show_tokens, show_pictures, show_task, judge)
        return FlatVectorEnv(tokens) if flat else tokens
    except BaseException:
        env.close()
        raise


def _penalty_arguments(gripper_penalty: float | Mapping[str, Any], robot: RobotSpec) -> dict[str, Any]:
    """
    Turn the argument ``gripper_penalty`` into arguments of the wrapper.

    :param gripper_penalty: The cost, or keyword arguments of :class:`~rlt_gym.core.wrappers.GripperPenalty`.
    :param robot: The robot.
    :return: The keyword arguments.
    :raises ValueError: An unknown argument, or a value out of range.
    """
    arguments = dict(gripper_penalty) if isinstance(gripper_penalty, Mapping) else {"penalty": gripper_penalty}
    try:
        GripperPenalty.check_arguments(robot.action_size, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"gripper_penalty must be a number or a dict for GripperPenalty, got {gripper_penalty!r}: {error}"
        ) from error
    return arguments
