"""Layers and operations that Stable-Baselines3 does not have."""

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch as th
from torch import nn
from torch.nn import functional as F


class AntiWindupClamp(th.autograd.Function):
    """
    Computes ``clamp(x, -1, 1)``, with a gradient at and beyond the border as well.

    Numbers of VLA chunks are often exactly on the border (the gripper command is -1 or 1). The gradient of
    ``torch.clamp`` is zero beyond the border, so a unit pushed outside could never return. A plain straight-through
    gradient has the opposite fault: a critic that prefers larger values pushes the unit ever further out while the
    output stays 1, and the pull towards the reference, which is computed from the output, does not change. So all
    gradients pass except those whose descent step would move a saturated unit further outside.
    """

    @staticmethod
    def forward(ctx: Any, x: th.Tensor) -> th.Tensor:
        """
        Clamp to [-1, 1].

        :param x: any shape
        :return: x limited to [-1, 1]; inside exactly x
        """
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: th.Tensor) -> th.Tensor:
        """
        Drop gradients whose descent step would move a saturated unit further outside.

        :param grad: gradient of the output
        :return: gradient of the input
        """
        (x,) = ctx.saved_tensors
        outward = ((x >= 1.0) & (grad < 0.0)) | ((x <= -1.0) & (grad > 0.0))
        return grad.masked_fill(outward, 0.0)


class EnsembleMLP(nn.Module):
    """
    ``n`` independent MLPs with one output each, evaluated together with batched matrix products.

    Hidden layers are ``activation(LayerNorm(W x + b))``. LayerNorm has no affine part, which saves two passes over the
    activations: the bias before it and the weights after it do the same work.

    :param n: number of members
    :param input_dim: size of the input
    :param net_arch: hidden layer sizes
    :param activation_fn: activation
    :param layer_norm: normalize hidden layers; keeps Q-values of unseen actions from growing (Ball et al., RLPD, 2023)
    """

    def __init__(
        self, n: int, input_dim: int, net_arch: Sequence[int], activation_fn: type[nn.Module], layer_norm: bool = True
    ):
        super().__init__()
        self.n = n
        self.layer_norm = layer_norm
        self.activation = activation_fn()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        sizes = [input_dim, *net_arch, 1]
        for fan_in, fan_out in pairwise(sizes):
            bound = 1.0 / math.sqrt(fan_in)  # as nn.Linear
            self.weights.append(nn.Parameter(th.empty(n, fan_in, fan_out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(th.empty(n, 1, fan_out).uniform_(-bound, bound)))

    def forward(
        self, x: th.Tensor, members: th.Tensor | slice | None = None, actions: th.Tensor | None = None
    ) -> th.Tensor:
        """
        Evaluate members of the ensemble.

        :param x: inputs (B, input_dim), or their first part if ``actions`` are given
        :param members: indices of the members to evaluate; all by default
        :param actions: the last part of the inputs. Where the weights get no gradient it is multiplied separately: no
            copy to join the parts, and no gradient of the wide part on the way back.
        :return: outputs (members, B)
        """
        weights_learn = th.is_grad_enabled() and self.weights[0].requires_grad
        apart = actions is not None and not x.requires_grad and not weights_learn
        if actions is not None and not apart:
            x = th.cat([x, actions], dim=1)
        last = len(self.weights) - 1
        hidden = x
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if members is not None:
                weight, bias = weight[members], bias[members]
            if layer == 0:
                hidden = x.expand(len(weight), *x.shape)
                if apart:
                    assert actions is not None
                    width = x.shape[1]
                    bias = th.baddbmm(bias, actions.expand(len(weight), *actions.shape), weight[:, width:])
                    weight = weight[:, :width]
            hidden = th.baddbmm(bias, hidden, weight)
            if layer < last:
                if self.layer_norm:
                    hidden = F.layer_norm(hidden, hidden.shape[-1:])
                hidden = self.activation(hidden)
        return hidden.squeeze(-1)


def times_per_dimension(chunks: th.Tensor, factor: Any) -> th.Tensor:
    """
    Multiply every control step's action by a factor.

    :param chunks: flat chunks (B, C*d)
    :param factor: a number, or one per action dimension (d,)
    :return: the chunks, every step's actions times the factor
    """
    numbers = np.asarray(factor, dtype=float)
    of_step = constant(tuple(numbers.flatten().tolist()), chunks.dtype, chunks.device)
    return chunks * (of_step[0] if numbers.ndim == 0 else of_step.repeat(chunks.shape[1] // len(numbers)))


@functools.lru_cache(maxsize=256)
def constant(numbers: tuple[float, ...], dtype: th.dtype, device: th.device) -> th.Tensor:
    """
    Return the same tensor for the same numbers: copying them to a GPU each time would wait for the GPU each time.

    :param numbers: the numbers
    :param dtype: of the tensor
    :param device: of the tensor
    :return: the tensor (n,), not to be changed
    """
    return th.tensor(numbers, dtype=dtype, device=device)


def polyak(online: th.nn.Module, target: th.nn.Module, tau: float) -> None:
    """
    As SB3's ``polyak_update``, with all parameters in one call.

    :param online: the network that learns
    :param target: its slow copy
    :param tau: weight of the former
    """
    with th.no_grad():
        th._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)
