"""Every example, every shipped configuration and every Python block of README and docs run, with small arguments."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_helpers import import_benchmark
from python_files import run_file

from rlt_gym.core.hooks import check_hook
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.cli.main import parse
from rlt_sb3.common.replay.offline import save_transitions
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.config import EnvConfig, shipped_configs
from rlt_sb3.experiment.train import train

ROOT = Path(__file__).parent.parent
HELPERS = str(ROOT / "tests" / "helpers")
#: example -> its arguments, what it prints in this order (as whole lines), the files it leaves
EXAMPLES = {
    "train_rlt.py": (
        "--env toy_env:ToyRLToken-v0 --chunks 40 --states 4 --selection-states 4 --learning-starts 20 "
        "--critic-warmup-updates 5",
        [r"frozen VLA: 2/4 \(50%, .*", r"RLT: +[0-4]/4 \(.*", r"Comparison\(fixed=.*p_value=.*"],
        ["rlt.zip"],
    ),
    # the command is the one of `rlt`, which must know the algorithm's name and its settings
    "own_algorithm.py": (
        "train --algorithm trpo --trpo.n_steps 10 --trpo.batch_size 20 --env.id toy_env:ToyRLToken-v0 --env.suite null "
        "--env.vla null --total_chunks 40 --evaluation.n_states 4 --evaluation.selection_states 4 "
        "--evaluation.videos false --name trpo --progress false",
        [
            "Run runs/trpo: toy_env:ToyRLToken-v0, 2 simulators, seed 0",
            r"frozen VLA, held-out states: +2/4 .*",
            r"frozen VLA, selection states: +2/4 .*",
            r"selection after 40 chunks .*: TRPO [0-4]/4, frozen VLA 2/4",
            r"policy +success .*",
            r"frozen VLA +2/4 .*",
            r"TRPO +[0-4]/4 .*",
            r"paired on the same 4 held-out .*",
            r"lowest point of the practicing actor.*",
            r"predict\(\) on the selection states, 30 points .*",
            r"predict\(\) on the selection states, 90 %.*",
            r"training: \d+ episodes, 40 chunks, .*",
            "Everything is in runs/trpo; open runs/trpo/report.html",
        ],
        ["runs"],
    ),
    # the scripted takeover solves the task; nobody else does anything
    "interventions.py": (
        "--num-envs 1 --episodes 1",
        [r"put the bowl on the stove: success after \d+ control steps, [1-9]\d* taken over"],
        [],
    ),
    "vector_env.py": (
        "--env toy_env:ToyRLToken-v0 --episodes 3",
        [
            r"observation: Dict\('z_rl': .*",
            r"action: +Box\(-1.0, 1.0, .*",
            "show the sign: success after 4 control steps",
            "show the sign: no success after 6 control steps",
            "show the sign: no success after 4 control steps",
        ],
        [],
    ),
}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example(path, tmp_path):
    arguments, lines, files = EXAMPLES[path.name]
    done = run_file(path, *arguments.split(), cwd=tmp_path, PYTHONPATH=HELPERS, RLT_ALLOWED_IMPORTS="toy_env")
    assert done.returncode == 0, done.stderr
    # the progress bar has blank lines and one that begins with a space
    printed = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith(" ")]
    assert len(printed) == len(lines), done.stdout
    for line, pattern in zip(printed, lines, strict=True):
        assert re.fullmatch(pattern, line), line
    assert sorted(file.name for file in tmp_path.iterdir()) == files


@pytest.mark.parametrize(("more", "passed"), [([], {}), (["--learning-starts", "20"], {"learning_starts": 20})])
def test_the_example_trains_with_the_defaults_unless_told(monkeypatch, more, passed):
    """They are the recipe of the demo."""

    class Made(Exception):
        pass

    def made(policy, venv, **settings):
        venv.close()
        raise Made(settings)

    monkeypatch.setattr("rlt_sb3.RLT", made)
    few = ["--states", "1", "--selection-states", "1"]
    monkeypatch.setattr(sys, "argv", ["train_rlt.py", "--env", "toy_env:ToyRLToken-v0", *few, *more])
    with pytest.raises(Made) as found:
        runpy.run_path(str(ROOT / "examples" / "train_rlt.py"), run_name="__main__")
    assert found.value.args == ({"seed": 0, "device": "cpu"} | passed,)


def parsed(line):
    """The command line of ``rlt``, as the command reads it."""
    command, *arguments = shlex.split(line, comments=True)[1:]
    return command, parse(command, arguments)


@pytest.mark.parametrize("quick", ["", "1"])
def test_distillation_names_settings_that_exist(quick, tmp_path):
    """The script with an ``rlt`` that writes its arguments down; each command uses what the one before wrote."""
    (tmp_path / "rlt").write_text(f"#!/bin/sh\nprintf 'rlt %s\\n' \"$*\" >> {tmp_path / 'lines'}\n")
    (tmp_path / "rlt").chmod(0o755)
    (tmp_path / "out" / "practice").mkdir(parents=True)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "QUICK": quick}
    script = str(ROOT / "examples" / "distill.sh")
    subprocess.run(["bash", script, str(tmp_path / "out")], env=environment, cwd=tmp_path, check=True, timeout=60)
    names, settings = zip(*map(parsed, (tmp_path / "lines").read_text().splitlines()), strict=True)
    assert names == ("train", "collect", "train-vla", "eval", "eval", "compare")
    practice, rollouts, tuning, before, after, compared = settings
    assert rollouts.policy == str(Path(practice.out) / practice.name) and rollouts.successes_only
    assert tuning.demos == [rollouts.out] and tuning.init == before.vla == "mini" and after.vla == tuning.output
    assert practice.env.task_ids == before.tasks == after.tasks == [1] and before.suites == [practice.env.suite]
    assert list(vars(compared).values())[:2] == [before.out, after.out]


def test_commands_of_the_page_on_distillation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    page = (ROOT / "docs/guide/distillation.md").read_text()
    lines = re.findall(r"^rlt .*$", page, flags=re.M)
    assert len(lines) == 12
    for line in lines:
        parsed(line)


#: Configurations that a test has practiced: those that differ in task, VLA or name only would do it again
PRACTICED = set()


def write_rows(path):
    """Rows of the environment without a simulator, as ``rlt encode-demos`` writes those of demonstrations."""
    venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(2))
    model = RLT("MultiInputPolicy", venv, learning_starts=40, device="cpu", seed=0)
    model.learn(40)
    save_transitions(path, model.replay_buffer.storage)
    venv.close()
    return str(path)


def train_shortened(config, out):
    """The run that a configuration describes, shortened, on the environment without a simulator; equal ones once."""
    config.check()
    env, kwargs = config.env, dict(config.env.kwargs)
    of_buffer = config.settings.get("replay_buffer_kwargs", {})
    demonstrations = of_buffer.pop("offline_data", None)  # each task has a file of its own
    # hooks need a simulator: here only their names and arguments are checked
    for hook, *rules in (("intervention", 3), ("critical_phase", 1, False)):  # as of WorkerVectorEnv
        check_hook(hook, kwargs.pop(hook, None), kwargs.pop(f"{hook}_kwargs", None), *rules)
    config.env = EnvConfig(id="FakeRLToken-v0", num_envs=env.num_envs, chunk_length=env.chunk_length, kwargs=kwargs)
    config.out = str(out)
    config.progress = False
    config.total_chunks = 40
    config.evaluation.n_states = config.evaluation.selection_states = 4
    known = {setting.name for setting in get_algorithm(config.algorithm).settings()}
    shorter = {"learning_starts": 20, "batch_size": 16, "critic_warmup_updates": 5}
    config.settings.update({name: value for name, value in shorter.items() if name in known})
    import toy_env  # noqa: F401

    if config.algorithm == "dsrl":  # needs a VLA whose noise it can choose
        import flow_vla  # noqa: F401

        config.env = replace(config.env, id="TwoWays-v0")
    practice = repr(replace(config, name="", out=""))
    if practice in PRACTICED:
        return
    PRACTICED.add(practice)
    if demonstrations:  # they need a simulator: rows of the same shapes stand in for them
        of_buffer["offline_data"] = write_rows(Path(out) / "rows.safetensors")
    assert train(config).best.n == 4


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_config(name, tmp_path):
    config = parse("train", ["--config", name])
    assert config.name == name
    assert config.evaluation.n_states >= 50 or "quick" in name
    train_shortened(config, tmp_path)


def queued_runs():
    """The runs of every settings file of benchmarks/recipe.py, one per task and setting."""
    recipe = import_benchmark("recipe")
    files = sorted((ROOT / "benchmarks" / "recipes").glob("*.yaml"))
    assert files
    return [run for file in files for run in recipe.queue(recipe.read_settings(file) | {"seeds": [3]}, Path("runs"))]


@pytest.mark.parametrize("run", queued_runs(), ids=lambda run: run.folder.name)
def test_settings_of_the_recipe_benchmark(run, tmp_path):
    config = parse("train", [*run.arguments, "--out", str(tmp_path), "--seed", str(run.seed)])
    train_shortened(config, tmp_path)


@pytest.mark.parametrize("name", [n for n in shipped_configs() if n.startswith("libero_") and not n.endswith("_ten")])
def test_tasks_share_the_recipe_of_the_demo(name):
    demo = parse("train", ["--config", "demo"])
    task = parse("train", ["--config", name])
    assert task.settings == demo.settings == {}  # the algorithm's own defaults
    assert task.total_chunks >= demo.total_chunks
    assert task.name == name == f"{task.env.suite}_{task.env.task_ids[0]}"


@pytest.mark.sim
def test_readme_python_blocks(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        # Few chunks of short episodes: the test is that every line runs.
        short, count = re.subn(r"\b(total_timesteps|n_states)=\d+", r"\1=2", block)
        short, envs = re.subn(r"num_envs=2", r"\g<0>, max_episode_steps=40", short)
        assert count == 4 and envs == 1
        (tmp_path / "block.py").write_text(short)
        done = run_file(tmp_path / "block.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "rlt.zip").stat().st_size > 0
        printed = r"frozen VLA [0-2]/2 \(.* CI .*\nRLT        [0-2]/2 \(.* CI .*\nComparison\(fixed=.*p_value=.*\n"
        assert re.search(printed, done.stdout), done.stdout


# ---------------------------------------------------------------- Python blocks of the documentation

#: A comment right before a block: "setup:" and code that the page leaves out, or "not run:" and the reason.
COMMENT = r"<!-- (?P<kind>setup|not run):(?P<text>(?:(?!-->).)*)-->\s*"
BLOCK = re.compile(
    rf"(?:{COMMENT})?^(?P<indent> *)```[ \t]*(?:python|py|\{{code-block\}} python)\b[^\n]*\n(?P<code>.*?)^ *```",
    re.S | re.M,
)
#: What makes a block short, and runnable on this machine; what it prints is not looked at.
SHORTER = [
    (r"\b(total_timesteps|total_chunks|n_states|n_eval_episodes)=[\d_]+", r"\1=4"),
    (r'RLToken-LIBERO-v0", num_envs=2', r"\g<0>, max_episode_steps=40"),
    (r'worker_python="[^"]*"', f'worker_python="{sys.executable}"'),
]
#: Pages whose blocks start simulators.
SIMULATED = re.compile(r"LIBERO-v0|LiberoSimulator|make_vec")


def blocks_of(text):
    """
    :param text: of a page
    :return: the code that runs: its blocks in this order, each with its setup, and the number of those that do not run
    """
    code, skipped = [], 0
    for block in BLOCK.finditer(text):
        if block["kind"] == "not run":
            assert block["text"].strip(), "say why it is not run"
            skipped += 1
            continue
        lines = [line.removeprefix(block["indent"]) for line in block["code"].splitlines(keepends=True)]
        code.append(textwrap.dedent(block["text"] or "").strip() + "\n" + "".join(lines))
    return code, skipped


def shortened(code):
    """:return: the code with small numbers"""
    for pattern, short in SHORTER:
        code = re.sub(pattern, short, code)
    return code


PAGES = {
    str(path.relative_to(ROOT)): blocks_of(path.read_text())
    for path in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
RUN = [
    pytest.param(page, code, marks=[pytest.mark.sim] if SIMULATED.search("".join(code)) else [], id=page)
    for page, (code, _) in PAGES.items()
    if code
]


@pytest.mark.parametrize("page, code", RUN)
def test_python_blocks_of_a_page(page, code, tmp_path):
    """One after the other, in one process, as a reader types them: later ones may use what earlier ones made."""
    for number, block in enumerate(code):
        (tmp_path / f"block_{number}.py").write_text(shortened(block))
    program = tmp_path / "program.py"
    program.write_text(
        "import runpy\nnames = {}\n"
        + "".join(f"names |= runpy.run_path('block_{number}.py', names)\n" for number in range(len(code)))
    )
    done = run_file(program, cwd=tmp_path, timeout=600, PYTHONPATH=HELPERS)
    assert done.returncode == 0, f"{page}:\n{done.stderr}"


def test_all_python_blocks_are_found():
    """A fence that the pattern does not know would be a block that nobody runs."""
    fence = r"^ *(?:```|~~~|:::)[ \t{]*(?:code-block\W+)?(?:python|py|pycon|python3|ipython)\b"
    for page, (code, skipped) in PAGES.items():
        assert len(re.findall(fence, (ROOT / page).read_text(), flags=re.M)) == len(code) + skipped, page
    text = """
<!-- not run: needs a robot -->
```python
1 / 0
```
- an entry

  <!-- setup:
  x = 4
  -->
  ```python
  f(n_states=50, x=x)
  ```
```
python -m nothing
```
"""
    assert blocks_of(text) == (["x = 4\nf(n_states=50, x=x)\n"], 1)
    assert shortened("f(n_states=50, total_timesteps=7_200, seed=50)") == "f(n_states=4, total_timesteps=4, seed=50)"


def test_a_vla_of_ones_own_takes_60_lines():
    """From the class to training."""
    text = (ROOT / "docs/guide/your_own_vla.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    lines = [line for line in "".join(blocks).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert "class MyVLA" in blocks[0] and "model.learn" in blocks[0] and len(lines) <= 60
