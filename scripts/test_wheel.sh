#!/usr/bin/env bash
# Builds the source archive and from it the wheel, installs the wheel into a fresh environment and plays a step, all
# outside the checkout. Dependencies are those of the environment that calls it; nothing of its editable install is seen.
#   scripts/test_wheel.sh [PYTHON]     PYTHON has the dependencies and `build` (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(realpath --no-symlinks "${1:-.venv/bin/python}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH RLT_NO_AUTOLOAD

"$python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log" >&2; exit 1; }
wheel="$(echo "$work"/dist/*.whl)"
case "$wheel" in
    *-py3-none-any.whl) ;;
    *) echo "$(basename "$wheel") is not for every Python 3." >&2; exit 1 ;;
esac
# Every file that git knows under the packages, the two of the mechanism that makes ids known, and no other.
diff <(git ls-files rlt_gym rlt_sb3 _rlt_autoload.py rlt-gymnasium.pth | LC_ALL=C sort) \
    <("$python" -m zipfile --list "$wheel" | awk 'NR > 1 {print $1}' | grep -v '\.dist-info/' | LC_ALL=C sort) ||
    { echo "The wheel does not hold what the packages hold (< missing, > too much)." >&2; exit 1; }

"$python" -m venv --without-pip "$work/fresh"
fresh="$work/fresh/bin/python"
site="$("$fresh" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# A folder that a .pth file names is searched last, and its own .pth files (of the editable install) are not read.
"$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' >"$site/dependencies.pth"
"$python" -m pip --disable-pip-version-check --python "$fresh" install --quiet --no-deps "$wheel"

cd "$work"
"$work/fresh/bin/rlt" list
"$work/fresh/bin/rlt" doctor --suites libero_goal
"$fresh" - "$work/fresh" <<'STEP'
import sys

import gymnasium

env = gymnasium.make("RLToken-LIBERO-v0", assets="embedded")
observation, _ = env.reset(seed=0)
_, reward, _, _, info = env.step(observation["vla_ref"])
assert info["chunk_steps"] == len(observation["vla_ref"]), info
env.close()
for name in ("rlt_gym", "rlt_sb3", "_rlt_autoload"):
    assert __import__(name).__file__.startswith(sys.argv[1]), sys.modules[name].__file__
print(f"RLToken-LIBERO-v0: a chunk of {info['chunk_steps']} control steps, reward {reward}")
STEP
echo "$(basename "$wheel"): ok"
