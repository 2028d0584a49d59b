#!/usr/bin/env bash
# Distillation: what RLT has learned by practice goes into the VLA, which then plays alone.
#     practice -> successful rollouts of RLT -> fine-tuning of the VLA on them -> the VLA before and after, on held-out states
#     examples/distill.sh [FOLDER]       FOLDER keeps everything (runs/distill); an old one must be deleted first
# About an hour on two cores. QUICK=1 shows that every step runs; it is too short to learn anything.
set -euo pipefail
OUT="${1:-runs/distill${QUICK:+-quick}}"
TASK=1
if [ -n "${QUICK:-}" ]; then
    config=demo_quick demos=2 steps=2 selection=2 episodes=2
else
    config=demo demos=60 steps=100 selection=24 episodes=50
fi

rlt train --config "$config" --out "$OUT" --name practice

# Training states that the practice has hardly seen; neither selection nor held-out states
rlt collect --policy "$OUT/practice" --successes_only true --demos "$demos" --seed 1 --out "$OUT/rollouts"

# The number of steps is chosen by the success rate on selection states, which --eval_states writes into the JSON file
rlt train-vla --init mini --demos "$OUT/rollouts" --output "$OUT/distilled.safetensors" --steps "$steps" \
    --eval_states "$selection" --assets embedded

for vla in mini "$OUT/distilled.safetensors"; do
    rlt eval --vla "$vla" --suites libero_goal --tasks "$TASK" --episodes "$episodes" --assets embedded --num_envs 2 \
        --out "$OUT/eval-$(basename "$vla" .safetensors).json"
done
rlt compare "$OUT/eval-mini.json" "$OUT/eval-distilled.json"
