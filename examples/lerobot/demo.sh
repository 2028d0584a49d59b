#!/usr/bin/env bash
# Train policies with LeRobot, practice them with rlt:
#     demonstrations -> lerobot-train, unmodified -> rlt vla check -> rlt eval -> RL token -> rlt train -> table
# for a small SmolVLA (libero_goal 1) and a small ACT (libero_goal 6). `make lerobot-demo` makes the environment and runs this.
#     examples/lerobot/demo.sh [FOLDER]       FOLDER keeps everything (runs/lerobot); finished steps are not repeated
# POLICIES="smolvla" does one of them, SEEDS="0 1 2" practices three times each, QUICK=1 shows in a few minutes that every step
# runs (in runs/lerobot-quick): too little training to solve anything. RLT_ARGS are further settings for `rlt train`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
BIN="${LEROBOT_BIN:-.venv-lerobot/bin}"
OUT="${1:-runs/lerobot${QUICK:+-quick}}"
if [ -n "${QUICK:-}" ]; then
    demos=2 steps=2 token_steps=20 episodes=1
    size=(--total_chunks 40 --rlt.learning_starts 16 --rlt.policy_kwargs.offset_search.opening 2 --evaluation.n_states 2 --evaluation.selection_states 2 \
        --evaluation.selection_every 20 --evaluation.record_states 1)
else
    demos=60 steps=200 token_steps=400 episodes=50
    size=()
fi
# LeRobot asks the model hub for nothing; one thread for each process, as networks and pictures are small
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export MUJOCO_GL="${MUJOCO_GL:-osmesa}"
export PYOPENGL_PLATFORM="${PYOPENGL_PLATFORM:-$MUJOCO_GL}"
rlt() { "$BIN/python" -m rlt_sb3 "$@"; }

step() { # TITLE FILE COMMAND...: runs the command unless the file, its result, is there
    local title="$1" result="$2"
    shift 2
    if [ -e "$result" ]; then
        echo "== $title: $result is there"
        return
    fi
    echo "== $title: $*"
    local began=$SECONDS
    "$@"
    echo "== $title: $(((SECONDS - began + 30) / 60)) min"
}

# The scripted expert's demonstrations as a LeRobot dataset, in the size that the policies read
collect() { # TASK
    step "demonstrations" "$OUT/dataset_$1" rlt collect --format lerobot --suite libero_goal --task_ids "[$1]" \
        --demos "$demos" --image_size 64 --assets embedded --render fast --out "$OUT/dataset_$1"
}

# What both have in common. 200 optimizer steps leave the policies middling on purpose; 400 would solve nearly every state.
common() { # POLICY TASK
    echo --dataset.repo_id="rlt/libero_goal_$2" --dataset.root="$OUT/dataset_$2" --policy.device=cpu --policy.push_to_hub=false \
        --policy.chunk_size=8 --policy.n_action_steps=8 --output_dir="$OUT/$1/train" --steps="$steps" --num_workers=1 \
        --save_freq=50 --log_freq=25 --eval_freq=0 --seed=0 --wandb.enable=false
}

lerobot_train() { # POLICY SETTINGS...
    local folder="$OUT/$1/train" last
    last="$folder/checkpoints/$(printf %06d "$steps")"
    [ -e "$last" ] || rm -rf "$folder" # LeRobot refuses the folder of a training that was interrupted
    step "lerobot-train" "$last" "$BIN/lerobot-train" "${@:2}"
}

train_smolvla() {
    step "backbone" "$OUT/smolvlm_tiny" "$BIN/python" examples/lerobot/tiny_smolvlm.py "$OUT/smolvlm_tiny"
    # Without the first four settings of the second line a random language model would stay frozen, be cut or be fetched. The
    # learning rate stays at its peak, so that the checkpoints of a longer training are those of a shorter one.
    # shellcheck disable=SC2046
    lerobot_train smolvla $(common smolvla 1) --policy.type=smolvla --batch_size=32 \
        --policy.vlm_model_name="$OUT/smolvlm_tiny" --policy.load_vlm_weights=false --policy.num_vlm_layers=0 \
        --policy.freeze_vision_encoder=false --policy.train_expert_only=false \
        --policy.resize_imgs_with_padding='[64,64]' --policy.max_state_dim=8 --policy.max_action_dim=7 \
        --policy.tokenizer_max_length=24 --policy.optimizer_lr=1e-3 --policy.optimizer_weight_decay=0.01 \
        --policy.scheduler_warmup_steps=100 --policy.scheduler_decay_steps="$steps" --policy.scheduler_decay_lr=1e-3
}

train_act() {
    # mixed precision pays for ACT, not for the small SmolVLA; null, or LeRobot fetches the weights of a ResNet
    # shellcheck disable=SC2046
    ACCELERATE_MIXED_PRECISION=bf16 lerobot_train act $(common act 6) \
        --policy.type=act --batch_size=16 --policy.pretrained_backbone_weights=null --policy.dim_model=128 \
        --policy.n_heads=4 --policy.dim_feedforward=512 --policy.n_encoder_layers=3 --policy.n_decoder_layers=1 \
        --policy.use_vae=false --policy.optimizer_lr=3e-4 --policy.optimizer_lr_backbone=3e-4
}

practice() { # POLICY TASK
    local folder="$OUT/$1" vla="lerobot:$OUT/$1/packed"
    step "pack" "$folder/packed" "$BIN/python" examples/lerobot/pack.py "$folder/train/checkpoints/last/pretrained_model" "$folder/packed"
    rlt vla check "$vla"
    step "rlt eval" "$folder/eval.json" rlt eval --vla "$vla" --suites libero_goal --tasks "$2" --assets embedded --render fast \
        --episodes "$episodes" --num_envs 2 --out "$folder/eval.json"
    step "RL token" "$folder/rl_token.safetensors" rlt pretrain-token --demos "[$OUT/dataset_$2]" --vla "$vla" \
        --output "$folder/rl_token.safetensors" --steps "$token_steps"
    for seed in ${SEEDS:-0}; do
        # shellcheck disable=SC2086
        step "rlt train" "$OUT/$1-$seed/report.html" rlt train --config "examples/lerobot/$1.yaml" --env.vla "$vla" \
            --env.rl_token "$folder/rl_token.safetensors" --name "$1-$seed" --out "$OUT" --seed "$seed" ${size[@]+"${size[@]}"} ${RLT_ARGS:-}
    done
}

runs=()
for policy in ${POLICIES:-smolvla act}; do
    case "$policy" in
        smolvla) task=1 ;;
        act) task=6 ;;
        *) echo "POLICIES may be smolvla and act, got $policy." >&2; exit 2 ;;
    esac
    collect "$task"
    "train_$policy"
    practice "$policy" "$task"
    for seed in ${SEEDS:-0}; do runs+=("$OUT/$policy-$seed"); done
done
"$BIN/python" scripts/readme_results.py "${runs[@]}"
