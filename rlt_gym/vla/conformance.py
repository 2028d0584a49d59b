"""What a user's own VLA should pass before anything is trained on it: ``rlt vla check``, :func:`check_vla`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlt_gym.vla.base import ORIENTATIONS, TOKEN_KINDS, FrozenVLA, VLAObs, VLAOutput, VLASpec, require_vla
from rlt_gym.vla.batches import run_vla
from rlt_gym.vla.probing import example_observations, networks_of, orientation_of, sums_of

#: Instructions of different lengths.
TASKS = ("open the drawer", "put the bowl on the plate", "stack the left cup on the right one", "push the button")
#: Appended to one row's instruction, which makes all rows of the batch longer.
LONGER = " and then go back to where the hand was before and wait there until somebody says that it is enough"
#: Smallest difference of two outputs that counts as one.
DIFFERENT = 1e-6


@dataclass(frozen=True)
class CheckResult:
    """
    One line of the table of ``rlt vla check``.

    :param name: Of the check.
    :param status: ``"pass"``, ``"FAIL"``, ``"skip"`` or ``"info"``.
    :param detail: What was found.
    """

    name: str
    status: str
    detail: str


class _Skipped(Exception):
    """What a check needs is not there."""


class _Info(Exception):
    """A check has something to say that is neither right nor wrong."""


@dataclass
class _Probe:
    """A VLA with observations and its output for all of them."""

    vla: FrozenVLA
    obs: VLAObs
    tasks: list[str]
    seeds: list[int]
    tolerance: float
    given: dict[str, np.ndarray]
    sums: Mapping[str, int]
    first: VLAOutput | None = None

    @property
    def spec(self) -> VLASpec:
        return self.vla.spec

    @property
    def output(self) -> VLAOutput:
        if self.first is None:
            self.first = self.run()
        return self.first

    def run(
        self,
        rows: Sequence[int] | None = None,
        tasks: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        obs: VLAObs | None = None,
    ) -> VLAOutput:
        """One forward pass (or as many as ``max_batch`` demands); what is not given is as in the first one."""
        rows = range(len(self.tasks)) if rows is None else rows
        pictures = {key: np.asarray(value)[list(rows)] for key, value in (obs or self.given).items()}
        tasks, seeds = tasks or self.tasks, seeds or self.seeds
        return run_vla(self.vla, pictures, [tasks[i] for i in rows], [seeds[i] for i in rows])

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"The VLA {self.spec.name!r} breaks the FrozenVLA contract: {message}.")

    def equal(self, first: VLAOutput, second: VLAOutput, what: str) -> None:
        """Compare valid tokens and chunk; pads may be more or fewer."""
        left, right = first.tokens[first.mask].float(), second.tokens[second.mask].float()
        self.require(left.shape == right.shape, f"{what} has {len(right)} valid tokens, not {len(left)}")
        kinds = torch.equal(first.kind[first.mask], second.kind[second.mask])
        self.require(kinds, f"{what} has tokens of other kinds")
        for name, a, b in (("tokens", left, right), ("chunk", first.chunk, second.chunk)):
            close = torch.allclose(a, b, rtol=self.tolerance, atol=self.tolerance)
            largest = float((a - b).abs().max()) if a.numel() else 0.0
            limit = f"{self.tolerance:g}"
            self.require(close, f"{what} has other {name}: they differ by up to {largest:.2g}, allowed is {limit}")

    def changed(self, **change: Any) -> list[bool]:
        """For each row whether its output is another one after a change of the input."""
        other = self.run(**change)
        return [_difference(_row(self.output, i), _row(other, i)) > DIFFERENT for i in range(len(self.tasks))]


def examine_vla(
    vla: FrozenVLA,
    obs: VLAObs | None = None,
    tasks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tolerance: float = 1e-4,
) -> list[CheckResult]:
    """
    Run every check of :data:`CHECKS` and report on each. What the VLA raises is a failure of the check.

    :param vla: The VLA.
    :param obs: Raw observations of B >= 2 rows that differ; ``None`` = made up
        (:func:`~rlt_gym.vla.probing.example_observations`).
    :param tasks: One instruction per row; ``None`` = those of :data:`TASKS`.
    :param seeds: One number per row, all different; ``None`` = 0, 1, ...
    :param tolerance: Largest difference, absolute and relative, between a row in the batch and the same row alone;
        a batch of another size rounds otherwise, in half precision more than in single.
    :return: One result per check; the first alone if the VLA gives no output at all.
    :raises ValueError: For fewer than two rows.
    """
    results = []
    for name, status, detail, _ in _examine(vla, obs, tasks, seeds, tolerance):
        results.append(CheckResult(name, status, " ".join(detail.split())))
    return results


def check_vla(
    vla: FrozenVLA,
    obs: VLAObs | None = None,
    tasks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tolerance: float = 1e-4,
) -> VLAOutput:
    """
    Run a VLA and compare it with the contract of :class:`~rlt_gym.vla.base.FrozenVLA`.

    :data:`CHECKS` says what is checked. The arguments are those of :func:`examine_vla`.

    :param vla: The VLA.
    :param obs: Raw observations of B >= 2 rows that differ; ``None`` = made up.
    :param tasks: One instruction per row.
    :param seeds: One number per row, all different.
    :param tolerance: Largest difference between a row in the batch and the same row alone.
    :return: The output for the whole batch.
    :raises ValueError: Naming the first rule that is broken.
    """
    probe = _probe(require_vla(vla), obs, tasks, seeds, tolerance)
    for _, status, _, error in _examine(vla, obs, tasks, seeds, tolerance, probe):
        if status == "FAIL" and error is not None:
            raise error
    return probe.output


def _probe(
    vla: FrozenVLA, obs: VLAObs | None, tasks: Sequence[str] | None, seeds: Sequence[int] | None, tolerance: float
) -> _Probe:
    tasks = list(TASKS if tasks is None else tasks)
    if len(tasks) < 2:
        raise ValueError(f"check_vla was given {len(tasks)} rows; it needs at least two to tell them apart.")
    obs = example_observations(vla.spec, len(tasks)) if obs is None else obs
    seeds = list(range(len(tasks))) if seeds is None else list(seeds)
    given = {key: np.array(value) for key, value in obs.items()}
    return _Probe(vla, obs, tasks, seeds, tolerance, given, sums_of(vla))


def _examine(
    vla: FrozenVLA,
    obs: VLAObs | None,
    tasks: Sequence[str] | None,
    seeds: Sequence[int] | None,
    tolerance: float,
    probe: _Probe | None = None,
) -> Any:
    """Yield name, status, detail and error of each check."""
    try:
        require_vla(vla)
    except ValueError as error:
        yield "contract", "FAIL", str(error), error
        return
    probe = probe or _probe(vla, obs, tasks, seeds, tolerance)
    for name, check in CHECKS.items():
        broken: Exception | None = None
        try:
            status, detail = "pass", check(probe)
        except _Skipped as reason:
            status, detail = "skip", str(reason)
        except _Info as said:
            status, detail = "info", str(said)
        except ValueError as error:
            status, detail, broken = "FAIL", str(error), error
        except Exception as error:  # whatever a user's code raises
            status, detail, broken = "FAIL", f"{type(error).__name__}: {error}", error
        yield name, status, detail, broken
        if broken is not None and probe.first is None:
            return  # without an output nothing else can be said


def _check_output(probe: _Probe) -> str:
    """Check that shapes, types and ranges are those of the specification."""
    output = probe.output
    tokens, chunk = output.tokens, output.chunk
    return f"tokens {tokens.dtype} {tuple(tokens.shape)}, chunk {tuple(chunk.shape)}".replace("torch.", "")


def _check_tokens(probe: _Probe) -> str:
    """Check number, kinds, device and finiteness of the tokens, which :meth:`VLAOutput.check` leaves open."""
    output, spec = probe.output, probe.spec
    count, device = output.tokens.shape[1], torch.empty(0, device=probe.vla.device).device
    limit = spec.max_tokens
    probe.require(limit is None or count <= limit, f"there are {count} tokens, more than spec.max_tokens = {limit}")
    probe.require(bool(output.mask.any(dim=1).all()), "a row has no valid token")
    probe.require(bool(output.tokens[output.mask].isfinite().all()), "valid tokens are NaN or infinite")
    probe.require(not output.tokens.is_inference(), "tokens are inference tensors; use torch.no_grad() instead")
    kinds = set(output.kind[output.mask].unique().tolist())
    known = {number: kind for kind, number in TOKEN_KINDS.items() if kind != "pad"}
    probe.require(kinds <= set(known), f"valid tokens have the kinds {sorted(kinds)}; known are {sorted(known)}")
    names = [name for number, name in known.items() if number in kinds]
    stated = spec.kinds
    probe.require(stated is None or set(stated) == set(names), f"tokens are of {names}, spec.kinds says {stated}")
    for name in ("tokens", "mask", "kind", "chunk"):
        found = getattr(output, name).device
        probe.require(found == device, f"{name} is on {found}, but vla.device is {device}")
    grids = spec.picture_grids
    if grids is not None:
        wanted = sum(rows * columns for _, rows, columns in grids)
        pictures = (output.mask & (output.kind == TOKEN_KINDS["image"])).sum(dim=1)
        row = int((pictures != wanted).int().argmax())
        wrong = f"row {row} has {int(pictures[row])} valid image tokens, spec.picture_grids {list(grids)} say {wanted}"
        probe.require(bool((pictures == wanted).all()), wrong)
    valid = output.mask.sum(dim=1)
    return f"{int(valid.min())} to {int(valid.max())} valid of {count}: {', '.join(names)}"


def _check_observation(probe: _Probe) -> str:
    """Check that ``forward()`` leaves the arrays that it is given as they are."""
    mine = {key: value.copy() for key, value in probe.given.items()}
    run_vla(probe.vla, mine, probe.tasks, probe.seeds)
    for key, value in probe.given.items():
        same = np.array_equal(mine[key], value)
        probe.require(same, f"forward() changes the observation {key!r} that it was given")
    return "left as it was"


def _check_repeat(probe: _Probe) -> str:
    """Check that the same call gives the same."""
    probe.equal(probe.output, probe.run(), "the same call a second time")
    return "the same call gives the same"


def _check_order(probe: _Probe) -> str:
    """Check that a row's place in the batch does not matter."""
    order = [len(probe.tasks) - 1, *range(len(probe.tasks) - 1)]
    moved = probe.run(order)
    for place, row in enumerate(order):
        probe.equal(_row(probe.output, row), _row(moved, place), f"row {row} in another place")
    return "a row's place does not matter"


def _check_single(probe: _Probe) -> str:
    """Check that the other rows do not matter."""
    for row in range(len(probe.tasks)):
        alone = probe.run([row])
        probe.equal(_row(probe.output, row), _row(alone, 0), f"row {row} without the other rows")
    return "a row alone gives what it gives in a batch"


def _check_padding(probe: _Probe) -> str:
    """Check that a long instruction in another row does not matter."""
    last = len(probe.tasks) - 1
    longer = probe.run(tasks=[*probe.tasks[:last], probe.tasks[last] + LONGER])
    for row in range(last):
        probe.equal(_row(probe.output, row), _row(longer, row), f"row {row} beside a long instruction")
    return f"{longer.tokens.shape[1]} tokens beside a long instruction, the rows as before"


def _check_seeds(probe: _Probe) -> str:
    """Give one row another seed: its chunk may change only if the VLA is stochastic, the other rows' never."""
    other = probe.run(seeds=[max(probe.seeds) + 1, *probe.seeds[1:]])
    limit = probe.tolerance
    same = torch.allclose(other.chunk[0], probe.output.chunk[0], rtol=limit, atol=limit)
    if probe.spec.stochastic:
        probe.require(not same, "spec.stochastic is True, but another seed gives the same chunk")
    else:
        probe.require(same, "spec.stochastic is False, but another seed gives another chunk")
    same = torch.allclose(other.chunk[1:], probe.output.chunk[1:], rtol=limit, atol=limit)
    probe.require(same, "the seed of one row changes the chunks of other rows")
    return "noise follows from the seed, row by row" if probe.spec.stochastic else "no noise"


def _check_noise(probe: _Probe) -> str:
    """Check that chunks of given noise depend on this noise and the row alone, if the VLA takes any."""
    if probe.spec.noise is None:
        raise _Skipped("spec.noise is None: it takes no noise from outside")
    output, spec, rows = probe.run(), probe.spec, len(probe.tasks)
    shape = (2, rows, *spec.check_noise())
    noise, other = torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    chunk, same = output.chunk_of(noise, spec), partial(torch.allclose, rtol=probe.tolerance, atol=probe.tolerance)
    mixed = torch.cat([other[:1], noise[1:]])
    probe.require(same(output.chunk_of(noise, spec), chunk), "the same noise a second time gives another chunk")
    changed = output.chunk_of(mixed, spec)
    probe.require(not same(changed[0], chunk[0]), "other noise gives the same chunk")
    probe.require(same(changed[1:], chunk[1:]), "the noise of one row changes the chunks of other rows")
    for row in range(rows):
        alone = probe.run([row]).chunk_of(noise[row : row + 1], spec)
        probe.require(same(alone[0], chunk[row]), f"row {row} makes another chunk of its noise without the other rows")
    probe.require(same(probe.run().chunk, probe.output.chunk), "after given noise its own chunks are others")
    return f"chunks of given noise {spec.noise}, row by row"


def _check_pictures(probe: _Probe) -> str:
    """Check that each camera's picture matters, and which way up it is."""
    for camera in probe.spec.cameras:
        for name in ("flipped", "mirrored"):
            changed = ORIENTATIONS[name](np.asarray(probe.given[camera])).copy()
            rows = probe.changed(obs={**probe.given, camera: changed})
            probe.require(all(rows), f"the picture of {camera!r} can be {name} and the output stays the same")
    return f"flipping or mirroring a picture changes the output: {', '.join(probe.spec.cameras) or 'no cameras'}"


def _check_language(probe: _Probe) -> str:
    """Check that the instruction matters, unless the specification says otherwise."""
    rows = probe.changed(tasks=[*probe.tasks[1:], probe.tasks[0]])
    if probe.spec.language:
        probe.require(all(rows), "another instruction gives the same output (say language=False if that is meant)")
        return "another instruction changes the output"
    probe.require(not any(rows), "spec.language is False, but another instruction changes the output")
    return "the instruction is not read, as spec.language says"


def _check_state(probe: _Probe) -> str:
    """Say whether the state matters: policies without it exist."""
    rows = probe.changed(obs={**probe.given, "state": probe.given["state"][::-1].copy()})
    raise _Info("another state changes the output" if all(rows) else "the state is not read")


def _check_frames(probe: _Probe) -> str:
    """Check that the network is shown what the environment gives, in the stated orientation."""
    show = getattr(probe.vla, "frames", None)
    if show is None:
        raise _Skipped("no frames(obs), which would give the pictures as the network reads them")
    shown = show(probe.given)
    found = {}
    for camera in probe.spec.cameras:
        probe.require(camera in shown, f"frames() lacks {camera!r}")
        found[camera] = orientation_of(np.asarray(probe.given[camera]), np.asarray(shown[camera]))
        probe.require(found[camera] is not None, f"frames() shows other pictures of {camera!r} than it was given")
    stated = probe.spec.orientation
    for camera, name in found.items():
        wrong = f"the network reads the picture of {camera!r} {name}, spec.orientation says {stated!r}"
        probe.require(stated in (None, name), wrong)
    if stated is None:
        raise _Info(f"the network reads pictures {found}; spec.orientation does not say it")
    return f"the network reads the pictures {stated}"


def _check_parameters(probe: _Probe) -> str:
    """Check that nothing is trainable, in training mode, or changed by what has been run."""
    modules = networks_of(probe.vla)
    if not modules:
        raise _Skipped("no torch.nn.Module among its attributes")
    trainable = [name for module in modules for name, value in module.named_parameters() if value.requires_grad]
    probe.require(not trainable, f"{len(trainable)} parameters require gradients ({', '.join(trainable[:2])})")
    training = [type(part).__name__ for module in modules for part in module.modules() if part.training]
    probe.require(
        not training, f"{len(training)} modules are in training mode ({', '.join(training[:2])}); call eval()"
    )
    now = sums_of(probe.vla)
    changed = [name for name, value in now.items() if probe.sums.get(name) != value]
    probe.require(not changed, f"forward() changes {', '.join(changed[:3])}")
    return f"{len(now)} tensors frozen and unchanged"


def _check_fingerprint(probe: _Probe) -> str:
    """Check that the fingerprint is a string that stays."""
    first = probe.vla.fingerprint()
    probe.require(isinstance(first, str) and bool(first), f"fingerprint() gives {first!r}, not a string that says more")
    probe.require(probe.vla.fingerprint() == first, "fingerprint() gives another string when it is called again")
    return f"{first[:16]}..."


def _measure_speed(probe: _Probe) -> str:
    """Time forward passes of one row and of all rows."""
    found = []
    for count in (1, len(probe.tasks)):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            probe.run(range(count)).chunk.cpu()  # waits for the device
            times.append((time.perf_counter() - start) / count)
        found.append(f"{1000 * min(times):.1f} ms per observation in a batch of {count}")
    raise _Info(", ".join(found))


def _measure_memory(probe: _Probe) -> str:
    """Say what weights and process, and the device, take."""
    tensors = {id(value): value for module in networks_of(probe.vla) for value in module.state_dict().values()}
    weights = sum(value.numel() * value.element_size() for value in tensors.values())
    found = [f"weights {weights / 1e6:.1f} MB"]
    device = torch.device(probe.vla.device)
    if device.type == "cuda":
        found.append(f"GPU at most {torch.cuda.max_memory_allocated(device) / 1e6:.0f} MB")
    status = Path("/proc/self/status")
    if status.is_file():
        resident = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        found.append(f"process {int(resident.split()[1]) / 1e3:.0f} MB")
    raise _Info(", ".join(found))


#: Name -> check, in the order in which they run.
CHECKS: dict[str, Callable[[_Probe], str]] = {
    "output": _check_output,
    "tokens": _check_tokens,
    "observation": _check_observation,
    "repeat": _check_repeat,
    "order": _check_order,
    "single row": _check_single,
    "padding": _check_padding,
    "seed": _check_seeds,
    "noise": _check_noise,
    "pictures": _check_pictures,
    "instruction": _check_language,
    "state": _check_state,
    "orientation": _check_frames,
    "frozen": _check_parameters,
    "fingerprint": _check_fingerprint,
    "speed": _measure_speed,
    "memory": _measure_memory,
}


def _row(output: VLAOutput, row: int) -> VLAOutput:
    part = slice(row, row + 1)
    return VLAOutput(output.tokens[part], output.mask[part], output.kind[part], output.chunk[part])


def _difference(first: VLAOutput, second: VLAOutput) -> float:
    """Largest difference of valid tokens and chunk, infinite if there are other tokens."""
    left, right = first.tokens[first.mask].float(), second.tokens[second.mask].float()
    if left.shape != right.shape:
        return float("inf")
    return max(float((left - right).abs().max()), float((first.chunk - second.chunk).abs().max()))
