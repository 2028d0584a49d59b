"""What Gymnasium's ``SyncVectorEnv`` offers about its members, for vector environments whose members are no objects."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Spaces of a member, by the name they have there.
_SPACES = {"observation_space": "single_observation_space", "action_space": "single_action_space"}

#: Methods of the vector environment that act on all members at once.
_OF_THE_VECTOR = ("reset", "step", "step_async", "step_wait", "close")


class MemberAccess:
    """
    Adds ``call``, ``get_attr`` and ``set_attr`` to a ``gymnasium.vector.VectorEnv``.

    The members share the attributes of the vector environment, and so most values: what differs from member to member
    is the frame (``"render"``) and what :attr:`per_member` names. The spaces are those of a member. A wrapper asks the
    environment below for what it does not have itself.
    """

    #: Methods that take the index of a member and say something about it.
    per_member: tuple[str, ...] = ()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """
        Ask every member for an attribute, or for the result of a method.

        :param name: Its name. A method that all members share is called once.
        :param args: Of the method.
        :param kwargs: Of the method.
        :return: One value for each member.
        :raises AttributeError: There is none of that name.
        :raises ValueError: ``reset``, ``step`` and ``close``, which act on all members at once.
        """
        env: Any = self
        number = env.num_envs
        if name in _OF_THE_VECTOR:
            raise ValueError(f"{name}() acts on all {number} environments at once: call it on the vector environment")
        if name in _SPACES:
            return (getattr(env, _SPACES[name]),) * number
        if not hasattr(env, name):
            if env.unwrapped is env or not hasattr(env.unwrapped, "call"):
                raise AttributeError(f"{type(env.unwrapped).__name__} has no attribute {name!r}.")
            return env.unwrapped.call(name, *args, **kwargs)
        found = getattr(env, name)
        if name in self.per_member:
            return tuple(found(member, *args, **kwargs) for member in range(number))
        value = found(*args, **kwargs) if callable(found) else found
        return tuple(value) if name == "render" and value is not None else (value,) * number

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """
        Read an attribute of every member.

        :param name: As for :meth:`call`.
        :return: One value for each member.
        :raises AttributeError: There is none of that name.
        """
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """
        Set an attribute, which the members share.

        :param name: Its name; one that exists.
        :param values: The value, or a list or tuple with one for each member, which must be equal.
        :raises AttributeError: There is none of that name, or it cannot be set.
        :raises ValueError: A list of another length, or with different values, or an attribute that is a member's own.
        """
        env: Any = self
        if isinstance(values, list | tuple):
            if len(values) != env.num_envs:
                raise ValueError(f"{name} needs one value or {env.num_envs}, one for each member; got {len(values)}")
            if any(value is not values[0] and not np.array_equal(value, values[0]) for value in values):
                raise ValueError(f"the members share {name}: give one value, or {env.num_envs} equal ones")
            values = values[0]
        if name in (*_SPACES, *_OF_THE_VECTOR, *self.per_member, "render"):
            raise ValueError(f"{name} cannot be set: the environment sets it itself")
        for level in (env, env.unwrapped):
            if hasattr(level, name):
                setattr(level, name, values)
                return
        raise AttributeError(f"{type(env.unwrapped).__name__} has no attribute {name!r}.")
