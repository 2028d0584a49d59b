"""The shape of an RL token's values: how many directions they use, how they change over time, and maps of them."""

import numpy as np
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score

from rlt_gym.data.demo_set import DemoRows


def spectrum(z_rl: np.ndarray) -> dict[str, float | list[float]]:
    """
    Measure how many directions the values use.

    :param z_rl: float (R, D).
    :return: ``shares``: share of the variance of each principal component, largest first; ``top_10``: of ten of them
        together; ``effective_rank``: exponential of the shares' entropy, between 1 and D.
    """
    values = np.linalg.eigvalsh(np.cov(z_rl, rowvar=False))[::-1].clip(0)
    shares = values / max(values.sum(), 1e-12)
    positive = shares[shares > 0]
    return {
        "shares": shares.tolist(),
        "top_10": float(shares[:10].sum()),
        "effective_rank": float(np.exp(-(positive * np.log(positive)).sum())),
    }


def smoothness(z_rl: np.ndarray, rows: DemoRows, seed: int = 0) -> dict[str, float]:
    """
    Compare neighbors in time with observations at random.

    :param z_rl: float (R, D).
    :param rows: What is known about the observations.
    :param seed: Of the random pairs.
    :return: ``jump``: mean distance of consecutive observations over that of random pairs; ``cosine``: mean cosine
        similarity of consecutive observations, after the mean is taken off.
    """
    same = rows.demo[1:] == rows.demo[:-1]
    first, second = z_rl[:-1][same], z_rl[1:][same]
    pairs = np.random.default_rng(seed).integers(0, len(z_rl), (2, 4000))
    random = np.linalg.norm(z_rl[pairs[0]] - z_rl[pairs[1]], axis=1)
    center = z_rl.mean(axis=0)
    a, b = first - center, second - center
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return {
        "jump": float(np.linalg.norm(second - first, axis=1).mean() / max(random.mean(), 1e-12)),
        "cosine": float(((a * b).sum(axis=1) / np.maximum(norms, 1e-12)).mean()),
    }


def silhouettes(z_rl: np.ndarray, rows: DemoRows) -> dict[str, float]:
    """
    Measure how far tasks and outcomes are apart, from -1 to 1; 0 = not at all.

    :param z_rl: float (R, D).
    :param rows: What is known about the observations.
    :return: ``task`` and ``success``, those of which the data have two.
    """
    labels = {"task": rows.task, "success": rows.success}
    return {
        name: float(silhouette_score(z_rl, values, sample_size=min(2000, len(z_rl)), random_state=0))
        for name, values in labels.items()
        if 1 < len(np.unique(values)) < len(z_rl)
    }


def maps(z_rl: np.ndarray) -> dict[str, np.ndarray]:
    """
    Lay the values out in the plane.

    :param z_rl: float (R, D), R >= 4.
    :return: ``PCA`` and ``t-SNE``, float (R, 2) each, scaled to [0, 1].
    """
    found = {
        "PCA": PCA(2, random_state=0).fit_transform(z_rl),
        "t-SNE": TSNE(2, init="pca", perplexity=min(30, (len(z_rl) - 1) // 3), random_state=0).fit_transform(z_rl),
    }
    return {name: (xy - xy.min(axis=0)) / np.maximum(np.ptp(xy, axis=0), 1e-12) for name, xy in found.items()}
