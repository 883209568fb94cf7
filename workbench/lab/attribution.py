"""What patching each head would win, estimated for all heads at once from one backward pass.

The KL of the following tokens is a function of the cache that they read. Its gradient at the mapped cache, times the
step from the mapped tensors to the true ones, is what the exchange wins to first order:

    estimate[t, h] = sum over tokens of  dKL/dK · (K_mapped - K_true) + dKL/dV · (V_mapped - V_true)

One forward and one backward pass over the following tokens give it for every head, where patching needs a pass for each.
The KL is bent along the way, so `path_gains` takes the mean of the gradients at four points of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from workbench.kv.cache import layer_tensors
from workbench.lab.branches import Branches

POINTS = (0.0, 0.25, 0.5, 0.75)
"""Where on the way from the mapped cache (0) to the true one (1) gradients are taken."""


def path_gains(branches: Branches) -> Tensor:
    """Estimated patch gains of all heads, (L, H, 2) float64 of keys and values: means over `POINTS`."""
    return torch.stack([estimated_gains(branches, at) for at in POINTS]).mean(0)


def estimated_gains(branches: Branches, at: float = 0.0) -> Tensor:
    """First-order patch gains of all heads.

    Args:
        branches: a text's two caches and its following tokens.
        at: where on the way from the mapped cache (0) to the true one (1) the gradient is taken.

    Returns:
        (L, H, 2) float64: of keys and of values; their sum is the estimate for the head.
    """
    leaves: list[Tensor] = []
    steps: list[Tensor] = []
    layers = []
    with torch.inference_mode(False), torch.enable_grad():
        for index in range(branches.target.spec.layers):
            pair = []
            for mapped, true in zip(
                layer_tensors(branches.mapped, index), layer_tensors(branches.true, index), strict=True
            ):
                step = true.clone() - mapped
                leaf = (mapped + at * step).requires_grad_()
                leaves.append(leaf)
                steps.append(step)
                pair.append(leaf)
            layer = DynamicLayer()
            layer.lazy_initialization(*pair)
            layer.keys, layer.values = pair
            layers.append(layer)
        kl = branches.kl_of(Cache(layers=layers))
        gradients = torch.autograd.grad(kl, leaves)
    gains = [
        -(gradient.double() * step.double()).sum((0, 2, 3)).cpu()
        for gradient, step in zip(gradients, steps, strict=True)
    ]
    return torch.stack(gains).view(branches.target.spec.layers, 2, -1).transpose(1, 2)
