"""
The deployment gate: it decides by noise-free training episodes which actor is deployed.

Long because its seats, samples and tests share one state.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlt_sb3.common.chunk_outcome import ChunkOutcome, envs_of
from rlt_sb3.common.contenders import Contender, copied
from rlt_sb3.common.gated_policy import GatedPolicy, play_practicing, play_seats
from rlt_sb3.common.stats import fisher_p, mcnemar_p
from rlt_sb3.common.trials import Sample, Trial, is_better, worse_on_a_task

AnyEvaluation = TypeVar("AnyEvaluation")


class PolicyGate:
    """
    Plays a share of the training episodes without noise, and deploys the best actor that beats the VLA in them.

    The practicing actor is worse than the VLA for a while, because it follows critics that are still wrong. The gate
    keeps such an actor from being deployed. Only noise-free episodes of a fixed actor measure its success rate: noise
    can free a policy that stands still, and the practicing actor changes with every update. So the gate compares
    copies that do not change (safe policy improvement, as in Thomas et al., "High Confidence Policy Improvement",
    2015):

    1. *Baseline*: ``4 * window`` noise-free episodes of the VLA. Those that it has played before training count
       (:meth:`know_vla`). The others start in the warm-up, and continue after it until there are enough.
    2. *Screening*: then a copy of the training actor is put on trial. If it is not better than the VLA in its first
       ``window`` trials, the next copy has its turn.
    3. *Confirmation*: its next ``2 * window`` trials, and only these, decide. The copy passes if it solves more than
       the VLA.

    Both are Fisher's exact one-sided test at ``level``, as is McNemar's in :meth:`audition`. The level is the same
    however many copies are tried. So a copy that is *as good* as the VLA passes in some runs, which costs nothing; one
    that is ten points worse passes in 4 % of the runs at most (``benchmarks/gate.py``). Levels that shrink with every
    test would keep out equal copies as well, and with them most that are ten points better.

    If the VLA solves so much that not even ``2 * window`` successes could pass, an actor has to be quicker: it must
    solve at least the VLA's share, in fewer control steps (Mann and Whitney's one-sided test on the successful
    episodes, at the same level). No actor passes that is worse in one of several tasks (at 5 %).

    Of all actors that have passed, the one with the largest gain over the VLA is deployed, by all of its episodes: its
    confirmation, and the selection states if it has played them (:class:`~rlt_sb3.common.contenders.Contender`). So an
    actor is replaced only by one with at least as good evidence. If it does worse on the selection states than in its
    confirmation, the actor before it can come back: the best :attr:`KEPT` are kept.

    Episodes count in the order in which they *start* (see :class:`~rlt_sb3.common.trials.Sample`), and a sample is
    judged when all of its episodes have ended; a copy that can no longer pass is rejected at once. Episodes in which
    the simulator broke or someone took over are replaced. ``docs/guide/deployment_gate.md`` has the simulated error
    rates.

    An algorithm calls :meth:`play_vla` or :meth:`choose` before each vector step and :meth:`step` after it, and
    :meth:`restart` when environments are reset from outside. Its policy is a :class:`GatedPolicy`.

    :param share: share of the episodes that may be noise-free, in (0, 1]; the others are played with noise. Half of it
        during the opening of the search for an offset
    :param window: trials of the screening; the baseline has four times as many, the confirmation twice
    :param level: significance level of each test, in (0, 1): how often, at most, one copy that is only as good as the
        VLA passes a test
    :param task_weight: with several tasks: largest weight of a task, its number of training episodes in a round of the
        tasks, see :attr:`~rlt_sb3.common.task_gate.TaskGate.weights`. The smallest weight is 1, so 1 gives all tasks
        equally many
    :raises ValueError: for settings out of range, and where ``window`` is too small for any actor to pass
    """

    #: level at which an actor is worse in one of the tasks
    WORSE = 0.05
    #: actors that have passed and are kept, the deployed one among them
    KEPT = 3
    #: what :meth:`state_dict` holds besides the samples and the contenders
    COUNTERS = ("clock", "on_trial", "screened", "candidates", "passed", "approvals")
    SAMPLES = ("baseline", "trials")

    def __init__(self, share: float = 0.5, window: int = 16, level: float = 0.1, task_weight: int = 4):
        if not (isinstance(share, int | float | np.floating) and 0.0 < share <= 1.0):
            raise ValueError(f"gate.share must be in (0, 1] (a share of the episodes), got {share!r}.")
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"gate.window must be an integer >= 1, got {window!r}.")
        if not (isinstance(level, float | np.floating) and 0.0 < level < 1.0):
            raise ValueError(f"gate.level must be in (0, 1) (a significance level), got {level!r}.")
        if not isinstance(task_weight, int) or isinstance(task_weight, bool) or task_weight < 1:
            raise ValueError(f"gate.task_weight must be an integer >= 1, got {task_weight!r}.")
        self.share, self.window, self.level, self.task_weight = share, window, level, task_weight
        if fisher_p((2 * window, 2 * window, 0, 4 * window)) > level:
            raise ValueError(
                f"gate.window={window} is too small for gate.level={level}: an actor that always succeeds could not "
                "pass over a VLA that never does. Raise gate.window."
            )
        self.recent: deque[bool] = deque(maxlen=window)  # the last trials of all actors, for the log
        self.known: list[Trial] = []  # of the VLA, played before the run that begins next
        self.baseline = Sample(4 * window)  # the VLA's episodes
        self.trials = Sample()  # of the actor on trial
        self.vla_states = Sample()  # the VLA's episodes on the selection states
        self.contenders: list[Contender] = []  # the best actors that have passed, best first: the deployed one
        self.on_trial = False  # whether an actor is on trial
        self.screened = False  # whether it has passed the screening
        self.candidates = 0  # actors that were put on trial
        self.passed = 0  # actors that have beaten the VLA
        self.approvals = 0  # those of them that were deployed at once
        self.clock = 0  # vector steps
        self.gives_way = False  # whether practice needs more of the episodes; the algorithm says so
        self._longest = 0  # longest episode, in vector steps
        self._practicing = self._warned = False
        self.restart(1)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data (for JSON) from which :meth:`load_state_dict` continues, without the running episodes."""
        state = {name: getattr(self, name) for name in self.COUNTERS}
        longest = self._longest_possible()
        samples = {name: getattr(self, name).until(self.clock - longest).to_list() for name in self.SAMPLES}
        kept = {"vla_states": self.vla_states.to_list(), "contenders": [one.to_list() for one in self.contenders]}
        return state | samples | kept | {"longest": longest, "recent": list(self.recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Continue where another gate stopped; new episodes begin.

        :param state: of :meth:`state_dict`
        """
        for name in self.COUNTERS:
            setattr(self, name, state[name])
        for name in self.SAMPLES:
            setattr(self, name, Sample.from_list(state[name]))
        self.vla_states = Sample.from_list(state["vla_states"])
        self.contenders = [Contender.from_list(one) for one in state["contenders"]]
        self.recent = deque(state["recent"], maxlen=self.window)
        self._longest = state["longest"]
        self._open_seats(self.n_envs)

    # ---------------------------------------------------------------- which actor plays

    def begin(self) -> None:
        """
        Begin a new run: the VLA plays what is missing of its baseline first, and no actor is on trial.

        The deployed actor stays, but nothing is known of it.
        """
        self.abandon_trial()
        self.baseline, self.known = self._baseline_of(self.known), []
        self.vla_states, self._longest = Sample(), 0
        self.contenders = [Contender(one.number, one.parameters) for one in self.contenders[:1]]
        self._practicing = self._warned = False

    def know_vla(self, played: Sample) -> None:
        """
        Count episodes of the VLA that were played before training as its baseline, in the run that begins next.

        A run that has begun and has not counted any episode yet counts them too.

        :param played: its episodes, on states that come from the same distribution as those of training. The more there
            are, the fewer noise-free training episodes are left to the VLA, and the earlier is the first actor on trial
        """
        self.known = list(played.trials)
        if all(trial.start < 0 for trial in self.baseline.trials):
            self.baseline = self._baseline_of(self.known)

    def _baseline_of(self, known: list[Trial]) -> Sample:
        return Sample(max(4 * self.window, len(known)), known)

    def restart(self, n_envs: int) -> None:
        """
        Begin new episodes in all environments; the running ones do not count.

        Neither do others of the unfinished samples that started when they could still be running.

        :param n_envs: number of environments from now on
        """
        self._longest = self._longest_possible()
        for name in self.SAMPLES:
            setattr(self, name, getattr(self, name).until(self.clock - self._longest))
        self._open_seats(n_envs)

    def _longest_possible(self) -> int:
        """Return the number of vector steps after which an episode has ended, as far as known."""
        return max(self._longest, self.clock - int(self._begun.min(initial=self.clock)) + 1) if self.clock else 0

    def _open_seats(self, n_envs: int) -> None:
        self.n_envs = n_envs
        self.player = np.full(n_envs, "", dtype=object)  # whose sample the running episode belongs to: "vla", "actor"
        self._seats: list[Trial | None] = [None] * n_envs  # the running episodes of samples
        self._fresh = np.ones(n_envs, dtype=bool)  # whether the next chunk is the first one of its episode
        self._begun = np.full(n_envs, self.clock)  # vector steps before the running episodes
        self.noise_free = np.zeros(n_envs, dtype=bool)  # which environments play without noise in this vector step

    @property
    def share_now(self) -> float:
        """Share of the episodes that begin now that may be noise-free."""
        return self.share / 2.0 if self.gives_way else self.share

    @property
    def none_deployed(self) -> bool:
        """Whether no actor has passed yet: the untrained one is deployed."""
        return self.approvals == 0

    def plays_vla(self, policy: GatedPolicy) -> bool:
        """
        Tell whether ``predict`` plays the VLA's chunks.

        :param policy: the policy
        :return: whether what is deployed plays the VLA's own chunks
        """
        return self.none_deployed and policy.starts_at_vla

    def play_vla(self, observation: Mapping[str, np.ndarray]) -> None:
        """
        Play the VLA's own chunks without noise in all environments; all new episodes can be its baseline.

        :param observation: of all environments; not needed for one task
        """
        self.take_seats(np.ones(self.n_envs, dtype=bool), "vla")
        self._fresh[:] = False
        self.noise_free = np.ones(self.n_envs, dtype=bool)

    def choose(
        self, policy: GatedPolicy, observation: Any, chunks: np.ndarray, reference: np.ndarray, ready: bool
    ) -> np.ndarray:
        """
        Choose who plays in each environment: the training actor, the VLA or the actor on trial.

        :param policy: the policy
        :param observation: as its actors take it, of all environments
        :param chunks: of the training actor (n_envs, ...)
        :param reference: the VLA's own chunks, like ``chunks``
        :param ready: whether the training actor moves. If it does, no actor is on trial and the baseline is complete, a
            copy of it goes on trial now
        :return: chunks to play (n_envs, ...). No noise may be added to those of ``noise_free``
        """
        self.try_next(policy, ready)
        if self._fresh.any():
            self.take_seats(np.random.random(self.n_envs) < self.share_now, "vla", "actor")
            self._fresh[:] = False
        self.noise_free, chunks = play_seats(policy, self.player, observation, chunks, reference)
        return chunks

    def try_next(self, policy: GatedPolicy, ready: bool) -> None:
        """
        Put a copy of the training actor on trial if it is its turn.

        :param policy: the policy
        :param ready: see :meth:`choose`
        """
        self._practicing |= ready
        if ready and not self.on_trial and self.baseline.complete:
            self.start_trial(policy)

    def _samples(self) -> dict[str, Sample]:
        return {"vla": self.baseline, "actor": self.trials}

    def next_player(self, *players: str) -> str:
        """
        Tell whose sample an episode without noise is for that begins now.

        :param players: whose samples count, the first one that needs more first; none: those of all
        :return: "vla", "actor", or "": nobody's
        """
        samples = self._samples()
        return next((name for name in players or samples if samples[name].wanted), "")

    def take_seats(self, drawn: np.ndarray, *players: str) -> None:
        """
        Assign the episodes that begin now and are drawn to the first sample that needs more.

        :param drawn: (n_envs,)
        :param players: whose samples
        """
        samples = self._samples()
        for env in np.flatnonzero(drawn & self._fresh):
            name = self.next_player(*players)
            self.player[env], self._seats[env] = name, samples[name].start(self.clock) if name else None

    # ---------------------------------------------------------------- where others play

    @property
    def trial_numbers(self) -> tuple[int, ...]:
        """Number of the actor on trial in each task, here one, counted from 1; 0: none is."""
        return (self.candidates if self.on_trial else 0,)

    def plan(self, policy: GatedPolicy, n: int, warm_up: bool, ready: bool) -> list[tuple[str, ...]]:
        """
        Plan who plays episodes that may begin in other processes. :meth:`seat` is told which of them did.

        :param policy: the policy
        :param n: number of environments
        :param warm_up: whether all of them play the VLA's chunks, as with :meth:`play_vla`
        :param ready: whether the training actor moves, see :meth:`choose`
        :return: for each of them who plays an episode of each task, here of the only one: "vla", "actor" (the one on
            trial), or "": practice
        """
        self.try_next(policy, ready)
        drawn = np.random.random(n) < (1.0 if warm_up else self.share_now)
        return [(self.next_player() if one else "",) for one in drawn]

    def seat(
        self, envs: Sequence[int], tasks: np.ndarray, began: np.ndarray, players: np.ndarray, trials: Sequence[int]
    ) -> None:
        """
        Count the episodes that have begun in other processes, before :meth:`step` is told of their first chunk.

        An episode belongs to a sample if that one still needs it, and if its actor is still on trial.

        :param envs: of n environments
        :param tasks: their tasks (n,), not needed for one
        :param began: (n,) whether an episode has begun
        :param players: who plays it by :meth:`plan` (n,)
        :param trials: :attr:`trial_numbers` at that time
        """
        samples = self._samples()
        for row in np.flatnonzero(began).tolist():
            name, env = players[row], envs[row]
            if name and samples[name].wanted and (name == "vla" or tuple(trials) == self.trial_numbers):
                self.player[env], self._seats[env] = name, samples[name].start(self.clock)
            self._fresh[env] = False

    def start_trial(self, policy: GatedPolicy) -> None:
        """
        Put a copy of the training actor on trial, which plays episodes from now on.

        :param policy: the policy
        """
        self.abandon_trial()
        policy.start_trial()
        self.on_trial, self.trials = True, Sample(3 * self.window)
        self.candidates += 1

    def abandon_trial(self) -> None:
        """End the trial without a decision; its running episodes become practice, and the next actor can be tried."""
        self.on_trial = self.screened = False
        for env, trial in enumerate(self._seats):
            if trial is not None and trial in self.trials.trials:
                self.player[env], self._seats[env] = "", None
        self.trials = Sample()

    def weigh_tasks(self, env: Any) -> None:
        """
        Leave the order of the tasks as it is, see :meth:`~rlt_sb3.common.task_gate.TaskGate.weigh_tasks`.

        :param env: environments
        """

    @property
    def success_rate(self) -> float:
        """
        Estimate the success rate of what is deployed, without noise.

        It counts all episodes that are evidence on the deployed actor. If there is none, it counts those of the VLA's
        baseline so far. One success and one failure are added (Laplace's rule), so the rate is never 0 or 1.
        """
        samples = [self.baseline] if self.best is None else [self.best.trials, self.best.states]
        successes, episodes = map(sum, zip(*(sample.count() for sample in samples), strict=True))
        return (successes + 1) / (episodes + 2)

    # ---------------------------------------------------------------- the best actor so far

    @property
    def best(self) -> Contender | None:
        """The deployed actor with the evidence on it; None: no actor has passed."""
        return self.contenders[0] if self.contenders else None

    def pass_trial(self, policy: GatedPolicy) -> None:
        """
        Count the actor on trial among those that have beaten the VLA, and deploy it if it is the best of them.

        :param policy: the policy
        """
        self._pass(policy, policy.actor_on_trial.state_dict(), self.trials, Sample())

    def _pass(self, policy: GatedPolicy, parameters: Mapping[str, Any], trials: Sample, states: Sample) -> None:
        """Add an actor that has beaten the VLA, and deploy it if it is the best."""
        self.passed += 1
        self.abandon_trial()
        self.contenders.insert(0, Contender(self.passed, copied(parameters), trials, states))
        self._rank(policy)
        self.approvals += self.contenders[0].number == self.passed

    def _rank(self, policy: GatedPolicy) -> None:
        """Deploy the best actor by the evidence so far; of equals, the one that is first in the list."""
        before = self.contenders[0]
        merit = {one.number: one.merit(self.baseline, self.vla_states) for one in self.contenders}
        self.contenders.sort(key=lambda one: merit[one.number], reverse=True)  # a stable sort
        self.contenders = self.contenders[: self.KEPT]
        if self.contenders[0] is not before or before.number == self.passed:
            policy.deploy(self.contenders[0].parameters)

    def use_states(self, vla: Sample) -> None:
        """
        Tell the gate how the VLA does on the selection states, on which actors are compared as well.

        :param vla: the VLA's episodes, in the order of the states. Where they differ from those before, what actors did
            on other states is not evidence any more
        """
        if vla.to_list() != self.vla_states.to_list():
            self.vla_states = vla
            for one in self.contenders:
                one.states = Sample()

    def add_states(self, policy: GatedPolicy, states: Sample) -> None:
        """
        Count the episodes of :attr:`best` on the selection states as evidence; the best can be another actor now.

        :param policy: the policy
        :param states: its episodes, in the order of :meth:`use_states`
        """
        self.contenders[0].states = states
        self._rank(policy)

    def adopt_unknown(self, policy: GatedPolicy) -> None:
        """
        Take notice of what is deployed, if nothing is known of it.

        :param policy: the policy
        """
        if self.best is None:
            self.adopt(policy)

    def adopt(self, policy: GatedPolicy) -> None:
        """
        Take notice of an actor that was deployed from outside; of the kept ones, only this one is known from now on.

        :param policy: the policy
        """
        now = copied(policy.actor_deployed.state_dict())
        same = [one for one in self.contenders if all(value.equal(one.parameters[name]) for name, value in now.items())]
        self.passed += not same
        self.contenders = same[:1] or [Contender(self.passed, now)]

    # ---------------------------------------------------------------- the tests

    def step(self, policy: GatedPolicy, outcomes: Sequence[ChunkOutcome], dones: np.ndarray) -> None:
        """
        Count one vector step; deploys the actor on trial if it has passed and is the best so far.

        :param policy: the policy
        :param outcomes: of the n chunks just played, see :func:`~rlt_sb3.common.chunk_outcome.envs_of`. An episode
            whose simulator broke or in which someone took over does not count
        :param dones: (n,)
        """
        self.clock += 1
        ended = False  # whether a trial has
        for env, outcome, done in zip(envs_of(outcomes), outcomes, dones, strict=True):
            trial, player = self._seats[env], self.player[env]
            if trial is not None:
                void = outcome.broken or outcome.taken_over
                trial.steps, trial.task = trial.steps + outcome.steps, outcome.task_id
                if void:
                    (self.baseline if player == "vla" else self.trials).drop(trial)
                elif done:
                    trial.success = bool(outcome.success)
                    if player == "actor":
                        ended = True
                        self.recent.append(trial.success)
                if void or done:
                    self.player[env], self._seats[env] = "", None
            if done:
                self._longest = max(self._longest, self.clock - int(self._begun[env]))
                self._fresh[env], self._begun[env] = True, self.clock
        if ended:
            self._judge(policy)

    def _judge(self, policy: GatedPolicy) -> None:
        """Pass or reject the actor on trial, if its episodes decide."""
        if not self.screened:
            passed = self._passed(self.window)
            if passed is False:
                self.abandon_trial()
            if not passed:
                return
            self.screened = True
            self.trials = Sample(2 * self.window, self.trials.trials[self.window :])
        passed = self._passed(2 * self.window)
        if passed is None:
            return
        if passed and not worse_on_a_task(self.trials, self.baseline, self.WORSE):
            self.pass_trial(policy)
        else:
            self.abandon_trial()

    @property
    def _by_speed(self) -> bool:
        """Whether not even a confirmation full of successes could pass."""
        full = 2 * self.window
        return fisher_p((full, full, *self.baseline.count())) > self.level

    def _passed(self, n: int) -> bool | None:
        return is_better(self.trials, n, self.baseline, self.level, self._by_speed)

    def audition(
        self,
        policy: GatedPolicy,
        evaluate: Callable[[], AnyEvaluation],
        sample: Callable[[AnyEvaluation], Sample],
    ) -> tuple[AnyEvaluation, list[str]]:
        """
        Evaluate the training actor on the states of :meth:`use_states`; it passes if it beats the VLA on them.

        :param policy: the policy; the training actor is deployed while it is evaluated. What was deployed before comes
            back, unless the training actor passes and is the best so far
        :param evaluate: plays what is deployed
        :param sample: of the evaluation: its episodes, in the order of the states
        :return: evaluation of the training actor; its name among :attr:`names`, if it has passed
        """
        result = play_practicing(policy, evaluate)
        return result, [str(self.passed)] if self.judge_states(policy, sample(result)) else []

    def judge_states(self, policy: GatedPolicy, states: Sample) -> bool:
        """
        Let the training actor pass if it has beaten the VLA on the states of :meth:`use_states`.

        The test is McNemar's exact one-sided one, at ``level``.

        :param policy: the policy
        :param states: the training actor's episodes, in the order of the states
        :return: whether it has passed
        """
        pairs = [(bool(a.success), bool(b.success)) for a, b in zip(self.vla_states.trials, states.trials, strict=True)]
        fixed, broken = pairs.count((False, True)), pairs.count((True, False))
        if mcnemar_p(fixed, broken, alternative="greater") > self.level:
            return False
        self._pass(policy, policy.training_actor.state_dict(), Sample(), states)
        return True

    @property
    def deployed_name(self) -> str:
        """Name of what is deployed: the number of the best actor, 0 for the VLA."""
        return str(self.best.number if self.best else 0)

    @property
    def names(self) -> list[str]:
        """Names of the actors that are deployed or can be again without a further trial."""
        return [str(one.number) for one in self.contenders]

    def metrics(self) -> dict[str, float]:
        """Return what is logged."""
        counts: dict[str, float] = {}
        if not self.recent:
            return counts
        if len(self.recent) == self.recent.maxlen:  # fewer trials are another number
            counts["trial_success_rate"] = float(np.mean(self.recent))
        return counts | {"candidates": self.candidates, "approvals": self.approvals}

    @property
    def waits_for_baseline(self) -> bool:
        """Whether actors have learned, but none could be put on trial yet."""
        return self._practicing and not self.baseline.complete

    def warn_of_open_baseline(self) -> None:
        """Warn, once, if training has ended before an actor could be put on trial."""
        if self.waits_for_baseline and not self._warned:
            self._warned = True
            warnings.warn(
                f"No actor has been on trial, so none could be deployed: {len(self.baseline.ended())} noise-free "
                f"episodes of the VLA have been counted, {self.baseline.size} are needed (4 * gate.window). Train for "
                "longer, raise learning_starts or gate.share, or lower gate.window.",
                stacklevel=4,
            )
