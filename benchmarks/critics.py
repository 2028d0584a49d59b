"""
What the critics of a run know: their values by phase of the episode, and whether they can rank chunks.

    python benchmarks/critics.py runs/demo
    python benchmarks/critics.py runs/demo --episodes 300 --updates 1500 --gamma 0.997 --n-steps 8

The first table compares the values that the run's critics give to its stored chunks with what the episodes returned,
for each third of the episode. For the second one, new critics of the same kind are trained on three quarters of the
episodes and asked about the fourth: how much better than the VLA's chunk is the one that was executed,
Q(s, a) - Q(s, vla_ref)? It has the correlation of their answers with what came out: the return of the episode (and the
value after 1 and 3 chunks), less the value of the state. That value comes from critics that were trained on the same
episodes without seeing actions. Critics that know nothing of chunks have a correlation of 0. No simulator is needed;
some CPU minutes.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.save_util import load_from_pkl

from rlt_sb3 import RLT
from rlt_sb3.common.replay.storage import TransitionStorage
from rlt_sb3.common.torch_utils import polyak
from rlt_sb3.experiment.checkpoints import BUFFER, MODEL, find_checkpoint

PHASES = ("first third", "second third", "last third")


def episodes_of(storage: TransitionStorage) -> list[np.ndarray]:
    """
    Find the whole episodes of a buffer.

    :param storage: the rows
    :return: slots of each episode's rows in order; episodes in the order of their first row
    """
    rows = np.flatnonzero(storage.is_row(np.arange(storage.size)))
    ended = storage.terminated | storage.truncated
    inner = {int(storage.next_slot[row]) for row in rows if not ended[row]}
    episodes = []
    for row in (int(row) for row in rows if int(row) not in inner):
        episode = [row]
        while not ended[episode[-1]] and storage.is_row(int(storage.next_slot[episode[-1]])):
            episode.append(int(storage.next_slot[episode[-1]]))
        if ended[episode[-1]]:
            episodes.append(np.array(episode))
    return episodes


def returns_of(storage: TransitionStorage, episodes: list[np.ndarray], gamma: float) -> np.ndarray:
    """
    Compute the discounted return from every row to the end of its episode.

    :param storage: the rows
    :param episodes: of :func:`episodes_of`
    :param gamma: discount per control step
    :return: (slots,); 0 for other slots
    """
    powers, returns = gamma ** np.arange(storage.chunk_length), np.zeros(storage.size)
    for episode in episodes:
        following = 0.0
        for row in reversed(episode):
            following = storage.step_rewards[row] @ powers + gamma ** int(storage.chunk_steps[row]) * following
            returns[row] = following
    return returns


class Rows:
    """
    The rows of a buffer as tensors.

    :param storage: the rows
    :param features: maps observations to features, as the critics' do
    """

    def __init__(self, storage: TransitionStorage, features: Any):
        self.storage = storage
        with th.no_grad():
            self.features = features({key: th.as_tensor(value) for key, value in storage.obs.items()})
        self.actions = th.as_tensor(storage.actions).flatten(1)
        self.references = th.as_tensor(storage.obs["vla_ref"]).float().flatten(1).clamp(-1.0, 1.0)
        self.no_actions = th.zeros_like(self.actions)

    def ask(self, critic: Any, rows: np.ndarray, actions: th.Tensor) -> np.ndarray:
        """
        Ask critics about rows.

        :param critic: of the run's kind
        :param rows: slots
        :param actions: (slots, C*d)
        :return: mean over the members (rows,)
        """
        with th.no_grad():
            return critic.q_values({"features": self.features[rows]}, actions[rows]).mean(0).numpy()

    def fit(self, critic: Any, rows: np.ndarray, actions: th.Tensor, gamma: float, n_steps: int, updates: int) -> Any:
        """
        Train critics on rows; the chunk that follows is the one that was executed (SARSA).

        :param critic: new ones
        :param rows: slots
        :param actions: what they see of chunks (slots, C*d)
        :param gamma: discount per control step
        :param n_steps: chunks in a return
        :param updates: number of updates, of 256 rows
        :return: the trained critics
        """
        totals, discounts, last = self.storage.returns(rows, n_steps, gamma)
        going = ~(self.storage.terminated | self.storage.truncated)[last]  # time-outs count as failures
        following = th.as_tensor(np.where(going, self.storage.next_slot[last], 0).astype(np.int64))
        rewards, factors = (th.as_tensor(values, dtype=th.float32) for values in (totals, discounts * going))
        slots, target = th.as_tensor(rows), copy.deepcopy(critic)
        optimizer = th.optim.Adam(critic.parameters(), 3e-4, fused=True)
        for update in range(updates):
            drawn = th.randint(len(slots), (256,))
            here, there = slots[drawn], following[drawn]
            with th.no_grad():
                value = target.q_values({"features": self.features[there]}, actions[there]).amin(0)
                goal = (rewards[drawn] + factors[drawn] * value).clamp(0.0, 1.0)
            loss = (critic.q_values({"features": self.features[here]}, actions[here]) - goal).pow(2).mean(1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if update % 2:
                polyak(critic, target, 0.005)
        return critic


def correlations(rows: Rows, episodes: list[np.ndarray], make: Any, gamma: float, n_steps: int, updates: int) -> dict:
    """
    Ask new critics about the chunks of episodes that they have not seen.

    :param rows: the buffer
    :param episodes: those to use
    :param make: makes new critics
    :param gamma: discount per control step
    :param n_steps: chunks in a return
    :param updates: updates of each critic
    :return: correlation of their answers with what came out, and spread of the answers; mean over four parts
    """
    storage, returns = rows.storage, returns_of(rows.storage, episodes, gamma)
    order = np.random.default_rng(0).permutation(len(episodes))
    found: dict[str, list[float]] = {}
    for part in range(4):
        unseen = [episodes[at] for at in order[part::4]]
        seen = np.concatenate([episodes[at] for at in np.setdiff1d(order, order[part::4])])
        value = rows.fit(make(), seen, rows.no_actions, gamma, n_steps, updates)
        critic = rows.fit(make(), seen, rows.actions, gamma, n_steps, updates)
        slots = np.concatenate(unseen)
        slots = slots[(rows.actions[slots] - rows.references[slots]).norm(dim=1).numpy() > 1e-3]
        if not len(slots):
            raise ValueError("All chunks of these episodes are the VLA's own: name more episodes.")
        here = rows.ask(value, slots, rows.no_actions)
        happened = {"return of the episode": returns[slots] - here}
        for chunks in (1, 3):
            totals, discounts, last = storage.returns(slots, chunks, gamma)
            going = ~(storage.terminated | storage.truncated)[last]
            there = rows.ask(value, np.where(going, storage.next_slot[last], 0), rows.no_actions)
            happened[f"value after {chunks} chunk{'s' * (chunks > 1)}"] = totals + discounts * going * there - here
        answers = rows.ask(critic, slots, rows.actions) - rows.ask(critic, slots, rows.references)
        for name, advantage in happened.items():
            found.setdefault(name, []).append(float(np.corrcoef(answers, advantage)[0, 1]))
        found.setdefault("spread of the answers", []).append(float(answers.std()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def by_phase(
    rows: Rows, episodes: list[np.ndarray], critic: Any, gamma: float
) -> list[tuple[str, str, int, float, float]]:
    """
    Compare values with returns.

    :param rows: the buffer
    :param episodes: those to use
    :param critic: the run's own
    :param gamma: discount per control step
    :return: phase of the episode, its outcome, rows, mean value of the executed chunks, mean return
    """
    returns, lines = returns_of(rows.storage, episodes, gamma), []
    for name, outcome in (("success", True), ("failure", False)):
        chosen = [episode for episode in episodes if bool(rows.storage.successful[episode[0]]) is outcome]
        for number, phase in enumerate(PHASES):
            parts = [np.array_split(episode, 3)[number] for episode in chosen]
            slots = np.concatenate(parts) if parts else np.array([], dtype=int)
            if len(slots):
                values = rows.ask(critic, slots, rows.actions)
                lines.append((phase, name, len(slots), float(values.mean()), float(returns[slots].mean())))
    return lines


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of RLT, or one of its checkpoints")
    parser.add_argument("--episodes", type=int, default=300, help="first episodes of the run to use")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--gamma", type=float, help="the run's by default")
    parser.add_argument("--n-steps", type=int, help="the run's by default")
    args = parser.parse_args()
    th.set_num_threads(1)
    th.manual_seed(0)
    checkpoint = find_checkpoint(args.run)[1]
    if checkpoint is None:
        parser.error(f"{args.run} has no checkpoint with a replay buffer yet")
    model = RLT.load(checkpoint.path / MODEL, device="cpu")
    storage = load_from_pkl(checkpoint.path / BUFFER).storage
    rows = Rows(storage, model.critic.features_extractor)
    episodes = episodes_of(storage)[: args.episodes]
    gamma, n_steps = args.gamma or model.gamma, args.n_steps or model.n_steps
    print(f"{len(episodes)} episodes, {sum(bool(storage.successful[one[0]]) for one in episodes)} of them successful\n")
    print("| phase | outcome | chunks | mean value by the run's critics | mean return |\n|---|---|---|---|---|")
    for phase, outcome, count, value, returned in by_phase(rows, episodes, model.critic, model.gamma):
        print(f"| {phase} | {outcome} | {count} | {value:.2f} | {returned:.2f} |")
    found = correlations(rows, episodes, model.policy.make_critic, gamma, n_steps, args.updates)
    print(
        f"\nnew critics on unseen episodes, gamma {gamma}, {n_steps}-chunk returns; correlation of their answers with"
    )
    print("\n".join(f"  {name}: {value:+.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
