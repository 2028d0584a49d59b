"""
An OFT-style policy as a frozen VLA: Qwen2.5-VL, one action query per step, an MLP that makes actions of them.

Written after Qwen-OFT of starVLA and AlphaBrain, and run on random weights only. A checkpoint is a folder with

- the model and its processor, as ``save_pretrained`` writes them (the vocabulary has the action query),
- ``head.safetensors``, the weights of :class:`Head`,
- ``dataset_statistics.json`` with ``q01``, ``q99`` and ``mask`` of the actions.

Check it, then use it wherever a VLA is named::

    export PYTHONPATH=examples/vlas RLT_ALLOWED_IMPORTS=qwen_oft
    rlt vla check qwen_oft:QwenOFT --vla_kwargs '{path: my_checkpoint}'
    rlt train --env.vla qwen_oft:QwenOFT --env.vla_kwargs '{path: my_checkpoint}' --env.rl_token mean
"""

from pathlib import Path

import torch
from torch import nn

from rlt_gym.vla import VLASpec
from rlt_gym.vla.hf import HFVLA
from rlt_gym.vla.pretrained import load_pretrained, load_processor, read_statistics
from rlt_gym.vla.weights import load_weights

#: The action query; its number of repetitions is the length of the chunk.
QUERY = "🔍"
#: A picture in the text of Qwen's models.
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


class Head(nn.Sequential):
    """
    From the hidden state of a query to an action.

    :param width: Of the hidden state.
    :param action_dim: Numbers per action.
    """

    def __init__(self, width, action_dim):
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, action_dim),
        )


class QwenOFT(HFVLA):
    """
    The policy.

    :param path: Folder of the checkpoint.
    :param device: Where it runs.
    :param dtype: Type of the model's weights; the head's are float32.
    :param horizon: Steps of the chunk, as in training.
    :param unnorm_key: Which statistics of the file; ``None`` = the only ones.
    :param max_batch: Most rows of a forward pass.
    """

    def __init__(self, path, device="cpu", dtype="bfloat16", horizon=8, unnorm_key=None, max_batch=8):
        path = Path(path)
        statistics = read_statistics(path / "dataset_statistics.json", unnorm_key)
        if statistics.mask[-1]:  # its gripper is cut at 0.5, and 0.5 means something else before that
            raise ValueError(f"{path}: mask says that the gripper is normalized; Qwen-OFT leaves it between 0 and 1.")
        processor = load_processor(path)
        model = load_pretrained("Qwen2_5_VLForConditionalGeneration", path, device, dtype)
        width, size = model.config.text_config.hidden_size, 224
        with torch.device(device):
            head = Head(width, len(statistics.offset))
        load_weights(head, path / "head.safetensors")
        (query,) = processor.tokenizer.encode(QUERY, add_special_tokens=False)  # one token of Qwen's vocabulary
        vision = model.config.vision_config
        image_tokens = (size // (vision.patch_size * vision.spatial_merge_size)) ** 2
        spec = VLASpec(
            "qwen-oft",
            token_dim=width,
            horizon=horizon,
            max_tokens=2 * image_tokens + horizon + 200,  # 200: prompt and instruction
            cameras=("agentview", "wrist"),
            image_size=size,
            frame_size=256,
            render="exact",
            assets="official",
            upside_down=True,  # LIBERO's pictures come so, and the policy was trained on upright ones
            orientation="turned",
            kinds=("image", "text", "action"),
            dtype=dtype,
            max_batch=max_batch,
            control_mode="relative",
        )
        kinds = {model.config.image_token_id: "image", query: "action"}
        super().__init__(
            model, spec, processor, head, kinds, statistics, gripper="open", binarize=True, resample="bilinear"
        )
        self.query = query

    def prompt(self, task, state):
        """Ask what the policy was asked in training, word for word; this one does not read the state."""
        queries = QUERY * self.spec.horizon
        ask = f"{task} Please predict the next {self.spec.horizon} robot actions: <action>{queries}<action>."
        return f"<|im_start|>user\n{2 * PICTURE}{ask}<|im_end|>\n<|im_start|>assistant\n"

    def actions(self, hidden, inputs, state, seed):
        """Make one action per query, within the quantiles of the data."""
        queries = self.slots(hidden, inputs["input_ids"], self.query, self.spec.horizon)
        actions = self.head(queries.float())
        return torch.cat([actions[..., :-1].clamp(-1, 1), actions[..., -1:]], dim=-1)
