"""Undoing normalizations and translating grippers: numbers by hand, and the formulas of the codes that train."""

import numpy as np
import pytest
import torch

from rlt_gym.core.gripper import Gripper
from rlt_gym.vla.normalization import Normalization, to_chunk

Q01, Q99 = [-0.5, 0.0, -2.0, 0.0], [0.5, 0.4, 6.0, 1.0]
LOW_HIGH = Normalization.quantiles(Q01, Q99, (True, True, True, False))

ARRAYS = pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])


@ARRAYS
@pytest.mark.parametrize(
    ("normalization", "normalized", "by_hand"),
    [
        # middle, low, high, and half as far again as high; the gripper is not normalized
        (LOW_HIGH, [0.0, 0.0, 0.0, 0.7], [0.0, 0.2, 2.0, 0.7]),
        (LOW_HIGH, [-1.0, -1.0, -1.0, 0.0], [-0.5, 0.0, -2.0, 0.0]),
        (LOW_HIGH, [1.0, 1.0, 1.0, 1.0], [0.5, 0.4, 6.0, 1.0]),
        (LOW_HIGH, [2.0, 2.0, 2.0, 2.0], [1.0, 0.6, 10.0, 2.0]),
        (Normalization.min_max([0.0, -1.0], [10.0, 3.0]), [0.5, -0.5], [7.5, 0.0]),
        (Normalization.min_max([2.0], [2.0]), [0.7], [2.0]),
        (Normalization.mean_std([1.0, -2.0], [0.5, 4.0]), [2.0, -0.25], [2.0, -3.0]),
        (Normalization.mean_std([1.0, -2.0], [0.5, 4.0], (False, True)), [2.0, -0.25], [2.0, -3.0]),
        (Normalization.mean_std([1.0], [0.5], epsilon=0.5), [2.0], [3.0]),
    ],
)
def test_numbers_computed_by_hand(make, normalization, normalized, by_hand):
    values = make(np.array([[normalized, normalized]], np.float32))
    result = normalization.unnormalize(values)
    assert type(result) is type(values) and result.dtype == values.dtype and result.shape == values.shape
    np.testing.assert_allclose(np.asarray(result[0, 1]), by_hand, rtol=1e-6, atol=1e-6)
    if 0.0 not in normalization.scale:
        np.testing.assert_allclose(
            np.asarray(normalization.normalize(result)), np.asarray(values), rtol=1e-5, atol=1e-6
        )


def test_the_formulas_of_the_codes_that_train_with_them():
    rng = np.random.default_rng(0)
    a, low, width = rng.uniform(-1.5, 1.5, (5, 8, 7)), rng.normal(size=7), rng.uniform(0.01, 2, 7)
    high, mask = low + width, np.array([True] * 6 + [False])
    openvla_oft = np.where(mask, 0.5 * (a + 1) * (high - low + 1e-8) + low, a)
    openpi_quantiles = (a + 1.0) / 2.0 * (high - low + 1e-6) + low
    openpi_mean_std = a * (width + 1e-6) + low
    lerobot_mean_std = a * width + low
    lerobot_min_max = (a + 1) / 2 * (high - low) + low
    for expected, normalization in (
        (openvla_oft, Normalization.quantiles(low, high, mask, epsilon=1e-8)),
        (openpi_quantiles, Normalization.quantiles(low, high, epsilon=1e-6)),
        (openpi_mean_std, Normalization.mean_std(low, width, epsilon=1e-6)),
        (lerobot_mean_std, Normalization.mean_std(low, width)),
        (lerobot_min_max, Normalization.min_max(low, high)),
    ):
        np.testing.assert_allclose(normalization.unnormalize(a), expected, rtol=1e-12, atol=1e-12)
    lerobot_state = (a - low) / (width + 1e-8)
    np.testing.assert_allclose(Normalization.mean_std(low, width, epsilon=1e-8).normalize(a), lerobot_state, rtol=1e-12)


@ARRAYS
def test_a_number_that_never_changes_becomes_zero(make):
    normalization = Normalization.mean_std([1.0, 2.0], [0.0, 4.0])
    np.testing.assert_array_equal(np.asarray(normalization.normalize(make(np.array([5.0, 6.0])))), [0.0, 1.0])


def test_statistics_that_do_not_fit():
    with pytest.raises(ValueError, match=r"Statistics have \[2, 1, 2\] numbers"):
        Normalization.mean_std([0.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="2 lower and 1 upper"):
        Normalization.quantiles([0.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="NaN or infinite"):
        Normalization.mean_std([0.0], [float("nan")])
    with pytest.raises(ValueError, match="statistics of 4 numbers, and the values have 7"):
        LOW_HIGH.unnormalize(np.zeros((2, 7)))
    with pytest.raises(ValueError, match="statistics of 4 numbers, and the values have 3"):
        LOW_HIGH.normalize(torch.zeros(2, 3))


@ARRAYS
@pytest.mark.parametrize(
    ("gripper", "opens", "closes", "between"),
    [("env", -1.0, 1.0, 0.0), ("open", 1.0, 0.0, 0.5), ("closed", 0.0, 1.0, 0.5), ("open-signed", 1.0, -1.0, 0.0)],
)
def test_grippers(make, gripper, opens, closes, between):
    middle = opens + 0.25 * (closes - opens)
    beyond = opens - 0.1 * (closes - opens)
    values = make(np.array([opens, closes, between, middle, beyond], np.float32))
    result = Gripper(gripper).to_env(values)
    assert type(result) is type(values) and result.dtype == values.dtype
    np.testing.assert_allclose(np.asarray(result), [-1.0, 1.0, 0.0, -0.5, -1.0], atol=1e-6)
    back = Gripper(gripper).from_env(result)[:4]  # the last one was clipped
    np.testing.assert_allclose(np.asarray(back), np.asarray(values[:4]), atol=1e-6)
    binary = np.asarray(Gripper(gripper).to_env(values, binarize=True))
    assert binary.tolist() == [-1.0, 1.0, 1.0, -1.0, -1.0]


def test_openvla_oft_gripper():
    """Its own two steps: [0, 1] to [-1, 1] with a sign, then inverted, since 1 is open there and -1 opens here."""
    values = np.array([0.0, 0.2, 0.8, 1.0])
    theirs = -np.sign(2 * values - 1)
    np.testing.assert_array_equal(Gripper.OPEN.to_env(values, binarize=True), theirs)


def test_a_chunk_is_clipped_last_and_has_the_actions_own_numbers():
    """A policy pads its actions to 32 numbers, and normalized ones beyond 1 are within 1 afterwards."""
    actions = torch.full((2, 50, 32), 9.0, dtype=torch.bfloat16)
    actions[..., :4] = torch.tensor([1.5, -1.5, 3.0, 0.25], dtype=torch.bfloat16)
    given = actions.clone()
    chunk = to_chunk(actions, LOW_HIGH, gripper="open")
    assert chunk.shape == (2, 50, 4) and chunk.dtype == torch.float32 and torch.equal(actions, given)
    torch.testing.assert_close(chunk[1, 49], torch.tensor([0.75, -0.1, 1.0, 0.5]), rtol=1e-6, atol=1e-6)
    plain = torch.tensor([[[0.5, -2.0, 0.25]]], requires_grad=True)
    chunk = to_chunk(plain, gripper=Gripper.CLOSED, gripper_index=0)
    assert chunk.tolist() == [[[0.0, -1.0, 0.25]]] and not chunk.requires_grad
    assert to_chunk(plain, gripper="open", binarize=True)[0, 0, 2] == 1.0
    with pytest.raises(ValueError, match="'wide' is not a valid Gripper"):
        to_chunk(plain, gripper="wide")


def test_a_chunk_with_gradients():
    """By hand: half the width of the statistics, nothing where the action is clipped, 1 - 2v for the gripper."""
    actions = torch.tensor([[[0.5, 0.5, 3.0, 0.25]]], requires_grad=True)
    chunk = to_chunk(actions, LOW_HIGH, gripper="open", gradients=True)
    assert torch.equal(chunk, to_chunk(actions, LOW_HIGH, gripper="open"))
    torch.testing.assert_close(chunk, torch.tensor([[[0.25, 0.3, 1.0, 0.5]]]))
    (found,) = torch.autograd.grad(chunk.sum(), actions)
    torch.testing.assert_close(found, torch.tensor([[[0.5, 0.2, 0.0, -2.0]]]))
