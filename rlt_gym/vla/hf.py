"""
A vision-language model of transformers with an action head, as a frozen VLA: the base class of OFT-style policies.

A checkpoint of transformers says neither its prompt nor its head nor the conventions of its data, so a policy is a
small class that says them: a subclass of :class:`HFVLA` with :meth:`HFVLA.prompt` and :meth:`HFVLA.actions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from rlt_gym.core.gripper import Gripper
from rlt_gym.vla.base import ORIENTATIONS, TOKEN_KINDS, VLAObs, VLAOutput, VLASpec, fingerprint
from rlt_gym.vla.normalization import Normalization, to_chunk

#: PIL's filters for making pictures smaller or larger.
FILTERS = ("nearest", "box", "bilinear", "bicubic", "lanczos")


class HFVLA(nn.Module):
    """
    A frozen VLA made of a model of transformers, its processor and an action head.

    :meth:`forward` does the same for every policy: it turns, crops and resizes the pictures, lets :meth:`inputs` make
    the model's input of them, runs the model once, and makes the chunk of what :meth:`actions` gives. A subclass says
    :meth:`prompt` and :meth:`actions`; it overrides :meth:`inputs`, :meth:`hidden` or :meth:`kinds` if its model is
    called otherwise.

    :param model: The model, on its device and in its type.
    :param spec: What it needs and gives; ``orientation`` and ``image_size`` must be said.
    :param processor: Called as transformers' processors of vision-language models are; ``None`` if :meth:`inputs` is
        overridden.
    :param head: What makes actions of hidden states; ``None`` if :meth:`actions` needs none.
    :param token_kinds: Number of a token in the vocabulary -> its kind, e.g. ``{image_token_id: "image"}``; others are
        text.
    :param statistics: Of the actions; ``None`` = the head's numbers are the environment's.
    :param gripper: What the gripper's number means after the normalization was undone.
    :param binarize: Whether the gripper only opens or closes (:meth:`~rlt_gym.core.gripper.Gripper.to_env`).
    :param resample: Filter by which pictures are resized, one of :data:`FILTERS`.
    :param crop: Share of a picture's area that is kept in its middle, before it is resized; 0.9 for policies that
        were trained on random crops of this size (OpenVLA-OFT). ``None`` = all.
    :raises ValueError: If one of them cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: VLASpec,
        processor: Any = None,
        head: nn.Module | None = None,
        token_kinds: Mapping[int, str] | None = None,
        statistics: Normalization | None = None,
        gripper: Gripper | str = Gripper.ENV,
        binarize: bool = False,
        resample: str = "bicubic",
        crop: float | None = None,
    ) -> None:
        super().__init__()
        if spec.orientation is None or spec.image_size is None:
            raise ValueError(f"VLASpec.orientation and .image_size of {spec.name!r} must be said: HFVLA keeps them.")
        if resample not in FILTERS:
            raise ValueError(f"resample may be {', '.join(FILTERS)}, got {resample!r}.")
        if crop is not None and not 0 < crop <= 1:
            raise ValueError(f"crop must be above 0 and at most 1 (share of the area), got {crop!r}.")
        if statistics is not None and len(statistics.offset) != spec.action_dim:
            raise ValueError(
                f"The statistics have {len(statistics.offset)} numbers, the actions of {spec.name!r} {spec.action_dim}."
            )
        self.model, self.head, self.processor, self.spec = model, head, processor, spec
        self.token_kinds = {int(number): TOKEN_KINDS[kind] for number, kind in (token_kinds or {}).items()}
        self.statistics, self.gripper, self.binarize = statistics, Gripper(gripper), binarize
        self.resample, self.crop = resample, crop
        self._fingerprint = ""
        self.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.model.parameters()).device

    # ------------------------------------------------------------------------------------- what a policy says

    def prompt(self, task: str, state: np.ndarray) -> str:
        """
        Make the text of a row, with the processor's placeholders for pictures and with the action queries.

        :param task: Instruction.
        :param state: Float32 (P,), as the environment gives it.
        :return: The text.
        """
        raise NotImplementedError(f"{type(self).__name__} must define prompt(task, state), or override inputs().")

    def actions(
        self, hidden: torch.Tensor, inputs: Mapping[str, Any], state: torch.Tensor, seed: Sequence[int] | None
    ) -> torch.Tensor:
        """
        Make normalized actions of the hidden states.

        :param hidden: (B, M, H), what :meth:`hidden` gave.
        :param inputs: What :meth:`inputs` gave.
        :param state: Float32 (B, P), as the environment gives it.
        :param seed: One number per row, for :meth:`noise`.
        :return: (B, T, d), normalized.
        """
        raise NotImplementedError(f"{type(self).__name__} must define actions(hidden, inputs, state, seed).")

    def inputs(self, pictures: Mapping[str, np.ndarray], tasks: Sequence[str], state: np.ndarray) -> Mapping[str, Any]:
        """
        Make the model's input.

        :param pictures: What :meth:`frames` gave, in the order of ``spec.cameras``.
        :param tasks: One instruction per row.
        :param state: Float32 (B, P), as the environment gives it.
        :return: Arguments of the model; ``input_ids`` and ``attention_mask`` (B, M) say what the tokens are.
        """
        texts = [self.prompt(task, row) for task, row in zip(tasks, state, strict=True)]
        images = [[Image.fromarray(pictures[camera][row]) for camera in pictures] for row in range(len(tasks))]
        batch = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        dtype = next(self.model.parameters()).dtype
        moved = {key: value.to(self.device) for key, value in batch.items()}
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in moved.items()}

    def hidden(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """
        Run the model once, without its language head.

        :param inputs: What :meth:`inputs` gave.
        :return: Hidden states after the last norm (B, M, H).
        """
        return self.model.model(**inputs).last_hidden_state  # type: ignore[operator]

    def kinds(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Say which tokens are valid, and what they are.

        :param inputs: What :meth:`inputs` gave.
        :return: Mask bool (B, M), kinds uint8 (B, M).
        """
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        kind = torch.full_like(ids, TOKEN_KINDS["text"], dtype=torch.uint8)
        for number, name in self.token_kinds.items():
            kind[ids == number] = name
        return mask, kind.masked_fill(~mask, TOKEN_KINDS["pad"])

    # ------------------------------------------------------------------------------------- what all do alike

    def frames(self, obs: VLAObs) -> dict[str, np.ndarray]:
        """
        Turn, crop and resize pictures. A picture that has the right size already stays as it is.

        :param obs: Raw observations.
        :return: For each camera of the specification uint8 (B, S, S, 3), S = ``spec.image_size``.
        :raises ValueError: If a picture is not square: stretching it would change what the policy sees.
        """
        return {camera: self._fitted(np.asarray(obs[camera]), camera) for camera in self.spec.cameras}

    def _fitted(self, pictures: np.ndarray, camera: str) -> np.ndarray:
        turned = np.ascontiguousarray(ORIENTATIONS[str(self.spec.orientation)](pictures))
        edge, size = turned.shape[1], int(self.spec.image_size or 0)
        if turned.shape[2] != edge:
            raise ValueError(f"{camera} has pictures of {turned.shape[1:3]}; {self.spec.name!r} needs square ones.")
        margin = 0.0 if self.crop is None else edge * (1 - self.crop**0.5) / 2
        if edge == size and not margin:
            return turned
        box, filter = (margin, margin, edge - margin, edge - margin), Image.Resampling[self.resample.upper()]
        return np.stack([np.asarray(Image.fromarray(row).resize((size, size), filter, box=box)) for row in turned])

    def slots(self, hidden: torch.Tensor, ids: torch.Tensor, token: int, count: int) -> torch.Tensor:
        """
        Pick the hidden states of the action queries.

        :param hidden: (B, M, H).
        :param ids: (B, M), ``input_ids``.
        :param token: Number of the query token.
        :param count: Queries per row.
        :return: (B, count, H), in their order.
        :raises ValueError: If a row has more or fewer: its instruction contains the token, or the text was cut.
        """
        places = ids == token
        wrong = places.sum(dim=1) != count
        if bool(wrong.any()):
            row = int(wrong.int().argmax())
            raise ValueError(f"Row {row} has {int(places[row].sum())} action queries, {self.spec.name!r} has {count}.")
        return hidden[places].view(len(ids), count, -1)

    def noise(self, seed: Sequence[int] | None, shape: Sequence[int]) -> torch.Tensor:
        """
        Draw a stochastic policy's noise, the same for a seed on every device and in every batch.

        :param seed: One number per row.
        :param shape: Of one row.
        :return: Standard normal float32, B rows of this shape.
        :raises ValueError: Without seeds.
        """
        if seed is None:
            raise ValueError(f"The VLA {self.spec.name!r} draws noise and needs a seed for each row.")
        rows = [torch.randn(*shape, generator=torch.Generator().manual_seed(int(number) % 2**63)) for number in seed]
        return torch.stack(rows).to(self.device)

    @torch.no_grad()
    def forward(self, obs: VLAObs, tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> VLAOutput:
        """
        Run the policy on a batch.

        :param obs: Raw observations, see :data:`~rlt_gym.vla.base.VLAObs`.
        :param tasks: One instruction per row.
        :param seed: One number per row.
        :return: Tokens and chunk.
        """
        state = np.array(obs["state"], dtype=np.float32)
        inputs = self.inputs(self.frames(obs), list(tasks), state)
        hidden = self.hidden(inputs)
        mask, kind = self.kinds(inputs)
        actions = self.actions(hidden, inputs, torch.from_numpy(state).to(hidden.device), seed)
        if tuple(actions.shape[:2]) != (len(tasks), self.spec.horizon):
            shape = (len(tasks), self.spec.horizon, self.spec.action_dim)
            raise ValueError(f"actions() of {self.spec.name!r} gave the shape {tuple(actions.shape)}, not {shape}.")
        chunk = to_chunk(actions, self.statistics, self.gripper, binarize=self.binarize)
        return VLAOutput(hidden, mask, kind, chunk)

    def fingerprint(self) -> str:
        """
        Identify the policy; it is computed once.

        :return: sha256 of weights, prompt, statistics and conventions.
        """
        if not self._fingerprint:
            unread = ("max_batch", "picture_grids")  # they change nothing that the policy gives
            spec = {key: value for key, value in asdict(self.spec).items() if key not in unread}
            text = None
            if type(self).prompt is not HFVLA.prompt:
                text = self.prompt("task", np.zeros(self.spec.state_dim or 8, np.float32))
            says = {
                "format": "rlt-hf-vla", "class": type(self).__qualname__, "spec": spec, "prompt": text,
                "statistics": self.statistics and asdict(self.statistics), "gripper": str(self.gripper),
                "binarize": self.binarize, "resample": self.resample, "crop": self.crop,
            }  # fmt: skip
            self._fingerprint = fingerprint(says, self.state_dict())
        return self._fingerprint
