"""
MiniVLA: the small language-conditioned vision transformer that is shipped, so that everything runs without a model hub.

Long because its words, its network and the policy around it are read together.

The robot's cameras go through one convolutional stem (modulated by the instruction); LIBERO's two become 64 + 16
tokens. A pre-norm transformer mixes them with one text token, one state token and T action queries, from which the
action chunk is read.
"""

import json
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from rlt_gym.core.files import atomic_write, write_json
from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.data.libero_hdf5 import ROBOT
from rlt_gym.vla.base import TOKEN_KINDS, VLAObs, VLAOutput, VLASpec, fingerprint
from rlt_gym.vla.mini import FORMAT
from rlt_gym.vla.weights import load_weights

#: Every word of LIBERO's 130 instructions; other words fall into hash buckets.
VOCABULARY = (
    "akita alphabet and at back basket bbq between black book both bottle bottom bowl box butter cabinet caddy center "
    "cheese chocolate close compartment cookies cream drawer dressing from front frying in inside it juice ketchup "
    "layer left microwave middle milk moka mug next of off on open orange pan pick place plate pot pots pudding push "
    "put rack ramekin red right salad sauce shelf soup stack stove table the them to tomato top tray turn under up "
    "white wine wooden yellow"
).split()
_WORD_INDEX = {word: index for index, word in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class MiniVLAConfig:
    """
    Architecture of a MiniVLA.

    :param horizon: Length T of the action chunk in control steps.
    :param width: Token width.
    :param layers: Transformer layers.
    :param heads: Attention heads.
    :param mlp_ratio: Hidden width of the transformer's MLPs, in token widths.
    :param stem: Channels of the three convolutions (stride 2 each).
    :param image_size: Edge in pixels that frames are average-pooled to; a multiple of 16.
    :param hash_buckets: Rows of the word table for words that LIBERO's instructions do not have.
    """

    horizon: int = 8
    width: int = 128
    layers: int = 4
    heads: int = 4
    mlp_ratio: int = 4
    stem: tuple[int, int, int] = (32, 64, 128)
    image_size: int = 64
    hash_buckets: int = 32

    def __post_init__(self) -> None:
        for name in ("horizon", "width", "layers", "heads", "mlp_ratio", "image_size", "hash_buckets"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"MiniVLAConfig.{name} is {getattr(self, name)!r}; it must be a positive integer.")
        if self.image_size % 16:
            raise ValueError(f"MiniVLAConfig.image_size is {self.image_size}; it must be a multiple of 16.")
        if self.width % self.heads:
            raise ValueError(f"MiniVLAConfig.width {self.width} must be a multiple of heads {self.heads}.")
        if len(self.stem) != 3:
            raise ValueError(f"MiniVLAConfig.stem is {self.stem!r}; it must have three channel counts.")
        object.__setattr__(self, "stem", tuple(self.stem))


def word_ids(instruction: str, hash_buckets: int = 32) -> list[int]:
    """
    Look an instruction's words up.

    :param instruction: Any text; case and punctuation do not count.
    :param hash_buckets: Number of rows for unknown words.
    :return: Row numbers of the word table.
    """
    words = re.findall(r"[a-z0-9]+", instruction.lower())
    # crc32 and not hash(): the latter differs from process to process
    return [_WORD_INDEX.get(word, len(VOCABULARY) + zlib.crc32(word.encode()) % hash_buckets) for word in words]


class Block(nn.Module):
    """
    Pre-norm transformer layer.

    :param width: Token width.
    :param heads: Attention heads.
    :param mlp_ratio: Hidden width of the MLP in token widths.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, mlp_ratio * width), nn.Linear(mlp_ratio * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Transform a sequence.

        :param x: (B, M, width).
        :return: The same shape.
        """
        batch, count, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        # float32 here even under autocast: the bfloat16 attention kernel's backward is three times slower on a CPU
        with torch.autocast(x.device.type, enabled=False):
            y = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        x = x + self.out(y.transpose(1, 2).reshape(batch, count, width))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class MiniVLANet(nn.Module):
    """
    The trainable network behind :class:`MiniVLA`.

    :param config: Architecture.
    :param robot: The robot that it sees and moves: it has a grid of tokens for each camera, a finer one for the first.
    """

    proprio_mean: torch.Tensor
    proprio_std: torch.Tensor

    def __init__(self, config: MiniVLAConfig, robot: RobotSpec = ROBOT) -> None:
        super().__init__()
        self.config, self.robot = config, robot
        width, (c1, c2, c3) = config.width, config.stem
        self.words = nn.EmbeddingBag(len(VOCABULARY) + config.hash_buckets, width, mode="mean")
        self.conv1 = nn.Conv2d(3, c1, 5, 2, 2)
        self.conv2 = nn.Conv2d(c1, c2, 3, 2, 1)
        self.conv3 = nn.Conv2d(c2, c3, 3, 2, 1)
        self.film = nn.Linear(width, 2 * (c2 + c3))
        for number, camera in enumerate(robot.camera_keys):
            self.add_module(f"patch_{camera}", nn.Conv2d(c3, width, 2, 2) if number else nn.Conv2d(c3, width, 1))
        self.text = nn.Linear(width, width)
        self.state = nn.Sequential(nn.Linear(robot.proprio_size, width), nn.ReLU(), nn.Linear(width, width))
        self.position = nn.Parameter(0.02 * torch.randn(self.num_tokens, width))
        self.queries = nn.Parameter(0.02 * torch.randn(config.horizon, width))
        self.blocks = nn.ModuleList(Block(width, config.heads, config.mlp_ratio) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, robot.action_size))
        self.register_buffer("proprio_mean", torch.zeros(robot.proprio_size))
        self.register_buffer("proprio_std", torch.ones(robot.proprio_size))
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def picture_grids(self) -> tuple[tuple[str, int, int], ...]:
        """Camera, rows and columns of each grid of picture tokens."""
        # three convolutions of stride 2; the patches of all cameras but the first take two places each way
        edge = self.config.image_size // 8
        sizes = (edge // 2 if number else edge for number in range(len(self.robot.cameras)))
        return tuple((camera, size, size) for camera, size in zip(self.robot.camera_keys, sizes, strict=True))

    @property
    def token_counts(self) -> dict[str, int]:
        """Number of tokens per source, in the order in which they stand."""
        pictures = {camera: rows * columns for camera, rows, columns in self.picture_grids}
        return {**pictures, "text": 1, "state": 1, "action": self.config.horizon}

    @property
    def num_tokens(self) -> int:
        """Number of tokens M."""
        return sum(self.token_counts.values())

    def forward(
        self, pictures: Sequence[torch.Tensor], proprio: torch.Tensor, words: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Compute tokens and chunk.

        :param pictures: For each camera float (B, 3, image_size, image_size), see :meth:`normalized`.
        :param proprio: Raw proprioception, float (B, P).
        :param words: Joined word ids of all rows, int64.
        :param offsets: Where each row's words begin, int64 (B,).
        :return: Tokens (B, M, width) and chunk (B, T, d) in [-1, 1].
        """
        text = self.words(words, offsets)
        c2, c3 = self.config.stem[1:]
        scale2, shift2, scale3, shift3 = (
            part.repeat(len(pictures), 1)[:, :, None, None] for part in self.film(text).split([c2, c2, c3, c3], dim=1)
        )
        x = torch.cat(list(pictures)).contiguous(memory_format=torch.channels_last)
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x) * (1 + scale2) + shift2)
        x = F.relu(self.conv3(x) * (1 + scale3) + shift3)
        state = self.state(((proprio - self.proprio_mean) / self.proprio_std).clamp(-5, 5))
        pieces = (
            *(
                getattr(self, f"patch_{camera}")(part).flatten(2).transpose(1, 2)
                for camera, part in zip(self.robot.camera_keys, x.chunk(len(pictures)), strict=True)
            ),
            self.text(text)[:, None],
            state[:, None],
            self.queries.expand(len(proprio), -1, -1),
        )
        x = torch.cat([piece.float() for piece in pieces], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        tokens = self.norm(x)
        return tokens, torch.tanh(self.head(tokens[:, -self.config.horizon :]))

    def normalized(self, frames: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """
        Make the pictures that :meth:`forward` takes.

        :param frames: For each camera uint8 (B, S, S, 3) as the environment gives it.
        :return: What :func:`normalize_frames` gives.
        """
        size, cameras = self.config.image_size, self.robot.cameras
        return [normalize_frames(frame, size, cam.upside_down) for cam, frame in zip(cameras, frames, strict=True)]

    def text_batch(self, instructions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Look up the words of instructions.

        :param instructions: One per row.
        :return: Joined word ids and row offsets for :meth:`forward`.
        """
        ids = [word_ids(instruction, self.config.hash_buckets) for instruction in instructions]
        offsets = np.cumsum([0] + [len(row) for row in ids[:-1]])
        device = self.position.device
        words = torch.tensor([word for row in ids for word in row], dtype=torch.int64, device=device)
        return words, torch.as_tensor(offsets, dtype=torch.int64, device=device)


def normalize_frames(frames: torch.Tensor, size: int, upside_down: bool = True) -> torch.Tensor:
    """
    Frames of an environment -> what the network reads: average-pooled, upright, roughly zero mean and unit scale.

    :param frames: uint8 (B, S, S, 3).
    :param size: Wanted edge in pixels.
    :param upside_down: Whether the first row of the frames is the bottom of the scene.
    :return: float32 (B, 3, size, size).
    """
    x = frames.permute(0, 3, 1, 2).float()
    if x.shape[-1] != size:
        x = F.avg_pool2d(x, x.shape[-1] // size) if x.shape[-1] % size == 0 else F.adaptive_avg_pool2d(x, size)
    return ((x.flip(2) if upside_down else x) - 127.5) / 64.0


class MiniVLA:
    """
    A trained :class:`MiniVLANet` as a :class:`~rlt_gym.vla.base.FrozenVLA`: no gradients, evaluation mode.

    :param net: The network; it is frozen in place.
    :param provenance: How it was trained; ``assets`` in it is the kind of assets (default: ``"embedded"``),
        ``frame_size`` the edge in pixels of the frames (default: 128), ``render`` how they were drawn (default:
        ``"fast"``; ``None`` = not said).
    :param max_batch: Most rows of one forward pass; ``None`` = any number.
    """

    #: Class of a copy that learns, for ``rlt pretrain-token --alpha``.
    learner = "rlt_gym.vla.mini.learner:MiniLearner"
    #: Class of a copy with gradients, for ``train_vla`` of RLT.
    gradients = "rlt_gym.vla.mini.gradients:MiniGradients"

    def __init__(self, net: MiniVLANet, provenance: dict[str, Any] | None = None, max_batch: int | None = None) -> None:
        self.net = net.eval().requires_grad_(False)
        self.provenance = dict(provenance or {})
        config, robot = net.config, net.robot
        ways = {camera.upside_down for camera in robot.cameras}
        upside_down = ways.pop() if len(ways) == 1 else None  # nothing can be said of cameras that differ
        self._spec = VLASpec(
            "mini",
            config.width,
            config.horizon,
            robot.action_size,
            max_tokens=net.num_tokens,
            cameras=robot.camera_keys,
            image_size=config.image_size,
            assets=self.provenance.get("assets", "embedded"),
            frame_size=self.provenance.get("frame_size", 128),
            state_dim=robot.proprio_size,
            render=self.provenance.get("render", "fast"),
            kinds=("image", "text", "state", "action"),
            upside_down=upside_down,
            orientation=None if upside_down is None else "flipped" if upside_down else "same",
            proprio=tuple(part.name for part in robot.proprio),
            control_mode=robot.control_mode,
            control_frequency=robot.control_frequency,
            max_batch=max_batch,
            dtype="float32",
            picture_grids=net.picture_grids,
        )
        names = [name for key, n in net.token_counts.items() for name in [key if key in TOKEN_KINDS else "image"] * n]
        self._kind = torch.tensor([TOKEN_KINDS[name] for name in names], dtype=torch.uint8)
        self._fingerprint: str | None = None

    @property
    def spec(self) -> VLASpec:
        """Shapes and names."""
        return self._spec

    @property
    def config(self) -> MiniVLAConfig:
        """Architecture."""
        return self.net.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.net.position.device

    def to(self, device: torch.device | str) -> "MiniVLA":
        """
        Move the weights.

        :param device: Where to.
        :return: This object.
        """
        self.net.to(device)
        return self

    def fingerprint(self) -> str:
        """
        Identify the policy.

        :return: sha256 over configuration and weights in the type in which they are stored (float16).
        """
        if self._fingerprint is None:  # the weights are frozen, so once is enough
            config = {"format": FORMAT, **asdict(self.config)}
            if self.net.robot != ROBOT:
                config["robot"] = self.net.robot.to_dict()
            self._fingerprint = fingerprint(config, self.net.state_dict(), dtype=torch.float16)
        return self._fingerprint

    def forward(self, obs: VLAObs, tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> VLAOutput:
        """
        Run the policy on a batch.

        :param obs: For each camera uint8 (B, S, S, 3) as the environment gives it, S >= image_size (a multiple of it
            pools exactly); ``state`` float32 (B, P).
        :param tasks: One instruction per row.
        :param seed: Not used: this policy is deterministic.
        :return: Tokens and chunk.
        :raises ValueError: If keys are missing or shapes or types do not fit.
        """
        state, frames = self._check_obs(obs, tasks)
        with torch.no_grad():
            images = self.net.normalized([torch.from_numpy(frame).to(self.device) for frame in frames])
            proprio = torch.from_numpy(state).to(self.device)
            tokens, chunk = self.net(images, proprio, *self.net.text_batch(tasks))
        return self.output(tokens, chunk)

    def output(self, tokens: torch.Tensor, chunk: torch.Tensor) -> VLAOutput:
        """
        Describe what the network gave.

        :param tokens: (B, N, width).
        :param chunk: (B, T, d).
        :return: Both, with kinds and mask of the tokens.
        """
        return VLAOutput(
            tokens=tokens,
            mask=torch.ones(tokens.shape[:2], dtype=torch.bool, device=self.device),
            kind=self._kind.to(self.device).expand(len(tokens), -1),
            chunk=chunk.float(),
        )

    def frames(self, obs: VLAObs) -> dict[str, np.ndarray]:
        """
        Show what the network reads.

        :param obs: As for :meth:`forward`.
        :return: For each camera its pictures (B, image_size, image_size, 3), upright, normalized.
        """
        pictures = [torch.from_numpy(np.ascontiguousarray(obs[camera])) for camera in self.spec.cameras]
        seen = [picture.permute(0, 2, 3, 1).numpy() for picture in self.net.normalized(pictures)]
        return dict(zip(self.spec.cameras, seen, strict=True))

    def _check_obs(self, obs: VLAObs, tasks: Sequence[str]) -> tuple[np.ndarray, list[np.ndarray]]:
        cameras, size = self.spec.cameras, self.net.robot.proprio_size
        if not {*cameras, "state"} <= obs.keys() or isinstance(tasks, str):
            raise ValueError(
                f"MiniVLA needs {', '.join(cameras)} and state and a list of instructions; got {sorted(obs)} and "
                f"{type(tasks).__name__}."
            )
        state = np.ascontiguousarray(obs["state"], dtype=np.float32)
        if state.shape != (len(tasks), size):
            raise ValueError(
                f"state has shape {state.shape}; with {len(tasks)} instructions it must be ({len(tasks)}, {size})."
            )
        frames = []
        for key in cameras:
            frame = np.ascontiguousarray(obs[key])
            square = frame.ndim == 4 and frame.shape[1] == frame.shape[2] >= self.config.image_size
            if frame.dtype != np.uint8 or not square or frame.shape[0] != len(tasks) or frame.shape[3] != 3:
                raise ValueError(
                    f"{key} is {frame.dtype} {frame.shape}; it must be uint8 ({len(tasks)}, S, S, 3) with "
                    f"S >= {self.config.image_size}."
                )
            frames.append(frame if frame.flags.writeable else frame.copy())  # torch warns about read-only arrays
        return state, frames

    def save(self, path: str | os.PathLike[str]) -> None:
        """
        Write ``path`` (float16 safetensors, configuration in its header) and ``path`` with ``.json`` (provenance).

        :param path: A name that ends in ``.safetensors``.
        :raises ValueError: If it ends otherwise.
        """
        path = Path(path)
        if path.suffix != ".safetensors":
            raise ValueError(f"MiniVLA weights must be written to a .safetensors file, not {path}.")
        state = {
            key: value.detach().cpu().to(torch.float16).contiguous() for key, value in self.net.state_dict().items()
        }
        metadata = {"format": FORMAT, "config": json.dumps(asdict(self.config))}
        if self.net.robot != ROBOT:
            metadata["robot"] = json.dumps(self.net.robot.to_dict())
        with atomic_write(path) as temporary:
            save_file(state, temporary, metadata=metadata)
        write_json(path.with_suffix(".json"), {**self.provenance, "fingerprint": self.fingerprint()})

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str = "cpu", max_batch: int | None = None
    ) -> "MiniVLA":
        """
        Read weights written by :meth:`save`.

        :param path: The ``.safetensors`` file.
        :param device: Device to run on; the weights are read onto it.
        :param max_batch: Most rows of one forward pass; ``None`` = any number.
        :return: The frozen policy.
        :raises ValueError: If the file is missing, damaged, or no MiniVLA.
        """
        path = Path(path)
        advice = "train one with `rlt train-vla`, or name another file."
        if not path.is_file():
            raise ValueError(f"There are no MiniVLA weights at {path}; {advice}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise KeyError(f"format is {metadata.get('format')!r}, not {FORMAT!r}")
            robot = RobotSpec.from_dict(json.loads(metadata["robot"])) if "robot" in metadata else ROBOT
            with torch.device(device):
                net = MiniVLANet(MiniVLAConfig(**json.loads(metadata["config"])), robot)
            load_weights(net, path)
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
            raise ValueError(f"{path} cannot be read as MiniVLA weights ({error}); {advice}") from error
        record = path.with_suffix(".json")
        return cls(net, json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None, max_batch)
