"""
A policy as other people's are: 50 steps, tokens of width 2048 in bfloat16, noise, pads in the middle, a normalization
and a gripper of its own; and a world that is not LIBERO's: three upright cameras of 224 pixels, another arm.
"""

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from rlt_gym.core.chunk_vector_env import Task
from rlt_gym.core.in_process import InProcessVectorEnv
from rlt_gym.core.robot_spec import Camera, ProprioPart, RobotSpec
from rlt_gym.libero.robot import PANDA
from rlt_gym.vla import VLAOutput, VLASpec
from rlt_gym.vla.base import ORIENTATIONS, TOKEN_KINDS
from rlt_gym.vla.normalization import Normalization, to_chunk

SIZE, WIDTH, STEPS = 224, 2048, 50

JOINTED = RobotSpec(
    name="jointed",
    cameras=(Camera("front"), Camera("left"), Camera("hand")),
    proprio=(ProprioPart("joints", 7), ProprioPart("gripper", 2)),
    action_names=(*(f"joint{i}" for i in range(7)), "gripper"),
    control_frequency=30.0,
    gripper_index=7,
    control_mode="absolute",
)


class ForeignVLA(torch.nn.Module):
    """
    A random network with the shape of a flow-matching VLA: 16 tokens per camera, words padded to the longest
    instruction, one token of the state, in this order.

    :param device: Where it runs.
    :param robot: Whose cameras, state and action it knows.
    :param max_batch: Most rows of one forward pass.
    """

    def __init__(self, device="cpu", robot=JOINTED, max_batch=3):
        super().__init__()
        size, actions = robot.proprio_size, robot.action_size
        noise = torch.Generator().manual_seed(0)
        for name, shape in (("see", (48, WIDTH)), ("word", (64, WIDTH)), ("feel", (size, WIDTH)), ("act", (WIDTH, 32))):
            weight = torch.randn(shape, generator=noise) / shape[0] ** 0.5
            self.register_parameter(name, torch.nn.Parameter(weight.to(torch.bfloat16).to(device), requires_grad=False))
        self.eval()
        # actions of which most lie in +-0.3, some beyond; the gripper is 1 when open and not normalized
        low, high = [-0.3] * actions, [0.3] * actions
        self.statistics = Normalization.quantiles(low, high, [True] * (actions - 1) + [False], epsilon=1e-6)
        upside_down = robot.cameras[0].upside_down
        self.spec = VLASpec(
            "foreign", WIDTH, STEPS, action_dim=actions, max_tokens=16 * len(robot.cameras) + 24 + 1, stochastic=True,
            cameras=robot.camera_keys, image_size=SIZE, state_dim=size, max_batch=max_batch, dtype="bfloat16",
            kinds=("image", "text", "state"), render="exact", upside_down=upside_down,
            orientation="turned" if upside_down else "same", proprio=tuple(part.name for part in robot.proprio),
            control_mode=robot.control_mode, control_frequency=robot.control_frequency,
        )  # fmt: skip

    @property
    def device(self):
        return self.see.device

    def frames(self, obs):
        turn = ORIENTATIONS[self.spec.orientation]
        return {camera: np.ascontiguousarray(turn(obs[camera])) for camera in self.spec.cameras}

    @torch.no_grad()
    def forward(self, obs, tasks, *, seed=None):
        rows = len(tasks)
        assert rows <= (self.spec.max_batch or rows) and len(seed) == rows
        images = []
        for picture in self.frames(obs).values():
            assert picture.shape == (rows, SIZE, SIZE, 3)
            pixels = torch.tensor(picture, device=self.device).permute(0, 3, 1, 2).float() / 127.5 - 1
            patches = F.unfold(F.adaptive_avg_pool2d(pixels, 16), kernel_size=4, stride=4).transpose(1, 2)
            images.append(patches.to(torch.bfloat16) @ self.see)
        words = [[int(hashlib.sha256(w.encode()).hexdigest()[:4], 16) % 64 for w in t.split()][:24] for t in tasks]
        longest = max(map(len, words))
        text = torch.zeros(rows, longest, WIDTH, dtype=torch.bfloat16, device=self.device)
        for row, ids in enumerate(words):
            text[row, : len(ids)] = self.word[ids]
        state = torch.tensor(np.asarray(obs["state"], np.float32), device=self.device).to(torch.bfloat16) @ self.feel
        tokens = torch.cat([*images, text, state[:, None]], dim=1)
        counts = {"image": 16 * len(images), "text": longest, "state": 1}
        kinds = [TOKEN_KINDS[name] for name, count in counts.items() for _ in range(count)]
        kind = torch.tensor(kinds, dtype=torch.uint8, device=self.device).repeat(rows, 1)
        lengths = torch.tensor([len(ids) for ids in words], device=self.device)
        pads = torch.arange(longest, device=self.device) >= lengths[:, None]
        mask = torch.ones_like(kind, dtype=torch.bool)
        mask[:, -1 - longest : -1] = ~pads
        kind[~mask] = 0
        mean = (tokens * mask[..., None]).float().sum(1) / mask.sum(1, keepdim=True)
        noise = torch.stack([torch.randn(STEPS, 32, generator=torch.Generator().manual_seed(s)) for s in seed])
        actions = torch.tanh(mean @ self.act.float())[:, None] + 0.5 * noise.to(self.device)
        return VLAOutput(tokens, mask, kind, to_chunk(actions, self.statistics, gripper="open"))

    def fingerprint(self):
        return hashlib.sha256(f"foreign {self.spec.cameras} {self.spec.state_dim}".encode()).hexdigest()


class LiberoForeignVLA(ForeignVLA):
    """The same for LIBERO's robot."""

    def __init__(self, device="cpu", max_batch=3):
        super().__init__(device, PANDA, max_batch)


class JointedEnv(InProcessVectorEnv):
    """Three pictures of one number: the first joint is to be moved up to a mark."""

    def __init__(self, num_envs=2, **settings):
        pictures = {key: spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8) for key in JOINTED.camera_keys}
        space = spaces.Dict({**pictures, "proprio": spaces.Box(-np.inf, np.inf, (9,), np.float32)})
        super().__init__(num_envs, [Task(0, "raise the arm"), Task(1, "lift")], space, JOINTED, **settings)
        self.place, self.mark = np.zeros(num_envs), np.zeros(num_envs)

    def _begin(self, env):
        self.place[env] = 0.0
        self.mark[env] = np.random.default_rng(self.episodes[env].init_index).uniform(0.2, 1.0)

    def _control_step(self, env, action):
        self.place[env] += 0.05 * abs(float(action[0]))
        solved = bool(self.place[env] >= self.mark[env])
        return float(solved), solved

    def _observe(self, env):
        observation = {}
        for number, key in enumerate(JOINTED.camera_keys):
            picture = np.full((SIZE, SIZE, 3), 40 * number, dtype=np.uint8)
            picture[: int(SIZE * min(1.0, self.place[env])), : SIZE // 2] = 255
            observation[key] = picture
        proprio = np.zeros(9, dtype=np.float32)
        proprio[:2] = self.place[env], self.mark[env]
        return {**observation, "proprio": proprio}
