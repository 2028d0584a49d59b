"""MiniVLA, the small VLA that is shipped. Importing this package registers its names and does not need PyTorch."""

import json
from functools import partial
from pathlib import Path

from rlt_gym.vla.registry import register_vla, register_vla_format

#: Format in the metadata of a MiniVLA's ``.safetensors`` file.
FORMAT = "rlt_gym.mini_vla/1"
#: Where the shipped MiniVLAs and their RL tokens lie.
WEIGHTS = Path(__file__).resolve().parent / "weights"


def _tasks(record: Path) -> str:
    """Read the tasks that a shipped MiniVLA has learned from the JSON beside its weights."""
    tasks: dict[str, list[str]] = {}
    for key in json.loads(record.read_text(encoding="utf-8"))["success_rates"]:
        suite, slash, task_id = key.partition("/")
        if slash:
            tasks.setdefault(suite, []).append(task_id)
    return "; ".join(f"{suite} {', '.join(numbers)}" for suite, numbers in tasks.items())


def _register(name: str, weights: str) -> None:
    path = WEIGHTS / weights
    tasks = partial(_tasks, path.with_suffix(".json"))
    register_vla(name, "rlt_gym.vla.mini.model:MiniVLA.load", tasks, kwargs={"path": path}, encoders=WEIGHTS)


register_vla_format(FORMAT, "rlt_gym.vla.mini.model:MiniVLA.load")
_register("mini", "mini_vla.safetensors")
_register("mini-10", "mini_vla_10.safetensors")
_register("mini-goal", "mini_vla_goal.safetensors")
_register("mini-object", "mini_vla_object.safetensors")
_register("mini-slow", "mini_vla_slow.safetensors")
_register("mini-spatial", "mini_vla_spatial.safetensors")
_register("mini-spatial-ten", "mini_vla_spatial_ten.safetensors")
