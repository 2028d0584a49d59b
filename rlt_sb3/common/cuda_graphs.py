"""
Updates as CUDA graphs: one launch for an update instead of hundreds.

The operations of an update with small networks are so short on a GPU that the GPU waits for Python, which launches them
one by one. A CUDA graph keeps all launches of one update, with the places in memory that they read and write, and
launches them at once (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch as th
from torch.utils._pytree import tree_leaves, tree_map

#: An update: any nest of tensors -> numbers for the log
Update = Callable[..., tuple[th.Tensor, ...]]


class UpdateGraphs:
    """
    Carries out updates, and records each kind of update as a CUDA graph after it has run a few times.

    An update may read, besides its arguments, only what keeps its place in memory (networks, optimizers' states,
    tensors) or is part of its key (numbers, switches). Learning rates may change at any time.

    :param device: where the updates run
    :param optimizers: the optimizers that updates step, fused Adam or AdamW
    :param networks: the networks that updates read or change
    """

    #: updates of each kind before it is recorded; optimizers make their states in the first one
    WARM_UP = 3

    def __init__(
        self, device: th.device, optimizers: Sequence[th.optim.Optimizer], networks: Sequence[th.nn.Module]
    ) -> None:
        self.device, self.optimizers, self.networks = device, optimizers, networks
        self.rates = [[th.zeros((), device=device) for _ in one.param_groups] for one in optimizers]
        self.calls: dict[Hashable, int] = {}
        self.recorded: dict[Hashable, tuple[Callable[[], None], list[th.Tensor], tuple[th.Tensor, ...]]] = {}
        self._places: list[int] = []

    def begin(self) -> None:
        """
        Prepare for updates: call it after networks, optimizers or learning rates may have changed.

        A model that was loaded has its optimizers' states in other places; what was recorded for the old ones is gone.
        """
        tensors = [tensor for module in self.networks for tensor in (*module.parameters(), *module.buffers())]
        states = [state for one in self.optimizers for state in one.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, th.Tensor)]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places = places
            self.recorded.clear()
            self.calls.clear()
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                rate.fill_(group["lr"])

    def run(self, key: Hashable, update: Update, *arguments: Any) -> tuple[th.Tensor, ...]:
        """
        Carry out one update.

        :param key: everything that decides which operations the update has, and the numbers in them
        :param update: the update
        :param arguments: of the update: tensors on :attr:`device`, and dicts and tuples of them
        :return: what the update returns
        """
        given = tree_leaves(arguments)
        key = (key, *((tensor.shape, tensor.dtype) for tensor in given))
        if key not in self.recorded:
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= self.WARM_UP:
                return self._run(update, arguments)
            own = tree_map(th.clone, arguments)
            with self._recordable():
                replay, results = self._record(update, own)
            self.recorded[key] = replay, tree_leaves(own), results
        replay, places, results = self.recorded[key]
        th._foreach_copy_(places, given)
        replay()
        return tuple(result.clone() for result in results)  # the next replay overwrites them

    @contextmanager
    def _recordable(self) -> Iterator[None]:
        """Have optimizers read their learning rates from tensors, whose contents a graph reads each time."""
        kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                kept.append((group, {name: group[name] for name in ("lr", "capturable")}))
                group.update(lr=rate, capturable=True)
        try:
            yield
        finally:
            for group, values in kept:
                group.update(values)

    def _run(self, update: Update, arguments: tuple[Any, ...]) -> tuple[th.Tensor, ...]:
        """Carry out an update on a stream of its own, as PyTorch asks for before a graph is recorded."""
        th.cuda.synchronize(self.device)
        with th.cuda.stream(th.cuda.Stream(self.device)):
            results = update(*arguments)
        th.cuda.synchronize(self.device)
        return results

    def _record(self, update: Update, arguments: tuple[Any, ...]) -> tuple[Callable[[], None], tuple[th.Tensor, ...]]:
        """Record an update without carrying it out; return what carries it out, and where the results will be."""
        graph = th.cuda.CUDAGraph()
        # other threads of the process may use the GPU meanwhile
        with th.cuda.device(self.device), th.cuda.graph(graph, capture_error_mode="thread_local"):
            results = update(*arguments)
        return graph.replay, results
