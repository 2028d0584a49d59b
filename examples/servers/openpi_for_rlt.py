"""
openpi's pi0 and pi0.5 (PyTorch) for ``rlt://``. NEVER RUN ON REAL WEIGHTS.

What is done to observations and actions is tested on stand-ins; what calls the model is written after the code of
https://github.com/Physical-Intelligence/openpi.

Run it in that project's environment, with ``rlt_server.py`` beside it, on a checkpoint that openpi's
``examples/convert_jax_model_to_pytorch.py`` made::

    python openpi_for_rlt.py --config pi05_libero --checkpoint PATH

openpi's own server throws the hidden states of the prefix (pictures and prompt) away; here they are kept.
"""

import argparse
import os

import numpy as np
import rlt_server

SPEC = {
    "name": "openpi", "max_tokens": 1024, "cameras": ["agentview", "wrist"], "image_size": 224, "frame_size": 256,
    "state_dim": 8, "stochastic": True, "kinds": ["image", "text"], "assets": "official", "render": "exact",
    "upside_down": True, "control_mode": "relative",
}  # fmt: skip


def observation(pictures, state, task, resize):
    """Make openpi's request for LIBERO: pictures turned by 180 degrees, resized as its client does."""
    turned = {camera: resize(np.ascontiguousarray(picture[::-1, ::-1])) for camera, picture in pictures.items()}
    return {
        "observation/image": turned["agentview"],
        "observation/wrist_image": turned["wrist"],
        "observation/state": np.asarray(state),
        "prompt": str(task),
    }


def kinds(mask, words):
    """Tell what the tokens are: patches of the pictures (those of a missing camera are masked), then the prompt."""
    kind = np.full(len(mask), rlt_server.KINDS["image"], np.uint8)
    kind[len(mask) - words :] = rlt_server.KINDS["text"]
    return np.where(mask, kind, 0).astype(np.uint8)


def noise(seed, steps, numbers):
    """Draw a row's noise from its seed."""
    return np.random.default_rng(seed).standard_normal((steps, numbers)).astype(np.float32)


def keep_prefix(model):
    """Let the model note the prefix of each call: hidden states, mask, number of words."""
    core, kept, embed = model.paligemma_with_expert, {}, model.embed_prefix
    forward = core.forward

    def embed_prefix(images, img_masks, lang_tokens, lang_masks):
        result = embed(images, img_masks, lang_tokens, lang_masks)
        kept.update(mask=result[1], words=lang_tokens.shape[1])
        return result

    def forward_core(*args, **kwargs):
        outputs, cache = forward(*args, **kwargs)
        if kwargs["inputs_embeds"][1] is None:
            kept["tokens"] = outputs[0]
        return outputs, cache

    model.embed_prefix, core.forward = embed_prefix, forward_core
    return kept


class Policy:
    """Answers one observation at a time."""

    def __init__(self, config, checkpoint):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiled sample_actions would not call what keep_prefix puts there
        from openpi.policies.policy_config import create_trained_policy
        from openpi.training.config import get_config
        from openpi_client import image_tools

        self.policy = create_trained_policy(get_config(config), checkpoint)
        self.model, self.resize = self.policy._model, lambda picture: image_tools.resize_with_pad(picture, 224, 224)
        self.kept = keep_prefix(self.model)

    def __call__(self, pictures, state, task, seed):
        """Run one observation. Actions are un-normalized; the gripper's sign is LIBERO's."""
        config = self.model.config
        request = observation(pictures, state, task, self.resize)
        actions = self.policy.infer(request, noise=noise(seed, config.action_horizon, config.action_dim))["actions"]
        mask = self.kept["mask"][0].cpu().numpy().astype(bool)
        tokens = self.kept["tokens"][0].float().cpu().numpy()
        return tokens, mask, kinds(mask, self.kept["words"]), np.asarray(actions)[:, :7]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    identity = rlt_server.fingerprint(args.checkpoint, "openpi", args.config)
    rlt_server.start(Policy(args.config, args.checkpoint), SPEC, identity, args.port).serve_forever()
