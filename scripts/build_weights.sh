#!/usr/bin/env bash
# Rebuild the shipped weights from nothing: demonstrations -> MiniVLA -> RL token (about 15 minutes on two cores).
# 230 steps make a middling policy on purpose (13 of 24 selection states of task 1; 800 steps on 12 demonstrations a task
# solved 20 of 20). Short training and not few demonstrations makes it weak: one from three demonstrations falls apart under
# the smallest noise, which no real VLA does.
#   scripts/build_weights.sh [FOLDER]     FOLDER keeps the demonstrations (default: build/weights)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rlt="${RLT:-.venv/bin/rlt}"
work="${1:-build/weights}"
weights=rlt_gym/weights

"$rlt" collect --suite libero_goal --task_ids '[1, 2, 4, 6, 8]' --demos 20 --noise 0.3 --assets embedded --out "$work/demos"
"$rlt" train-vla --demos "[$work/demos]" --output "$work/mini_vla.safetensors" --steps 230 --held_out 0 \
    --eval_states 24 --assets embedded
"$rlt" pretrain-token --demos "[$work/demos]" --vla "$work/mini_vla.safetensors" \
    --output "$work/mini_rl_token.safetensors" --steps 400 --frame_stride 4
mkdir -p "$weights"
cp "$work"/mini_vla.{safetensors,json} "$work"/mini_rl_token.{safetensors,json} "$weights/"
