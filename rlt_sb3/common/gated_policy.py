"""The policies that a deployment gate controls, and who of their players plays in which environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch as th
from torch import nn

from rlt_sb3.common.contenders import copied

#: Key of the observation that says which task is played, (T,): 1 at its place, else 0.
TASK = "task"
Result = TypeVar("Result")


class GatedPolicy(Protocol):
    """A policy that a gate can control: it has the actor that learns, a copy on trial and a deployed copy."""

    @property
    def actor_on_trial(self) -> nn.Module:
        """The copy on trial."""

    @property
    def actor_deployed(self) -> nn.Module:
        """The copy that is deployed."""

    @property
    def training_actor(self) -> nn.Module:
        """The practicing actor, which learns and plays the other training episodes."""

    @property
    def starts_at_vla(self) -> bool:
        """Whether the untrained actor plays the VLA's chunks."""

    def start_trial(self) -> None:
        """Copy the training actor to ``actor_on_trial``."""

    def deploy(self, parameters: Mapping[str, Any]) -> None:
        """
        Give ``actor_deployed``, which ``predict`` plays, these parameters.

        :param parameters: an actor's state dict
        """


def play_seats(
    policy: GatedPolicy, player: np.ndarray, observation: Any, chunks: np.ndarray, reference: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """
    Let the VLA and the actor on trial play where it is their turn.

    :param policy: the policy
    :param player: whose episode each environment plays: "vla", "actor", or "" for practice
    :param observation: as its actors take it, of all environments
    :param chunks: of the training actor (n_envs, ...)
    :param reference: the VLA's own chunks, like ``chunks``
    :return: in which environments no noise may be added (n_envs,), and chunks to play
    """
    by_vla, by_actor = player == "vla", player == "actor"
    chunks = chunks.copy()
    chunks[by_vla] = reference[by_vla]
    if by_actor.any():
        with th.no_grad():
            tried = policy.actor_on_trial(observation).cpu().numpy().reshape(chunks.shape)
        chunks[by_actor] = tried[by_actor]
    return by_vla | by_actor, chunks


class TaskActors(nn.Module):
    """
    A copy of an actor for each task; each row of an observation is played by its task's copy.

    :param actors: one per task
    """

    def __init__(self, actors: Iterable[nn.Module]):
        super().__init__()
        self.actors = nn.ModuleList(actors)

    def forward(self, observation: Mapping[str, th.Tensor]) -> th.Tensor:
        """
        Choose chunks.

        :param observation: with ``task`` (B, T)
        :return: chunks, flat, (B, C*d)
        """
        tasks = task_rows(observation)
        chunks = None
        for task in tasks.unique().tolist():
            rows = tasks == task
            chosen = self.actors[task]({name: value[rows] for name, value in observation.items()})
            chunks = chosen.new_zeros(len(tasks), chosen.shape[1]) if chunks is None else chunks
            chunks[rows] = chosen
        assert chunks is not None
        return chunks

    def all_as(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """
        Make the parameters with which all copies are one actor.

        :param parameters: of the actor
        :return: of this module
        """
        return {
            f"actors.{task}.{name}": value for task in range(len(self.actors)) for name, value in parameters.items()
        }


class ActorOfTask:
    """
    One task's part of a policy whose copies are :class:`TaskActors`, for the gate of this task.

    :param policy: the policy
    :param task: the task
    """

    def __init__(self, policy: GatedPolicy, task: int):
        self.policy, self.task = policy, task

    @property
    def actor_on_trial(self) -> nn.Module:
        """The task's copy on trial."""
        return self.policy.actor_on_trial.actors[self.task]  # type: ignore[index,return-value]

    @property
    def actor_deployed(self) -> nn.Module:
        """The copy that is deployed for the task."""
        return self.policy.actor_deployed.actors[self.task]  # type: ignore[index,return-value]

    @property
    def training_actor(self) -> nn.Module:
        """The practicing actor, one for all tasks."""
        return self.policy.training_actor

    @property
    def starts_at_vla(self) -> bool:
        """Whether the untrained actor plays the VLA's chunks."""
        return self.policy.starts_at_vla

    def start_trial(self) -> None:
        """Copy the training actor to the task's ``actor_on_trial``."""
        self.actor_on_trial.load_state_dict(self.training_actor.state_dict())

    def deploy(self, parameters: Mapping[str, Any]) -> None:
        """
        Deploy an actor for the task.

        :param parameters: an actor's state dict
        """
        self.actor_deployed.load_state_dict(parameters)


def tasks_of(observation: Mapping[str, Any]) -> np.ndarray:
    """
    Tell which tasks are played.

    :param observation: its ``task`` (B, T) is an array or a tensor
    :return: their numbers (B,); 0 where observations do not say which task is played
    """
    if TASK not in observation:
        return np.zeros(len(next(iter(observation.values()))), dtype=int)
    told = observation[TASK]
    return told.argmax(1).cpu().numpy() if th.is_tensor(told) else np.asarray(told).argmax(1)


def task_rows(observation: Mapping[str, th.Tensor]) -> th.Tensor:
    """
    Tell which tasks are played, on the device of the observation.

    :param observation: tensors, with ``task`` (B, T) if there are several tasks
    :return: their numbers (B,); 0 where observations do not say which task is played
    """
    if TASK in observation:
        return observation[TASK].argmax(1)
    some = next(iter(observation.values()))
    return th.zeros(len(some), dtype=th.long, device=some.device)


def n_tasks_of(observation_space: Any) -> int | None:
    """
    Tell how many tasks an observation tells apart.

    :param observation_space: a space
    :return: their number; None if observations do not say which task is played
    """
    task = getattr(observation_space, "spaces", {}).get(TASK)
    return None if task is None else int(task.shape[0])


def practicing_everywhere(policy: GatedPolicy) -> dict[str, Any]:
    """
    Make the parameters with which the practicing actor is deployed, in all tasks.

    :param policy: the policy
    :return: of ``actor_deployed``
    """
    parameters, deployed = policy.training_actor.state_dict(), policy.actor_deployed
    return deployed.all_as(parameters) if isinstance(deployed, TaskActors) else parameters


def same_actors(policy: GatedPolicy) -> bool:
    """
    Compare the practicing actor with the deployed one.

    :param policy: the policy
    :return: whether the practicing actor is the deployed one, in all tasks
    """
    deployed = policy.actor_deployed.state_dict()
    return all(value.equal(deployed[name]) for name, value in practicing_everywhere(policy).items())


def play_practicing(policy: GatedPolicy, evaluate: Callable[[], Result]) -> Result:
    """
    Evaluate the practicing actor in the place of the deployed one, which comes back afterwards.

    :param policy: the policy
    :param evaluate: plays what is deployed
    :return: its result
    """
    before = copied(policy.actor_deployed.state_dict())
    policy.deploy(practicing_everywhere(policy))
    try:
        return evaluate()
    finally:
        policy.deploy(before)
