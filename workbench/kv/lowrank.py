"""Reduced-rank regression: all target layers read the same few coordinates of the source's cache.

The keys and values of all layers of a model come out of one residual stream, so the features of neighbouring layers say
nearly the same, and so do the outputs. A map of one thin matrix `A` (features, rank) that all target layers share and
one small matrix `B[t]` (rank, outputs) each is several times smaller and cheaper than a matrix per target layer, and no
source layer has to be left out.

Among all maps of that rank the one with the smallest ridge objective, errors measured by an output metric D D,

    E |(y - x A B) D|² + ridge * s * |A B D|²

is, with the Cholesky factor `L L' = C_xx + ridge * s * I` and U the first left singular vectors of `L^-1 C_xy D`:

    A = L'^-1 U        B = U' L^-1 C_xy = A' C_xy

so the metric decides only which directions are kept. (With full rank it would cancel.) U comes from a few rounds of
subspace iteration with a fixed seed. The coordinates `x A` are uncorrelated with a variance of at most 1, which suits
half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kv.moments import Moments, Rows
from workbench.kv.ridge import loaded_factor

ROUNDS = 4
EXTRA = 16  # directions that the iteration carries beyond those that are kept
RIDGE_LADDER = (1e-4, 1e-3, 1e-2, 1e-1)
SKETCH = 256  # random mixtures of the outputs by which a ridge is chosen


@dataclass(frozen=True)
class LowRank:
    """`reduce` (features, rank), `weight` (rank, outputs), `bias` (outputs,), float64; y = x @ reduce @ weight + bias."""

    reduce: Tensor
    weight: Tensor
    bias: Tensor


def reduced_rank(train: Moments, columns: Tensor, ridge: float, rank: int, metric: Tensor) -> LowRank:
    """The best map of a rank from the chosen feature columns to all outputs.

    Args:
        train: sums over the fitted tokens.
        columns: which features are read.
        ridge: strength, relative to the mean variance of these features.
        rank: coordinates; at most the features and the outputs.
        metric: D, symmetric: (outputs,) for a diagonal, or (blocks, d, d) along the diagonal, in the outputs' order.
    """
    train.flush()
    everything = slice(None)
    cross, factor = train.cov_xy(columns, everything), loaded_factor(train.cov_xx(columns), ridge)
    whitened = torch.linalg.solve_triangular(factor, cross, upper=False)
    # Directions are found in float32: they only have to span nearly the best subspace, B is exact for whatever A is.
    basis = leading(apply_metric(whitened, metric).float(), min(rank, *cross.shape)).double()
    reduce = torch.linalg.solve_triangular(factor.T, basis, upper=True)
    weight = basis.T @ whitened
    bias = train.mean_y - train.mean_x[columns] @ reduce @ weight
    return LowRank(reduce, weight, bias)


def choose_ridge(
    train: Moments, heldout: Rows, columns: Tensor, scale: Tensor, ridges: Sequence[float]
) -> float:
    """The ridge with the smallest held-out error at full rank, judged by random mixtures of all outputs.

    Args:
        train: sums over the fitted tokens.
        heldout: tokens to judge by.
        columns: which features are read.
        scale: (outputs,) by which each output is divided first, so that all heads count alike.
        ridges: to choose among.
    """
    train.flush()
    generator = torch.Generator().manual_seed(0)
    mix = (
        torch.randn(scale.numel(), min(SKETCH, scale.numel()), generator=generator).double() / scale[:, None]
    )
    cov, cross = train.cov_xx(columns), train.cov_xy(columns, slice(None)) @ mix
    x, y = heldout.part(columns, slice(None))
    x, y = x - train.mean_x[columns].float(), (y - train.mean_y.float()) @ mix.float()
    best, best_error = ridges[0], float("inf")
    for ridge in ridges:
        weight = torch.cholesky_solve(cross, loaded_factor(cov.clone(), ridge))
        error = float((y - x @ weight.float()).double().square().sum())
        if error < best_error:
            best, best_error = ridge, error
    return best


def apply_metric(rows: Tensor, metric: Tensor) -> Tensor:
    """(n, outputs) times D; see `reduced_rank`."""
    metric = metric.to(rows.dtype)
    if metric.ndim == 1:
        return rows * metric
    blocks = rows.view(rows.shape[0], metric.shape[0], -1).transpose(0, 1)
    return torch.bmm(blocks, metric).transpose(0, 1).reshape(rows.shape)


def leading(matrix: Tensor, rank: int) -> Tensor:
    """(n, rank) orthonormal: nearly the first left singular vectors of an (n, m) matrix, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    carried = min(rank + EXTRA, *matrix.shape)
    found = matrix @ torch.randn(matrix.shape[1], carried, generator=generator).to(matrix)
    for _ in range(ROUNDS):
        found = torch.linalg.qr(found).Q
        found = matrix @ (matrix.T @ found)
    basis = torch.linalg.qr(found).Q
    inner = basis.T @ matrix
    _, vectors = torch.linalg.eigh((inner @ inner.T).double())  # ascending
    return basis @ vectors.flip(1)[:, :rank].to(basis)
