"""What stage 1 reports: how well the tokens and the positions of objects can be computed from an RL token."""

import numpy as np
import torch

from rlt_gym.rl_token.decoder import RLTokenDecoder, reconstruction_loss
from rlt_gym.rl_token.encoder import RLTokenEncoder
from rlt_gym.rl_token.tokens import Tokens


def evaluate_token(
    encoder: RLTokenEncoder, decoder: RLTokenDecoder, tokens: Tokens, train_rows: np.ndarray, held_rows: np.ndarray
) -> dict[str, float]:
    """
    Compute mean squared errors on held-out rows, in standardized token units.

    ``z_only`` blanks every earlier token, so that it measures ``z_rl`` alone. ``shuffled`` gives each row another row's
    ``z_rl``. ``position_mean`` predicts each place's mean over the training rows, which is what a token without
    information reaches. ``explained_by_z_only`` is the share of its error that ``z_only`` does not have,
    ``shuffled_gap`` how many times larger the error of ``z_only`` is when it is shuffled.

    :param encoder: The encoder.
    :param decoder: Its decoder.
    :param tokens: The VLA's tokens.
    :param train_rows: Rows for the baseline's mean.
    :param held_rows: Rows to evaluate.
    :return: Named numbers.
    """
    device = encoder.e_rl.device
    with torch.no_grad():
        sums, counts = torch.zeros(0), torch.zeros(0)
        for part in tokens.batches(train_rows[:: max(1, len(train_rows) // 4000)]):
            found, mask = tokens.batch(part, device)
            z = encoder.standardize(found) * mask[..., None]
            sums, counts = (z.sum(0), mask.sum(0)) if not len(counts) else (sums + z.sum(0), counts + mask.sum(0))
        center = sums / counts.clamp_min(1)[:, None]
        totals: dict[str, float] = {}
        held_rows = np.random.default_rng(0).permutation(held_rows)[:2048]  # mixed, so that shuffling crosses episodes
        for part in tokens.batches(held_rows):
            found, mask = tokens.batch(part, device)
            z = encoder.standardize(found)
            z_rl = encoder.encode(z, mask)
            other = z_rl.roll(1, dims=0)
            losses = {
                "L_ro_teacher_forced": decoder(z_rl, z),
                "L_ro_teacher_forced_shuffled": decoder(other, z),
                "L_ro_z_only": decoder(z_rl, z, 1.0),
                "L_ro_z_only_shuffled": decoder(other, z, 1.0),
                "L_ro_position_mean": center.expand_as(z),
            }
            for key, prediction in losses.items():
                share = float(reconstruction_loss(prediction, z, mask)["mean"]) * len(part) / len(held_rows)
                totals[key] = totals.get(key, 0.0) + share
    totals["explained_by_z_only"] = 1 - totals["L_ro_z_only"] / max(totals["L_ro_position_mean"], 1e-12)
    totals["shuffled_gap"] = totals["L_ro_z_only_shuffled"] / max(totals["L_ro_z_only"], 1e-12)
    return totals


def probe_objects(
    encoder: RLTokenEncoder, tokens: Tokens, train_rows: np.ndarray, held_rows: np.ndarray
) -> dict[str, float]:
    """
    Compute held-out R2 of ridge regressions to object positions.

    Compare ``z_rl`` with ``proprio``: the arm's position alone predicts a part of them.

    :param encoder: The encoder.
    :param tokens: The VLA's tokens; ``object_positions`` of their rows are the targets.
    :param train_rows: Rows to fit on.
    :param held_rows: Rows to evaluate on.
    :return: ``probe_r2_{proprio,z_rl,z_rl_proprio}``; empty if the files have no object positions.
    """
    train_rows, held_rows = train_rows[:: max(1, len(train_rows) // 6000)], held_rows[:: max(1, len(held_rows) // 2000)]
    data = tokens.rows
    targets = data.object_positions.reshape(len(data), -1).astype(np.float64)
    usable = np.isfinite(targets[train_rows]).all(axis=0) & np.isfinite(targets[held_rows]).all(axis=0)
    if not usable.any():
        return {}
    targets = targets[:, usable]
    moves = targets[train_rows].std(axis=0) > 5e-3  # 5 mm: leave out what never moves
    targets = targets[:, moves & (targets[held_rows].std(axis=0) > 0)]  # R2 divides by the held-out spread
    if not targets.shape[1]:
        return {}
    features = {}
    for name, rows in (("train", train_rows), ("held", held_rows)):
        with torch.no_grad():
            parts = []
            for part in tokens.batches(rows):
                found, mask = tokens.batch(part, encoder.e_rl.device)
                parts.append(encoder.encode(encoder.standardize(found), mask).cpu().numpy())
        z_rl, proprio = np.concatenate(parts).astype(np.float64), data.proprio[rows].astype(np.float64)
        features[name] = {"proprio": proprio, "z_rl": z_rl, "z_rl_proprio": np.concatenate([z_rl, proprio], axis=1)}
    return {
        f"probe_r2_{key}": _ridge_r2(
            features["train"][key], targets[train_rows], features["held"][key], targets[held_rows]
        )
        for key in features["train"]
    }


def _ridge_r2(x: np.ndarray, y: np.ndarray, x_held: np.ndarray, y_held: np.ndarray, penalty: float = 1e-2) -> float:
    """Pooled R2 over the outputs, each in units of its training deviation; inputs standardized."""
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-8
    x, x_held = (x - mean) / std, (x_held - mean) / std
    center, scale = y.mean(axis=0), y.std(axis=0)
    weights = np.linalg.solve(x.T @ x + penalty * len(x) * np.eye(x.shape[1]), x.T @ ((y - center) / scale))
    residual = (y_held - center) / scale - x_held @ weights
    return float(1 - (residual**2).sum() / (((y_held - y_held.mean(axis=0)) / scale) ** 2).sum())
