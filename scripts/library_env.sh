#!/usr/bin/env bash
# Makes the Python environments of the examples with other RL libraries (examples/libraries):
#     scripts/library_env.sh NAME [NAME ...]
# NAME: torchrl, tianshou, rllib, sbx, skrl, minari, rl_zoo3. Each environment is .venv-libraries/NAME. It lies over the
# environment of this checkout (.venv, or that of PYTHON) and adds only the library and what the library needs besides, so
# that libraries with requirements against each other do not meet. RLT_LIBRARIES is another folder than .venv-libraries.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
FOLDER="${RLT_LIBRARIES:-$ROOT/.venv-libraries}"

# The versions that the examples were run with. ray[rllib] would pin an older Gymnasium, so ray's further requirements
# are listed here.
requirements() {
    case "$1" in
        torchrl) echo "torchrl==0.14.1 tensordict==0.14.3" ;;
        tianshou) echo "tianshou==2.0.1" ;;
        rllib) echo "ray==2.60.0 dm-tree==0.1.10 lz4==4.4.5 ormsgpack==1.13.1 pandas==2.3.3 pyarrow==26.0.1 tensorboardX==2.6.5 requests==2.34.2" ;;
        sbx) echo "sbx-rl==0.28.0 jax==0.10.2 flax==0.12.8" ;;
        skrl) echo "skrl==2.1.1" ;;
        minari) echo "minari[create,hdf5]==0.5.4 jax==0.10.2" ;;
        rl_zoo3) echo "rl_zoo3==2.9.2" ;;
        *) echo "unknown library '$1': torchrl, tianshou, rllib, sbx, skrl, minari or rl_zoo3" >&2; return 1 ;;
    esac
}

[ $# -gt 0 ] || { echo "usage: scripts/library_env.sh NAME [NAME ...]" >&2; exit 2; }
for name in "$@"; do requirements "$name" > /dev/null; done
for name in "$@"; do
    read -ra wanted <<< "$(requirements "$name")"
    "$PYTHON" -m venv "$FOLDER/$name"
    "$FOLDER/$name/bin/python" - "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY'
import pathlib
import sys
import sysconfig

below = pathlib.Path(sysconfig.get_path("purelib")) / "environment_below.pth"
below.write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")
PY
    "$FOLDER/$name/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
    echo "Ready: $FOLDER/$name/bin/python"
done
