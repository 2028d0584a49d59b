"""
A policy with the architecture of OpenVLA-OFT, in miniature and with random weights: pictures through DINOv2 and
SigLIP side by side, a fused projector, a token of the state, Llama with attention in both directions, action queries
that are zeros, and a head that makes an action of the hidden states of its numbers.
"""

import numpy as np
import torch
from tiny_hf import HIGH, LOW, MASK, bytewise_tokenizer
from torch import nn
from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlamaModel, SiglipVisionConfig, SiglipVisionModel

from rlt_gym.vla import VLASpec
from rlt_gym.vla.base import TOKEN_KINDS
from rlt_gym.vla.hf import HFVLA
from rlt_gym.vla.normalization import Normalization

SIZE, PATCH, WIDTH, STEPS, NUMBERS = 56, 14, 48, 4, 7
STATE = Normalization.quantiles([-1.0] * 8, [1.0] * 8, epsilon=1e-8)


class Prismatic(nn.Module):
    """Vision towers, projectors and language model."""

    def __init__(self, words):
        super().__init__()
        tower = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": SIZE,
                 "patch_size": PATCH, "initializer_range": 0.2}  # fmt: skip
        self.dino = Dinov2Model(Dinov2Config(**tower, mlp_ratio=2))
        self.siglip = SiglipVisionModel(SiglipVisionConfig(**tower, intermediate_size=48))
        self.projector = nn.Sequential(
            nn.Linear(48, 96), nn.GELU(), nn.Linear(96, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )
        self.proprio = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.language = LlamaModel(
            LlamaConfig(vocab_size=words, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=4, initializer_range=0.2)
        )  # fmt: skip

    def see(self, pixels):
        """(B, cameras, 3, S, S) in [0, 1] -> (B, cameras * patches, width)."""
        flat, half = pixels.flatten(0, 1), torch.tensor(0.5)
        first = self.dino((flat - 0.45) / 0.22).last_hidden_state[:, 1:]
        second = self.siglip((flat - half) / half).last_hidden_state
        return self.projector(torch.cat([first, second], dim=-1)).unflatten(0, pixels.shape[:2]).flatten(1, 2)


class OpenVLALike(HFVLA):
    """With ``bidirectional=False`` attention is Llama's own: what stock transformers does with a mask (B, M)."""

    def __init__(self, device="cpu", bidirectional=True, max_batch=3):
        torch.manual_seed(0)
        self_tokenizer = bytewise_tokenizer(["<pad>", "<s>", "</s>"], pad_token="<pad>", bos_token="<s>")
        with torch.device(device):
            model = Prismatic(len(self_tokenizer))
            head = nn.Sequential(nn.LayerNorm(WIDTH * NUMBERS), nn.Linear(WIDTH * NUMBERS, NUMBERS))
        self.places = 2 * (SIZE // PATCH) ** 2
        spec = VLASpec(
            "openvla-like", WIDTH, STEPS, max_tokens=3 + self.places + STEPS * NUMBERS + 200, image_size=SIZE,
            orientation="turned", upside_down=True, state_dim=8, kinds=("image", "text", "state", "action"),
            dtype="float32", max_batch=max_batch,
        )  # fmt: skip
        statistics = Normalization.quantiles(LOW, HIGH, MASK, epsilon=1e-8)
        super().__init__(
            model, spec, None, head, None, statistics, gripper="open", binarize=True, resample="lanczos", crop=0.9
        )
        self.tokenizer, self.bidirectional = self_tokenizer, bidirectional

    def prompt(self, task, state):
        return f"In: What action should the robot take to {task.lower()}?\nOut:"

    def inputs(self, pictures, tasks, state):
        texts = [self.prompt(task, row) for task, row in zip(tasks, state, strict=True)]
        words = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        pixels = torch.from_numpy(np.stack(list(pictures.values()), axis=1)).permute(0, 1, 4, 2, 3) / 255.0
        numbers = STATE.normalize(torch.from_numpy(state)).clamp(-1, 1)
        values = {
            "ids": words["input_ids"],
            "words": words["attention_mask"].bool(),
            "pixels": pixels,
            "state": numbers,
        }
        return {key: value.to(self.device) for key, value in values.items()}

    def hidden(self, inputs):
        """BOS, patches, state, prompt (padded), queries, end."""
        model, rows = self.model, len(inputs["ids"])
        embed = model.language.embed_tokens
        bos, end = (embed(torch.full((rows, 1), number, device=self.device)) for number in
                    (self.tokenizer.bos_token_id, self.tokenizer.convert_tokens_to_ids("</s>")))  # fmt: skip
        queries = torch.zeros(rows, STEPS * NUMBERS, WIDTH, device=self.device)
        state = model.proprio(inputs["state"])[:, None]
        embeds = torch.cat([bos, model.see(inputs["pixels"]), state, embed(inputs["ids"]), queries, end], dim=1)
        mask, _ = self.kinds(inputs)
        allowed = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        if not self.bidirectional:
            allowed = allowed & torch.ones(mask.shape[1], mask.shape[1], device=self.device).tril().bool()
        bias = torch.zeros(allowed.shape, device=self.device).masked_fill(~allowed, torch.finfo(torch.float32).min)
        places = (mask.cumsum(1) - 1).clamp_min(0)
        return model.language(inputs_embeds=embeds, attention_mask=bias, position_ids=places).last_hidden_state

    def kinds(self, inputs):
        rows, longest = inputs["ids"].shape
        counts = {"text": 1, "image": self.places, "state": 1, "words": longest, "action": STEPS * NUMBERS, "end": 1}
        of = TOKEN_KINDS | {"words": TOKEN_KINDS["text"], "end": TOKEN_KINDS["text"]}
        kinds = [of[name] for name, count in counts.items() for _ in range(count)]
        kind = torch.tensor(kinds, dtype=torch.uint8, device=self.device).repeat(rows, 1)
        mask = torch.ones_like(kind, dtype=torch.bool)
        first = 2 + self.places
        mask[:, first : first + longest] = inputs["words"]
        return mask, kind.masked_fill(~mask, 0)

    def actions(self, hidden, inputs, state, seed):
        queries = hidden[:, -1 - STEPS * NUMBERS : -1]
        return self.head(queries.reshape(len(hidden), STEPS, NUMBERS * WIDTH))
