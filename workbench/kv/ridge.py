"""Ridge regression from moments: which source layers, how much ridge, and the solution.

For one target layer and one kind (keys or values)

    W = (C_xx + ridge * s * I)^-1 C_xy,    b = mean_y - mean_x W

where `s` is the mean of the diagonal of `C_xx`, so that `ridge` has no unit (arXiv 2608.03893 uses 0.01). All heads of a
target layer share their features, so they are solved, and later applied, together.

Everything that is chosen is chosen by held-out tokens that are then joined to the fitted ones; the figures that are
reported come from a third set. One eigendecomposition `C_xx = Q diag(e) Q'` serves every ridge and every target layer
that reads the same source layers: `W = Q diag(1 / (e + ridge * s)) Q' C_xy`.

Source layers are put in order in one of two ways: *ranked*, each scored alone by held-out R² (as published), or
*greedy*, each scored by what it adds to the ones before it. Layers that follow one another say nearly the same, so the
second best alone is seldom the second best to have. A step of the greedy search is one more block row of a Cholesky
factorisation: with `T = L_SS^-1 C_S,:` for the layers S taken so far, what candidate c adds to the explained part is

    || chol(C_cc - T_c'T_c + ridge * s * I)^-1 (C_cy - T_c'T_y) ||²

Features are ordered by source layer; `columns(layer)` says which columns belong to one (with both features these are
its keys' and its values').
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.kv.moments import Moments, Rows

RIDGE_LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
TOP_K_LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ORDER_RIDGE = 1e-2  # while layers are put in order and the ridge is still to be chosen


@dataclass(frozen=True)
class Solution:
    """One target layer's map: `layers` chosen, `weight` (features, w_tgt) and `bias` (w_tgt,) in float64."""

    layers: tuple[int, ...]
    ridge: float
    weight: Tensor
    bias: Tensor


class RidgeSolver:
    """Solves many target layers from one set of moments, and remembers factorisations that they share.

    Args:
        train: sums over the fitted tokens.
        heldout: other tokens of the same captures, that choices are made by.
        source_layers: how many.
        heads: KV heads of a target layer, over which R² is averaged.
        width_tgt: outputs of a target layer.
        kinds: how many features a source layer has besides its keys (1), or keys and values (2): with 2 the first half
            of the columns are all layers' keys, the second half all layers' values.
    """

    def __init__(
        self, train: Moments, heldout: Rows, source_layers: int, heads: int, width_tgt: int, kinds: int = 1
    ) -> None:
        train.flush()
        if train.count == 0 or heldout.count == 0:
            raise ValueError("both the fitting and the held-out tokens must be more than none")
        self.train, self.heldout = train, heldout
        self.source_layers, self.heads, self.width_tgt, self.kinds = source_layers, heads, width_tgt, kinds
        self.width_src = train.sum_x.numel() // source_layers // kinds
        self._shared: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._factor: tuple[tuple[tuple[int, ...], float], Tensor] | None = None  # of the last solution

    def columns(self, layers: Sequence[int]) -> Tensor:
        """Feature columns of these source layers, in the given order; with two kinds all keys first."""
        return columns_of(layers, self.width_src, self.source_layers, self.kinds)

    def solve(self, outputs: slice, layers: tuple[int, ...], ridge: float) -> Solution:
        """The ridge solution of some outputs over the chosen source layers, in float64."""
        columns = self.columns(layers)
        if self._factor is None or self._factor[0] != (layers, ridge):
            self._factor = None  # let go of the old one first
            self._factor = (layers, ridge), loaded_factor(self.train.cov_xx(columns), ridge)
        weight = torch.cholesky_solve(self.train.cov_xy(columns, outputs), self._factor[1])
        return Solution(layers, ridge, weight, self._bias(outputs, columns, weight))

    def ladder(self, outputs: slice, layers: tuple[int, ...], ridges: Sequence[float]) -> list[Solution]:
        """The solutions for several ridges, from one eigendecomposition."""
        columns = self.columns(layers)
        if layers not in self._shared:
            values, vectors = torch.linalg.eigh(self.train.cov_xx(columns))
            if len(layers) in (1, self.source_layers):  # other choices are seldom shared by two target layers
                self._shared[layers] = values, vectors
        else:
            values, vectors = self._shared[layers]
        turned = vectors.T @ self.train.cov_xy(columns, outputs)
        scale = values.mean().clamp_min(1e-12)
        found = []
        for ridge in ridges:
            weight = vectors @ (turned / (values + ridge * scale).clamp_min(1e-15)[:, None])
            found.append(Solution(layers, ridge, weight, self._bias(outputs, columns, weight)))
        return found

    def r2(self, outputs: slice, solution: Solution) -> Tensor:
        """(heads,) held-out R² of one target layer: 1 - squared error over the variance about the mean."""
        x, y = self.heldout.part(self.columns(solution.layers), outputs)
        return head_r2(y - (x @ solution.weight.float() + solution.bias.float()), y, self.heads)

    def ranked(self, outputs: slice, ridge: float) -> list[int]:
        """All source layers, best first, each scored alone by held-out R² averaged over the target layer's heads."""
        scores = [
            float(self.r2(outputs, self.ladder(outputs, (layer,), (ridge,))[0]).mean())
            for layer in range(self.source_layers)
        ]
        return sorted(range(self.source_layers), key=lambda layer: -scores[layer])

    def greedy(self, outputs: slice, ridge: float, most: int, weight: Tensor | None = None) -> list[int]:
        """At most `most` source layers, in the order in which they explain most of what is still unexplained.

        Args:
            outputs: of one target layer, or of all.
            ridge: as in `solve`.
            most: how many.
            weight: (outputs,) of each output's squared error; None: one over its head's variance.
        """
        train, width = self.train, self.width_src * self.kinds
        order = self.columns(range(self.source_layers)).view(self.kinds, self.source_layers, -1)
        blocks = order.transpose(0, 1).reshape(self.source_layers, width)  # (layers, columns of each)
        columns = blocks.flatten()
        cov, cross = train.cov_xx(columns), train.cov_xy(columns, outputs)
        cov.diagonal().add_(ridge * _scale(cov))
        if weight is None:
            dim = self.width_tgt // self.heads
            weight = 1 / train.var_y(outputs).view(-1, dim).sum(1).clamp_min(1e-12).repeat_interleave(dim)
        cross = cross * weight.sqrt()
        at = [slice(layer * width, (layer + 1) * width) for layer in range(self.source_layers)]
        done_x, done_y = cov.new_empty(0, cov.shape[0]), cross.new_empty(0, cross.shape[1])
        taken: list[int] = []
        while len(taken) < min(most, self.source_layers):
            best, best_gain, best_factor = -1, -1.0, cov
            for layer in sorted(set(range(self.source_layers)) - set(taken)):
                part = done_x[:, at[layer]]
                factor = loaded_factor(cov[at[layer], at[layer]] - part.T @ part, 0.0)
                rest = cross[at[layer]] - part.T @ done_y
                gain = float(torch.linalg.solve_triangular(factor, rest, upper=False).square().sum())
                if gain > best_gain:
                    best, best_gain, best_factor = layer, gain, factor
            part = done_x[:, at[best]]
            rows_x = torch.linalg.solve_triangular(best_factor, cov[at[best]] - part.T @ done_x, upper=False)
            rows_y = torch.linalg.solve_triangular(
                best_factor, cross[at[best]] - part.T @ done_y, upper=False
            )
            done_x, done_y = torch.cat((done_x, rows_x)), torch.cat((done_y, rows_y))
            taken.append(best)
        return taken

    def choose(
        self,
        outputs: slice,
        top_k: int | None,
        ridge: float | None,
        selection: str = "ranked",
        should_stop: Callable[[], None] | None = None,
    ) -> tuple[tuple[int, ...], float]:
        """Source layers and ridge of one target layer.

        Args:
            outputs: of the target layer.
            top_k: number of source layers, None for the number with the best held-out R².
            ridge: None for the value with the best held-out R².
            selection: "ranked" or "greedy".
            should_stop: called between candidates; raises to stop.

        Returns:
            The source layers in ascending order, and the ridge.
        """
        everything = tuple(range(self.source_layers))
        counts = sorted({min(k, self.source_layers) for k in ((top_k,) if top_k else (*TOP_K_LADDER, 10**9))})
        order: list[int] = []
        if counts[0] < self.source_layers:
            first = ridge or ORDER_RIDGE
            most = max(k for k in counts if k < self.source_layers)
            order = (
                self.ranked(outputs, first) if selection == "ranked" else self.greedy(outputs, first, most)
            )
        candidates = [everything if k == self.source_layers else tuple(sorted(order[:k])) for k in counts]
        if len(candidates) == 1 and ridge:
            return candidates[0], ridge
        best, best_score = (candidates[0], ridge or ORDER_RIDGE), float("-inf")
        for layers in candidates:
            if should_stop:
                should_stop()
            for solution in self.ladder(outputs, layers, (ridge,) if ridge else RIDGE_LADDER):
                score = float(self.r2(outputs, solution).mean())
                if score > best_score:
                    best, best_score = (layers, solution.ridge), score
        return best

    def _bias(self, outputs: slice, columns: Tensor, weight: Tensor) -> Tensor:
        return self.train.mean_y[outputs] - self.train.mean_x[columns] @ weight


def columns_of(layers: Sequence[int], width: int, source_layers: int = 0, kinds: int = 1) -> Tensor:
    """(kinds * len(layers) * width,) feature columns of these source layers, in the given order, keys before values."""
    return torch.cat([
        torch.arange(layer * width, (layer + 1) * width) + kind * source_layers * width
        for kind in range(kinds)
        for layer in layers
    ])  # fmt: skip


def head_r2(error: Tensor, y: Tensor, heads: int) -> Tensor:
    """(heads,) 1 - squared error over the variance about the mean, summed over a head's channels and all rows."""
    squared = error.double().square().sum(0).view(heads, -1).sum(1)
    variance = (y.double() - y.double().mean(0)).square().sum(0).view(heads, -1).sum(1)
    return 1 - squared / variance.clamp_min(1e-12)


def loaded_factor(cov: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of C + ridge * s * I; C is changed.

    Raises:
        InputError: the features depend on each other so much that this little ridge does not help.
    """
    cov.diagonal().add_(ridge * _scale(cov))
    factor, failed = torch.linalg.cholesky_ex(cov)
    if failed:
        raise InputError(
            f"A ridge of {ridge:g} is too small for these features.", "Use a larger one, such as 0.001."
        )
    return factor


def _scale(cov: Tensor) -> Tensor:
    return cov.diagonal().mean().clamp_min(1e-12)
