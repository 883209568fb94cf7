"""Streamed second moments: everything that ridge regression needs to know about the calibration tokens.

A closed-form fit does not need the tokens, only sums over them. For features `x` (source keys or values, one row a
token) and outputs `y` (target keys or values) these are `n`, the means, `x'x`, `x'y` and the diagonal of `y'y`. They are
added up chunk by chunk, so the memory does not depend on how much text is read, and every choice made later (which
source layers, how much ridge) is made from the same sums without another pass over the models.

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
    """Sums over tokens of `features` inputs and `outputs` outputs; `add` them, then read `mean_x`, `cov_xx`, …"""

    def __init__(self, features: int, outputs: int) -> None:
        self.count = 0
        self.shift_x = torch.zeros(features)
        self.shift_y = torch.zeros(outputs)
        self.sum_x = torch.zeros(features, dtype=torch.float64)
        self.sum_y = torch.zeros(outputs, dtype=torch.float64)
        self.sum_xx = torch.zeros(features, features, dtype=torch.float64)
        self.sum_xy = torch.zeros(features, outputs, dtype=torch.float64)
        self.sum_yy = torch.zeros(outputs, dtype=torch.float64)
        self._pending: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count in one chunk of tokens.

        Args:
            x: (n, F) features.
            y: (n, G) outputs of the same tokens.

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
        self._pending.append((x, y))
        if sum(rows.shape[0] for rows, _ in self._pending) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Move the gathered rows into the sums."""
        if not self._pending:
            return
        x = torch.cat([rows for rows, _ in self._pending]) - self.shift_x
        y = torch.cat([rows for _, rows in self._pending]) - self.shift_y
        self._pending.clear()
        self.count += x.shape[0]
        self.sum_x += x.sum(0, dtype=torch.float64)
        self.sum_y += y.sum(0, dtype=torch.float64)
        self.sum_xx += x.T @ x
        self.sum_xy += x.T @ y
        self.sum_yy += (y.double() ** 2).sum(0)

    @property
    def mean_x(self) -> Tensor:
        """(F,) float64 means of the features."""
        return self.shift_x.double() + self.sum_x / self.count

    @property
    def mean_y(self) -> Tensor:
        """(G,) float64 means of the outputs."""
        return self.shift_y.double() + self.sum_y / self.count

    def cov_xx(self, columns: Tensor) -> Tensor:
        """(f, f) centred covariance of the chosen feature columns, divided by n."""
        mean = self.sum_x[columns] / self.count
        return self.sum_xx[columns][:, columns] / self.count - torch.outer(mean, mean)

    def cov_xy(self, columns: Tensor, outputs: slice) -> Tensor:
        """(f, g) centred cross-covariance of the chosen columns with a slice of the outputs, divided by n."""
        mean_x, mean_y = self.sum_x[columns] / self.count, self.sum_y[outputs] / self.count
        return self.sum_xy[columns, outputs] / self.count - torch.outer(mean_x, mean_y)

    def var_y(self, outputs: slice) -> Tensor:
        """(g,) variance of the outputs about their means."""
        mean = self.sum_y[outputs] / self.count
        return (self.sum_yy[outputs] / self.count - mean**2).clamp_min(0)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on adding after a restart, as named tensors."""
        self.flush()
        names = ("shift_x", "shift_y", "sum_x", "sum_y", "sum_xx", "sum_xy", "sum_yy")
        return {name: getattr(self, name) for name in names} | {"count": torch.tensor(self.count)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Moments:
        """The inverse of `state`."""
        moments = cls(0, 0)
        for name, tensor in state.items():
            setattr(moments, name, int(tensor) if name == "count" else tensor)
        return moments
