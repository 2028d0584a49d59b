"""
Breaks the algorithm on purpose, one line at a time, and looks whether a test notices.

Run by hand, ``python tests/mutations.py [--only 3,7] [--jobs 2]``; it takes some minutes, and ends with 1 if a mutation
survives. ``test_mutations.py`` looks after the list. A mutation that survives is a test that is missing.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: What the tests need of the repository.
NEEDED = ("rlt_gym", "rlt_sb3", "tests", "benchmarks", "pyproject.toml")
#: Seconds after which a run of tests counts as hanging
PATIENCE = 300


class Mutation(NamedTuple):
    """
    :param what: what it breaks, in plain words
    :param file: where, below ``rlt_sb3``
    :param old: a part of one line, which the file has exactly once
    :param new: what takes its place
    :param tests: files, below ``tests/rlt_sb3``, of which one test must fail
    """

    what: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def path(self) -> Path:
        return Path("rlt_sb3", self.file)

    @property
    def test_files(self) -> list[str]:
        return [f"tests/rlt_sb3/{name}" for name in self.tests.split()]

    def apply(self, root: Path) -> str:
        """
        :param root: the tree to change
        :return: the file's text before
        :raises ValueError: if the fragment is not there exactly once
        """
        text = (root / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {self.old!r} {text.count(self.old)} times, it must be there once.")
        (root / self.path).write_text(text.replace(self.old, self.new))
        return text


RLT, POLICIES, FEATURES, SETTINGS = "rlt/rlt.py", "rlt/policies.py", "rlt/features.py", "rlt/settings.py"
ROLLOUTS = "rlt/rollouts.py"
OFF_POLICY, GATE, SEATS = "common/chunk_off_policy.py", "common/policy_gate.py", "common/gated_policy.py"
CONTENDERS = "common/contenders.py"
OFFSET, GRAPHS = "rlt/offset.py", "common/cuda_graphs.py"
TASK_GATE = "common/task_gate.py"
TRIALS, STATS = "common/trials.py", "common/stats.py"
BIAS, NOISE, SCHEDULES = "common/value_bias.py", "common/noise.py", "common/schedules.py"
OUTCOME, VEC_ENV, TORCH = "common/chunk_outcome.py", "common/vec_env.py", "common/torch_utils.py"
BUFFER, STORAGE, OPEN = (f"common/replay/{name}.py" for name in ("buffer", "storage", "open_episode"))
COPIES, OFFLINE, INDEX = (f"common/replay/{name}.py" for name in ("intervention_copies", "offline", "task_index"))
EVALUATE, COMPARE, SELECTION = "evaluation/evaluate.py", "evaluation/compare.py", "callbacks/selection.py"

# fmt: off
MUTATIONS = dict(enumerate([
    # ------------------------------------------------------------------------------------ returns and rows
    Mutation("discount of the whole chunk for one that was cut short", STORAGE,
             "return totals, gamma**steps, last", "return totals, gamma ** (0 * steps + self.chunk_length), last",
             "common/replay/test_buffer.py"),
    Mutation("no value after a time-out: done instead of terminated", STORAGE,
             "dones=column(self.terminated[last])", "dones=column(self.terminated[last] | self.truncated[last])",
             "common/replay/test_buffer.py"),
    Mutation("next observation of the first chunk instead of the last one of the return", STORAGE,
             "following = self.next_slot[last].astype", "following = self.next_slot[slots].astype",
             "common/replay/test_buffer.py"),
    Mutation("one chunk more in each return", STORAGE,
             "for _ in range(n_steps - 1):", "for _ in range(n_steps):", "common/replay/test_buffer.py"),
    Mutation("returns run on where the next chunk is not known", STORAGE,
             "goes_on = ~ended & self.is_row(following)", "goes_on = ~ended", "common/replay/test_buffer.py"),
    Mutation("later chunks of a return are not discounted", STORAGE,
             "totals[going] += gamma ** steps[going] * (", "totals[going] += (", "common/replay/test_buffer.py"),
    Mutation("intervention mask: the whole chunk counts as chosen by the expert", STORAGE,
             "return th.where(chosen, actions, reference)", "return actions", "common/replay/test_buffer.py"),
    Mutation("the mark of a success stays in a slot that is used again", STORAGE,
             "self.successful[slot] = False", "pass", "common/replay/test_buffer.py"),
    Mutation("the mark of an intervention stays in a slot that is used again", STORAGE,
             "self.intervention[slot] = False  # read", "pass  # read", "common/replay/test_buffer.py"),
    Mutation("a success marks what has been written over an overwritten row", STORAGE,
             "for number in numbers if self.living(number)]", "for number in numbers]",
             "common/replay/test_buffer.py"),
    Mutation("a row leads to another environment's observation", BUFFER,
             "next_slot = storage.put_observation(next_obs, row)", "next_slot = storage.put_observation(next_obs, 0)",
             "common/replay/test_buffer.py"),
    Mutation("rewards after the executed steps count", "common/replay/open_episode.py", "rewards[steps:] = 0.0", "pass",
             "rlt/test_mutants.py"),
    Mutation("time-outs are failures where they should not be, and the other way round", BUFFER,
             "self.handle_timeout_termination = not timeout_is_failure",
             "self.handle_timeout_termination = timeout_is_failure", "rlt/test_recipe.py"),
    Mutation("offline rows: the actor sees what was demonstrated as vla_ref", BUFFER,
             '== "replace" and chosen is self.storage', '== "replace"', "rlt/test_mutants.py"),
    Mutation("failed episodes are marked as successes", BUFFER,
             "if done and outcome.success:", "if done:", "rlt/test_bc_coef.py"),
    Mutation("offline rows: their share of a batch is not rounded", BUFFER,
             "n_offline = round(batch_size * self.offline_ratio)", "n_offline = int(batch_size * self.offline_ratio)",
             "common/replay/test_sampling.py"),
    Mutation("a return runs across a reset that nobody has told", STORAGE,
             "                return False", "                continue", "common/replay/test_buffer.py"),
    Mutation("rows inside chunks: the actions after the end are not the last one", OPEN,
             "actions[steps:] = actions[steps - 1]", "actions[steps:] = 0.0", "common/replay/test_buffer.py"),
    Mutation("rows inside chunks: too few rewards of the next chunk", OPEN,
             "take = 0 if after is None else min(start, after.steps)",
             "take = 0 if after is None else min(start, after.steps) // 2", "common/replay/test_buffer.py"),
    Mutation("the ends of copied rows are bootstrapped", COPIES,
             "bool(source.terminated[slot]),", "False,", "common/replay/test_intervention_copies.py"),
    Mutation("copied rows replace vla_ref also where only the target should be", COPIES,
             'if overwrite and "vla_ref" in target.obs:', 'if "vla_ref" in target.obs:',
             "common/replay/test_intervention_copies.py"),
    Mutation("rows of a file lead to themselves", OFFLINE,
             "int(following[slot]),", "int(slot),", "common/replay/test_offline.py"),
    Mutation("rows of a file lose their marks of success", OFFLINE,
             'rows.successful[:size] = arrays["successful"]', "pass", "common/replay/test_offline.py"),
    Mutation("as many rows of each task: not divided", INDEX,
             "if stratified:", "if False:", "common/replay/test_sampling.py"),
    Mutation("a share of successes in all tasks together", INDEX,
             "if not stratified:", "if True:", "common/replay/test_sampling.py"),
    Mutation("a share of successes also where there are none", INDEX,
             "if not (len(with_mark) and len(without)):", "if False:", "common/replay/test_sampling.py"),
    # ------------------------------------------------------------------------------------ updates
    Mutation("pull: sum over the chunk instead of the mean", RLT,
             "loss = bc_coef * squared.mean()", "loss = bc_coef * squared.sum(1).mean()", "rlt/test_updates.py"),
    Mutation("reference dropout in targets", RLT,
             "next_actions = self.actor_target(batch.next_observations)",
             "next_actions = self.actor_target(batch.next_observations, th.zeros(len(batch.dones), 1))",
             "rlt/test_updates.py"),
    Mutation("targets from the online actor", RLT,
             "next_actions = self.actor_target(", "next_actions = self.actor(", "rlt/test_updates.py"),
    Mutation("targets from the online critics", RLT,
             "self.critic_target.target_q(", "self.critic.target_q(", "rlt/test_updates.py"),
    Mutation("mean of the target critics instead of the minimum", POLICIES,
             "self.q_values(obs, actions, members).amin(0)", "self.q_values(obs, actions, members).mean(0)",
             "rlt/test_updates.py"),
    Mutation("target noise is not clipped", RLT,
             "noise.clamp_(-self.target_noise_clip, self.target_noise_clip)", "noise", "rlt/test_updates.py"),
    Mutation("target noise without the unit of action", RLT,
             "times_per_dimension(noise, self.action_unit)", "noise", "rlt/test_updates.py"),
    Mutation("pull without the unit of action", RLT,
             "times_per_dimension(difference, 1.0 / self.action_unit).pow(2)", "difference.pow(2)",
             "rlt/test_updates.py"),
    Mutation("q_bounds limit the wrong side", RLT,
             "targets.clamp_(*self.q_bounds)", "targets.clamp_(min=self.q_bounds[0])", "rlt/test_updates.py"),
    Mutation("the value is limited before the reward is added", RLT,
             "next_q.unsqueeze(1)).squeeze(1)", "next_q.clamp(0.0, 1.0).unsqueeze(1)).squeeze(1)",
             "rlt/test_updates.py"),
    Mutation("critics: loss is a mean over the ensemble", RLT,
             "loss = (q_values - targets).pow(2).mean(1).sum()", "loss = (q_values - targets).pow(2).mean()",
             "rlt/test_updates.py"),
    Mutation("actor pulled to vla_ref, not to the target of the pull", RLT,
             "difference = actions - bc_target", 'difference = actions - observations["vla_ref"].flatten(1)',
             "rlt/test_mutants.py"),
    Mutation("policy delay is counted in each call", RLT,
             "due = self._n_updates % self.policy_delay == 0", "due = (1 + len(critic_stats)) % self.policy_delay == 0",
             "rlt/test_learn.py"),
    Mutation("a recorded update sees its first batch only", GRAPHS,
             "th._foreach_copy_(places, given)", "pass", "common/test_cuda_graphs.py"),
    Mutation("a recorded update keeps its learning rate", GRAPHS,
             'rate.fill_(group["lr"])', 'rate.fill_(rate if self.recorded else group["lr"])',
             "common/test_cuda_graphs.py"),
    Mutation("a recorded update writes over what it returned", GRAPHS,
             "tuple(result.clone() for result in results)", "tuple(results)", "common/test_cuda_graphs.py"),
    Mutation("what was recorded is kept when optimizers are loaded", GRAPHS,
             "if places != self._places:", "if not self._places:", "common/test_cuda_graphs.py"),
    Mutation("updates with and without the actor are recorded as one", RLT,
             "graphs.run((due, acts, warming_up, *self._constants())", "graphs.run((warming_up, *self._constants())",
             "common/test_cuda_graphs.py"),
    Mutation("the actor's slow copy ignores actor_tau", RLT,
             "polyak(self.actor, self.actor_target, actor_tau)", "polyak(self.actor, self.actor_target, self.tau)",
             "rlt/test_updates.py"),
    Mutation("target critics are never updated", RLT,
             "polyak(self.critic, self.critic_target, self.tau)", "pass", "rlt/test_updates.py"),
    Mutation("a ChunkSchedule follows the progress of training", RLT,
             "return self.bc_coef(self.num_timesteps - self._opening_chunks)",
             "return self.bc_coef(int((1 - self._current_progress_remaining) * self.bc_coef.chunks))",
             "rlt/test_bc_coef.py"),
    Mutation("the pull is weaker on successes instead of failures", RLT,
             "(batch.successful + self.bc_failure_weight * (1.0 - batch.successful))",
             "(1.0 - batch.successful + self.bc_failure_weight * batch.successful)", "rlt/test_bc_coef.py"),
    Mutation("a direct actor follows critics that know nothing", RLT,
             "follow_q=not warming_up", "follow_q=True", "rlt/test_learn.py"),
    Mutation("actor_std is ignored", RLT, "if self.policy.actor_std > 0.0:", "if False:", "rlt/test_recipe.py"),
    Mutation("features of next observations are those of the observations", RLT,
             'observations["features"] = self.actor.features_extractor(observations)',
             'observations["features"] = self.actor.features_extractor(batch.observations)',
             "rlt/test_known_values.py"),
    Mutation("a ChunkSchedule goes on below its end", SCHEDULES,
             "min(collected / self.chunks, 1.0)", "collected / self.chunks", "rlt/test_recipe.py"),
    # ------------------------------------------------------------------------------------ offset
    Mutation("an episode's offset follows the actor's", ROLLOUTS,
             "offsets[tries] = self.search.tried[tries]", "offsets[tries] = self.search.tried[tries].mean(0)",
             "rlt/test_offset.py"),
    Mutation("no noise on top of the offset", ROLLOUTS,
             "np.clip(reference + correction * share + noise, -1.0, 1.0)",
             "np.clip(reference + correction * share + (0 if self.search else noise), -1.0, 1.0)",
             "rlt/test_offset.py"),
    Mutation("the pull's schedule begins before the network learns", RLT,
             "self.bc_coef(self.num_timesteps - self._opening_chunks)", "self.bc_coef(self.num_timesteps)",
             "rlt/test_offset.py"),
    Mutation("the pull's schedules of tasks begin before", RLT,
             "counts = self.task_chunks - self._opening_chunks", "counts = self.task_chunks", "rlt/test_offset.py"),
    Mutation("the pull undoes the offset", RLT,
             "(bc_target + self.actor.offsets(observations)).clamp(-1.0, 1.0)", "bc_target", "rlt/test_offset.py"),
    Mutation("the network learns while the search opens", RLT,
             "not (warming_up or self.search_opens)", "not warming_up", "rlt/test_offset.py"),
    Mutation("one offset for both phases", OFFSET,
             "1 * (references[:, :, gripper].mean(1) > 0.0)", "0 * (references[:, :, gripper].mean(1) > 0.0)",
             "rlt/test_offset.py"),
    Mutation("episodes in which someone took over count", OFFSET,
             "if env not in self.spoiled and not outcome.broken:", "if not outcome.broken:", "rlt/test_offset.py"),
    Mutation("a trial has the present actor's offset", ROLLOUTS,
             "found[env] = actor.offset[tasks[env]].cpu().numpy() / self.action_unit",
             "found[env] = self._offset_table()[tasks[env]]", "rlt/test_offset.py"),
    Mutation("the VLA has another offset than none", ROLLOUTS,
             '"vla") & self._vla_has_offset] = 0.0', '"vla") & self._vla_has_offset] = 1.0', "rlt/test_offset.py"),
    Mutation("episodes without noise count as the search's", OFFSET,
             "self.counted[task] += outcome.searching", "self.counted[task] += 1", "rlt/test_offset.py"),
    Mutation("a trial that was abandoned stays a sample", OFFSET,
             "self.tried[noisy & ~self.searching] = np.nan", "self.tried[noisy & ~noisy] = np.nan",
             "rlt/test_offset.py"),
    Mutation("the offset goes the wrong way", OFFSET,
             "return -float(near.sum()), near @ (vector - tried) / length**2",
             "return float(near.sum()), near @ (tried - vector) / length**2", "rlt/test_offset.py"),
    Mutation("the slow copy of the actor keeps its offset", POLICIES,
             "for actor in (self.actor, self.actor_target):\n            actor.offset",
             "for actor in (self.actor,):\n            actor.offset", "rlt/test_offset.py"),
    Mutation("the network follows what an offset could follow", POLICIES,
             "return gradient - (is_due @ mean)", "return gradient - 0.0 * (is_due @ mean)", "rlt/test_offset.py"),
    Mutation("the gate does not give way to the search", "common/policy_gate.py",
             "self.share / 2.0 if self.gives_way", "self.share if self.gives_way", "rlt/test_offset.py"),
    Mutation("a task that is practiced less needs a whole opening", OFFSET,
             "ended >= self.opening * self.shares[task]", "ended >= self.opening", "rlt/test_offset.py"),
    # ------------------------------------------------------------------------------------ several tasks
    Mutation("the easiest tasks are practiced most", TASK_GATE,
             "4.0 * rate * (1.0 - rate)", "3.0 * rate", "common/test_task_gate.py"),
    Mutation("a task's weight does not follow its deployed actor", GATE,
             "[self.baseline] if self.best is None else", "[self.baseline] if self.baseline else",
             "common/test_task_gate.py"),
    Mutation("a resumed run begins with even weights", OFF_POLICY,
             "self.gate.restart(self.n_envs)\n            self.gate.weigh_tasks(self.env)",
             "self.gate.restart(self.n_envs)\n            pass", "common/test_task_gate.py"),
    Mutation("the search does not know the weights", ROLLOUTS,
             "np.array(self.gate.weights_told) / max(self.gate.weights_told)", "np.ones(len(self.gate.weights_told))",
             "common/test_task_gate.py"),
    Mutation("one horizon for all tasks", TRIALS,
             "horizon[row.task_id] if isinstance(horizon, Mapping)",
             "max(horizon.values()) if isinstance(horizon, Mapping)", "common/test_trials.py"),
    # ------------------------------------------------------------------------------------ networks
    Mutation("dropped references are missing from the sum, too", POLICIES,
             "apply(reference + self.offsets(obs) + output", "apply(seen + self.offsets(obs) + output",
             "rlt/test_updates.py"),
    Mutation("the untrained actor is not the VLA", POLICIES,
             "nn.init.zeros_(last.weight)", "pass", "rlt/test_start.py"),
    Mutation("critics see the reference", POLICIES,
             "self.ensemble(self.features_extractor(obs), members",
             'self.ensemble(self.features_extractor(obs) + obs["vla_ref"].mean(), members',
             "rlt/test_networks.py"),
    Mutation("bfloat16 always", POLICIES,
             'in_bfloat16 = self.precision == "bfloat16" or', 'in_bfloat16 = self.precision != "" or',
             "rlt/test_critic_precision.py"),
    Mutation("a unit on the border never comes back: torch's gradient of clamp", TORCH,
             "outward = ((x >= 1.0) & (grad < 0.0)) | ((x <= -1.0) & (grad > 0.0))", "outward = x.abs() >= 1.0",
             "rlt/test_networks.py"),
    Mutation("a unit on the border is pushed ever further out: straight-through gradient", TORCH,
             "return grad.masked_fill(outward, 0.0)", "return grad", "rlt/test_networks.py"),
    Mutation("proprio is not centered", FEATURES,
             "(linear - self.center) * self.inverse_scale", "linear * self.inverse_scale", "rlt/test_networks.py"),
    Mutation("RL token is not normalized", FEATURES,
             'self.token_norm(observations["z_rl"].float())', 'observations["z_rl"].float()', "rlt/test_updates.py"),
    Mutation("rotations the other way round", FEATURES,
             "x * y * rest + z * sin,", "x * y * rest - z * sin,", "rlt/test_updates.py"),
    # ------------------------------------------------------------------------------------ rollouts and counting
    Mutation("warm-up with noise", ROLLOUTS,
             "return reference, reference.copy()",
             "return (noisy := (reference * 0.99).astype(np.float32)), noisy.copy()", "rlt/test_start.py"),
    Mutation("reference dropout also in rollouts", ROLLOUTS,
             "self.policy.training_actor(observation).cpu()",
             "self.policy.training_actor(observation, th.zeros(n_envs, 1)).cpu()", "rlt/test_updates.py"),
    Mutation("noise in rollouts without the unit of action", ROLLOUTS,
             "np.asarray(self.exploration_std) * self.action_unit", "np.asarray(self.exploration_std)",
             "rlt/test_start.py"),
    Mutation("one share of the correction for all environments", ROLLOUTS,
             "size=(count, n_envs, 1, 1))", "size=(count, 1, 1, 1))", "rlt/test_start.py"),
    Mutation("the critics choose the chunk that they like least", ROLLOUTS,
             "values.argmax(0)", "values.argmin(0)", "rlt/test_start.py"),
    Mutation("critics choose before they have learned", ROLLOUTS,
             "candidates > 1 and not (self._warming_up or self.search_opens)", "candidates > 1", "rlt/test_start.py"),
    Mutation("the gripper's critic does not act before the network learns", RLT,
             "elif copies and self.policy.gripper_training is not None:", "elif False:", "rlt/test_gripper_critic.py"),
    Mutation("the VLA's episodes count as the actor's, which reverses the gripper", ROLLOUTS,
             "self._corrects[self._tasks()] & (self.policy.gripper_training is not None)", "np.zeros(1, dtype=bool)",
             "rlt/test_gripper_critic.py"),
    Mutation("the gripper's critic acts in all tasks", "rlt/gripper_critic.py",
             "self.active[task_rows(observations)]", "self.active.any()", "rlt/test_gripper_critic.py"),
    Mutation("the pull reverses the gripper in all tasks", "rlt/gripper.py",
             "if TASK in observations:", "if False:", "rlt/test_gripper.py"),
    Mutation("the trial of a task counts episodes after its end", "rlt/gripper.py",
             "self.trying[tasks[env]] and not", "not", "rlt/test_gripper.py"),
    Mutation("a trial of the gripper goes on for ever", "rlt/gripper.py",
             "len(self.ended[task]) >= self.EPISODES", "False", "rlt/test_gripper.py"),
    Mutation("episodes with a reversed gripper tell the search about the offset", ROLLOUTS,
             "self.search.give_up(self.gripper_trial.reversed)", "pass", "rlt/test_gripper.py"),
    Mutation("collectors keep the critics that they began with", "collectors/collector.py",
             ', "critic_target": critics}', "}", "collectors/test_collectors.py"),
    Mutation("another model's parameters are taken for sent", "collectors/vec_env.py",
             "self._model, self._sent = model, {}", "self._model = model", "collectors/test_collectors.py"),
    Mutation("episodes in collectors have the player of the first task", "collectors/collector.py",
             "names[task] for names, task", "names[0] for names, task", "collectors/test_collectors.py"),
    Mutation("a rejected actor of one task ends the trials of all", "collectors/collector.py",
             "(self.trials != before)[tasks]", "(self.trials != before).any()", "collectors/test_collectors.py"),
    Mutation("collectors do not follow the tasks' weights", "collectors/vec_env.py",
             "model.collecting_state(), self._weights)", "model.collecting_state())", "collectors/test_collectors.py"),
    Mutation("a new collector begins with equal weights", "collectors/vec_env.py",
             "int(noise >> 1), self._weights", "int(noise >> 1), None", "collectors/test_collectors.py"),
    Mutation("episodes in collectors count for every task", "common/task_gate.py",
             "began & (tasks == task)", "began", "collectors/test_collectors.py"),
    Mutation("each variant has features of its own", ROLLOUTS,
             "if isinstance(critics.features_extractor, RLTFeatures):", "if False:", "rlt/test_start.py"),
    Mutation("the noise-free episodes play a share of the correction", ROLLOUTS,
             "chunk[noisy] = self._with_noise(observation, reference, correction, action_noise)[noisy]",
             "chunk = self._with_noise(observation, reference, correction, action_noise).astype(np.float32)",
             "rlt/test_gated_rlt.py"),
    Mutation("held noise changes within a chunk", NOISE,
             "np.tile(np.random.normal(0.0, self.sigma), (self.chunk_length, 1))",
             "np.random.normal(0.0, self.sigma, (self.chunk_length, len(self.sigma)))", "rlt/test_start.py"),
    Mutation("unit of action without a floor", NOISE,
             "np.clip(SPREADS * spread, LOWEST_UNIT, HIGHEST_UNIT)", "np.clip(SPREADS * spread, 0.0, HIGHEST_UNIT)",
             "rlt/test_recipe.py"),
    Mutation("unit of action without a cap", NOISE,
             "np.clip(SPREADS * spread, LOWEST_UNIT, HIGHEST_UNIT)", "np.clip(SPREADS * spread, LOWEST_UNIT, None)",
             "rlt/test_recipe.py"),
    Mutation("unit of action is measured again after the warm-up", ROLLOUTS,
             "if self._measured_unit is not None:", "if False:", "rlt/test_recipe.py"),
    Mutation("the VLA's chunks are played outside [-1, 1]", ROLLOUTS,
             'np.clip(np.asarray(self._last_obs["vla_ref"], dtype=np.float32), -1.0, 1.0)',
             'np.asarray(self._last_obs["vla_ref"], dtype=np.float32)', "rlt/test_start.py"),
    Mutation("noise leads out of [-1, 1]", ROLLOUTS,
             "np.clip(reference + correction * share + noise, -1.0, 1.0)", "(reference + correction * share + noise)",
             "rlt/test_start.py"),
    Mutation("a direct actor plays before it is fitted to the VLA", ROLLOUTS,
             "if self.policy.starts_at_vla or not self._warming_up:", "if True:", "rlt/test_start.py"),
    Mutation("fractions of updates are lost", OFF_POLICY,
             "self._update_credit -= due", "self._update_credit = 0.0", "rlt/test_learn.py"),
    Mutation("updates are counted per vector step, not per stored row", OFF_POLICY,
             "self.utd * (replay_buffer.rows_stored - stored)", "self.utd * self.n_envs", "rlt/test_interventions.py"),
    Mutation("rows of the warm-up are owed updates", OFF_POLICY,
             "if self.num_timesteps > self.learning_starts:", "if True:", "rlt/test_learn.py"),
    Mutation("the actor moves one update too early", OFF_POLICY,
             "self._n_updates <= self.critic_warmup_updates", "self._n_updates < self.critic_warmup_updates",
             "rlt/test_learn.py"),
    Mutation("updates of the critics' warm-up come instead of the others", OFF_POLICY,
             "return due + max(self.critic_warmup_updates - self._n_updates, 0)",
             "return max(self.critic_warmup_updates - self._n_updates, due)", "rlt/test_learn.py"),
    Mutation("a loaded replay buffer ignores the model's settings", OFF_POLICY,
             "buffer.take_settings_from(made)", "pass", "rlt/test_save_load.py"),
    Mutation("a gate without a warm-up is accepted", SETTINGS,
             "starts = model.gate is None or model.learning_starts > 0", "starts = True", "rlt/test_gated_rlt.py"),
    Mutation("q_bounds without a range are accepted", SETTINGS,
             "bounds[0] < bounds[1]", "bounds[0] <= bounds[1]", "rlt/test_settings.py"),
    # ------------------------------------------------------------------------------------ what an environment tells
    Mutation("the chunk that was asked for counts as executed", OUTCOME,
             'np.asarray(info["executed_actions"])', "np.asarray(action)", "common/test_chunk_outcome.py"),
    Mutation("the critic learns from what the VLA does before the critical phase", OUTCOME,
             "return self.critical_chunk is not False", "return True", "rlt/test_interventions.py"),
    Mutation("seeds do not reach the environment", VEC_ENV,
             "self.env.reset(seed=seeds, ", "self.env.reset(seed=None, ", "common/test_vec_env.py"),
    Mutation("last observation of another environment", VEC_ENV,
             "value = None if final is None else final[index]", "value = None if final is None else final[0]",
             "common/test_vec_env.py"),
    Mutation("a time-out wins over a termination in the same step", VEC_ENV,
             "bool(truncations[index] and not terminations[index])", "bool(truncations[index])",
             "common/test_vec_env.py"),
    Mutation("observations change after they were handed out", VEC_ENV,
             "return {key: np.array(obs[key]) for", "return {key: np.asarray(obs[key]) for", "common/test_vec_env.py"),
    Mutation("realized returns discount per chunk", BIAS,
             "self.discounts[index] *= self.gamma**outcome.steps", "self.discounts[index] *= self.gamma",
             "rlt/test_learn.py"),
    Mutation("control steps count whole chunks", BIAS,
             "self.control_steps += outcome.steps", "self.control_steps += len(outcome.step_rewards)",
             "rlt/test_learn.py"),
    Mutation("an episode keeps its promise across a reset from outside", OFF_POLICY,
             "self._value_bias.restart(self.n_envs)", "pass", "rlt/test_learn.py"),
    Mutation("returns outside q_bounds are not seen where they are discounted at the start", BIAS,
             "ends = (float(self.returns[index]), discounted)", "ends = (float(self.returns[index]),)",
             "rlt/test_q_bounds.py"),
    Mutation("an episode that a broken simulator ended counts as over-estimated", BIAS,
             "if not np.isnan(self.promised[index]) and not outcome.broken:",
             "if not np.isnan(self.promised[index]):", "rlt/test_learn.py"),
    # ------------------------------------------------------------------------------------ deployment gate
    Mutation("the warm-up does not measure the VLA", ROLLOUTS,
             "self.gate.play_vla(self._last_obs)", "self.gate.noise_free[:] = True", "rlt/test_gate_in_learn.py"),
    Mutation("only a share of the warm-up's episodes measures the VLA", GATE,
             'self.take_seats(np.ones(self.n_envs, dtype=bool), "vla")',
             'self.take_seats(np.random.random(self.n_envs) < self.share, "vla")', "rlt/test_gate_in_learn.py"),
    Mutation("a second learn() credits an actor with the VLA's warm-up", OFF_POLICY,
             "self.gate.begin()", "pass", "rlt/test_gate_in_learn.py"),
    Mutation("noisy trials", ROLLOUTS,
             "else ~self.gate.noise_free", "else np.ones(n_envs, dtype=bool)", "rlt/test_gate_in_learn.py"),
    Mutation("the baseline is played by the actor", SEATS,
             "chunks[by_vla] = reference[by_vla]", "pass", "common/test_policy_gate.py"),
    Mutation("what the VLA has done before training is forgotten when a run begins", GATE,
             "self.baseline, self.known = self._baseline_of(self.known), []",
             "self.baseline, self.known = self._baseline_of([]), []", "common/test_policy_gate.py"),
    Mutation("successes beyond the training horizon count in the baseline", "common/trials.py",
             "row.success and row.steps == steps", "row.success", "common/test_trials.py"),
    Mutation("a run does not tell the gate what the VLA has done", "experiment/session.py",
             'hasattr(self.model, "know_vla")', "False", "experiment/test_train.py"),
    Mutation("an actor goes on trial before the baseline is complete", GATE,
             "if ready and not self.on_trial and self.baseline.complete:", "if ready and not self.on_trial:",
             "common/test_policy_gate.py"),
    Mutation("an actor goes on trial while only the critics learn", ROLLOUTS,
             "ready=not self._warming_up", "ready=True", "rlt/test_gate_in_learn.py"),
    Mutation("the actor that learns plays the trials", SEATS,
             "tried = policy.actor_on_trial(observation)", "tried = policy.training_actor(observation)",
             "common/test_policy_gate.py"),
    Mutation("the online actor goes on trial, not the one that practices", POLICIES,
             "self.actor_on_trial.load_state_dict(self.training_actor.state_dict())",
             "self.actor_on_trial.load_state_dict(self.actor.state_dict())", "rlt/test_mutants.py"),
    Mutation("the present actor is deployed instead of the one that was tried", GATE,
             "self._pass(policy, policy.actor_on_trial.state_dict(),",
             "self._pass(policy, policy.training_actor.state_dict(),",
             "common/test_policy_gate.py"),
    Mutation("predict() plays the actor that practices", POLICIES,
             "self.actor_deployed(observation) if self.gated else self.training_actor(observation)",
             "self.training_actor(observation)", "rlt/test_gated_rlt.py"),
    Mutation("peeking: a verdict before all trials have ended", TRIALS,
             "    if len(trials) < n:", "    if len(trials) < n // 2:", "common/test_trials.py"),
    Mutation("trials count in the order of their end", TRIALS,
             "[trial for trial in self.trials[:n] if trial.success is not None]",
             "[trial for trial in self.trials if trial.success is not None][:n]", "common/test_trials.py"),
    Mutation("a sample is complete before its last episodes have ended", TRIALS,
             "return not self.wanted and all(trial.success is not None for trial in self.trials)",
             "return not self.wanted", "common/test_trials.py"),
    Mutation("a reset keeps the short episodes of those that were running", TRIALS,
             "[trial for trial in self.trials if trial.start <= last]",
             "[trial for trial in self.trials if trial.success is not None]", "common/test_trials.py"),
    Mutation("a reset looks back only as far as the running episodes are old", GATE,
             "self._longest = max(self._longest, self.clock - int(self._begun[env]))", "pass",
             "common/test_policy_gate.py"),
    Mutation("a gate that is loaded goes on with episodes of before", GATE,
             "self._open_seats(self.n_envs)", "pass", "common/test_policy_gate.py"),
    Mutation("steps of different tasks are compared", TRIALS,
             "[float(t.steps / unit[t.task]) for t in mine if t.task in unit], [float(t.steps / unit[t.task])",
             "[float(t.steps) for t in mine if t.task in unit], [float(t.steps)", "common/test_trials.py"),
    Mutation("the level of the confirmation is not the one that was set", GATE,
             "self.baseline, self.level, self._by_speed", "self.baseline, 0.1, self._by_speed",
             "common/test_policy_gate.py"),
    Mutation("an audition is tested against both alternatives", GATE,
             'alternative="greater")', 'alternative="two-sided")', "common/test_policy_gate.py"),
    Mutation("trials of the screening count in the confirmation", GATE,
             "self.trials.trials[self.window :])", "self.trials.trials)", "common/test_policy_gate.py"),
    Mutation("trials with an expert's help count", GATE,
             "void = outcome.broken or outcome.taken_over", "void = outcome.broken", "common/test_policy_gate.py"),
    Mutation("a loser of an audition stays deployed", SEATS,
             "        policy.deploy(before)", "        pass", "callbacks/test_candidates.py"),
    Mutation("the last actor that passes is deployed, not the best", GATE,
             "self.contenders.sort(key", "sorted(self.contenders, key", "common/test_contenders.py"),
    Mutation("an actor that is as good does not replace the one before", GATE,
             "self.contenders.insert(0,", "self.contenders.insert(len(self.contenders),", "common/test_contenders.py"),
    Mutation("the actor that comes back is not deployed", GATE,
             "if self.contenders[0] is not before or", "if", "common/test_contenders.py"),
    Mutation("selection states do not count as evidence", CONTENDERS,
             "evidence = ((self.trials, vla_trials), (self.states, vla_states))",
             "evidence = ((self.trials, vla_trials),)", "common/test_contenders.py"),
    Mutation("all kinds of episodes weigh the same", CONTENDERS,
             "weight = sum((Fraction(n * n0, n + n0)", "weight = sum((Fraction(n + n0, 4)",
             "common/test_contenders.py"),
    Mutation("a kept actor follows the training actor", CONTENDERS,
             "value.cpu().clone()", "value.cpu()", "common/test_contenders.py"),
    Mutation("episodes on other states stay evidence", GATE,
             "                one.states = Sample()", "                pass", "common/test_contenders.py"),
    Mutation("evaluations of kept actors are lost by a resume", SELECTION,
             'for name, result in state["played"].items()', "for name, result in ()", "callbacks/test_audition.py"),
    Mutation("another actor's trials count as those of the one that an audition deploys", GATE,
             "policy.training_actor.state_dict(), Sample(), states)",
             "policy.training_actor.state_dict(), self.trials, states)", "common/test_policy_gate.py"),
    Mutation("a gain in one task hides a loss in another", TRIALS,
             "fisher_p((k0, n0, k, n)) <= level", "fisher_p((k, n, k0, n0)) <= level", "common/test_trials.py"),
    Mutation("the observed number of successes does not belong to its tail", STATS,
             "distribution[observed:].sum()", "distribution[observed + 1 :].sum()", "common/test_trials.py"),
    Mutation("slower actors are taken for quicker ones", STATS,
             'alternative="less"', 'alternative="greater"', "common/test_trials.py"),
    # ------------------------------------------------------------------------------------ evaluation and selection
    Mutation("McNemar by the order of the rows instead of by state", COMPARE,
             "fixed = sum(b[key] and not a[key] for key in a)",
             "fixed = sum(y and not x for x, y in zip(a.values(), b.values(), strict=True))",
             "evaluation/test_evaluate.py"),
    Mutation("a task is below the VLA's interval where it is below its rate", COMPARE,
             "theirs[task].rate < part.interval[0]", "theirs[task].rate < part.rate", "evaluation/test_evaluate.py"),
    Mutation("the paired test is reversed", GATE,
             "mcnemar_p(fixed, broken,", "mcnemar_p(broken, fixed,", "callbacks/test_candidates.py"),
    Mutation("evaluations are random", EVALUATE,
             "policy.predict(obs, deterministic=True)[0]", "policy.predict(obs, deterministic=False)[0]",
             "evaluation/test_evaluate.py"),
    Mutation("an evaluation goes on in the sequence of states where the last one has ended", EVALUATE,
             "env.reset(options=options)", "env.reset()", "evaluation/test_evaluate.py"),
    Mutation("an outcome is written down for another state", EVALUATE,
             "pairs = [shard[0] + ((n_envs - 1 - i) + played[i]", "pairs = [shard[0] + (i + played[i]",
             "evaluation/test_evaluate.py"),
    Mutation("an episode that a broken simulator ended counts as a failure", EVALUATE,
             'if _per_env(final, "worker_restarted", i, False):', "if False:", "evaluation/test_evaluate.py"),
    Mutation("episodes that an environment plays beyond its share count", EVALUATE,
             "            if played[i] < share[i]:", "            if True:", "evaluation/test_evaluate.py"),
    Mutation("the last model is kept instead of the best one", SELECTION,
             "if self.best is None or _order(result) >= _order(self.best):", "if True:",
             "callbacks/test_audition.py"),
    Mutation("the practicing actor's evaluation is replaced by the VLA's", SELECTION,
             "else self._deployed(gate)), practicing", "else self._deployed(gate)), deployed",
             "callbacks/test_candidates.py"),
    Mutation("a successful model is the better one the slower it is", SELECTION,
             "-np.inf if np.isnan(steps) else -steps", "-np.inf if np.isnan(steps) else steps",
             "callbacks/test_candidates.py"),
    Mutation("networks that are put back leave their trial to another actor", SELECTION,
             "gate.abandon_trial()  # the actor", "pass  # the actor", "callbacks/test_audition.py"),
], start=1))
# fmt: on


def run_tests(tree: Path, files: list[str]) -> tuple[int, str]:
    """
    :param tree: copy of the repository
    :param files: test files
    :return: pytest's exit status (-1: it hung), and what it said
    """
    # no bytecode: a mutation can keep size and time stamp (in seconds) of the file
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    env = {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"} | env
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {PATIENCE} s"
    return done.returncode, done.stdout + done.stderr


def try_out(tree: Path, mutation: Mutation) -> tuple[str, str]:
    """
    :param tree: copy of the repository, as it was before and is afterwards
    :param mutation: what to break in it
    :return: "killed" and the name of the test that has failed; "SURVIVED"; "NO VERDICT" and pytest's last line
    """
    before = mutation.apply(tree)
    try:
        status, said = run_tests(tree, mutation.test_files)
    finally:
        (tree / mutation.path).write_text(before)
    # the status alone does not tell a test that fails from a file that cannot be collected
    failed = re.search(r"^FAILED (?:tests/rlt_sb3/)?(.+?)(?: - .*)?$", said, re.MULTILINE)
    if status == 1 and failed:
        return "killed", failed[1]
    return ("SURVIVED", mutation.tests) if status == 0 else ("NO VERDICT", said.strip().splitlines()[-1])


def copy_of_repository(folder: Path) -> Path:
    """
    :param folder: where to
    :return: the copy
    """
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main() -> int:
    """:return: exit status: 0 if all mutations are killed"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="numbers of mutations, e.g. 3,7 or 20-30")
    parser.add_argument("--jobs", type=int, default=2, help="how many at the same time")
    options = parser.parse_args()
    numbers = list(MUTATIONS)
    if options.only:
        ends = [list(map(int, part.split("-"))) for part in options.only.split(",")]
        numbers = [number for number in numbers if any(end[0] <= number <= end[-1] for end in ends)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(options.jobs):
            trees.put(copy_of_repository(Path(temporary, str(job))))
        tree = trees.get()
        where = subprocess.run(
            [sys.executable, "-c", "import rlt_sb3; print(rlt_sb3.__file__)"],
            cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert Path(where.strip()).is_relative_to(tree), f"Python imports {where.strip()}, not the copy in {tree}."
        files = sorted({name for number in numbers for name in MUTATIONS[number].test_files})
        status, said = run_tests(tree, files)
        trees.put(tree)
        if status != 0:
            print(f"The tests do not pass as they are:\n{said}")
            return 1
        print(f"{len(files)} test files pass as they are ({time.monotonic() - began:.0f} s)", flush=True)

        def one(number: int) -> str:
            tree, start = trees.get(), time.monotonic()
            try:
                verdict, by = try_out(tree, MUTATIONS[number])
            finally:
                trees.put(tree)
            seconds = f"{time.monotonic() - start:.0f} s"
            print(f"{number:3} {verdict:10} {seconds:>5}  {MUTATIONS[number].what}: {by}", flush=True)
            return verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(one, numbers))
    others = [number for number, verdict in zip(numbers, verdicts, strict=True) if verdict != "killed"]
    print(f"{len(numbers) - len(others)} of {len(numbers)} killed in {time.monotonic() - began:.0f} s")
    if others:
        print(f"not killed: {', '.join(map(str, others))}")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
