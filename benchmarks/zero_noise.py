"""
What a VLA solves if its flow begins with noise zero, beside what it solved with random noise in a run of DSRL.

    python benchmarks/zero_noise.py runs/dsrl
    python benchmarks/zero_noise.py runs/dsrl --split selection

DSRL plays the mean of its policy, which begins near zero. So noise zero solves about what DSRL solves before it has
learned anything. Both rows are of the same initial states.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from markdown_table import markdown_table

from rlt_gym.rl_token.noise import NoiseAction
from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.evaluate import evaluate
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.config import load_config
from rlt_sb3.experiment.environment import make_env
from rlt_sb3.experiment.frozen_vla import known_vla


def main() -> None:
    """Play the states, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run of DSRL")
    parser.add_argument("--split", choices=("eval", "selection"), default="eval")
    args = parser.parse_args()
    try:
        config = load_config(args.run / "config.yaml")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    n_states = config.evaluation.states(args.split)
    vla = known_vla(args.run, args.split, range(n_states))
    if config.algorithm != "dsrl":
        parser.error(f"{args.run} must be a run of dsrl, got {config.algorithm}.")
    if vla is None:
        parser.error(f"{args.run} has not played its frozen VLA on all states: give a finished run.")
    env = make_env(config.env, args.split, config.seed)
    try:
        steered = NoiseAction(env)

        def play(observations: Any) -> np.ndarray:
            return steered.chunks(np.zeros(steered.action_space.shape or ()))

        zero = evaluate(play, env, n_states, split=args.split, name="noise zero")
    finally:
        env.close()
    both = compare(vla, zero)
    head = ("noise", "solved", "95 % interval")
    print(markdown_table([head, _row("random", vla), _row("zero", zero)]))
    print(f"only with zero: {both.fixed}, only with random: {both.broken}, McNemar p = {both.p_value:.2g}")


def _row(name: str, played: Evaluation) -> tuple[str, ...]:
    low, high = played.interval
    return name, f"{played.successes}/{played.n}", f"{low:.0%} to {high:.0%}"


if __name__ == "__main__":
    main()
