"""
Linear readouts of several RL tokens, beside what practice with each of them solves.

    rlt collect --suite libero_spatial --task_ids '[6]' --demos 24 --seed 7 --assets embedded --out demos
    python benchmarks/probes.py --vla mini-spatial --demos demos --tokens auto mean-all none --solved 96 95 75

The readouts are those of ``rlt probe``, which itself takes trained tokens only. They read ``z_rl`` and proprioception
together, as the networks of RLT do. With ``--solved`` the last line has Spearman's rank correlation of each score with
the numbers of solved states; its two-sided p is exact up to eight tokens.
"""

import argparse
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from json_file import write_json
from markdown_table import markdown_table
from scipy.stats import rankdata, spearmanr

from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.data.demo_set import DemoRows
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.io import load_rl_token
from rlt_gym.rl_token.probe.readouts import read, targets
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.vla.base import FrozenVLA, VLAOutput
from rlt_gym.vla.registry import load_vla

#: tokens up to which all orders are counted
EXACT = 8


def features(token: str, vla: FrozenVLA, shards: TokenShards) -> np.ndarray:
    """
    Compute what RLT's networks read: ``z_rl`` and proprioception.

    :param token: as ``env.rl_token``
    :param vla: whose tokens the shards have, of all kinds
    :param shards: tokens of the demonstrations
    :return: (rows, D + P)
    """
    encoder, found = load_rl_token(token, vla), []
    for rows in shards.batches(np.arange(len(shards))):
        tokens, mask = shards.batch(rows, "cpu")
        chunk = torch.zeros(len(rows), vla.spec.horizon, vla.spec.action_dim)
        output = VLAOutput(tokens, mask, torch.from_numpy(shards.kinds(rows)), chunk)
        with torch.no_grad():
            found.append(encoder(output).numpy())
    return np.concatenate([np.concatenate(found), shards.rows.proprio], axis=1).astype(float)


def scores(values: np.ndarray, rows: DemoRows, robot: RobotSpec | None) -> dict[str, float]:
    """
    Read everything that can be read.

    :param values: of :func:`features`
    :param rows: what is known about the observations
    :param robot: that they show
    :return: target -> R2, or balanced accuracy for classes; cross-validated over whole episodes
    """
    found, _ = targets(rows, robot)
    return {one.name: read(one, values[one.rows], rows.demo[one.rows])["score"] for one in found}


def rank_correlation(first: list[float], second: list[float]) -> tuple[float, float]:
    """
    Compare two orders.

    :param first: n numbers
    :param second: n numbers
    :return: Spearman's coefficient, and p: the share of all orders with one as large, of either sign; NaN where the
        numbers of one list are all equal
    """
    if min(len(set(first)), len(set(second))) == 1:
        return math.nan, math.nan
    rho = float(spearmanr(first, second).statistic)
    if len(first) > EXACT:
        return rho, float(spearmanr(first, second).pvalue)
    one, other = rankdata(first), rankdata(second)
    all_orders = [np.corrcoef(one, order)[0, 1] for order in itertools.permutations(other)]
    return rho, float(np.mean(np.abs(all_orders) >= abs(rho) - 1e-9))


def table(
    found: dict[str, dict[str, float]], solved: list[int] | None, correlations: dict[str, tuple[float, float]]
) -> str:
    """
    Make the table.

    :param found: token -> :func:`scores`
    :param solved: held-out states solved with each token; None: there is no column for them
    :param correlations: target -> :func:`rank_correlation` of its scores with ``solved``
    :return: Markdown
    """
    names = list(next(iter(found.values())))
    rows = [["token", *names]]
    rows += [[f"`{token}`", *(f"{of_token[name]:.2f}" for name in names)] for token, of_token in found.items()]
    if solved is not None:
        for row, last in zip(rows, ("solved", *map(str, solved)), strict=True):
            row.append(last)
        cells = [f"{rho:+.2f} (p = {p:.2g})" for rho, p in correlations.values()]
        rows.append([f"rank correlation, n = {len(solved)}", *cells, ""])
    return markdown_table(rows)


def main() -> None:
    """Encode the demonstrations, read the tokens, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vla", required=True, help="VLA whose tokens are read")
    parser.add_argument("--demos", required=True, nargs="+", help="demonstrations with positions of objects")
    parser.add_argument("--tokens", required=True, nargs="+", help="RL tokens, as env.rl_token")
    parser.add_argument("--solved", nargs="+", type=int, help="held-out states that practice solves with each")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    args = parser.parse_args()
    if args.solved is not None and len(args.solved) != len(args.tokens):
        parser.error(f"--solved has {len(args.solved)} numbers for {len(args.tokens)} tokens: give one for each.")
    vla = load_vla(args.vla)
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "tokens")
        encode_tokens(EncodeTokensConfig(args.demos, output, args.vla, kinds=("all",), progress=False), vla)
        shards = TokenShards(output)
        found = {token: scores(features(token, vla, shards), shards.rows, shards.robot) for token in args.tokens}
    correlations = {}
    if args.solved is not None:
        for name in found[args.tokens[0]]:
            correlations[name] = rank_correlation([found[token][name] for token in args.tokens], args.solved)
    print(table(found, args.solved, correlations))
    write_json(args, scores=found, rank_correlations=correlations)


if __name__ == "__main__":
    main()
