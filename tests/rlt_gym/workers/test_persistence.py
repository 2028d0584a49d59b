"""Workers stay: an episode costs no process, no simulator and no memory. What that memory is, a benchmark tells."""

import re
from pathlib import Path

import psutil
import pytest
from benchmark_helpers import run_benchmark

from rlt_gym.libero.vector_env import LiberoVectorEnv

ROOT = Path(__file__).parents[3]
MB = 1 << 20


@pytest.mark.sim
def test_a_hundred_resets_in_the_same_process_with_the_same_simulator():
    env = LiberoVectorEnv(
        1,
        "libero_goal",
        [1],
        chunk_length=1,
        assets="embedded",
        render="fast",
        image_size=16,
        critical_phase="intervention_hooks:models_are",
        critical_phase_kwargs={"number": 1},
    )
    pids = env.worker_pids
    worker = psutil.Process(pids[0])
    infos, memory, descriptors = [env.reset(seed=0)[1]], [], []
    for _ in range(100):
        infos.append(env.reset()[1])
        memory.append(worker.memory_info().rss)
        descriptors.append(worker.num_fds())
    assert env.worker_pids == pids and worker.is_running() and env.worker_restarts == 0
    env.close()
    assert len({info["init_index"][0] for info in infos}) > 90
    assert all(info["critical_phase"][0] for info in infos)  # one model, however many episodes
    # The fewest, because a worker's lifeline opens one for a moment whenever it looks whether its owner lives.
    assert min(descriptors[-20:]) == min(descriptors[10:30]) >= max(descriptors[10:]) - 1
    assert max(memory[10:]) - memory[9] < 20 * MB


@pytest.mark.sim
def test_the_report_of_memory_and_parameters():
    """The command behind the table in docs/guide/workers.md, with one environment."""
    done = run_benchmark("workers", "--envs", "1", "--render", "fast")
    assert done.returncode == 0, done.stderr
    (row,) = re.findall(r"^\| 1 \| (.*) \|$", done.stdout, re.MULTILINE)
    *cells, gpu = row.split(" | ")
    workers, per_env, zygote, process, total = map(int, cells)
    assert 50 < workers == per_env < 2000 and 50 < zygote < 2000 and 150 < process < 6000
    assert abs(workers + zygote + process - total) <= 2  # rounded
    assert gpu == "no GPU" or int(gpu) > 0
    page = (ROOT / "docs/guide/workers.md").read_text()
    told = re.search(
        r"^The VLA has ([\d,]+) parameters, the RL token ([\d,]+), the actor ([\d,]+), the five critics ([\d,]+)\.",
        page,
        re.M,
    )
    found = re.search(
        r"^parameters: VLA ([\d,]+), RL token ([\d,]+), actor ([\d,]+), critics ([\d,]+)$", done.stdout, re.M
    )
    assert told and found and found.groups() == told.groups()
