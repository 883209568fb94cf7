"""The MLP drop-in: two hidden layers that add nonlinear coordinates to the low-rank map.

A linear map is fitted first. What it leaves over, `r = y - z @ weight - bias` with the coordinates z of the source's cache,
is then learnt by a network whose last hidden layer the target layers read beside z:

    h = gelu(gelu(z @ m0 + b0) @ m1 + b1),    y = [z | h] @ [weight; readout] + bias

The readout starts at zero, so training starts from the linear map. Errors are measured in the metric of the objective, on
tokens of the same captures (a bounded sample); every epoch is judged by the held-out tokens that choices are made by, and
the best one is kept, the linear map included. Adam, cosine schedule, on the CPU or on the target's accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kv.checkpoint import Checkpoint
from workbench.kv.features import hidden_coordinates
from workbench.kv.lowrank import LowRank, apply_metric
from workbench.kv.moments import Rows

EPOCHS = 20
BATCH = 256
RATE = 1e-3


@dataclass(frozen=True)
class Mlp:
    """`layers`: weight, bias, weight, bias of the hidden layers; `readout` (hidden, outputs); errors per epoch.

    `errors` are held-out squared errors in the metric, as a share of the linear map's: first 1, then one per epoch.
    """

    layers: tuple[Tensor, ...]
    readout: Tensor
    errors: tuple[float, ...]


def train_mlp(
    linear: LowRank,
    columns: Tensor,
    fitted: Rows,
    heldout: Rows,
    metric: Tensor,
    hidden: int,
    *,
    device: torch.device | str = "cpu",
    epochs: int = EPOCHS,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[float, str], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Mlp:
    """Train the hidden layers and their readout.

    Args:
        linear: the map to start from.
        columns: the feature columns that it reads.
        fitted: tokens to learn from.
        heldout: tokens that choose the epoch.
        metric: D, as for `reduced_rank`.
        hidden: width of both hidden layers.
        device: where to train.
        epochs: passes over `fitted`.
        checkpoint: keeps each finished epoch; removed at the end.
        progress: called with a share and a sentence after each epoch.
        check: called before each epoch; raises to stop.
    """
    rank, outputs = linear.weight.shape
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(rows**-0.5).to(device)

    parameters = [normal(rank, hidden), torch.zeros(hidden, device=device), normal(hidden, hidden),
                  torch.zeros(hidden, device=device), torch.zeros(hidden, outputs, device=device)]  # fmt: skip
    judge = _Judge(linear, columns, heldout, metric, device)
    best, errors, first = [p.clone() for p in parameters], [1.0], 0
    adam = torch.optim.Adam(parameters, lr=RATE)
    if checkpoint is not None and (kept := checkpoint.load(_named(parameters, best))):
        errors = kept["errors"].tolist()
        first = len(errors) - 1
        for index in range(len(parameters)):
            parameters[index].copy_(kept[f"now.{index}"])
            best[index].copy_(kept[f"best.{index}"])
    batches = (fitted.count + BATCH - 1) // BATCH
    step, steps = first * batches, max(1, epochs * batches)
    for epoch in range(first, epochs):
        if check:
            check()
        order = torch.randperm(fitted.count, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, fitted.count, BATCH):
            z, left = judge.left_over(fitted, order[start : start + BATCH])
            with torch.enable_grad():
                for parameter in parameters:
                    parameter.requires_grad_(True)
                h = hidden_coordinates(z, parameters[:4])
                loss = (left - apply_metric(h @ parameters[4], judge.metric)).square().mean()
                adam.zero_grad()
                loss.backward()
            adam.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
            adam.step()
            step += 1
        for parameter in parameters:
            parameter.requires_grad_(False)
        errors.append(judge.error(parameters) / judge.linear_error)
        if errors[-1] <= min(errors):
            best = [parameter.clone() for parameter in parameters]
        if checkpoint is not None:
            tensors = _named(parameters, best)
            checkpoint.save(tensors | {"errors": torch.tensor(errors, dtype=torch.float64)})
        if progress:
            progress(
                (epoch + 1) / epochs,
                f"MLP: epoch {epoch + 1} of {epochs}, error {errors[-1]:.3f} of the linear map's",
            )
    if checkpoint is not None:
        checkpoint.discard()
    best = [parameter.cpu() for parameter in best]
    return Mlp(tuple(best[:4]), best[4], tuple(errors))


def _named(now: list[Tensor], best: list[Tensor]) -> dict[str, Tensor]:
    """As a checkpoint names them."""
    parts = (("now", now), ("best", best))
    return {f"{part}.{i}": each for part, several in parts for i, each in enumerate(several)}


class _Judge:
    """Coordinates and what the linear map leaves over, in the metric, for any kept tokens."""

    def __init__(
        self, linear: LowRank, columns: Tensor, heldout: Rows, metric: Tensor, device: torch.device | str
    ) -> None:
        self.columns, self.heldout, self.device = columns, heldout, device
        self.reduce, self.weight, self.bias = (
            part.float().to(device) for part in (linear.reduce, linear.weight, linear.bias)
        )
        self.metric = metric.float().to(device)
        self.metric = self.metric / self._typical()
        self.linear_error = self.error([])

    def _typical(self) -> Tensor:
        _, left = self.left_over(self.heldout, torch.arange(min(512, self.heldout.count)))
        return left.square().mean().sqrt().clamp_min(1e-12)

    def left_over(self, kept: Rows, index: Tensor) -> tuple[Tensor, Tensor]:
        kept.flush()
        rows = kept.rows[index].float() + kept.shift
        x, y = (
            rows[:, : kept.features][:, self.columns].to(self.device),
            rows[:, kept.features :].to(self.device),
        )
        z = x @ self.reduce
        return z, apply_metric(y - torch.addmm(self.bias, z, self.weight), self.metric)

    def error(self, parameters: list[Tensor]) -> float:
        total = 0.0
        for start in range(0, self.heldout.count, 1024):
            z, left = self.left_over(self.heldout, torch.arange(start, min(start + 1024, self.heldout.count)))
            if parameters:
                left = left - apply_metric(hidden_coordinates(z, parameters[:4]) @ parameters[4], self.metric)
            total += float(left.double().square().sum())
        return total
