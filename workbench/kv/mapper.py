"""The mapper: a source model's KV cache in, a target model's KV cache out.

For each target layer the chosen source layers' keys, with the source's rotation removed, stand side by side as features;
one matrix product turns them into the target layer's keys for all its heads, the target's own rotation is applied,
and the result is written straight into the target's cache. Values go the same way without any rotation.

    x = [k_pre_src of layer a | layer b | …]        (n, k * heads_src * head_dim_src)
    k_pre_tgt = x @ key_weight[t] + key_bias[t]     (n, heads_tgt * head_dim_tgt)

A `KVMapper` is frozen: it is made by `workbench.kv.fit` and stored by `workbench.kv.artefact`. Batch size is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor
from transformers import Cache

from workbench.errors import Cancelled
from workbench.kv.cache import layer_tensors, length, truncate
from workbench.kv.rope import Rotary
from workbench.kv.spec import KVSpec


@dataclass
class MapTimes:
    """Milliseconds spent in the three parts of mapping."""

    strip_ms: float = 0.0
    product_ms: float = 0.0
    rotate_ms: float = 0.0


@dataclass(frozen=True, eq=False)
class KVMapper:
    """Per target layer: which source layers are read, and the matrices that turn them into keys and values.

    Attributes:
        source: geometry of the model whose cache is read.
        target: geometry of the model whose cache is written.
        key_layers: per target layer, the source layers whose keys are its features.
        value_layers: the same for values.
        key_weight: per target layer (len(key_layers[t]) * source.kv_width, target.kv_width).
        key_bias: per target layer (target.kv_width,).
        value_weight: like `key_weight`.
        value_bias: like `key_bias`.
        anchors: how many first tokens the fit left out, and the target should run natively.
        hold_back: how many last tokens the target should run natively, at least 1.
    """

    source: KVSpec
    target: KVSpec
    key_layers: tuple[tuple[int, ...], ...]
    value_layers: tuple[tuple[int, ...], ...]
    key_weight: tuple[Tensor, ...]
    key_bias: tuple[Tensor, ...]
    value_weight: tuple[Tensor, ...]
    value_bias: tuple[Tensor, ...]
    anchors: int = 4
    hold_back: int = 16

    def __post_init__(self) -> None:
        """Check that layers and shapes fit the two geometries.

        Raises:
            ValueError: naming the first tensor that does not fit.
        """
        for kind in ("key", "value"):
            layers = getattr(self, f"{kind}_layers")
            weights, biases = getattr(self, f"{kind}_weight"), getattr(self, f"{kind}_bias")
            if not len(layers) == len(weights) == len(biases) == self.target.layers:
                raise ValueError(f"the {kind} maps must be {self.target.layers}, one a target layer")
            for t, chosen in enumerate(layers):
                if not chosen or any(not 0 <= layer < self.source.layers for layer in chosen):
                    raise ValueError(f"{kind}_layers[{t}] names source layers that do not exist: {chosen}")
                shape = (len(chosen) * self.source.kv_width, self.target.kv_width)
                if tuple(weights[t].shape) != shape or tuple(biases[t].shape) != shape[1:]:
                    raise ValueError(f"{kind}_weight[{t}] must have shape {shape}")

    @classmethod
    def identity(cls, spec: KVSpec) -> KVMapper:
        """The mapper of a model onto itself; the gate uses it to prove that the code path is exact."""
        layers = tuple((layer,) for layer in range(spec.layers))
        weight, bias = (torch.eye(spec.kv_width),) * spec.layers, (torch.zeros(spec.kv_width),) * spec.layers
        return cls(spec, spec, layers, layers, weight, bias, weight, bias, anchors=0, hold_back=1)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and biases as they are held now."""
        tensors = (*self.key_weight, *self.key_bias, *self.value_weight, *self.value_bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def to(self, dtype: torch.dtype | None = None, devices: Sequence[torch.device] | None = None) -> KVMapper:
        """The same mapper in another dtype, with each target layer's matrices on that layer's device.

        Args:
            dtype: of all tensors, None to keep.
            devices: one a target layer, None to keep.
        """

        def moved(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            places = devices or [tensor.device for tensor in tensors]
            return tuple(tensor.to(place, dtype) for tensor, place in zip(tensors, places, strict=True))

        return replace(
            self,
            key_weight=moved(self.key_weight),
            key_bias=moved(self.key_bias),
            value_weight=moved(self.value_weight),
            value_bias=moved(self.value_bias),
        )

    @torch.inference_mode()
    def map_into(
        self,
        source_cache: Cache,
        target_cache: Cache,
        start: int,
        stop: int,
        rotary_src: Rotary,
        rotary_tgt: Rotary,
        should_stop: Callable[[], bool] | None = None,
    ) -> MapTimes:
        """Append tokens `start .. stop-1` of the source's cache, mapped, to the target's cache.

        Args:
            source_cache: holds at least `stop` tokens.
            target_cache: holds exactly `start` tokens; every layer gets its new tokens on its own device.
            start: position of the first token to map.
            stop: position after the last.
            rotary_src: the source's rotary embedding.
            rotary_tgt: the target's.
            should_stop: asked before every layer.

        Returns:
            The time of each part.

        Raises:
            ValueError: when there is something to map and the caches do not hold what is said above.
            Cancelled: when asked to stop; the target's cache is then as it was before.
        """
        times = MapTimes()
        if start == stop:
            return times
        if not 0 <= start < stop <= length(source_cache) or length(target_cache) != start:
            raise ValueError(
                f"cannot map tokens {start} to {stop}: the source holds {length(source_cache)}, "
                f"the target {length(target_cache)}"
            )
        try:
            keys, values = self._features(source_cache, start, stop, rotary_src, times)
            for t in range(self.target.layers):
                if should_stop and should_stop():
                    raise Cancelled("The switch was stopped.")
                self._map_layer(t, keys, values, target_cache, start, rotary_tgt, times)
        except BaseException:
            truncate(target_cache, start)
            raise
        return times

    def _features(
        self, source_cache: Cache, start: int, stop: int, rotary_src: Rotary, times: MapTimes
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Per source layer that is read: stripped keys and values, each (n, kv_width) in the mapper's dtype."""
        clock = perf_counter()
        dtype = self.key_weight[0].dtype
        keys, values = {}, {}
        for layer in sorted({layer for chosen in self.key_layers for layer in chosen}):
            k_rot = layer_tensors(source_cache, layer)[0][..., start:stop, :]
            features = torch.empty(stop - start, self.source.kv_width, dtype=dtype, device=k_rot.device)
            rotary_src.strip(k_rot, start, out=head_by_head(features, self.source.kv_heads))
            keys[layer] = features
        for layer in sorted({layer for chosen in self.value_layers for layer in chosen}):
            values[layer] = side_by_side(layer_tensors(source_cache, layer)[1][..., start:stop, :]).to(dtype)
        _wait_for(next(iter(keys.values())).device)
        times.strip_ms += (perf_counter() - clock) * 1e3
        return keys, values

    def _map_layer(
        self,
        t: int,
        keys: dict[int, Tensor],
        values: dict[int, Tensor],
        target_cache: Cache,
        start: int,
        rotary_tgt: Rotary,
        times: MapTimes,
    ) -> None:
        """One target layer: two matrix products, then straight into its slots of the target's cache."""
        clock = perf_counter()
        device = self.key_weight[t].device
        heads = self.target.kv_heads
        k_pre = torch.addmm(self.key_bias[t], _gather(keys, self.key_layers[t], device), self.key_weight[t])
        value = torch.addmm(
            self.value_bias[t], _gather(values, self.value_layers[t], device), self.value_weight[t]
        )
        _wait_for(device)
        after_product = perf_counter()
        n = k_pre.shape[0]
        key_slots, value_slots = target_cache.layers[t].append_slots(
            n, heads, self.target.head_dim, k_pre.dtype, device
        )
        rotary_tgt.rotate(head_by_head(k_pre, heads), start, out=key_slots)
        value_slots.copy_(head_by_head(value, heads))
        _wait_for(device)
        times.product_ms += (after_product - clock) * 1e3
        times.rotate_ms += (perf_counter() - after_product) * 1e3


def side_by_side(heads: Tensor) -> Tensor:
    """(1, heads, n, head_dim) of one layer -> (n, heads * head_dim), head by head."""
    return heads[0].transpose(0, 1).flatten(1)


def head_by_head(rows: Tensor, heads: int) -> Tensor:
    """(n, heads * head_dim) -> (1, heads, n, head_dim), a view: the inverse of `side_by_side`."""
    return rows.view(rows.shape[0], heads, -1).transpose(0, 1)[None]


def _gather(features: dict[int, Tensor], layers: tuple[int, ...], device: torch.device) -> Tensor:
    """(n, k * kv_width) on `device`; a layer that came from elsewhere is moved once and remembered."""
    for layer in layers:
        if features[layer].device != device:
            features[layer] = features[layer].to(device)
    if len(layers) == 1:
        return features[layers[0]]
    return torch.cat([features[layer] for layer in layers], dim=1)


def _wait_for(device: torch.device) -> None:
    """Accelerators run behind; without this the milliseconds would belong to the wrong part."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
