"""
Tiny models of transformers with random weights, of the real architectures, and checkpoints of policies made of them.

Where torchvision belongs to another build of torch (as beside a CPU build from the package index), transformers can
import no vision-language model. Two declarations of operators, which nothing here calls, let it import.
"""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")
try:
    import torchvision  # noqa: F401
except ImportError:
    pass  # transformers knows that it is not there
except RuntimeError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

try:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )
except (ImportError, RuntimeError) as error:
    pytest.skip(f"transformers cannot import Qwen2.5-VL here: {error}", allow_module_level=True)

NEW = int(transformers.__version__.split(".")[0]) >= 5
QUERY = "🔍"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>", QUERY]  # fmt: skip
#: Actions beyond +-1 in some numbers, tiny ones in others; the gripper is not normalized.
LOW, HIGH = [-0.9, -0.6, -1.0, -0.1, -0.2, -0.3, 0.0], [0.8, 0.7, 1.0, 0.2, 0.1, 0.3, 1.0]
MASK = [True] * 6 + [False]


def bytewise_tokenizer(special, **kwargs):
    """A tokenizer of single bytes and ``special`` ones, made of nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    name = "PreTrainedTokenizerFast" if NEW else "Qwen2TokenizerFast"  # the older processor wants its own
    return getattr(transformers, name)(tokenizer_object=tokenizer, **kwargs)


def write_qwen_oft(path, head, horizon=4, mask=MASK, seed=0):
    """
    Write a checkpoint of ``examples/vlas/qwen_oft.py``.

    :param head: its class ``Head``
    """
    torch.manual_seed(seed)
    more = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = bytewise_tokenizer(
        SPECIAL, pad_token="<|endoftext|>", eos_token="<|im_end|>", extra_special_tokens=more
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=224 * 224)
    Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template="").save_pretrained(path)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1,
            "rope_parameters" if NEW else "rope_scaling": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "window_size": 56, "fullatt_block_indexes": [1], "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    weights = head(64, 7).state_dict()
    weights["5.weight"] *= 8.0  # actions beyond +-1
    save_file(weights, path / "head.safetensors")
    action = {"q01": LOW, "q99": HIGH, "mask": mask}
    (path / "dataset_statistics.json").write_text(json.dumps({"libero_goal_no_noops": {"action": action}}))
    return path


def libero_frames(rows, size=256, seed=0):
    """Pictures of blocks, no two alike and none symmetric, and a state."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (2, rows, 8, 8, 3), dtype=np.uint8).repeat(size // 8, 2).repeat(size // 8, 3)
    return {"agentview": blocks[0], "wrist": blocks[1], "state": rng.normal(0, 0.3, (rows, 8)).astype(np.float32)}
