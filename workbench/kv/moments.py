"""Streamed second moments: everything that ridge regression needs to know about the calibration tokens.

A closed-form fit does not need the tokens, only sums over them. For features `x` (source keys or values, one row a
token) and outputs `y` (target keys or values) these are `n`, the means, `x'x`, `x'y` and the diagonal of `y'y`. They are
added up chunk by chunk, so the memory does not depend on how much text is read, and every choice made later (which
source layers, how much ridge) is made from the same sums without another pass over the models.

What is held out is kept as it is, in half precision and at most so many tokens (`Rows`): a second square of sums would be
larger, and rows can be asked anything, a nonlinear map's error included.

Shapes: x is (n, F), y is (n, G). Products are float32, sums are float64. A constant shift (the mean of the first
chunk) is taken off first: families with key biases have means far larger than their spread, and float32 products
would lose the spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLUSH_ROWS = (
    2048  # rows gathered before the products: adding to a float64 (F, F) matrix costs more than few rows do
)


class Moments:
    """Sums over tokens of `features` inputs and `outputs` outputs; `add` them, then read `mean_x`, `cov_xx` and others."""

    def __init__(self, features: int, outputs: int) -> None:
        self.count = 0
        self.mass = 0.0  # sum of the tokens' weights
        self.shift_x = torch.zeros(features)
        self.shift_y = torch.zeros(outputs)
        self.sum_x = torch.zeros(features, dtype=torch.float64)
        self.sum_y = torch.zeros(outputs, dtype=torch.float64)
        self.sum_xx = torch.zeros(features, features, dtype=torch.float64)
        self.sum_xy = torch.zeros(features, outputs, dtype=torch.float64)
        self.sum_yy = torch.zeros(outputs, dtype=torch.float64)
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Count in one chunk of tokens.

        Args:
            x: (n, F) features.
            y: (n, G) outputs of the same tokens.
            weight: (n,) of the tokens, with a mean of about 1; None: all 1. `count` stays the number of tokens.

        Raises:
            ValueError: when the shapes do not fit or a value is not finite.
        """
        expected = (x.shape[0], self.sum_x.numel()), (x.shape[0], self.sum_y.numel())
        if (tuple(x.shape), tuple(y.shape)) != expected:
            raise ValueError(f"expected shapes {expected}, got {tuple(x.shape)} and {tuple(y.shape)}")
        if x.shape[0] == 0:
            return
        x, y = x.to("cpu", torch.float32), y.to("cpu", torch.float32)
        if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
            raise ValueError("the calibration keys or values contain NaN or infinity")
        if self.count == 0 and not self._pending:
            self.shift_x, self.shift_y = x.mean(0), y.mean(0)
        self._pending.append((x, y, torch.ones(x.shape[0]) if weight is None else weight.float().cpu()))
        if sum(rows.shape[0] for rows, _, _ in self._pending) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Move the gathered rows into the sums."""
        if not self._pending:
            return
        x = torch.cat([rows for rows, _, _ in self._pending]) - self.shift_x
        y = torch.cat([rows for _, rows, _ in self._pending]) - self.shift_y
        weight = torch.cat([rows for _, _, rows in self._pending])[:, None]
        self._pending.clear()
        self.count += x.shape[0]
        self.mass += float(weight.double().sum())
        weighted_x, weighted_y = x * weight, y * weight
        self.sum_x += weighted_x.sum(0, dtype=torch.float64)
        self.sum_y += weighted_y.sum(0, dtype=torch.float64)
        self.sum_xx += weighted_x.T @ x
        self.sum_xy += weighted_x.T @ y
        self.sum_yy += (weighted_y.double() * y.double()).sum(0)

    def move_to(self, shift_x: Tensor, shift_y: Tensor) -> None:
        """Have the sums about another constant shift, as if it had been taken off from the start.

        Args:
            shift_x: (F,) of the features.
            shift_y: (G,) of the outputs.
        """
        self.flush()
        dx = self.shift_x.double() - shift_x.double()
        dy = self.shift_y.double() - shift_y.double()
        self.sum_xx += torch.outer(self.sum_x, dx) + torch.outer(dx, self.sum_x + self.mass * dx)
        self.sum_xy += torch.outer(self.sum_x, dy) + torch.outer(dx, self.sum_y + self.mass * dy)
        self.sum_yy += dy * (2 * self.sum_y + self.mass * dy)
        self.sum_x += self.mass * dx
        self.sum_y += self.mass * dy
        self.shift_x, self.shift_y = shift_x.clone(), shift_y.clone()

    @property
    def mean_x(self) -> Tensor:
        """(F,) float64 means of the features."""
        return self.shift_x.double() + self.sum_x / self.mass

    @property
    def mean_y(self) -> Tensor:
        """(G,) float64 means of the outputs."""
        return self.shift_y.double() + self.sum_y / self.mass

    def cov_xx(self, columns: Tensor) -> Tensor:
        """(f, f) centred covariance of the chosen feature columns, divided by n."""
        mean = self.sum_x[columns] / self.mass
        return self.sum_xx[columns][:, columns] / self.mass - torch.outer(mean, mean)

    def cov_xy(self, columns: Tensor, outputs: slice) -> Tensor:
        """(f, g) centred cross-covariance of the chosen columns with a slice of the outputs, divided by n."""
        mean_x, mean_y = self.sum_x[columns] / self.mass, self.sum_y[outputs] / self.mass
        return self.sum_xy[columns, outputs] / self.mass - torch.outer(mean_x, mean_y)

    def var_y(self, outputs: slice) -> Tensor:
        """(g,) variance of the outputs about their means."""
        mean = self.sum_y[outputs] / self.mass
        return (self.sum_yy[outputs] / self.mass - mean**2).clamp_min(0)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on adding after a restart, as named tensors."""
        self.flush()
        names = ("shift_x", "shift_y", "sum_x", "sum_y", "sum_xx", "sum_xy", "sum_yy")
        return {name: getattr(self, name) for name in names} | {
            "count": torch.tensor(self.count),
            "mass": torch.tensor(self.mass, dtype=torch.float64),
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Moments:
        """The inverse of `state`."""
        moments = cls(0, 0)
        for name, tensor in state.items():
            scalar = {"count": int, "mass": float}.get(name)
            setattr(moments, name, scalar(tensor) if scalar else tensor)
        return moments


class Rows:
    """Tokens kept as they are: features and outputs less a constant shift, in half precision, at most `most` of them.

    Which ones are kept when there are more is drawn evenly (reservoir sampling) by a seed.
    """

    def __init__(self, features: int, outputs: int, most: int) -> None:
        self.most, self.seen = most, 0
        self.shift = torch.zeros(features + outputs)
        self.features = features
        self.rows = torch.zeros(0, features + outputs, dtype=torch.float16)
        self._pending: list[Tensor] = []
        self._held = 0

    @property
    def count(self) -> int:
        """Tokens that are kept."""
        return self._held

    def add(self, x: Tensor, y: Tensor) -> None:
        """Keep one chunk of tokens: (n, F) features and (n, G) outputs."""
        both = torch.cat((x.to("cpu", torch.float32), y.to("cpu", torch.float32)), dim=1)
        if self.seen == 0 and len(both):
            self.shift = both.mean(0)
        both = (both - self.shift).clamp_(-60000.0, 60000.0).half()
        room = max(0, min(self.most - self._held, len(both)))
        if room:
            self._pending.append(both[:room])
            self._held += room
        rest = both[room:]
        if len(rest):
            generator = torch.Generator().manual_seed(self.seen)
            self.flush()
            place = (torch.rand(len(rest), generator=generator) * (self.seen + room)).long()
            for row, index in zip(rest, place.tolist(), strict=True):
                if index < self.most:
                    self.rows[index] = row
        self.seen += len(both)

    def flush(self) -> None:
        """Join what was added."""
        if self._pending:
            self.rows = torch.cat((self.rows, *self._pending))
            self._pending.clear()

    def part(
        self, columns: Tensor | slice, outputs: slice, rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Some features and some outputs of the kept tokens, float32: (n, f) and (n, g)."""
        self.flush()
        x = self.rows[rows, : self.features][:, columns].float() + self.shift[: self.features][columns]
        y = self.rows[rows, self.features :][:, outputs].float() + self.shift[self.features :][outputs]
        return x, y

    def state(self) -> dict[str, Tensor]:
        """Everything as named tensors."""
        self.flush()
        counts = torch.tensor([self.most, self.seen, self.features])
        return {"rows": self.rows, "shift": self.shift, "counts": counts}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Rows:
        """The inverse of `state`."""
        most, seen, features = map(int, state["counts"])
        kept = cls(features, state["shift"].numel() - features, most)
        kept.rows, kept.shift, kept.seen, kept._held = state["rows"], state["shift"], seen, len(state["rows"])
        return kept
