#!/usr/bin/env bash
# Makes a Python environment with rlt (this checkout, editable) and LeRobot, to train LeRobot's policies and to use them
# as frozen VLAs:
#     scripts/lerobot_env.sh FOLDER [TORCH]
# Without TORCH the resolver takes the newest PyTorch that LeRobot allows: 2.10 with LeRobot 0.4.4 (Python 3.11), 2.11
# with 0.6 (Python 3.12). TORCH is another version, for example 2.13.0+cpu, whatever LeRobot allows (from where pip finds
# it: PIP_FIND_LINKS, UV_FIND_LINKS or UV_INDEX). LeRobot 0.4.4 and 0.6.1 run on this one.
# PYTHON names the interpreter. Only PyPI is needed; LeRobot asks the model hub for nothing while HF_HUB_OFFLINE=1.
set -euo pipefail
FOLDER="${1:?usage: scripts/lerobot_env.sh FOLDER [VERSION-OF-TORCH]}"
TORCH="${2:-}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"

PYTHON="$PYTHON" bash "$ROOT/scripts/system_packages.sh"
"$PYTHON" -m venv "$FOLDER"
FOLDER="$(cd "$FOLDER" && pwd)"
ENV_PYTHON="$FOLDER/bin/python"
"$ENV_PYTHON" -m pip install --quiet --disable-pip-version-check uv
export VIRTUAL_ENV="$FOLDER"
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"

overrides=()
if [ -n "$TORCH" ]; then
    # torchvision 0.28 belongs to torch 2.13, 0.27 to 2.12, and so on; an override hides this from the resolver
    minor="$(cut -d. -f2 <<< "$TORCH")"
    printf 'torch==%s\ntorchvision==0.%s.*\n' "$TORCH" "$((minor + 15))" > "$FOLDER/overrides.txt"
    overrides=(--override "$FOLDER/overrides.txt")
fi
"$FOLDER/bin/uv" pip install --quiet ${overrides[@]+"${overrides[@]}"} --editable "$ROOT[lerobot,serve,test]"

# PyPI's torchvision is built for CUDA and does not load its operators beside a torch that is not. LeRobot uses none of
# them, but torchvision's import asks for the signatures of two.
if ! "$ENV_PYTHON" -c "import torchvision" 2>/dev/null; then
    SITE="$("$ENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    cat > "$SITE/torchvision_operators.py" <<'PY'
"""Declares two operators before torchvision is imported, whose own library cannot be loaded. Nothing implements them."""

import sys


class _Finder:
    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _Finder.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                _Finder.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Finder())
PY
    echo "import torchvision_operators" > "$SITE/torchvision_operators.pth"
    "$ENV_PYTHON" -c "import torchvision"
fi

"$ENV_PYTHON" - <<'PY'
from importlib.metadata import version

import lerobot.policies.factory  # noqa: F401
import rlt_gym  # noqa: F401

print(", ".join(f"{name} {version(name)}" for name in ("lerobot", "torch", "torchvision", "transformers", "gymnasium")))
PY
echo "Ready: $FOLDER/bin/rlt"
