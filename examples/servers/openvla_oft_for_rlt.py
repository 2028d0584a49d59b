"""
OpenVLA-OFT for ``rlt://``. NEVER RUN ON REAL WEIGHTS.

What is done to observations and actions is tested on stand-ins; what calls the model is written after the code of
https://github.com/moojink/openvla-oft.

Run it in that project's environment and folder, with ``rlt_server.py`` beside it::

    pip install msgpack "websockets>=13"
    python openvla_oft_for_rlt.py --checkpoint PATH --unnorm_key libero_goal_no_noops

A hook on the last norm of the language model gives the hidden states of the whole sequence.
"""

import argparse
from types import SimpleNamespace

import numpy as np
import rlt_server

PATCHES, PICTURES, STEPS, NUMBERS = 256, 2, 8, 7
SPEC = {
    "name": "openvla-oft", "max_tokens": 768, "cameras": ["agentview", "wrist"], "image_size": 224, "frame_size": 256,
    "state_dim": 8, "kinds": ["image", "text", "state", "action"], "assets": "official", "render": "exact",
    "upside_down": True, "control_mode": "relative",
}  # fmt: skip


def observation(pictures, state):
    """Make what ``get_vla_action`` reads: pictures turned by 180 degrees, one per camera."""
    turned = {camera: np.ascontiguousarray(picture[::-1, ::-1]) for camera, picture in pictures.items()}
    return {"full_image": turned["agentview"], "wrist_image": turned["wrist"], "state": np.array(state)}


def kinds(length):
    """Tell what the tokens are: start, patches, state, prompt, one query per number of the chunk, stop."""
    parts = {"text": 1, "image": PATCHES * PICTURES, "state": 1, "action": STEPS * NUMBERS}
    prompt = length - sum(parts.values()) - 1
    if prompt < 1:
        raise ValueError(f"{length} tokens are too few for {PICTURES} pictures and {STEPS} steps: another layout?")
    order = [("text", 1), ("image", parts["image"]), ("state", 1), ("text", prompt), ("action", parts["action"])]
    return np.array([rlt_server.KINDS[name] for name, count in [*order, ("text", 1)] for _ in range(count)], np.uint8)


def chunk_of(actions):
    """Turn the gripper around: it is un-normalized, 1 is open and 0 closed; LIBERO's is -1 and 1."""
    chunk = np.array(actions, dtype=np.float32)
    chunk[:, -1] = -np.sign(2 * chunk[:, -1] - 1)
    return chunk


class Policy:
    """Answers one observation at a time, as ``predict_action`` does."""

    def __init__(self, checkpoint, unnorm_key):
        from experiments.robot import openvla_utils as utils

        self.config = SimpleNamespace(
            pretrained_checkpoint=checkpoint, unnorm_key=unnorm_key, use_l1_regression=True, use_diffusion=False,
            use_film=False, use_proprio=True, num_images_in_input=PICTURES, center_crop=True, load_in_8bit=False,
            load_in_4bit=False,
        )  # fmt: skip
        self.utils, self.vla = utils, utils.get_vla(self.config)
        self.processor = utils.get_processor(self.config)
        self.head = utils.get_action_head(self.config, self.vla.llm_dim)
        self.proprio = utils.get_proprio_projector(self.config, self.vla.llm_dim, proprio_dim=8)
        self.vla.language_model.model.norm.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        self.hidden = output

    def __call__(self, pictures, state, task, seed):
        """Run one observation; the policy is deterministic."""
        actions = self.utils.get_vla_action(
            self.config, self.vla, self.processor, observation(pictures, state), task, self.head, self.proprio
        )
        tokens = self.hidden[0].float().cpu().numpy()
        return tokens, np.ones(len(tokens), bool), kinds(len(tokens)), chunk_of(actions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--unnorm_key", required=True)
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    identity = rlt_server.fingerprint(args.checkpoint, "openvla-oft", args.unnorm_key)
    rlt_server.start(Policy(args.checkpoint, args.unnorm_key), SPEC, identity, args.port).serve_forever()
