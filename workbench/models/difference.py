"""The small sibling as a difference to the large model: a few bits a weight instead of sixteen.

    small[i].W = bfloat16( float32(large[kept[i]].W) + (code - (2**bits - 1) / 2) * scale )

`code` has `bits` bits, one `scale` (float16) serves `group` neighbours along a matrix' input side. Norm gains
are stored exactly. Rebuilding is elementwise, so it gives the same bits on every machine, which a low-rank
product would not.

Shapes: a matrix `(out, in)`, codes packed to `ceil(out * in * bits / 8)` bytes, scales `(out, ceil(in /
group))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

FORMAT = 1


@dataclass(frozen=True)
class QuantSettings:
    """How weights are rounded.

    `bits` a weight and how many neighbours share one scale; `search` is how many scales are tried for each group.
    """

    bits: int = 3
    group: int = 64
    search: int = 24

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8 or self.group < 1 or self.search < 1:
            raise ValueError("bits must be 1 to 8, group and search at least 1")


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes below `2**bits` (any shape) as a dense uint8 vector, most significant bit first."""
    flat = codes.reshape(-1).to(torch.uint8).numpy()
    planes = (flat[:, None] >> np.arange(bits - 1, -1, -1, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(planes.reshape(-1)))


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack_bits`: `count` codes, uint8."""
    planes = np.unpackbits(packed.numpy(), count=count * bits).reshape(count, bits)
    weights = (1 << np.arange(bits - 1, -1, -1)).astype(np.uint8)
    return torch.from_numpy((planes * weights).sum(1, dtype=np.uint8))


def _grouped(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """`(out, in)` as `(out, groups, group)`, zero-padded on the right."""
    return F.pad(matrix, (0, -matrix.shape[1] % group)).reshape(matrix.shape[0], -1, group)


def quantise(
    delta: torch.Tensor, settings: QuantSettings, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `(out, in)` and scales `(out, groups)` that leave the least squared error in every group.

    Args:
        delta: the difference of a matrix, `(out, in)`, float32.
        settings: bits and group size.
        importance: mean square of each input, `(in,)`: errors are weighted by what they do to the output.
    """
    x = _grouped(delta.float(), settings.group)
    w = torch.ones_like(delta[:1]) if importance is None else importance.float()[None] + 1e-8
    w = _grouped(w, settings.group)
    middle, top = (2**settings.bits - 1) / 2, 2**settings.bits - 1
    widest = x.abs().amax(-1, keepdim=True).clamp_min(1e-8)
    best_error = torch.full_like(widest, torch.inf)
    best_scale = torch.zeros_like(widest)
    for step in range(
        settings.search
    ):  # the widest value is often an outlier: clipping it may cost less than coarse steps
        share = 1.05 - 0.85 * step / settings.search
        scale = (widest * share / middle).half().float().clamp_min(6e-8)
        rounded = ((x / scale + middle).round().clamp(0, top) - middle) * scale
        error = ((x - rounded).square() * w).sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    codes = (x / best_scale + middle).round().clamp(0, top).to(torch.uint8)
    return codes.reshape(len(delta), -1)[:, : delta.shape[1]].contiguous(), best_scale[..., 0].half()


def quantise_compensated(
    delta: torch.Tensor, settings: QuantSettings, second_moment: torch.Tensor, damp: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `quantise`, but columns to the right make up for each column's error (GPTQ, arXiv 2210.17323).

    Args:
        delta: the matrix to round.
        settings: how.
        second_moment: `E[x x^T]` of the matrix' inputs, `(in, in)`, float64.
        damp: share of the mean diagonal that is added to it.
    """
    _, scales = quantise(delta, settings, second_moment.diagonal())
    h = second_moment.double().clone()
    h.diagonal().add_(damp * h.diagonal().mean() + 1e-12)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    middle, top = (2**settings.bits - 1) / 2, 2**settings.bits - 1
    work, codes = delta.float().clone(), torch.zeros(delta.shape, dtype=torch.uint8)
    block = 64
    for start in range(0, work.shape[1], block):
        stop = min(start + block, work.shape[1])
        errors = torch.zeros(len(work), stop - start)
        for column in range(start, stop):
            scale = scales[:, column // settings.group].float()
            code = (work[:, column] / scale + middle).round().clamp(0, top)
            codes[:, column] = code.to(torch.uint8)
            error = (work[:, column] - (code - middle) * scale) / upper[column, column]
            work[:, column:stop] -= error[:, None] * upper[column, column:stop]
            errors[:, column - start] = error
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes, scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, settings: QuantSettings) -> torch.Tensor:
    """The difference `(out, in)`, float32, that codes and scales stand for; elementwise."""
    middle = (2**settings.bits - 1) / 2
    spread = scales.float().repeat_interleave(settings.group, 1)[:, : codes.shape[1]]
    return (codes.float() - middle) * spread


def apply_difference(
    large: Mapping[str, torch.Tensor],
    difference: Mapping[str, torch.Tensor],
    kept: list[int],
    settings: QuantSettings,
) -> dict[str, torch.Tensor]:
    """State dict of the small model, bfloat16, from the large model's and the shipped tensors.

    Raises:
        KeyError: a tensor is missing in either of the two.
    """
    small: dict[str, torch.Tensor] = {}
    for name, tensor in large.items():
        if not name.startswith("model.layers."):
            small[name] = difference.get(name, tensor).to(torch.bfloat16).clone()
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        for name in [n for n in large if n.startswith(prefix)]:
            target = f"model.layers.{new}.{name.removeprefix(prefix)}"
            base = large[name]
            if base.ndim == 1:
                small[target] = difference[target].to(torch.bfloat16).clone()
                continue
            codes = unpack_bits(difference[target + ".codes"], settings.bits, base.numel()).view(base.shape)
            delta = dequantise(codes, difference[target + ".scales"], settings)
            small[target] = (base.float() + delta).to(torch.bfloat16)
    return small
