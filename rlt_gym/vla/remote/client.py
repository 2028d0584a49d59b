"""The clients of policy servers, as frozen VLAs: any VLA behind ``rlt serve``, and policies behind openpi's server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlt_gym.vla.base import TOKEN_KINDS, VLAObs, VLAOutput, VLASpec, VLAUnavailableError
from rlt_gym.vla.patches import COUNT, EDGE, PATCH, WIDTH, patch_tokens
from rlt_gym.vla.remote import openpi
from rlt_gym.vla.remote.codec import pack
from rlt_gym.vla.remote.connection import Connection, address_of
from rlt_gym.vla.remote.protocol import PORT, read_description

if TYPE_CHECKING:
    from typing import Self

#: Why there is no RL token of a policy behind openpi's server.
NO_TOKENS = "openpi's servers send actions and no hidden states; vla_kwargs {tokens: pictures} takes the pictures'"


class _Served:
    """What the clients have in common."""

    #: What stands before the colon of the name, and the port if the name has none.
    SCHEME, PORT = "rlt", PORT

    _spec: VLASpec
    _fingerprint: str

    def __init__(self, connection: Connection, device: torch.device | str, arguments: Mapping[str, Any]) -> None:
        self._connection, self._device, self._arguments = connection, torch.device(device), dict(arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy, in this process or another one, has a connection of its own
        return partial(type(self), **self._arguments | {"device": str(self._device)}), ()

    @classmethod
    def at(cls, rest: str, device: torch.device | str = "cpu", **kwargs: Any) -> Self:
        """
        Connect to what a name says.

        :param rest: ``"//host:port"``, what stands behind the scheme.
        :param device: Where outputs are put.
        :param kwargs: Further arguments of the class.
        :return: The VLA.
        """
        host, port = address_of(rest, cls.SCHEME, cls.PORT)
        return cls(host=host, port=port, device=device, **kwargs)  # type: ignore[call-arg]

    @property
    def spec(self) -> VLASpec:
        """What the server's VLA needs and gives."""
        return self._spec

    @property
    def device(self) -> torch.device:
        """Where outputs are put."""
        return self._device

    def to(self, device: torch.device | str) -> Self:
        """
        Put outputs on another device; the VLA stays where its server has it.

        :param device: The device.
        :return: This object.
        """
        self._device = torch.device(device)
        return self

    def fingerprint(self) -> str:
        """
        Identify the policy.

        :return: What the server says.
        """
        return self._fingerprint

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class RemoteVLA(_Served):
    """
    A VLA behind ``rlt serve``, as a :class:`~rlt_gym.vla.base.FrozenVLA`.

    Specification and fingerprint are the server's VLA's own, so its RL token fits and another one is refused. Tokens
    have the type in which the server sends them, float16 by default.

    :param host: The server's name or address.
    :param port: Its port.
    :param device: Where outputs are put.
    :param key: What the server wants to be sent; ``None`` = the environment variable ``RLT_SERVE_KEY``.
    :param max_batch: Most rows of a request; ``None`` = what the server allows.
    :param timeout: Seconds to wait for a reply.
    :param patience: Seconds for which a lost server is looked for, at growing intervals of up to 5 seconds.
    :param wait: Seconds for which it is looked for at first.
    :param max_bytes: Most bytes of a reply.
    :raises ValueError: If the extra is missing, or the server has no VLA of this protocol.
    :raises VLAUnavailableError: If there is no server, or it wants another key.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        device: torch.device | str = "cpu",
        key: str | None = None,
        max_batch: int | None = None,
        timeout: float = 120.0,
        patience: float = 60.0,
        wait: float = 5.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if max_batch is not None and max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}.")
        super().__init__(Connection(host, port, key, timeout, patience, wait, max_bytes), device, arguments)
        metadata = self._connection.metadata
        try:
            self._spec, self._fingerprint = read_description(metadata, f"The server at {self._connection.address}")
        except ValueError:
            self.close()
            raise
        self.max_batch = min(int(metadata["max_batch"]), max_batch or 1024)
        self._max_bytes = int(metadata["max_bytes"])

    def forward(self, obs: VLAObs, tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> VLAOutput:
        """
        Let the server run the VLA.

        :param obs: Raw observations, see :data:`~rlt_gym.vla.base.VLAObs`.
        :param tasks: One instruction per row.
        :param seed: One number per row.
        :return: Tokens and chunk.
        :raises ValueError: If the VLA refuses the observations.
        :raises VLAUnavailableError: If the server is gone.
        """
        arrays = self._arrays(obs, tasks)
        rows = len(tasks)
        row_bytes = sum(array.nbytes for array in arrays.values()) // rows + 4 * max(map(len, tasks)) + 64
        fitting = (self._max_bytes - 4096) // row_bytes
        if fitting < 1:
            raise ValueError(
                f"An observation has {row_bytes} bytes, the server at {self._connection.address} takes "
                f"{self._max_bytes} at once: serve with a larger --max_mb."
            )
        step = min(self.max_batch, fitting)
        parts = [self._part(arrays, tasks, seed, slice(at, min(at + step, rows))) for at in range(0, rows, step)]
        return _joined(parts, self._device)

    def _arrays(self, obs: VLAObs, tasks: Sequence[str]) -> dict[str, np.ndarray]:
        keys = (*self._spec.cameras, "state")
        missing = [key for key in keys if key not in obs]
        if missing or isinstance(tasks, str) or not len(tasks):
            raise ValueError(
                f"The VLA {self._spec.name!r} needs {list(keys)} and a list of instructions; got {sorted(obs)} and "
                f"{tasks!r:.60}."
            )
        arrays = {key: np.asarray(obs[key], dtype=np.float32 if key == "state" else None) for key in keys}
        wrong = {key: len(array) for key, array in arrays.items() if len(array) != len(tasks)}
        if wrong:
            raise ValueError(f"{len(tasks)} instructions need as many rows of each observation, got {wrong}.")
        return arrays

    def _part(
        self, arrays: Mapping[str, np.ndarray], tasks: Sequence[str], seed: Sequence[int] | None, rows: slice
    ) -> dict[str, torch.Tensor]:
        request = {
            "obs": {key: array[rows] for key, array in arrays.items()},
            "tasks": [str(task) for task in tasks[rows]],
            "seed": None if seed is None else [int(number) for number in seed[rows]],
        }
        reply = self._connection.ask(request)
        arrays_wanted = {"tokens": ("f", 3), "mask": ("b", 2), "kind": ("u", 2), "chunk": ("f", 3)}
        for name, (kind, dims) in arrays_wanted.items():
            array = reply.get(name)
            if not isinstance(array, np.ndarray) or array.dtype.kind != kind or array.ndim != dims:
                raise VLAUnavailableError(f"The server at {self._connection.address} gave no {name} of this protocol.")
        part = {name: torch.from_numpy(reply[name].copy()) for name in arrays_wanted}
        VLAOutput(part["tokens"], part["mask"], part["kind"], part["chunk"]).check(self._spec, rows.stop - rows.start)
        return part


def _joined(parts: Sequence[Mapping[str, torch.Tensor]], device: torch.device) -> VLAOutput:
    """Rows below each other; a VLA that pads to the longest row gives other numbers of tokens each time."""
    longest = max(part["mask"].shape[1] for part in parts)

    def padded(name: str) -> torch.Tensor:
        rows = []
        for part in parts:
            tensor, more = part[name], longest - part["mask"].shape[1]
            if more:  # zeros: no token, kind 0 is padding
                tensor = torch.cat([tensor, tensor.new_zeros((len(tensor), more, *tensor.shape[2:]))], dim=1)
            rows.append(tensor)
        return torch.cat(rows).to(device)

    chunk = torch.cat([part["chunk"] for part in parts]).to(device)
    return VLAOutput(tokens=padded("tokens"), mask=padded("mask"), kind=padded("kind"), chunk=chunk)


class OpenPIVLA(_Served):
    """
    A policy behind openpi's own server. Such a server sends actions and no hidden states.

    So there is no RL token of the policy: ``rl_token="none"`` gives the learner a zero in its place, and with
    ``tokens="pictures"`` an RL token of the pictures themselves can be trained. The noise of the policy cannot be
    seeded from here, so the same episode differs from run to run. One observation is asked at a time.

    :param host: The server's name or address.
    :param port: Its port; openpi's default is 8000.
    :param device: Where outputs are put.
    :param key: What the server wants to be sent; ``None`` = the environment variable ``RLT_SERVE_KEY``.
    :param timeout: Seconds to wait for a reply; openpi compiles the policy at the first request.
    :param patience: Seconds for which a lost server is looked for.
    :param wait: Seconds for which it is looked for at first.
    :param max_bytes: Most bytes of a reply.
    :param state_dim: Numbers of the state that the policy needs.
    :param frame_size: Edge in pixels of the frames that the environment is to draw; 256 in openpi's LIBERO client.
    :param assets: Kind of assets that the policy was trained on.
    :param tokens: ``"none"``, or ``"pictures"``: patches of the pictures (:mod:`rlt_gym.vla.patches`).
    :raises ValueError: If the extra is missing, or the server gives no actions.
    :raises VLAUnavailableError: If there is no server, or it wants another key.
    """

    SCHEME, PORT = "openpi", 8000

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        device: torch.device | str = "cpu",
        key: str | None = None,
        timeout: float = 300.0,
        patience: float = 60.0,
        wait: float = 5.0,
        max_bytes: int = 64 << 20,
        state_dim: int = 8,
        frame_size: int = openpi.FRAME_SIZE,
        assets: str | None = "official",
        tokens: str = "none",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if tokens not in ("none", "pictures"):
            raise ValueError(f"tokens of an openpi:// VLA may be 'none' or 'pictures', got {tokens!r}.")
        super().__init__(Connection(host, port, key, timeout, patience, wait, max_bytes), device, arguments)
        metadata, patches = self._connection.metadata, tokens == "pictures"
        said = [metadata, "pictures", EDGE, PATCH] if patches else metadata
        self._fingerprint = "openpi-" + hashlib.sha256(pack(said)).hexdigest()
        #: Why there is no RL token of it.
        self.no_tokens = "" if patches else NO_TOKENS
        blank = {camera: np.zeros((1, frame_size, frame_size, 3), np.uint8) for camera in openpi.CAMERAS}
        try:  # the metadata do not say how long a chunk is
            actions = self._ask({**blank, "state": np.zeros((1, state_dim), np.float32)}, "", 0)
        except Exception:
            self.close()
            raise
        self._spec = VLASpec(
            "openpi",
            token_dim=WIDTH if patches else 1,
            max_tokens=COUNT * len(openpi.CAMERAS) if patches else None,
            horizon=actions.shape[0],
            action_dim=actions.shape[1],
            stochastic=True,
            cameras=tuple(openpi.CAMERAS),
            image_size=openpi.PICTURE_SIZE,
            assets=assets,
            frame_size=frame_size,
            state_dim=state_dim,
            kinds=("image",) if patches else (),
            upside_down=True,
        )

    def _ask(self, obs: Mapping[str, np.ndarray], task: str, row: int) -> np.ndarray:
        reply = self._connection.ask(openpi.write_observation(obs, task, row))
        return openpi.read_actions(reply, f"The server at {self._connection.address}")

    def forward(self, obs: VLAObs, tasks: Sequence[str], *, seed: Sequence[int] | None = None) -> VLAOutput:
        """
        Ask for each row's actions.

        :param obs: Raw observations, see :data:`~rlt_gym.vla.base.VLAObs`.
        :param tasks: One instruction per row.
        :param seed: Not used: the protocol has none.
        :return: The chunk, and the tokens that were chosen.
        :raises VLAUnavailableError: If the server is gone.
        """
        chunk = np.stack([self._ask(obs, task, row) for row, task in enumerate(tasks)])
        if self.no_tokens:
            tokens = torch.zeros(len(tasks), 0, 1)
        else:
            tokens = patch_tokens([obs[camera] for camera in self._spec.cameras])
        shape, device = tokens.shape[:2], self._device
        return VLAOutput(
            tokens=tokens.to(device),
            mask=torch.ones(shape, dtype=torch.bool, device=device),
            kind=torch.full(shape, TOKEN_KINDS["image"], dtype=torch.uint8, device=device),
            chunk=torch.from_numpy(chunk).to(device),
        )
