#!/usr/bin/env bash
# Makes sure that the system packages this project needs are there: Mesa's software OpenGL (pictures without a GPU),
# venv, and the compiler that two small dependencies of LIBERO (egl_probe) are built with.
# Installs what is missing when apt-get can be used without a password; otherwise prints the line to type and fails.
set -euo pipefail
PYTHON="${PYTHON:-python3}"

if ! command -v "$PYTHON" >/dev/null; then
    echo "No $PYTHON found. Install it first:  sudo apt-get install -y python3 python3-venv" >&2
    exit 1
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Python >= 3.11 is needed, $PYTHON is $("$PYTHON" --version). Name another one:  make PYTHON=python3.12 ..." >&2
    exit 1
fi

missing=()
has_library() { "$PYTHON" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }
needs() { missing+=("$1"); }

has_library libOSMesa.so.8 || has_library libOSMesa.so.6 || has_library libOSMesa.so || needs libosmesa6
has_library libEGL.so.1 || needs libegl1
has_library libGL.so.1 || needs libgl1
has_library libglib-2.0.so.0 || needs libglib2.0-0
command -v cmake >/dev/null || needs cmake
command -v make >/dev/null || needs make
command -v g++ >/dev/null || needs g++
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || needs python3-venv

if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi

line="apt-get install -y ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=(sudo -n)
    else
        as_root=(false)
    fi
fi
if command -v apt-get >/dev/null && [ "${as_root[*]:-}" != "false" ]; then
    echo "Installing system packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # A fresh container has no package lists yet, so the first try may fail.
    "${as_root[@]}" $line >/dev/null 2>&1 || { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" $line; } && exit 0
fi
echo "These system packages are missing: ${missing[*]}. Install them and run make again:" >&2
echo "    sudo $line" >&2
exit 1
