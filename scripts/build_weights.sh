#!/usr/bin/env bash
# Rebuild the shipped weights from nothing: demonstrations -> MiniVLA -> RL token (about 45 minutes on two cores).
#   scripts/build_weights.sh [FOLDER]     FOLDER keeps the demonstrations (default: build/weights)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rlt="${RLT:-.venv/bin/rlt}"
work="${1:-build/weights}"
weights=rlt_gym/weights

"$rlt" collect --suite libero_goal --task_ids '[1, 2, 4, 6, 8]' --demos 30 --noise 0.3 --assets embedded --out "$work/demos"
"$rlt" train-vla --demos "[$work/demos]" --output "$work/mini_vla.safetensors" --steps 2400 --eval_states 20 --assets embedded
"$rlt" pretrain-token --demos "[$work/demos]" --vla "$work/mini_vla.safetensors" \
    --output "$work/mini_rl_token.safetensors" --steps 1500 --frame_stride 2
mkdir -p "$weights"
cp "$work"/mini_vla.{safetensors,json} "$work"/mini_rl_token.{safetensors,json} "$weights/"
