#!/usr/bin/env bash
# Rebuild the shipped weights from nothing: demonstrations -> MiniVLA -> RL token (about 15 minutes on two cores).
# Three demonstrations a task and 350 steps make a middling policy on purpose: 12 and 800 solve task 1 in 20/20.
#   scripts/build_weights.sh [FOLDER]     FOLDER keeps the demonstrations (default: build/weights)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rlt="${RLT:-.venv/bin/rlt}"
work="${1:-build/weights}"
weights=rlt_gym/weights

"$rlt" collect --suite libero_goal --task_ids '[1, 2, 4, 6, 8]' --demos 20 --noise 0.3 --assets embedded --out "$work/demos"
# 3 of the 20 demonstrations for the policy, all of them for the token, which needs no labels.
"$rlt" train-vla --demos "[$work/demos]" --output "$work/mini_vla.safetensors" --steps 350 --max_demos 3 --held_out 0 \
    --eval_states 24 --assets embedded
"$rlt" pretrain-token --demos "[$work/demos]" --vla "$work/mini_vla.safetensors" \
    --output "$work/mini_rl_token.safetensors" --steps 600 --frame_stride 2
mkdir -p "$weights"
cp "$work"/mini_vla.{safetensors,json} "$work"/mini_rl_token.{safetensors,json} "$weights/"
