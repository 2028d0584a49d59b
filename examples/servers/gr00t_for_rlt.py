"""
NVIDIA's GR00T N1.5 for ``rlt://``. NEVER RUN ON REAL WEIGHTS.

What is done to observations and actions is tested on stand-ins; what calls the model is written after the code of
https://github.com/NVIDIA/Isaac-GR00T (its branch n1.5; later ones have another policy class).

Run it in that project's environment and folder, with ``rlt_server.py`` beside it::

    pip install msgpack "websockets>=13"
    python gr00t_for_rlt.py --checkpoint PATH --data_config examples.Libero.custom_data_config:LiberoDataConfig

A hook on the backbone gives the tokens of pictures and instruction, which the action head reads too.
"""

import argparse

import numpy as np
import rlt_server

STATE = {"x": [0], "y": [1], "z": [2], "roll": [3], "pitch": [4], "yaw": [5], "gripper": [6, 7]}
ACTION = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
SPEC = {
    "name": "gr00t-n1.5", "max_tokens": 1024, "cameras": ["agentview", "wrist"], "image_size": 224, "frame_size": 256,
    "state_dim": 8, "stochastic": True, "kinds": ["image", "text"], "assets": "official", "render": "exact",
    "upside_down": True, "control_mode": "relative",
}  # fmt: skip


def observation(pictures, state, task):
    """Make GR00T's observation of LIBERO: one time step, pictures turned by 180 degrees."""
    video = {"agentview": "video.image", "wrist": "video.wrist_image"}
    return {
        **{video[camera]: np.ascontiguousarray(picture[::-1, ::-1])[None] for camera, picture in pictures.items()},
        **{f"state.{name}": np.asarray(state, np.float64)[places][None] for name, places in STATE.items()},
        "annotation.human.action.task_description": [str(task)],
    }


def chunk_of(actions):
    """Put the parts of the action side by side. The gripper is 1 when open and 0 when closed; LIBERO's is -1 and 1."""
    steps = len(np.asarray(actions["action.x"]).reshape(-1))
    chunk = np.stack([np.asarray(actions[f"action.{name}"]).reshape(steps) for name in ACTION], axis=-1)
    chunk[:, -1] = np.sign(1 - 2 * chunk[:, -1])
    return chunk.astype(np.float32)


def kinds(ids, mask, image_token):
    """Tell what the tokens are: those that stand for pictures, and text."""
    kind = np.where(ids == image_token, rlt_server.KINDS["image"], rlt_server.KINDS["text"])
    return np.where(mask, kind, 0).astype(np.uint8)


class Policy:
    """Answers one observation at a time, so that each has the noise of its own seed."""

    def __init__(self, checkpoint, data_config, embodiment, denoising_steps):
        from gr00t.experiment.data_config import load_data_config
        from gr00t.model.policy import Gr00tPolicy

        data = load_data_config(data_config)
        self.policy = Gr00tPolicy(
            checkpoint, embodiment, data.modality_config(), data.transform(), denoising_steps=denoising_steps
        )
        self.backbone = self.policy.model.backbone
        self.backbone.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        # the tensors themselves: the action head puts others into the same fields
        self.kept = (output["backbone_features"], output["backbone_attention_mask"], inputs[0]["eagle_input_ids"])

    def __call__(self, pictures, state, task, seed):
        """Run one observation."""
        import torch

        torch.manual_seed(seed % 2**63)
        actions = self.policy.get_action(observation(pictures, state, task))
        tokens, mask, ids = (value[0].float().cpu().numpy() for value in self.kept)
        image_token = self.backbone.eagle_model.image_token_index
        return tokens, mask.astype(bool), kinds(ids, mask.astype(bool), image_token), chunk_of(actions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data_config", default="examples.Libero.custom_data_config:LiberoDataConfig")
    parser.add_argument("--embodiment", default="new_embodiment")
    parser.add_argument("--denoising_steps", type=int, default=8)
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    settings = (args.checkpoint, args.data_config, args.embodiment, args.denoising_steps)
    identity = rlt_server.fingerprint(args.checkpoint, "gr00t", *settings[1:])
    rlt_server.start(Policy(*settings), SPEC, identity, args.port).serve_forever()
