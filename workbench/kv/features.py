"""What a map reads: stripped keys and values of the chosen source layers, side by side in one matrix.

Rows are tokens. A layer's keys, or values, of all heads stand side by side in a row:
(1, heads, n, head_dim) <-> (n, heads * head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from workbench.kv.cache import layer_tensors
from workbench.kv.rope import Rotary

if TYPE_CHECKING:
    from workbench.kv.mapper import KVMapper


class Features:
    """Stripped keys and values of the source layers that are read, side by side in one matrix.

    Each layer is written once, straight to its columns; source layers that follow one another are then read as a view,
    and only scattered ones are gathered. (Adding up one product a layer instead, without gathering, was measured: no
    faster, and in half precision the error doubles, since every partial sum is rounded.)
    """

    def __init__(
        self, mapper: KVMapper, cache: Cache, start: int, stop: int, rotary: Rotary, layers: range
    ) -> None:
        """Args: layers: of the target, those that are made of these features; the rest as for `map_into`."""
        dtype, device = mapper.key_weight[0].dtype, mapper.key_weight[0].device
        self._mapper, self._width = mapper, mapper.source.kv_width
        used = {"key": {i for t in layers for i in mapper.key_layers[t]},
                "value": {i for t in layers for i in mapper.value_layers[t]}}  # fmt: skip
        if mapper.features == "both":
            used["key"] = used["value"] = used["key"] | used["value"]
        places = [(kind, layer) for kind in ("key", "value") for layer in sorted(used[kind])]
        self._place = {place: index for index, place in enumerate(places)}
        rows = torch.empty(stop - start, len(places) * self._width, dtype=dtype, device=device)
        for index, (kind, layer) in enumerate(places):
            columns = head_by_head(
                rows[:, index * self._width : (index + 1) * self._width], mapper.source.kv_heads
            )
            keys, values = layer_tensors(cache, layer)
            if kind == "value":
                columns.copy_(values[..., start:stop, :])
            elif keys.device == device:
                rotary.strip(keys[..., start:stop, :], start, out=columns, layer=layer)
            else:
                columns.copy_(rotary.strip(keys[..., start:stop, :], start, layer=layer))
        wait_for(device)
        self._rows = {device: rows}
        self._reduced: dict[tuple[str, torch.device], Tensor] = {}

    def reduce(self, mapper: KVMapper) -> None:
        """Low-rank form: make the coordinates that all target layers read, and let go of the features."""
        device = mapper.reduce[0].device
        for kind, matrix in zip(("key", "value"), mapper.reduce, strict=False):
            z = self._gathered(kind, 0, device) @ matrix
            if mapper.mlp:
                z = torch.cat((z, hidden_coordinates(z, mapper.mlp)), dim=1)
            self._reduced[kind, device] = z
        self._reduced.setdefault(("value", device), self._reduced["key", device])
        self._rows.clear()
        wait_for(device)

    def of(self, kind: str, t: int, device: torch.device) -> Tensor:
        """(n, features) of one target layer on its device; what had to be moved is remembered."""
        if not self._reduced:
            return self._gathered(kind, t, device)
        if (kind, device) not in self._reduced:
            self._reduced[kind, device] = next(z for (of, _), z in self._reduced.items() if of == kind).to(
                device
            )
        return self._reduced[kind, device]

    def _gathered(self, kind: str, t: int, device: torch.device) -> Tensor:
        if device not in self._rows:
            self._rows[device] = next(iter(self._rows.values())).to(device)
        layers = (self._mapper.key_layers if kind == "key" else self._mapper.value_layers)[t]
        kinds = ("key", "value") if self._mapper.features == "both" else (kind,)
        places = [self._place[of, layer] for of in kinds for layer in layers]
        rows, width = self._rows[device], self._width
        if places == list(range(places[0], places[0] + len(places))):
            return rows[:, places[0] * width : (places[-1] + 1) * width]
        return torch.cat([rows[:, at * width : (at + 1) * width] for at in places], dim=1)


def hidden_coordinates(z: Tensor, mlp: Sequence[Tensor]) -> Tensor:
    """(n, rank) -> (n, width): the two hidden layers of an MLP; gradients flow."""
    for weight, bias in zip(mlp[::2], mlp[1::2], strict=True):
        z = torch.nn.functional.gelu(torch.addmm(bias, z, weight))
    return z


def side_by_side(heads: Tensor) -> Tensor:
    """(1, heads, n, head_dim) of one layer -> (n, heads * head_dim), head by head."""
    return heads[0].transpose(0, 1).flatten(1)


def head_by_head(rows: Tensor, heads: int) -> Tensor:
    """(n, heads * head_dim) -> (1, heads, n, head_dim), a view: the inverse of `side_by_side`."""
    return rows.view(rows.shape[0], heads, -1).transpose(0, 1)[None]


def wait_for(device: torch.device) -> None:
    """Accelerators run behind; without this the milliseconds would belong to the wrong part."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
