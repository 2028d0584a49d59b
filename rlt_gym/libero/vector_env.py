"""LIBERO-v0: a Gymnasium vector environment whose action is a chunk of control steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from rlt_gym.core.chunk_vector_env import Played
from rlt_gym.core.worker_vector_env import WorkerVectorEnv
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.robot import PANDA
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, TRAIN_HORIZONS, episode_seed, get_tasks
from rlt_gym.libero.worker.perturbations import check_perturbations, perturbation_values
from rlt_gym.workers.backend import backend_settings

RENDER_QUALITIES = ("exact", "fast", "stock")
#: Bytes to reckon with for each task that a worker keeps: the model, and a GL context with the official meshes.
_TASK_BYTES = 500 << 20


class LiberoVectorEnv(WorkerVectorEnv):
    """
    Steps N LIBERO simulators together, each in a process that gets one message per chunk.

    The observation of each env has ``agentview`` and ``wrist``, uint8 (S, S, 3), upside down as LIBERO gives them, and
    ``proprio``, float32 (8,): gripper position (m), its axis-angle orientation (rad), finger positions (m).
    The action is float32 (C, 7) in [-1, 1], C control steps of 50 ms: six OSC pose deltas and the gripper (-1 opens, +1
    closes). The reward is 1 at success. :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv` describes the infos and
    the ends of chunks and episodes, :class:`~rlt_gym.core.episodes.EpisodeSequence` the order of tasks and initial
    states.

    :class:`~rlt_gym.core.worker_vector_env.WorkerVectorEnv` describes the supervision of the workers.

    :param num_envs: Number of simulators.
    :param suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or ``libero_90``.
    :param task_ids: Tasks of the suite; ``None`` for all.
    :param chunk_length: C.
    :param assets: ``"auto"`` (official meshes if present, else the embedded ones), ``"embedded"``, ``"official"`` or
        a folder.
    :param init_states: ``"train"``, ``"selection"`` or ``"eval"`` (LIBERO's own 50 of a task, then sampled ones); also
        ``reset(options={"init_states": ...})``.
    :param group_size: How often each training initial state is played, g episodes in a row over all envs, for methods
        that compare episodes from one state; ``task_id`` and ``init_index`` tell the groups apart. Selection and
        evaluation play each state once all the same.
    :param image_size: Side S of the pictures in pixels, at most 512.
    :param render: ``"exact"`` (LIBERO's pictures bit for bit), ``"fast"`` (cheap robot, no multisampling) or
        ``"stock"`` (the pictures of ``"exact"``, drawn without any shortcut, to find the cause of a wrong pixel).
    :param max_episode_steps: Control steps before truncation, in every split; ``None``: the suite's horizon
        (:data:`~rlt_gym.libero.suites.tasks.SUITE_HORIZONS`), and in the training split its shorter one.
    :param train_episode_steps: Control steps before truncation in the training split, at most ``max_episode_steps``,
        which turns the difference off (a list: of each task); ``None``:
        :data:`~rlt_gym.libero.suites.tasks.TRAIN_HORIZONS` of the suite, or ``max_episode_steps`` where that is given.
    :param render_mode: ``None`` or ``"rgb_array"`` (:meth:`render` gives upright 256-pixel frames).
    :param seed: Seed until :meth:`reset` is given one; ``None``: drawn from the operating system's entropy.
        ``np_random_seed`` is the present one.
    :param obs_stride: Also observe every s control steps inside a chunk, 1 <= s < C; ``None``: only at its end.
    :param intervention: Who may take over, ``"module:Class"`` or ``"module:function"``, see
        :mod:`rlt_gym.libero.interventions`.
    :param intervention_kwargs: Keyword arguments of the class or function.
    :param critical_phase: Predicate ``"module:function"``, see :mod:`rlt_gym.libero.critical_phase`.
    :param critical_phase_kwargs: Keyword arguments of the predicate.
    :param autoreset_mode: ``SAME_STEP``; ``NEXT_STEP``; or ``DISABLED`` (``reset(options={"reset_mask": ...})``).
    :param compiled: Whether control steps run through the compiled loop or through robosuite's own, which gives the
        same states some four times slower, to find the cause of a wrong state.
    :param perturbations: Strengths (0 to 2) of what changes from episode to episode in all splits, by kind: ``light``,
        ``color``, ``texture``, ``camera``, ``friction``, ``placement``, see
        :mod:`rlt_gym.libero.worker.perturbations`; ``None``: nothing does. ``info["perturbation_seed"]`` has the seed
        from which an episode's changes follow, ``info["perturbation_friction"]`` and others have the values of
        :func:`~rlt_gym.libero.worker.perturbations.perturbation_values`.
    :param worker_options: ``worker_start``, ``worker_python``, ``worker_timeout``, ``build_timeout``,
        ``max_restarts`` and ``resident_tasks`` (``None``: up to 10, as memory allows), see
        :class:`~rlt_gym.workers.options.WorkerOptions`.
    :raises ValueError: A bad argument or missing assets, before any process starts.
    :raises TypeError: An unknown argument.
    :raises WorkerError: No worker can be started.
    """

    def __init__(
        self,
        num_envs: int = 1,
        suite: str = "libero_goal",
        task_ids: Sequence[int] | None = None,
        chunk_length: int = 8,
        assets: str = "auto",
        init_states: str = "train",
        image_size: int = 128,
        render: str = "exact",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        seed: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        obs_stride: int | None = None,
        intervention: str | None = None,
        intervention_kwargs: dict[str, Any] | None = None,
        critical_phase: str | None = None,
        critical_phase_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
        train_episode_steps: int | Sequence[int] | None = None,
        compiled: bool = True,
        perturbations: Mapping[str, float] | None = None,
        **worker_options: Any,
    ):
        strengths = check_perturbations(perturbations)
        tasks = get_tasks(suite, task_ids)
        if max_episode_steps is None and train_episode_steps is None:
            train_episode_steps = TRAIN_HORIZONS[suite]
        if render not in RENDER_QUALITIES:
            raise ValueError(f"render must be one of {RENDER_QUALITIES}, got {render!r}")
        if not isinstance(compiled, bool):
            raise ValueError(f"compiled must be True or False, got {compiled!r}")
        #: Which meshes and textures the simulators have.
        self.assets = resolve_assets(assets)
        super().__init__(
            "LIBERO",
            backend_settings(
                "rlt_gym.libero.worker.backend:LiberoBackend",
                suite=suite,
                assets_path=str(self.assets.path),
                image_size=image_size,
                render=render,
                compiled=compiled,
                perturbations=strengths,
            ),
            _TASK_BYTES,
            num_envs,
            tasks,
            PANDA,
            chunk_length,
            SUITE_HORIZONS[suite] if max_episode_steps is None else max_episode_steps,
            image_size,
            intervention,
            intervention_kwargs,
            critical_phase,
            critical_phase_kwargs,
            init_states=init_states,
            seed=seed,
            autoreset_mode=autoreset_mode,
            render_mode=render_mode,
            obs_stride=obs_stride,
            train_episode_steps=train_episode_steps,
            group_size=group_size,
            **worker_options,
        )
        self.metadata["n_tasks"] = len(get_tasks(suite))
        self.metadata["render"] = render
        self.metadata["perturbations"] = strengths

    def _info(self, env: int, played: Played | None = None, restarted: bool = False) -> dict[str, Any]:
        info = super()._info(env, played, restarted)
        if self.metadata["perturbations"]:
            task: Any = self.task(env)
            seed = episode_seed(task, self.init_states, self._episode(env).init_index)
            info["perturbation_seed"] = seed
            for kind, value in perturbation_values(self.metadata["perturbations"], seed).items():
                info[f"perturbation_{kind}"] = value
        return info
