"""Entry points of ``gymnasium.make`` for LIBERO's ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode

from rlt_gym.core.flat import FlatVectorEnv
from rlt_gym.core.single_env import SingleEnv, arguments_of_one
from rlt_gym.core.wrappers import GripperPenalty
from rlt_gym.libero.robot import PANDA
from rlt_gym.rl_token.env import RLTokenVectorEnv, check_chunk_length, tokens_shape

if TYPE_CHECKING:
    import os

    from rlt_gym.rl_token.base import Encoder
    from rlt_gym.vla.base import FrozenVLA


def make_libero(**kwargs: Any) -> SingleEnv:
    """
    Entry point of ``gymnasium.make("LIBERO-v0")``.

    :param kwargs: Arguments of :class:`~rlt_gym.libero.vector_env.LiberoVectorEnv` without ``num_envs``.
    :return: One environment; it is reset by its user.
    :raises ValueError: A bad argument, or one that only vector environments have.
    """
    from rlt_gym.libero.vector_env import LiberoVectorEnv

    kwargs = arguments_of_one(kwargs)
    vector_env = LiberoVectorEnv(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
    return SingleEnv(vector_env).made_by(make_libero, **kwargs)


def _penalty_arguments(gripper_penalty: float | Mapping[str, Any]) -> dict[str, Any]:
    """
    Turn the argument ``gripper_penalty`` into arguments of the wrapper.

    :param gripper_penalty: The cost, or keyword arguments of :class:`~rlt_gym.core.wrappers.GripperPenalty`.
    :return: The keyword arguments.
    :raises ValueError: An unknown argument, or a value out of range.
    """
    arguments = dict(gripper_penalty) if isinstance(gripper_penalty, Mapping) else {"penalty": gripper_penalty}
    try:
        GripperPenalty.check_arguments(PANDA.action_size, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"gripper_penalty must be a number or a dict for GripperPenalty, got {gripper_penalty!r}: {error}"
        ) from error
    return arguments


def make_rl_token_libero_vec(
    num_envs: int = 1,
    suite: str = "libero_goal",
    task_ids: Sequence[int] | None = None,
    chunk_length: int = 8,
    vla: str | os.PathLike[str] | FrozenVLA = "mini",
    vla_kwargs: Mapping[str, Any] | None = None,
    rl_token: str | os.PathLike[str] | Encoder = "auto",
    device: str = "cpu",
    image_size: int | None = None,
    render: str | None = None,
    gripper_penalty: float | Mapping[str, Any] | None = None,
    show_tokens: bool = False,
    show_pictures: bool = False,
    show_task: bool = False,
    flat: bool = False,
    **raw_env_kwargs: Any,
) -> RLTokenVectorEnv | FlatVectorEnv:
    """
    Entry point of ``gymnasium.make_vec("RLToken-LIBERO-v0", ...)``.

    :param num_envs: Number of simulators.
    :param suite: LIBERO suite.
    :param task_ids: Tasks of the suite, ``None`` = all.
    :param chunk_length: Control steps per action, at most the VLA's horizon.
    :param vla: A registered name or scheme (``rlt list``), the path of a file that ``rlt train-vla`` wrote (or of
        another registered format), ``"package.module:Class"`` of an allowed package, or an object that obeys
        :class:`~rlt_gym.vla.base.FrozenVLA`; see :func:`~rlt_gym.vla.registry.load_vla`.
    :param vla_kwargs: Further arguments of whoever makes a VLA that is named.
    :param rl_token: ``"auto"``, ``"mean"`` (no RL token, but the mean of the VLA's picture tokens), ``"none"`` (a
        single zero, for a VLA that gives no tokens), another name of ``rlt list``, a ``.safetensors`` path, or an
        encoder.
    :param device: Where VLA and encoder run.
    :param image_size: Edge of the pictures in pixels; ``None`` = what the VLA's specification says, 128 if it says
        nothing. Another size than the VLA needs is refused.
    :param render: ``"exact"``, LIBERO's own pictures, ``"stock"``, the same without any shortcut, or ``"fast"``, cheap
        ones; ``None`` = those that the VLA was trained on, if its specification says it (MiniVLA: ``"fast"``), else
        ``"exact"``. Others than it was trained on are refused.
    :param gripper_penalty: Cost of each opening or closing of the gripper, or a dict of all arguments of
        :class:`~rlt_gym.core.wrappers.GripperPenalty`; ``None`` for none.
    :param show_tokens: Whether observations also have ``vla_tokens``, the tokens that the encoder reads, for a policy
        that trains the encoder further.
    :param show_pictures: Whether observations also have what the VLA reads, for a policy that trains a copy of it.
    :param show_task: Whether observations also have ``task`` (T,), which of the suite's T tasks is played: for a policy
        that plays several tasks.
    :param flat: Observation and action are vectors, see :class:`~rlt_gym.core.flat.FlatVectorEnv`.
    :param raw_env_kwargs: Further arguments of :class:`~rlt_gym.libero.vector_env.LiberoVectorEnv`.
    :return: The environment.
    :raises ValueError: If an argument is wrong; no process has been started then.
    """
    from rlt_gym.libero.vector_env import LiberoVectorEnv
    from rlt_gym.rl_token.io import load_rl_token
    from rlt_gym.rl_token.trainable import TrainableToken
    from rlt_gym.rl_token.trainable_vla import gradients_of
    from rlt_gym.vla.batches import run_vla
    from rlt_gym.vla.probing import example_observations
    from rlt_gym.vla.registry import load_vla

    penalty = None if gripper_penalty is None else _penalty_arguments(gripper_penalty)
    loaded = load_vla(vla, device, vla_kwargs)
    loaded.spec.check_robot(PANDA)
    check_chunk_length(chunk_length, loaded)
    quality = loaded.spec.check_render(render)
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
    # one made-up observation: what breaks the contract or does not fit into memory does so before simulators start
    encoder(run_vla(loaded, example_observations(replace(loaded.spec, frame_size=frame_size), 1), ["do nothing"], [0]))
    env = LiberoVectorEnv(
        num_envs=num_envs,
        suite=suite,
        task_ids=task_ids,
        chunk_length=chunk_length,
        image_size=frame_size,
        render=quality,
        **raw_env_kwargs,
    )
    trained_on = loaded.spec.assets
    if trained_on is not None and env.assets.kind != trained_on:
        warnings.warn(
            f"The VLA {loaded.spec.name!r} was trained on {trained_on} assets and plays on {env.assets.kind} ones here "
            f"({env.assets.path}): expect few successes. Pass assets={trained_on!r}.",
            stacklevel=2,
        )
    try:
        raw = env if penalty is None else GripperPenalty(env, **penalty)
        tokens = RLTokenVectorEnv(raw, loaded, encoder, device, show_tokens, show_pictures, show_task)
        # Copies load VLA and encoder again, from these arguments: by name if a name was given.
        return (FlatVectorEnv(tokens) if flat else tokens).made_by(
            make_rl_token_libero_vec,
            num_envs=num_envs,
            suite=suite,
            task_ids=task_ids,
            chunk_length=chunk_length,
            vla=vla,
            vla_kwargs=vla_kwargs,
            rl_token=rl_token,
            device=device,
            image_size=image_size,
            render=render,
            gripper_penalty=gripper_penalty,
            show_tokens=show_tokens,
            show_pictures=show_pictures,
            show_task=show_task,
            flat=flat,
            **raw_env_kwargs,
        )
    except BaseException:
        env.close()
        raise


def make_rl_token_libero(**kwargs: Any) -> SingleEnv:
    """
    Entry point of ``gymnasium.make("RLToken-LIBERO-v0")``.

    :param kwargs: Arguments of :func:`make_rl_token_libero_vec` without ``num_envs``.
    :return: One environment; it is reset by its user.
    :raises ValueError: A bad argument, or one that only vector environments have.
    """
    kwargs = arguments_of_one(kwargs)
    vector_env = make_rl_token_libero_vec(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
    return SingleEnv(vector_env).made_by(make_rl_token_libero, **kwargs)


# gymnasium.make reads the modes of its entry point: with them it adds HumanRendering and RenderCollection by itself.
make_libero.metadata = make_rl_token_libero.metadata = SingleEnv.metadata  # type: ignore[attr-defined]
make_rl_token_libero_vec.metadata = RLTokenVectorEnv.metadata  # type: ignore[attr-defined]
