"""Python files run as programs, in processes of their own that need not import the large libraries again."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

#: A process that imports what nearly all programs do, and forks for each program. Programs share nothing but that.
#: What reads the environment when it is imported (MuJoCo, robosuite) is left to the programs.
SERVER = """
import json, os, runpy, signal, sys
import torch._dynamo, torch.utils.tensorboard, gymnasium, stable_baselines3, sb3_contrib, scipy.optimize, scipy.stats

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(job["timeout"])  # its default action ends the process
for number, target in enumerate((os.devnull, job["out"], job["err"])):
    os.dup2(os.open(target, os.O_RDWR | os.O_CREAT), number)
os.chdir(job["cwd"])
os.environ.update(job["environment"])
file, *arguments = sys.argv = job["call"]
sys.path[0] = os.path.dirname(file)
sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
runpy.run_path(file, run_name="__main__")
"""


@cache
def _server() -> subprocess.Popen:
    """The process that forks, one for all tests of this process."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.stdin.close)
    return server


def run_file(path, *arguments, cwd, timeout=300, **environment):
    """
    Run a Python file as ``python PATH ARGUMENTS`` does.

    :param path: the file
    :param arguments: of its command line
    :param cwd: the folder it runs in
    :param timeout: seconds after which it is ended
    :param environment: variables for it, besides those of this process
    :return: the finished process, with its output as text
    """
    call = [str(Path(path).resolve()), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = {
            "call": call, "cwd": str(cwd), "timeout": timeout, "environment": dict(os.environ) | environment,
            "out": str(out), "err": str(err),
        }  # fmt: skip
        server = _server()
        print(json.dumps(job), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(call, status, out.read_text(), err.read_text())
