"""PI0 and PI05 with few and narrow layers. Their sizes are written into LeRobot's code, which is patched for that."""

import importlib
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from lerobot_policies import features, save, statistics, tokenizer

VOCABULARY = 512


def _small(base, **fixed):
    """A configuration of class ``base`` in which some entries stay what they are here."""

    def set_entry(self, name, value):
        base.__setattr__(self, name, fixed.get(name, value))

    return type(base.__name__, (base,), {"__setattr__": set_entry})


def _paligemma():
    from transformers import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig

    config = PaliGemmaConfig()
    config.vision_config = _small(SiglipVisionConfig, projection_dim=32, intermediate_size=64)(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=32, projection_dim=32
    )
    config.text_config = _small(GemmaConfig, vocab_size=VOCABULARY)(vocab_size=VOCABULARY, hidden_size=32)
    config.projection_dim = 32
    return config


def _gemma(**settings):
    from transformers import GemmaConfig

    return GemmaConfig(**{**settings, "vocab_size": VOCABULARY})


@contextmanager
def tiny_pi(kind):
    """While this is open, policies of the type ``"pi0"`` or ``"pi05"`` are built tiny."""
    module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    # the number of heads is 8 in the attention's code
    size = module.GemmaConfig(width=32, depth=2, mlp_dim=48, num_heads=8, num_kv_heads=1, head_dim=8)
    with (
        mock.patch.object(module, "get_gemma_config", lambda variant: size),
        mock.patch.object(module, "CONFIG_MAPPING", {"paligemma": _paligemma, "gemma": _gemma}),
    ):
        yield module


def make_pi(folder, kind, **settings):
    """The tokenizer lies inside the checkpoint; the one that is named is on the model hub."""
    from lerobot.processor import tokenizer_processor

    with tiny_pi(kind) as module:
        torch.manual_seed(0)
        policy_class = module.PI0Policy if kind == "pi0" else module.PI05Policy
        small = {"chunk_size": 8, "n_action_steps": 8, "num_inference_steps": 3, "image_resolution": (64, 64)}
        small |= {"max_state_dim": 8, "max_action_dim": 7}
        config = policy_class.config_class(device="cpu", push_to_hub=False, **features(), **{**small, **settings})
        policy = policy_class(config)
        for value in policy.parameters():  # some begin as zeros
            torch.nn.init.normal_(value, std=0.1)
        tokenizer().save_pretrained(Path(folder) / "tokenizer")
        with mock.patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer()):
            return save(policy, folder, statistics())
