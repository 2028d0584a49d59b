"""
What each part of the method is worth on a small task without a simulator (``FakeRLTokenVectorEnv``).

    python benchmarks/fake_task.py
    python benchmarks/fake_task.py --only RLT "no pull (bc_coef 0)" --seeds 0

The "VLA" of that task succeeds about half of the time: it leads straight to a place beside the goal. All variants get
the same number of control steps and of critic updates, and are evaluated on the same initial states, which practice
never sees. Writes ``benchmarks/results/fake_task.json`` and prints the table of the documentation. Runs that the file
has already are not repeated: remove it to measure anew.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from markdown_table import markdown_table
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.common.noise import HeldNoise
from rlt_sb3.common.stats import wilson_interval

CHUNK, ENVS, STATES = 4, 8, 200
CONTROL_STEPS = 14_400
#: standard deviation of the exploration noise, held during a chunk
NOISE = 0.1
#: control steps of the VLA alone at the beginning
WARM_UP = 1_600

#: Every setting that changes what is learned is written out: the results stay valid when RLT's defaults change.
SETTINGS: dict[str, Any] = dict(
    learning_rate=LinearSchedule(1e-3, 1e-4, 1.0),
    buffer_size=50_000,
    batch_size=128,
    tau=0.002,
    gamma=0.99,
    train_freq=1,
    utd=2.0,
    n_steps=3,
    policy_delay=2,
    target_policy_noise=0.1,
    target_noise_clip=0.2,
    bc_coef=1.0,
    bc_failure_weight=1.0,
    reference_dropout=0.5,
    exploration_std=0.0,
    action_scale=1.0,
    critic_warmup_updates=300,
    q_bounds=(0.0, 1.0),
    gate=False,
    replay_buffer_kwargs={"timeout_is_failure": False},
    policy_kwargs={
        "offset_search": False,
        "net_arch": [64, 64],
        "n_critics": 5,
        "n_target_critics": None,
        "critic_precision": "float32",
        "layer_norm": True,
        "actor_mode": "residual",
        "actor_q": "mean",
        "actor_tau": None,
        "actor_std": 0.0,
        "token_input": True,
        "reference_input": True,
        "act_with": "target",
        "candidates": 1,
    },
    device="cpu",
)

#: name -> what differs from SETTINGS; "chunk_length" is the environment's
VARIANTS: dict[str, dict[str, Any]] = {
    "RLT": {},
    "no reference input": {"policy_kwargs": {"reference_input": False}},
    "no reference dropout": {"reference_dropout": 0.0},
    "no pull (bc_coef 0)": {"bc_coef": 0.0},
    "chunk length 1": {"chunk_length": 1},
    "no RL token (proprio only)": {"policy_kwargs": {"token_input": False}},
    "time-outs taken for terminals": {"replay_buffer_kwargs": {"timeout_is_failure": True}},
    "pull on successes only": {"bc_failure_weight": 0.0},
    "direct actor": {"policy_kwargs": {"actor_mode": "direct"}},
    "direct actor, no reference input (paper's ablation)": {
        "policy_kwargs": {"actor_mode": "direct", "reference_input": False}
    },
}


def make_venv(n_envs: int, chunk_length: int, **kwargs: Any) -> VecMonitor:
    """Return the task, for Stable-Baselines3."""
    env = FakeRLTokenVectorEnv(n_envs, chunk_length=chunk_length, **kwargs)
    return VecMonitor(GymnasiumVecEnv(env), info_keywords=("is_success",))


def successes(model: RLT, chunk_length: int, states: int = STATES) -> int:
    """Return solved initial states of the evaluation set."""
    venv = make_venv(10, chunk_length, init_states="eval")
    rewards = evaluate_policy(model, venv, n_eval_episodes=states, return_episode_rewards=True)[0]
    return int(np.sum(np.asarray(rewards) > 0.5))


def run(
    name: str, seed: int, control_steps: int = CONTROL_STEPS, states: int = STATES, callback: BaseCallback | None = None
) -> dict[str, Any]:
    """
    Train one variant.

    :param name: a key of :data:`VARIANTS`
    :param seed: of the model and of the states of practice
    :param control_steps: length of the practice, if every chunk is complete
    :param states: evaluated initial states
    :param callback: of ``learn``
    :return: what it solved before and after, with CPU seconds
    """
    changes = dict(VARIANTS[name])
    length = changes.pop("chunk_length", CHUNK)
    settings = SETTINGS | {"learning_starts": WARM_UP // length, "utd": SETTINGS["utd"] * length / CHUNK} | changes
    settings["policy_kwargs"] = SETTINGS["policy_kwargs"] | changes.get("policy_kwargs", {})
    start = time.process_time()
    venv: Any = make_venv(ENVS, length, seed=1000 * (seed + 1))
    noise = HeldNoise(length, [NOISE] * venv.action_space.shape[1])
    model = RLT("MultiInputPolicy", venv, seed=seed, action_noise=noise, **settings)
    before = successes(model, length, states)
    model.learn(control_steps // length, callback=callback)
    after = successes(model, length, states)
    return {
        "variant": name,
        "seed": seed,
        "before": before,
        "after": after,
        "states": states,
        "chunks": model.num_timesteps,
        "control_steps": model.num_control_steps,
        "updates": model._n_updates,
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return markdown: what each seed solved, the mean, and Wilson's 95 % intervals of the worst and the best seed."""
    states = results[0]["states"]
    head = (
        "variant",
        "seeds",
        f"solved of {states}, seed by seed",
        "mean",
        "worst seed's 95 % interval",
        "best seed's",
    )
    lines = [head]
    for name in dict.fromkeys(entry["variant"] for entry in results):
        entries = sorted((entry for entry in results if entry["variant"] == name), key=lambda entry: entry["seed"])
        solved = [entry["after"] for entry in entries]
        bounds = [wilson_interval(count, states) for count in (min(solved), max(solved))]
        worst, best = (f"{low:.0%} to {high:.0%}".replace("%", " %") for low, high in bounds)
        each, mean = ", ".join(map(str, solved)), f"{np.mean(solved) / states:.1%}".replace("%", " %")
        lines.append((name, str(len(solved)), each, mean, worst, best))
    return markdown_table(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "fake_task.json")
    args = parser.parse_args()
    th.set_num_threads(1)
    results = json.loads(args.json.read_text())["runs"] if args.json.exists() else []
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for name in args.only:
            if not any(entry["variant"] == name and entry["seed"] == seed for entry in results):
                results.append(run(name, seed))
                print(json.dumps(results[-1]), flush=True)
                args.json.write_text(
                    json.dumps({"command": "python benchmarks/fake_task.py", "runs": results}, indent=1)
                )
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
