"""
Write a tiny backbone for SmolVLA: a folder that ``lerobot-train --policy.vlm_model_name`` can name.

    python examples/lerobot/tiny_smolvlm.py FOLDER

It has SmolVLM's configuration in small (1.3 M parameters with SmolVLA's expert), its processor, and a tokenizer that is
trained on the words of LIBERO's instructions. It has no weights: SmolVLA starts from random ones
(``--policy.load_vlm_weights=false``). Nothing is downloaded.
"""

import argparse

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks

# SmolVLA asks the tokenizer for the last four by these names
SPECIAL = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def make_tokenizer(vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """
    Train a byte-level tokenizer on the instructions of LIBERO's suites: any text works, LIBERO's words are short.

    :param vocabulary: most entries
    :return: the tokenizer
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *SPECIAL.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    instructions = [task.instruction for suite in SUITE_HORIZONS for task in get_tasks(suite)]
    tokenizer.train_from_iterator(instructions, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=SPECIAL,
        model_max_length=256,
    )


def write_backbone(folder: str, image_size: int, patch: int, vision: tuple[int, int], text: tuple[int, int]) -> None:
    """
    Write the folder.

    :param folder: where to
    :param image_size: edge of the pictures in pixels
    :param patch: edge of a patch in pixels
    :param vision: width and layers of the vision encoder
    :param text: width and layers of the language model; its heads are 32 wide
    """
    tokenizer = make_tokenizer()
    size, heads = {"longest_edge": image_size}, text[0] // 32
    processor = SmolVLMProcessor(
        SmolVLMImageProcessor(size=size, max_image_size=size),
        tokenizer,
        SmolVLMVideoProcessor(size=size, max_image_size=size),
        image_seq_len=(image_size // patch) ** 2 // 4,  # scale_factor 2 joins 2 x 2 patches
    )
    processor.save_pretrained(folder)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=text[0],
        intermediate_size=3 * text[0],
        num_hidden_layers=text[1],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=text[0] // heads,  # SmolVLA's expert copies it, so it cannot be left out
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    siglip = SmolVLMVisionConfig(
        hidden_size=vision[0],
        intermediate_size=3 * vision[0],
        num_hidden_layers=vision[1],
        num_attention_heads=max(1, vision[0] // 32),
        image_size=image_size,
        patch_size=patch,
    )
    SmolVLMConfig(
        text_config=llama.to_dict(),
        vision_config=siglip.to_dict(),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(SPECIAL["image_token"]),
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--patch", type=int, default=8)
    parser.add_argument("--vision", type=int, nargs=2, default=(64, 2), metavar=("WIDTH", "LAYERS"))
    parser.add_argument("--text", type=int, nargs=2, default=(128, 3), metavar=("WIDTH", "LAYERS"))
    args = parser.parse_args()
    write_backbone(args.folder, args.image_size, args.patch, tuple(args.vision), tuple(args.text))
