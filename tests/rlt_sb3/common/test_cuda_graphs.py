"""
Recorded updates are the updates. Here a "graph" carries out the update again, on the tensors it was recorded with.

What a GPU makes of it is in tests/test_cuda.py.
"""

import numpy as np
import pytest
import torch as th
from rlt_models import fast, make_model, make_venv
from stable_baselines3.common.utils import LinearSchedule

from rlt_sb3 import RLT
from rlt_sb3.common.cuda_graphs import UpdateGraphs
from rlt_sb3.common.schedules import ChunkSchedule
from rlt_sb3.rlt.features import RLTFeatures

NETWORKS = {"net_arch": [16, 16], "critic_precision": "float32"}


class ByHand(UpdateGraphs):
    """Updates without a GPU, with the same copies as with one."""

    replays = 0

    def _run(self, update, arguments):
        return update(*arguments)

    def _record(self, update, arguments):
        results = []

        def replay():
            self.replays += 1
            with self._recordable():
                found = update(*arguments)
            if not results:
                results[:] = [result.clone() for result in found]
            for place, result in zip(results, found, strict=True):
                place.copy_(result)  # as a graph: each time into the same places

        return replay, results


def recording(model: RLT) -> RLT:
    """Have a model record its updates on the CPU, too."""

    def graphs():
        if model._graphs is None:
            model._graphs = ByHand(model.device, model.policy.optimizers, model.policy.networks)
        model._graphs.begin()
        return model._graphs

    model._make_graphs = graphs
    return model


SCHEDULES = {"learning_rate": LinearSchedule(1e-2, 1e-4, 1.0), "bc_coef": ChunkSchedule(10.0, 1.0, 80)}
SETTINGS = [
    {},
    SCHEDULES,
    {"policy_kwargs": {"offset_search": {"opening": 3, "owns_constants": True}, "actor_std": 0.1}},
    {"policy_kwargs": {"actor_mode": "direct", "gripper_flip": 0.3, "gripper": 3}, "utd": 3.0},
    {"q_bounds": (-1.0, 1.0), "action_scale": 0.5, "policy_delay": 3, "bc_failure_weight": 0.5},
]


def compare(one: RLT, other: RLT, chunks: int = 80) -> None:
    logged = []
    for model in (one, other):
        th.manual_seed(0)
        np.random.seed(0)
        model.learn(chunks, log_interval=10**6)
        logged.append({name: value for name, value in model.logger.name_to_value.items() if name.startswith("train/")})
    assert one._n_updates == other._n_updates > 50
    assert other._graphs.replays > 30 and len(other._graphs.recorded) >= 2
    for name, value in one.policy.state_dict().items():
        th.testing.assert_close(other.policy.state_dict()[name], value, atol=1e-6, rtol=1e-5, msg=name)
    assert logged[1] == pytest.approx(logged[0], rel=1e-4, abs=1e-6) and "train/bc_loss" in logged[0]


@pytest.mark.parametrize("settings", SETTINGS)
def test_recorded_updates_are_the_updates(settings):
    settings = fast(learning_starts=20, critic_warmup_updates=10) | settings
    settings["policy_kwargs"] = NETWORKS | settings.get("policy_kwargs", {})
    compare(make_model(**settings), recording(make_model(**settings)))


def test_several_tasks_have_a_pull_of_their_own():
    settings = fast(bc_coef=ChunkSchedule(10.0, 1.0, 30), policy_kwargs=NETWORKS)
    one, other = (
        make_model(venv=make_venv(2, task_ids=(0, 1), show_task=True), **settings) for _ in range(2)
    )  # fmt: skip
    compare(one, recording(other))
    assert other.task_chunks is not None


def test_what_was_recorded_ends_with_the_places_it_knew(tmp_path):
    model = recording(make_model(**fast()))
    model.learn(60)
    by_hand = vars(model).pop("_make_graphs")  # a function of this test cannot be saved
    model.save(tmp_path / "model.zip")
    model._make_graphs = by_hand
    graphs, replays = model._graphs, model._graphs.replays
    model.learn(20, reset_num_timesteps=False)
    assert graphs.replays > replays  # nothing has moved
    recorded = dict(graphs.recorded)
    model.set_parameters(tmp_path / "model.zip")
    graphs.begin()
    assert recorded and not graphs.recorded  # the optimizers' states are other tensors now
    loaded = RLT.load(tmp_path / "model.zip", env=make_venv(2), device="cpu")
    assert loaded._graphs is None
    for optimizer in loaded.policy.optimizers:
        (group,) = optimizer.param_groups
        assert not group["capturable"] and isinstance(group["lr"], float)


class OwnFeatures(RLTFeatures):
    """Features of a user, which may do anything."""


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        ({}, True),
        ({"cuda_graphs": False}, False),
        ({"n_target_critics": 2}, False),
        ({"features_extractor_class": OwnFeatures}, False),
        ({"optimizer_class": th.optim.SGD}, False),
        ({"optimizer_kwargs": {"fused": False}}, False),
        ({"gripper_critic": {}, "gripper_flip": 0.1, "gripper": 3}, False),
    ],
)
def test_what_can_be_recorded(networks, expected):
    assert make_model(policy_kwargs=networks).policy.can_record is expected


def test_other_values_than_true_and_false_are_refused():
    with pytest.raises(ValueError, match="cuda_graphs must be True or False, got 'auto'"):
        make_model(policy_kwargs={"cuda_graphs": "auto"})
