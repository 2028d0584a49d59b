"""
How tokens and chunk are read from each type of policy, and how its noise follows from the rows' seeds.

A :class:`Reader` runs one batch that the checkpoint's pre-processor made. LeRobot's policies are not changed: a forward
hook, or a method of one instance that is wrapped during the call, sees what the policy throws away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from rlt_gym.vla.base import TOKEN_KINDS


class Reading(NamedTuple):
    """
    What a policy gives for B rows.

    :param actions: (B, T, d), normalized as the policy was trained.
    :param tokens: (B, M, H).
    :param mask: bool (B, M), True = valid.
    :param kind: uint8 (B, M), see :data:`~rlt_gym.vla.base.TOKEN_KINDS`.
    :param max_tokens: Largest M of any batch, ``None`` if unknown.
    :param grids: Rows and columns of each picture's tokens, in the order of the policy's picture features; ``None`` if
        they do not cover the whole pictures, or it is unknown.
    :param from_noise: Noise (B, S, n) -> the actions that the policy makes of it; ``None`` if it takes none.
    """

    actions: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    kind: torch.Tensor
    max_tokens: int | None
    grids: tuple[tuple[int, int], ...] | None = None
    from_noise: Callable[[torch.Tensor], torch.Tensor] | None = None


class Reader:
    """
    Runs a policy and reads its tokens.

    :param policy: LeRobot's policy.
    :param config: Its configuration.
    """

    #: Whether the actions depend on the seeds; ``None`` = to be tried out.
    stochastic: bool | None = True

    def __init__(self, policy: Any, config: Any) -> None:
        self.policy, self.config = policy, config

    @property
    def noise_shape(self) -> tuple[int, int] | None:
        """Shape (S, n) of the noise that a caller may choose; ``None``: there is none, or more is drawn on the way."""
        return None

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return next(self.policy.parameters()).device

    def read(self, batch: dict[str, Any], seeds: Sequence[int]) -> Reading:
        """
        Run the policy.

        :param batch: Of the pre-processor, B rows.
        :param seeds: One number per row.
        :return: Actions and tokens.
        """
        return self._read(batch, seeds)

    def noise(self, seeds: Sequence[int], *shape: int) -> torch.Tensor:
        """
        Draw normal noise, for each row by itself. The same seed gives the same noise on every device.

        :param seeds: One number per row.
        :param shape: Of one row's noise.
        :return: (B, *shape) on the policy's device.
        """
        rows = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows).to(self.device)

    def _read(self, batch: dict[str, Any], seeds: Sequence[int]) -> Reading:
        raise NotImplementedError

    def _reading(
        self,
        actions: torch.Tensor,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        kinds: list[str],
        max_tokens: int | None = None,
        grids: Sequence[Sequence[int]] | None = None,
    ) -> Reading:
        kind = torch.tensor([TOKEN_KINDS[name] for name in kinds], dtype=torch.uint8, device=mask.device)
        most = tokens.shape[1] if max_tokens is None else max_tokens
        whole = None if grids is None else tuple((int(rows), int(columns)) for rows, columns in grids)
        return Reading(actions, tokens, mask, kind * mask.to(torch.uint8), most, whole)


class ACTReader(Reader):
    """ACT: the transformer encoder's output. Its latent token, a constant when it acts, is masked."""

    stochastic = False

    def _read(self, batch: dict[str, Any], seeds: Sequence[int]) -> Reading:
        backbone = getattr(self.policy.model, "backbone", None)
        pictures = [] if backbone is None else [backbone]
        with outputs_of(self.policy.model.encoder) as outputs, outputs_of(*pictures) as maps:
            actions = self._act(batch)
        tokens = outputs[0].transpose(0, 1)  # the encoder is sequence first
        kinds = ["pad", "state"] if self.config.robot_state_feature else ["pad"]
        kinds += ["image"] * (tokens.shape[1] - len(kinds))
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        mask[:, 0] = False
        return self._reading(actions, tokens, mask, kinds, grids=[found["feature_map"].shape[-2:] for found in maps])

    def _act(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.policy.predict_action_chunk(batch)


class FlowReader(Reader):
    """
    SmolVLA, PI0, PI05: the language model's output for pictures, instruction and (SmolVLA) state.

    One forward pass fills the language model's cache, and its output is thrown away; here it is kept. With the cache
    the actions' flow is integrated, for other noise again.
    """

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape of the noise of a whole chunk; the numbers of a step are padded to the policy's largest action."""
        return self.config.chunk_size, self.config.max_action_dim

    def _read(self, batch: dict[str, Any], seeds: Sequence[int]) -> Reading:
        with self._tapped() as found:
            actions = self.policy.predict_action_chunk(batch, noise=self.noise(seeds, *self.noise_shape))
        longer = self.config.tokenizer_max_length - batch["observation.language.tokens"].shape[1]
        tokens, mask, kinds = found["tokens"], found["mask"], list(found["kinds"])
        kinds += ["state"] * (tokens.shape[1] - len(kinds))  # then perhaps pads, which are masked
        edges = [math.isqrt(count) for count in found["pictures"]]
        square = all(edge * edge == count for edge, count in zip(edges, found["pictures"], strict=True))
        grids = [(edge, edge) for edge in edges] if square else None
        reading = self._reading(actions, tokens, mask, kinds, tokens.shape[1] + max(0, longer), grids)
        return reading._replace(from_noise=partial(self._flow, batch, found["prefix"], found["cached"]))

    def _flow(self, batch: dict[str, Any], prefix: Any, cached: Any, noise: torch.Tensor) -> torch.Tensor:
        """
        Integrate the flow once more.

        :param batch: Of the forward pass.
        :param prefix: What ``embed_prefix`` gave in it.
        :param cached: The language model's output and cache.
        :param noise: Where the flow begins, (B, S, n).
        :return: Actions.
        """

        def forward(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return cached if kwargs["inputs_embeds"][1] is None else method(*args, **kwargs)

        with (
            wrapped(self.policy.model, "embed_prefix", lambda method, *args, **kwargs: prefix),
            wrapped(self._core, "forward", forward),
        ):
            return self.policy.predict_action_chunk(batch, noise=noise.to(self.device))

    @property
    def _core(self) -> Any:
        model = self.policy.model
        return model.vlm_with_expert if hasattr(model, "vlm_with_expert") else model.paligemma_with_expert

    @contextmanager
    def _tapped(self) -> Iterator[dict[str, Any]]:
        model, core = self.policy.model, self._core
        found: dict[str, Any] = {"kinds": [], "pictures": []}

        def embed(kind: str, method: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            tokens = method(*args, **kwargs)
            found["kinds"] += [kind] * tokens.shape[-2]
            found["pictures"] += [tokens.shape[-2]] if kind == "image" else []
            return tokens

        def embed_prefix(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            embedded = found["prefix"] = method(*args, **kwargs)
            found["mask"] = embedded[1].bool()
            return embedded

        def forward(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outputs, cache = method(*args, **kwargs)
            if kwargs["inputs_embeds"][1] is None:
                found["tokens"], found["cached"] = outputs[0], (outputs, cache)
            return outputs, cache

        with (
            wrapped(core, "embed_image", partial(embed, "image")),
            wrapped(core, "embed_language_tokens", partial(embed, "text")),
            wrapped(model, "embed_prefix", embed_prefix),
            wrapped(core, "forward", forward),
        ):
            yield found


class DiffusionReader(Reader):
    """
    Diffusion: the feature map of the picture encoder, one token per place.

    It reads ``n_obs_steps`` observations, and a VLA is given one: the robot is taken to have stood still before.
    """

    def _read(self, batch: dict[str, Any], seeds: Sequence[int]) -> Reading:
        diffusion, config = self.policy.diffusion, self.config
        noise = self.noise(seeds, config.horizon, config.action_feature.shape[0])
        # more noise is drawn while it is taken away; each row has a generator of its own, which goes on
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for generator in generators:
            torch.randn(noise.shape[1:], generator=generator)
        encoders = diffusion.rgb_encoder
        encoders = list(encoders) if isinstance(encoders, torch.nn.ModuleList) else [encoders]
        fill_queues(self.policy, batch)

        def sample(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return method(*args, **{**kwargs, "generator": generators})

        with (
            outputs_of(*(encoder.backbone for encoder in encoders)) as maps,
            wrapped(diffusion, "conditional_sample", sample),
        ):
            actions = self.policy.predict_action_chunk(batch, noise=noise)
        last = [found.unflatten(0, (len(seeds), config.n_obs_steps, -1))[:, -1] for found in maps]
        tokens = torch.cat([found.flatten(3).transpose(2, 3).flatten(1, 2) for found in last], dim=1)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        # a picture that is cropped first is seen in part
        grids = [found.shape[-2:] for found in last for _ in range(found.shape[1])] if not config.crop_shape else None
        return self._reading(actions, tokens, mask, ["image"] * tokens.shape[1], grids=grids)


class HookReader(Reader):
    """
    Any policy: the output of a module that the caller names.

    :param policy: LeRobot's policy.
    :param config: Its configuration.
    :param hook: Path of the module in the policy, e.g. ``"model.encoder"``. If it runs several times (for each camera),
        its outputs are put one after the other.
    :param layout: How its output is laid out, a pattern of einops that gives ``b m h``: rows, tokens, width. ``None`` =
        (B, M, H), (B, H) as one token, or (B, H, y, x) as a token per place.
    :param kind: Kind of all its tokens.
    :raises ValueError: If there is no such module or kind.
    """

    stochastic = None

    def __init__(self, policy: Any, config: Any, hook: str, layout: str | None = None, kind: str = "image") -> None:
        super().__init__(policy, config)
        kinds = [name for name in TOKEN_KINDS if name != "pad"]
        if kind not in kinds:
            raise ValueError(f"kind may be {', '.join(kinds)}, got {kind!r}.")
        modules = dict(policy.named_modules())
        if hook not in modules:
            near = [name for name in modules if name.count(".") <= hook.count(".") and name]
            raise ValueError(f"A {config.type} policy has no module {hook!r}; it has {', '.join(near[:12])}, ...")
        self.module, self.hook, self.layout, self.kind = modules[hook], hook, layout, kind
        #: Whether it may run one row at a time only: rows of one batch are padded and draw their noise together.
        self.one_row = False

    def _read(self, batch: dict[str, Any], seeds: Sequence[int]) -> Reading:
        if self.one_row and len(seeds) > 1:
            raise ValueError(f"A {self.config.type} policy with a hook runs one row at a time (spec.max_batch is 1).")
        fill_queues(self.policy, batch)
        with outputs_of(self.module) as outputs, random_numbers(seeds[0], self.device):
            actions = self.policy.predict_action_chunk(batch)
        if not outputs:
            raise ValueError(f"The module {self.hook!r} does not run when the policy acts: name another hook.")
        tokens = torch.cat([self._laid_out(output, len(seeds)) for output in outputs], dim=1)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        reading = self._reading(actions, tokens, mask, [self.kind] * tokens.shape[1])
        return reading._replace(max_tokens=None) if self.one_row else reading

    def _laid_out(self, output: Any, rows: int) -> torch.Tensor:
        from einops import EinopsError, rearrange

        if hasattr(output, "last_hidden_state"):  # of transformers
            output = output.last_hidden_state
        elif isinstance(output, tuple | list):
            output = output[0]
        elif isinstance(output, Mapping) and len(output) == 1:
            output = next(iter(output.values()))
        if not isinstance(output, torch.Tensor):
            raise ValueError(f"The module {self.hook!r} does not give a tensor: name another hook.")
        layout = self.layout or {2: "b h -> b 1 h", 4: "b h y x -> b (y x) h"}.get(output.ndim, "b m h -> b m h")
        try:
            tokens = rearrange(output, layout, b=rows)
        except EinopsError as error:
            raise ValueError(f"layout {layout!r} does not fit: {' '.join(str(error).split())}") from error
        if tokens.ndim != 3 or len(tokens) != rows:
            raise ValueError(f"layout {layout!r} gives {tuple(tokens.shape)}, not {rows} rows of tokens (b m h).")
        return tokens


#: Type of a LeRobot policy -> what reads it.
READERS: dict[str, type[Reader]] = {
    "act": ACTReader,
    "diffusion": DiffusionReader,
    "smolvla": FlowReader,
    "pi0": FlowReader,
    "pi05": FlowReader,
}


@contextmanager
def outputs_of(*modules: torch.nn.Module) -> Iterator[list[Any]]:
    """
    Collect what modules give.

    :param modules: The modules.
    :return: Their outputs in the order of their calls.
    """
    outputs: list[Any] = []
    handles = [module.register_forward_hook(lambda *call: outputs.append(call[-1])) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """
    Wrap a method of one object.

    :param owner: The object.
    :param name: The method.
    :param wrapper: Called with the method and then its arguments.
    """
    setattr(owner, name, partial(wrapper, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """
    Seed torch's own generators, and leave them afterwards as they were.

    :param seed: The seed.
    :param device: The GPU whose generator is meant, or the CPU.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def fill_queues(policy: Any, batch: dict[str, Any]) -> None:
    """
    Let a policy that remembers observations remember this one only, as often as it reads.

    :param policy: LeRobot's policy.
    :param batch: Of the pre-processor. It loses its empty entry for actions, and gets one for all pictures if the
        policy wants it.
    """
    from lerobot.policies.utils import populate_queues
    from lerobot.utils.constants import ACTION, OBS_IMAGES

    batch.pop(ACTION, None)
    policy.reset()
    queues = getattr(policy, "_queues", None)
    if not queues or not set(queues) - {ACTION}:
        return
    if OBS_IMAGES in queues:
        batch[OBS_IMAGES] = torch.stack([batch[key] for key in policy.config.image_features], dim=-4)
    policy._queues = populate_queues(queues, batch, exclude_keys=[ACTION])
