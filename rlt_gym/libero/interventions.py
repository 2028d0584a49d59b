"""Who may take over from the policy, control step by control step, inside a worker.

The RL Token paper (Alg. 1) lets a human overwrite the actor's chunk while the robot moves. Here anything importable
may: ``LIBERO-v0`` and ``RLToken-LIBERO-v0`` take ``intervention="module:Class"`` (or ``"module:function"``) and
``intervention_kwargs``. This module has the protocol and a scripted stand-in for the human;
:mod:`rlt_gym.libero.devices` has keyboard and SpaceMouse.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Intervenor(Protocol):
    """
    What an intervention class has. One instance per worker plays all its episodes.

    A plain function ``act(simulator, proposed, step, **kwargs)`` will do if nothing must be remembered.
    """

    def reset(self, simulator: Any, rng: np.random.Generator) -> None:
        """
        Prepare for a new episode. Optional.

        :param simulator: The worker's :class:`~rlt_gym.libero.worker.simulator.LiberoSimulator`, in the
            episode's first state.
        :param rng: Source of randomness; the same episode gets the same one on any worker.
        """

    def act(self, simulator: Any, proposed: np.ndarray, step: int) -> np.ndarray | None:
        """
        Asked before every control step.

        :param simulator: The simulator, to be read only.
        :param proposed: float64 (7,), what the policy is about to do.
        :param step: Control steps of this episode so far.
        :return: (7,) in [-1, 1] to do that instead, ``None`` to let the policy act.
        """


class Progress:
    """
    Tells whether an episode gets anywhere.

    Progress is: a goal predicate more holds; the hand is closer to the object of an open goal than ever before; that
    object is closer to where it belongs; a part that is to be opened has moved further. Each by ``least`` meters.

    :param problem: LIBERO's robosuite environment (``ControlEnv.env``).
    :param least: Smallest change that counts, meters.
    """

    def __init__(self, problem: Any, least: float = 0.01):
        from rlt_gym.libero.experts.scene import Scene

        self._scene = Scene(problem)
        self._goals = [[str(part) for part in goal] for goal in problem.parsed_problem["goal_state"]]
        self._least = least
        self.reset()

    def reset(self) -> None:
        """Begin to watch from the present state."""
        self._start = {goal[1]: self._scene.position(goal[1]) for goal in self._goals}
        self._open, self._best = self._measure()

    def _measure(self) -> tuple[int, dict[tuple[int, str], float]]:
        scene = self._scene
        distances: dict[tuple[int, str], float] = {}
        unmet = 0
        for number, goal in enumerate(self._goals):
            if scene.satisfied(goal):
                continue
            unmet += 1
            place = scene.position(goal[1])
            distances[number, "reach"] = float(np.linalg.norm(scene.hand_position - place))
            if len(goal) > 2:
                distances[number, "carry"] = float(np.linalg.norm(place - scene.position(goal[2])))
            else:
                distances[number, "move"] = -float(np.linalg.norm(place - self._start[goal[1]]))
        return unmet, distances

    def made(self) -> bool:
        """
        Look for progress since the last time there was some.

        :return: Whether there was.
        """
        unmet, distances = self._measure()
        better = [key for key, value in distances.items() if value < self._best.get(key, np.inf) - self._least]
        for key in better:
            self._best[key] = distances[key]
        fewer, self._open = unmet < self._open, unmet
        return fewer or bool(better)


class ScriptedTakeover:
    """
    Lets the scripted expert take over, as a person would, when an episode stalls; it gives control back after a while.

    There must be an expert for the task: ``rlt_gym.libero.experts.SOLVED_TASKS``.

    :param stall: Take over after this many control steps without :class:`Progress`; ``None``: never for this reason.
    :param deadline: Take over from this control step of the episode on; ``None``: never for this reason.
    :param probability: Share of the episodes in which it takes over once without a reason ...
    :param window: ... at a control step drawn from ``0..window-1``.
    :param hold: Control steps after which it gives control back. Success ends the episode before.
    :param max_takeovers: Per episode; ``None``: no limit.
    :param least_progress: See :class:`Progress`, meters.
    :param noise: Disturbances of the expert, see :class:`~rlt_gym.libero.experts.ScriptedExpert`.
    :raises ValueError: A value out of range, or no trigger at all.
    """

    def __init__(
        self,
        stall: int | None = 40,
        deadline: int | None = None,
        probability: float = 0.0,
        window: int = 100,
        hold: int = 60,
        max_takeovers: int | None = None,
        least_progress: float = 0.01,
        noise: float = 0.0,
    ):
        self.check_arguments(stall, deadline, probability, window, hold, max_takeovers, least_progress, noise)
        self.stall, self.deadline, self.probability, self.window = stall, deadline, probability, window
        self.hold, self.max_takeovers = hold, max_takeovers
        self.least_progress, self.noise = least_progress, noise
        self._simulator: Any = None

    @staticmethod
    def check_arguments(
        stall: int | None = 40,
        deadline: int | None = None,
        probability: float = 0.0,
        window: int = 100,
        hold: int = 60,
        max_takeovers: int | None = None,
        least_progress: float = 0.01,
        noise: float = 0.0,
    ) -> None:
        """
        Check the constructor's arguments; the environment calls this before it starts a worker.

        :param stall: See the class.
        :param deadline: See the class.
        :param probability: See the class.
        :param window: See the class.
        :param hold: See the class.
        :param max_takeovers: See the class.
        :param least_progress: See the class.
        :param noise: See the class.
        """
        optional = (("stall", stall, 1), ("deadline", deadline, 0), ("max_takeovers", max_takeovers, 1))
        for name, value, low in optional:
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise ValueError(f"{name} must be None or an integer >= {low}, got {value!r}")
        for name, value in (("window", window), ("hold", hold)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1 (control steps), got {value!r}")
        for name, share in (("probability", probability), ("noise", noise)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {share!r}")
        if not least_progress > 0.0:
            raise ValueError(f"least_progress must be > 0 (meters), got {least_progress!r}")
        if stall is None and deadline is None and probability == 0.0:
            raise ValueError("nothing makes this expert take over: set stall, deadline or probability")

    def reset(self, simulator: Any, rng: np.random.Generator) -> None:
        """
        Begin an episode.

        :param simulator: The worker's simulator, just reset.
        :param rng: The episode's randomness.
        """
        if simulator is not self._simulator:
            from rlt_gym.libero.experts import make_expert

            self._expert = make_expert(simulator, noise=self.noise)
            self._progress = Progress(simulator.problem, self.least_progress)
            self._simulator = simulator
        self._progress.reset()
        self._rng = rng
        at_random = rng.random() < self.probability
        self._random_start = int(rng.integers(self.window)) if at_random else None
        self._takeovers = 0
        self._stalled = -1  # asked before the first control step
        self._left = 0

    def act(self, simulator: Any, proposed: np.ndarray, step: int) -> np.ndarray | None:
        """
        Decide about one control step.

        :param simulator: The worker's simulator.
        :param proposed: The policy's action (7,).
        :param step: Number of the control step in the episode, from 0.
        :return: The action (7,) to execute, or ``None``: the policy's.
        """
        if self._left == 0:
            self._stalled = 0 if self._progress.made() else self._stalled + 1
            if not self._should_take_over(step):
                return None
            self._takeovers += 1
            self._left = self.hold
            self._expert.reset(self._rng)
        self._left -= 1
        if self._left == 0:  # the policy gets as long as at the start
            self._stalled = -1
            self._progress.reset()
        return self._expert.act()

    def _should_take_over(self, step: int) -> bool:
        if self.max_takeovers is not None and self._takeovers >= self.max_takeovers:
            return False
        if self._random_start is not None and step >= self._random_start:
            self._random_start = None
            return True
        late = self.deadline is not None and step >= self.deadline
        return late or (self.stall is not None and self._stalled >= self.stall)
