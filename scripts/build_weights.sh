#!/usr/bin/env bash
# Rebuild the shipped weights from nothing: demonstrations -> MiniVLA -> RL token, seven times.
# The policies are middling on purpose: 230 steps leave 13 of 24 selection states of libero_goal 1, 300 steps 6 to 11 of 12 of
# the tasks of libero_spatial, 172 steps on slow demonstrations 16 of 24 of libero_goal 8, 900 steps 1 to 9 of 12 of libero_10,
# 575 steps 0 to 12 of 12 of libero_object (570: it lets nothing go but task 1's; 580: 8 to 12), 320 steps 0 to 10 of 10 of all
# ten tasks of libero_spatial (450: 77 of 100 together, not 64); 800 steps on 12 demonstrations a task solved 20 of 20. Short
# training and not few demonstrations makes them weak: one from three demonstrations falls apart under the smallest noise, which
# no real VLA does.
#   scripts/build_weights.sh [FOLDER]     FOLDER keeps the demonstrations (default: build/weights)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rlt="${RLT:-.venv/bin/rlt}"
work="${1:-build/weights}"
weights=rlt_gym/vla/mini/weights
mkdir -p "$weights"

# build SUITE TASKS STEPS DEMOS SUFFIX SIMULATORS STATES SPEED
build() {
    "$rlt" collect --suite "$1" --task_ids "$2" --demos 20 --noise 0.3 --speed "$8" --assets embedded --num_envs "$6" \
        --out "$work/$4"
    "$rlt" train-vla --demos "[$work/$4]" --output "$work/mini_vla$5.safetensors" --steps "$3" --held_out 0 \
        --eval_states "$7" --assets embedded
    "$rlt" pretrain-token --demos "[$work/$4]" --vla "$work/mini_vla$5.safetensors" \
        --output "$work/mini_rl_token$5.safetensors" --steps 400 --frame_stride 4
    cp "$work"/mini_vla"$5".{safetensors,json} "$work"/mini_rl_token"$5".{safetensors,json} "$weights/"
}

build libero_goal '[1, 2, 4, 6, 8]' 230 demos "" 2 24 0.9
build libero_spatial '[0, 2, 5, 6, 8]' 300 spatial _spatial 1 12 0.9
build libero_10 '[2, 4, 5, 6]' 900 ten _10 1 12 0.9
build libero_object '[1, 2, 3, 5, 9]' 575 object _object 1 12 0.9
build libero_goal '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]' 1200 goal _goal 1 10 0.9
build libero_spatial '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]' 320 spatial_ten _spatial_ten 2 10 0.9
build libero_goal '[1, 8]' 172 slow _slow 2 24 0.55
