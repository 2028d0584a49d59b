"""Tiny policies of LeRobot with random weights, saved as its trainer saves them. Nothing is downloaded."""

import functools
from pathlib import Path

import torch

STATE, ACTION = 8, 7
CAMERAS = {"observation.images.image": 64, "observation.images.image2": 64}


def features(cameras=CAMERAS):
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {key: PolicyFeature(FeatureType.VISUAL, (3, size, size)) for key, size in cameras.items()}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE,))
    return {"input_features": inputs, "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION,))}}


def statistics(cameras=CAMERAS, image_std=0.25, action_std=0.4):
    """Of a made-up dataset. Normalized actions of a random policy stay within a few units, so few are clipped."""
    stats = {}
    for key, size, mean, std in (("observation.state", STATE, 0.1, 0.5), ("action", ACTION, 0.05, action_std)):
        low, high = mean - 2 * std, mean + 2 * std
        numbers = {"mean": mean, "std": std, "min": low, "max": high, "q01": low, "q99": high}
        stats[key] = {name: torch.full((size,), value) for name, value in numbers.items()}
    for key in cameras:
        numbers = {"mean": 0.5, "std": image_std, "min": 0.0, "max": 1.0}
        stats[key] = {name: torch.full((3, 1, 1), value) for name, value in numbers.items()}
    return stats


def save(policy, folder, stats):
    """Write what lerobot-train writes into ``pretrained_model``."""
    from lerobot.policies.factory import make_pre_post_processors

    pre, post = make_pre_post_processors(policy.config, dataset_stats=stats)
    policy.save_pretrained(folder)
    pre.save_pretrained(folder)
    post.save_pretrained(folder)
    return Path(folder)


def make_act(folder, cameras=CAMERAS, stats=None, **settings):
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    torch.manual_seed(0)
    small = {"chunk_size": 8, "n_action_steps": 8, "dim_model": 32, "n_heads": 2, "dim_feedforward": 64}
    small |= {"n_encoder_layers": 1, "n_decoder_layers": 1, "use_vae": False, "pretrained_backbone_weights": None}
    config = ACTConfig(device="cpu", push_to_hub=False, **features(cameras), **{**small, **settings})
    policy = ACTPolicy(config)
    policy.model.action_head.bias.data.copy_(torch.linspace(-1.8, 1.8, ACTION))  # normalized actions go beyond 1
    return save(policy, folder, statistics(cameras) if stats is None else stats)


def make_diffusion(folder, **settings):
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

    torch.manual_seed(0)
    small = {"n_obs_steps": 2, "horizon": 16, "n_action_steps": 8, "crop_shape": (56, 56), "down_dims": (16, 32)}
    small |= {"spatial_softmax_num_keypoints": 8, "diffusion_step_embed_dim": 16, "n_groups": 4}
    small |= {"num_train_timesteps": 5, "kernel_size": 3, "pretrained_backbone_weights": None, "use_group_norm": True}
    small |= {"use_separate_rgb_encoder_per_camera": False}
    config = DiffusionConfig(device="cpu", push_to_hub=False, **features(), **{**small, **settings})
    return save(DiffusionPolicy(config), folder, statistics())


WORDS = (
    "put the bowl on plate open drawer stack left cup right one push button and then go back to where hand was".split()
)


@functools.cache
def tokenizer():
    """Byte-level, with SmolVLM's special tokens; a few words are tokens of their own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    extra = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    extra |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*specials, *extra.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    start, end = {"bos_token": specials[1]}, {"eos_token": specials[2], "pad_token": specials[2]}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=specials[0], **start, **end, extra_special_tokens=extra
    )


def make_backbone(folder):
    """A folder that ``SmolVLAConfig.vlm_model_name`` can name: configuration, processor and tokenizer, no weights."""
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    fast, size = tokenizer(), {"longest_edge": 64}
    images = SmolVLMImageProcessor(size=size, max_image_size=size)
    videos = SmolVLMVideoProcessor(size=size, max_image_size=size)
    SmolVLMProcessor(images, fast, videos, image_seq_len=4).save_pretrained(folder)
    text = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        pad_token_id=fast.pad_token_id,
    )
    vision = SmolVLMVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16
    )
    image = fast.convert_tokens_to_ids("<image>")
    configs = {"text_config": text.to_dict(), "vision_config": vision.to_dict()}
    SmolVLMConfig(**configs, scale_factor=2, image_token_id=image, pad_token_id=fast.pad_token_id).save_pretrained(
        folder
    )
    return Path(folder)


def make_smolvla(folder, backbone=None, **settings):
    """By default the backbone lies inside the checkpoint, and is named as a folder that is gone."""
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    torch.manual_seed(0)
    backbone = make_backbone(backbone or Path(folder) / "backbone")
    small = {"chunk_size": 8, "n_action_steps": 8, "num_steps": 3, "num_vlm_layers": 0, "load_vlm_weights": False}
    small |= {"resize_imgs_with_padding": (64, 64), "max_state_dim": 8, "max_action_dim": 7, "tokenizer_max_length": 48}
    config = SmolVLAConfig(
        device="cpu", push_to_hub=False, vlm_model_name=str(backbone), **features(), **{**small, **settings}
    )
    return save(SmolVLAPolicy(config), folder, statistics())


def other_policy():
    """
    A type of policy that rlt does not know: its noise comes from torch's own generator, its instructions are padded.

    :return: Its classes of configuration and policy, registered with LeRobot.
    """
    import other_lerobot_policy

    return other_lerobot_policy.OtherConfig, other_lerobot_policy.OtherPolicy


def make_other(folder, **settings):
    from lerobot.policies.act.processor_act import make_act_pre_post_processors

    config_class, policy_class = other_policy()
    torch.manual_seed(0)
    policy = policy_class(config_class(device="cpu", push_to_hub=False, **features(), **settings))
    policy.save_pretrained(folder)
    for pipeline in make_act_pre_post_processors(policy.config, statistics()):
        pipeline.save_pretrained(folder)
    return Path(folder)
