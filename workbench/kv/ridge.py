"""Ridge regression from moments: which source layers, how much ridge, and the solution.

For one target layer and one kind (keys or values)

    W = (C_xx + ridge * s * I)^-1 C_xy,    b = mean_y - mean_x W

where `s` is the mean of the diagonal of `C_xx`, so that `ridge` has no unit (arXiv 2608.03893 uses 0.01). All heads of a
target layer share their features, so they are solved, and later applied, together. Errors on held-out tokens come
from held-out moments, again without touching the tokens:

    SSE/n = var_y - 2 diag(W' C_xy) + diag(W' C_xx W) + (mean_y - mean_x W - b)²

Features are ordered by source layer: layer `l` owns columns `l*width .. (l+1)*width - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kv.moments import Moments

RIDGE_LADDER = (1e-4, 1e-3, 1e-2, 1e-1)
TOP_K_LADDER = (1, 2, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Solution:
    """One target layer's map: `layers` chosen, `weight` (k*w_src, w_tgt) and `bias` (w_tgt,) in float64."""

    layers: tuple[int, ...]
    ridge: float
    weight: Tensor
    bias: Tensor


def columns_of(layers: tuple[int, ...], width: int) -> Tensor:
    """(len(layers)*width,) feature columns that belong to these source layers, in the given order."""
    return torch.cat([torch.arange(layer * width, (layer + 1) * width) for layer in layers])


class RidgeSolver:
    """Solves many target layers from one set of moments, and remembers factorisations that they share."""

    def __init__(self, train: Moments, heldout: Moments, source_layers: int, target_layers: int) -> None:
        train.flush()
        heldout.flush()
        if train.count == 0 or heldout.count == 0:
            raise ValueError("both the fitting and the held-out tokens must be more than none")
        self.train, self.heldout = train, heldout
        self.source_layers = source_layers
        self.width_src = train.sum_x.numel() // source_layers
        self.width_tgt = train.sum_y.numel() // target_layers
        self._factors: dict[tuple[tuple[int, ...], float], Tensor] = {}

    def outputs(self, target_layer: int) -> slice:
        """The output columns of one target layer."""
        return slice(target_layer * self.width_tgt, (target_layer + 1) * self.width_tgt)

    def solve(self, target_layer: int, layers: tuple[int, ...], ridge: float) -> Solution:
        """The ridge solution of one target layer over the chosen source layers, in float64."""
        columns, outputs = columns_of(layers, self.width_src), self.outputs(target_layer)
        weight = torch.cholesky_solve(self.train.cov_xy(columns, outputs), self._factor(layers, ridge))
        bias = self.train.mean_y[outputs] - self.train.mean_x[columns] @ weight
        return Solution(layers, ridge, weight, bias)

    def _factor(self, layers: tuple[int, ...], ridge: float) -> Tensor:
        if (layers, ridge) not in self._factors:
            cov = self.train.cov_xx(columns_of(layers, self.width_src))
            cov.diagonal().add_(ridge * cov.diagonal().mean().clamp_min(1e-12))
            factor = torch.linalg.cholesky(cov)
            if len(layers) not in (1, self.source_layers):
                return factor  # a ranked choice is seldom shared by two target layers: not worth the memory
            self._factors[layers, ridge] = factor
        return self._factors[layers, ridge]

    def squared_error(self, target_layer: int, solution: Solution) -> Tensor:
        """(w_tgt,) mean squared error of each output on the held-out tokens."""
        columns, outputs = columns_of(solution.layers, self.width_src), self.outputs(target_layer)
        held = self.heldout
        explained = 2 * held.cov_xy(columns, outputs) - held.cov_xx(columns) @ solution.weight
        offset = held.mean_y[outputs] - held.mean_x[columns] @ solution.weight - solution.bias
        return (held.var_y(outputs) - (solution.weight * explained).sum(0)).clamp_min(0) + offset**2

    def r2(self, target_layer: int, solution: Solution, heads: int) -> Tensor:
        """(heads,) held-out R²: 1 - squared error over the variance about the mean, summed over a head's channels."""
        error = self.squared_error(target_layer, solution).view(heads, -1).sum(1)
        variance = self.heldout.var_y(self.outputs(target_layer)).view(heads, -1).sum(1)
        return 1 - error / variance.clamp_min(1e-12)

    def rank(self, target_layer: int, heads: int, ridge: float) -> list[int]:
        """All source layers, best first, each scored alone by held-out R² averaged over the target layer's heads."""
        scores = [
            float(self.r2(target_layer, self.solve(target_layer, (layer,), ridge), heads).mean())
            for layer in range(self.source_layers)
        ]
        return sorted(range(self.source_layers), key=lambda layer: -scores[layer])

    def choose(self, target_layer: int, heads: int, top_k: int | None, ridge: float | None) -> Solution:
        """The best map of one target layer.

        Args:
            target_layer: which layer.
            heads: KV heads of the target, over which R² is averaged.
            top_k: number of source layers, None for the number with the best held-out R².
            ridge: None for the value with the best held-out R².

        Returns:
            The solution; its `layers` are in ascending order.
        """
        ladder = (
            (top_k,) if top_k else (*(k for k in TOP_K_LADDER if k < self.source_layers), self.source_layers)
        )
        everything = all(k >= self.source_layers for k in ladder)
        ranked = [] if everything else self.rank(target_layer, heads, ridge or 1e-2)
        best, best_score = None, float("-inf")
        for k in ladder:
            layers = (
                tuple(range(self.source_layers)) if k >= self.source_layers else tuple(sorted(ranked[:k]))
            )
            for candidate in (ridge,) if ridge else RIDGE_LADDER:
                solution = self.solve(target_layer, layers, candidate)
                score = float(self.r2(target_layer, solution, heads).mean())
                if score > best_score:
                    best, best_score = solution, score
        assert best is not None
        return best
