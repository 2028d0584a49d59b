"""Where the RL token looks: the encoder's attention from the RL token to the VLA's tokens, laid over the pictures."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlt_gym.data.demo_set import DemoRows
from rlt_gym.rl_token.encoder import Layer, RLTokenEncoder
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.vla.base import ORIENTATIONS, TOKEN_KINDS

#: Most tasks of which frames are shown, and when in an episode, as shares of its length.
TASKS, PHASES = 4, (0.1, 0.5, 0.9)
#: Observations over which the shares are averaged, and of a forward pass: weights between all tokens are large.
AVERAGED, BATCH = 64, 8


@dataclass(frozen=True)
class View:
    """
    The RL token's attention to the pictures of one camera.

    :param camera: The camera.
    :param number: Its number among the cameras whose pictures are kept with the tokens.
    :param weights: Of each map over the picture, upright, float (n, maps, rows, columns); they sum to the share of the
        camera's tokens.
    :param peaks: Of each map the largest weight of a picture over the mean of this picture, averaged over observations.
    """

    camera: str
    number: int
    weights: np.ndarray
    peaks: list[float]

    @property
    def contrast(self) -> float:
        """Largest ratio of a weight and the mean of its picture, or of the mean and a weight, in the shown frames."""
        means = self.weights.mean(axis=(2, 3), keepdims=True)
        return float(np.exp(np.abs(np.log(np.maximum(self.weights / means, 1e-3))).max().clip(1e-3)))


@dataclass(frozen=True)
class Looks:
    """
    The RL token's attention.

    :param maps: Names of the maps: one per layer, and the rollout.
    :param frames: Places of the shown frames among the rows that were given (n,).
    :param views: The attention to the pictures of each camera.
    :param shares: Source of tokens -> share of the attention in each map; beside them, as last number, the source's
        share of the tokens, which it would have if all were looked at alike.
    """

    maps: list[str]
    frames: np.ndarray
    views: list[View]
    shares: dict[str, list[float]]

    @property
    def numbers(self) -> dict[str, Any]:
        """What the report says."""
        peaks = {view.camera: view.peaks for view in self.views}
        return {"maps": self.maps, "shares": self.shares, "peaks": peaks}


@torch.no_grad()
def attention(
    encoder: RLTokenEncoder, z: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute what the RL token attends to, with the encoder's own weights.

    :param encoder: The encoder; its forward pass is not changed.
    :param z: Standardized tokens (B, N, H), valid ones first.
    :param mask: bool (B, N), ``None`` = all valid.
    :return: For each layer the attention from the RL token to the N tokens and itself, averaged over heads, (B, layers,
        N + 1); and the rollout (B, N + 1): the product of all layers' weights, each averaged with the identity, since
        half of a layer's output is what the token was before. Every row sums to 1.
    """
    x, keys = encoder.sequence(z, mask)
    same = torch.eye(x.shape[1], device=x.device)
    looks, path = [], same.expand(len(x), -1, -1)
    for layer in encoder.layers:
        assert isinstance(layer, Layer)
        weights = _weights(layer, x, keys)
        looks.append(weights[:, -1])
        path = (weights + same) / 2 @ path
        x = layer(x, keys)
    return torch.stack(looks, dim=1), path[:, -1]


def _weights(layer: Layer, x: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """Attention of every token to every token, averaged over heads, (B, M, M)."""
    batch, _, width = x.shape
    y = layer.norm1(x)
    shape = (batch, -1, layer.heads, width // layer.heads)
    q = layer.query(y).view(shape).transpose(1, 2).float()
    k = layer.key_value(y).chunk(2, dim=-1)[0].reshape(shape).transpose(1, 2).float()
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if keys is not None:
        scores = scores.masked_fill(~keys[:, None, None, :], -torch.inf)
    return scores.softmax(dim=-1).mean(dim=1)


def choose_frames(rows: DemoRows) -> np.ndarray:
    """
    Choose the frames that are shown: of several tasks, each of one episode at several times.

    :param rows: What is known about the observations.
    :return: Places in ``rows`` (n,), task by task, in the order of time.
    """
    chosen = []
    for task in np.unique(rows.task)[:TASKS]:
        demos = np.unique(rows.demo[rows.task == task])
        places = np.flatnonzero(rows.demo == demos[len(demos) // 2])
        chosen += [places[round(phase * (len(places) - 1))] for phase in PHASES]
    return np.array(chosen)


def look(encoder: RLTokenEncoder, tokens: TokenShards, rows: np.ndarray) -> Looks | str:
    """
    Find out where the RL token looks.

    :param encoder: The encoder.
    :param tokens: The VLA's tokens.
    :param rows: Rows that may be used (R,).
    :return: The attention; or why it is left out.
    """
    origin = tokens.origin
    grids = origin.picture_grids
    if grids is None or origin.orientation is None:
        missing = "picture_grids" if grids is None else "orientation"
        return f"{origin.vla} did not say where in the pictures its tokens are (VLASpec.{missing})"
    if not {"image", "all"} & set(origin.kinds):
        return "the RL token reads no picture tokens"
    cameras = [camera for camera, _, _ in grids]
    if not set(cameras) & set(origin.cameras):
        kept, has_tokens = (", ".join(names) or "no camera" for names in (origin.cameras, cameras))
        return f"there are pictures of {kept} and picture tokens of {has_tokens}"
    # without a robot they are LIBERO's, whose pictures are upside down
    standing = {camera.key for camera in (tokens.robot.cameras if tokens.robot else ()) if not camera.upside_down}
    frames = choose_frames(tokens.rows.take(rows))
    averaged = rows[np.linspace(0, len(rows) - 1, min(AVERAGED, len(rows))).round().astype(int)]
    both = np.concatenate([rows[frames], averaged])
    kinds = tokens.kinds(both)
    pictures = [np.flatnonzero(row == TOKEN_KINDS["image"]) for row in kinds]
    wanted = sum(high * wide for _, high, wide in grids)
    wrong = {len(places) for places in pictures} - {wanted}
    if wrong:
        return f"an observation has {wrong.pop()} picture tokens, and the VLA's grids have {wanted}"
    weights = np.concatenate([_looks(encoder, tokens, both[i : i + BATCH]) for i in range(0, len(both), BATCH)])
    views, start = [], 0
    for camera, high, wide in grids:
        part, start = slice(start, start + high * wide), start + high * wide
        if camera not in origin.cameras:
            continue
        found = np.stack([row[:, places[part]] for row, places in zip(weights, pictures, strict=True)])
        peaks = (found[len(frames) :].max(axis=2) / found[len(frames) :].mean(axis=2)).mean(axis=0)
        read = found[: len(frames)].reshape(-1, high, wide)
        upright = ORIENTATIONS[origin.orientation](read)
        if camera not in standing:
            upright = upright[:, ::-1]
        shape = (len(frames), -1, high, wide)
        views.append(View(camera, origin.cameras.index(camera), upright.reshape(shape), peaks.tolist()))
    return Looks(
        maps=[*(f"layer {number}" for number in range(1, len(encoder.layers) + 1)), "rollout"],
        frames=frames,
        views=views,
        shares=_shares(weights[len(frames) :], kinds[len(frames) :], pictures[len(frames) :], grids),
    )


def _looks(encoder: RLTokenEncoder, tokens: TokenShards, rows: np.ndarray) -> np.ndarray:
    """All maps of some rows, (B, layers + 1, N + 1); the last place is the RL token itself."""
    found, mask = tokens.batch(rows, encoder.e_rl.device)
    layers, rollout = attention(encoder, encoder.standardize(found), mask)
    return torch.cat([layers, rollout[:, None]], dim=1).cpu().numpy()


def _shares(
    weights: np.ndarray, kinds: np.ndarray, pictures: list[np.ndarray], grids: tuple[tuple[str, int, int], ...]
) -> dict[str, list[float]]:
    """Share of the attention, and of the tokens, of each source, averaged over rows."""
    sources = [*(camera for camera, _, _ in grids), *(name for name in TOKEN_KINDS if name not in ("pad", "image"))]
    of = np.zeros((len(kinds), len(sources), kinds.shape[1]), dtype=bool)
    for row, places in enumerate(pictures):
        start = 0
        for number, (_, high, wide) in enumerate(grids):
            of[row, number, places[start : start + high * wide]] = True
            start += high * wide
    for number, name in enumerate(sources[len(grids) :], len(grids)):
        of[:, number] = kinds == TOKEN_KINDS[name]
    count = (kinds > 0).sum(axis=1) + 1  # and the RL token
    shares = {}
    for number, name in enumerate(sources):
        if of[:, number].any():
            part = (weights[:, :, :-1] * of[:, number, None]).sum(axis=2).mean(axis=0)
            shares[name] = [*part.tolist(), float((of[:, number].sum(axis=1) / count).mean())]
    shares["the RL token itself"] = [*weights[:, :, -1].mean(axis=0).tolist(), float((1 / count).mean())]
    return shares
