"""What a user's own VLA should pass before anything is trained on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlt_gym.vla.base import TOKEN_KINDS, FrozenVLA, VLAObs, VLAOutput, check_vla


def check_vla_outputs(
    vla: FrozenVLA, obs: VLAObs, tasks: Sequence[str], seeds: Sequence[int] | None = None, tolerance: float = 1e-4
) -> VLAOutput:
    """
    Run a VLA and compare it with the contract of :class:`~rlt_gym.vla.base.FrozenVLA`.

    Checked are: shapes, types and ranges; that nothing carries gradients; that the outputs are on ``vla.device``, are
    finite, and have a valid token in every row; that the observation is left as it was; that a row's result depends
    neither on the other rows nor on its place in the batch; that the same call gives the same result; that a VLA whose
    specification says ``stochastic`` draws its noise from ``seed``, row by row, and another one ignores it; that the
    fingerprint is a string that stays.

    :param vla: The VLA.
    :param obs: Raw observations of B >= 2 rows that differ, see :data:`~rlt_gym.vla.base.VLAObs`.
    :param tasks: One instruction per row.
    :param seeds: One number per row, all different; ``None`` = 0, 1, ...
    :param tolerance: Largest difference, absolute and relative, between a row in the batch and the same row alone;
        a batch of another size rounds otherwise, in half precision more than in single.
    :return: The output for the whole batch.
    :raises ValueError: Naming the first rule that is broken.
    """
    vla, batch = check_vla(vla), len(tasks)
    if batch < 2:
        raise ValueError(f"check_vla_outputs was given {batch} rows; it needs at least two to tell them apart.")
    seeds = list(range(batch)) if seeds is None else list(seeds)
    given = {key: np.array(value) for key, value in obs.items()}
    output = vla.forward(obs, list(tasks), seed=seeds).check(vla.spec, batch)
    _check_tokens(vla, output)
    for key, value in given.items():
        _require(vla, np.array_equal(obs[key], value), f"forward() changes the observation {key!r} that it was given")
    _check_equal(vla, output, vla.forward(obs, list(tasks), seed=seeds), "the same call a second time", tolerance)
    order = [batch - 1, *range(batch - 1)]
    moved = vla.forward(_rows(obs, order), [tasks[i] for i in order], seed=[seeds[i] for i in order])
    for place, row in enumerate(order):
        _check_equal(vla, _row(output, row), _row(moved, place), f"row {row} in another place", tolerance)
    for row in range(batch):
        alone = vla.forward(_rows(obs, [row]), [tasks[row]], seed=[seeds[row]]).check(vla.spec, 1)
        _check_equal(vla, _row(output, row), _row(alone, 0), f"row {row} without the other rows", tolerance)
    _check_seeds(vla, obs, tasks, seeds, output, tolerance)
    first = vla.fingerprint()
    _require(vla, isinstance(first, str) and bool(first), f"fingerprint() gives {first!r}, not a string that says more")
    _require(vla, vla.fingerprint() == first, "fingerprint() gives another string when it is called again")
    return output


def _check_tokens(vla: FrozenVLA, output: VLAOutput) -> None:
    """Check the rest of what :meth:`VLAOutput.check` checks, which runs at every step and must be quick."""
    limit, device = vla.spec.max_tokens, torch.empty(0, device=vla.device).device
    count = output.tokens.shape[1]
    _require(vla, limit is None or count <= limit, f"there are {count} tokens, more than spec.max_tokens = {limit}")
    _require(vla, bool(output.mask.any(dim=1).all()), "a row has no valid token")
    _require(vla, bool(output.tokens[output.mask].isfinite().all()), "valid tokens are NaN or infinite")
    _require(vla, not output.tokens.is_inference(), "tokens are inference tensors; use torch.no_grad() instead")
    kinds = set(output.kind[output.mask].unique().tolist())
    known = set(TOKEN_KINDS.values()) - {TOKEN_KINDS["pad"]}
    _require(vla, kinds <= known, f"valid tokens have the kinds {sorted(kinds)}; known are {sorted(known)}")
    for name in ("tokens", "mask", "kind", "chunk"):
        found = getattr(output, name).device
        _require(vla, found == device, f"{name} is on {found}, but vla.device is {device}")


def _check_seeds(
    vla: FrozenVLA, obs: VLAObs, tasks: Sequence[str], seeds: Sequence[int], output: VLAOutput, tolerance: float
) -> None:
    """One row gets another seed: its chunk may change only if the VLA is stochastic, the other rows' never."""
    changed = [max(seeds) + 1, *seeds[1:]]
    other = vla.forward(obs, list(tasks), seed=changed)
    same = torch.allclose(other.chunk[0], output.chunk[0], rtol=tolerance, atol=tolerance)
    if vla.spec.stochastic:
        _require(vla, not same, "spec.stochastic is True, but another seed gives the same chunk")
    else:
        _require(vla, same, "spec.stochastic is False, but another seed gives another chunk")
    same = torch.allclose(other.chunk[1:], output.chunk[1:], rtol=tolerance, atol=tolerance)
    _require(vla, same, "the seed of one row changes the chunks of other rows")


def _check_equal(vla: FrozenVLA, first: VLAOutput, second: VLAOutput, what: str, tolerance: float) -> None:
    """Compare valid tokens and chunk; pads may be more or fewer."""
    left, right = first.tokens[first.mask].float(), second.tokens[second.mask].float()
    _require(vla, left.shape == right.shape, f"{what} has {len(right)} valid tokens, not {len(left)}")
    kinds = torch.equal(first.kind[first.mask], second.kind[second.mask])
    _require(vla, kinds, f"{what} has tokens of other kinds")
    for name, a, b in (("tokens", left, right), ("chunk", first.chunk, second.chunk)):
        close = torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        largest = float((a - b).abs().max()) if a.numel() else 0.0
        _require(vla, close, f"{what} has other {name}: they differ by up to {largest:.2g}, allowed is {tolerance:g}")


def _rows(obs: VLAObs, rows: list[int]) -> Mapping[str, np.ndarray]:
    return {key: np.asarray(value)[rows] for key, value in obs.items()}


def _row(output: VLAOutput, row: int) -> VLAOutput:
    part = slice(row, row + 1)
    return VLAOutput(output.tokens[part], output.mask[part], output.kind[part], output.chunk[part])


def _require(vla: FrozenVLA, condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"The VLA {vla.spec.name!r} breaks the FrozenVLA contract: {message}.")
