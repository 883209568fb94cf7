"""The mapper: a source model's KV cache in, a target model's KV cache out.

The chosen source layers' keys, with the source's rotation removed, and values stand side by side as features; matrix
products turn them into the target layers' keys and values for all heads, the target's own rotation is applied to the
keys, and the result is written straight into the target's cache. There are two forms:

    full       every target layer has its own matrices over the source layers that were chosen for it
                   k_pre_tgt = x[t] @ key_weight[t] + key_bias[t]           x[t] (n, k * heads_src * head_dim_src)
    low rank   thin matrices turn all features into a few coordinates, which all target layers read
                   z = x @ reduce,   k_pre_tgt = z @ key_weight[t] + key_bias[t]              z (n, rank)

With an MLP (low rank only) two hidden layers make further coordinates out of z, and the target layers read both:
`[z | gelu(gelu(z @ m0 + b0) @ m1 + b1)]`. Values go the same way as keys, without any rotation.

The lowest `native_layers` of the target are not mapped at a switch: the target runs them itself, which is exact, since a
layer's keys and values need nothing of the layers above. Their matrices are kept, so that the choice can be undone.

A `KVMapper` is frozen: it is made by `workbench.kv.fit` and stored by `workbench.kv.artefact`. Batch size is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import Cache

from workbench.errors import Cancelled
from workbench.kv.cache import check_takes, grows_in_place, length, truncate
from workbench.kv.features import Features, head_by_head, hidden_coordinates, wait_for
from workbench.kv.rope import Rotary
from workbench.kv.spec import KVSpec

FEATURES = ("own", "both")
LAYERS_AT_ONCE = 3  # target layers whose source layers are in memory together, stripped
"""What a map reads: keys from keys and values from values, or each from keys and values."""


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
        key_layers: per target layer, the source layers that its keys are made of; all equal in the low-rank form.
        value_layers: the same for values; equal to `key_layers` in the low-rank form with both features.
        key_weight: per target layer (features, target.kv_width). Features are k * source.kv_width in the full form,
            twice that with both features (keys first); rank, and the MLP's width, in the low-rank form.
        key_bias: per target layer (target.kv_width,).
        value_weight: like `key_weight`.
        value_bias: like `key_bias`.
        anchors: how many first tokens the fit left out, and the target should run natively.
        hold_back: how many last tokens the target should run natively, at least 1.
        features: a name in `FEATURES`.
        reduce: () in the full form. In the low-rank form the thin matrices (features, rank): the keys' and the values'
            with own features, a single one that serves both with both features.
        mlp: () or weight (rank, width), bias (width,), weight (width, width), bias (width,) of the two hidden layers;
            needs a single `reduce`.
        familiar: token ids that were frequent in the calibration text, the most frequent first. Tokens with any other
            id are better run natively by the target than mapped; () where all are mapped.
        native_layers: so many of the lowest target layers run natively over the tokens that are mapped in the others.
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
    features: str = "own"
    reduce: tuple[Tensor, ...] = ()
    mlp: tuple[Tensor, ...] = ()
    familiar: tuple[int, ...] = ()
    native_layers: int = 0

    def __post_init__(self) -> None:
        """Check that layers and shapes fit the two geometries.

        Raises:
            ValueError: naming the first tensor, or the number, that does not fit.
        """
        if not 0 <= self.native_layers <= self.target.layers:
            raise ValueError(f"native_layers must be 0 to {self.target.layers}, not {self.native_layers}")
        for kind in ("key", "value"):
            layers = getattr(self, f"{kind}_layers")
            weights, biases = getattr(self, f"{kind}_weight"), getattr(self, f"{kind}_bias")
            if not len(layers) == len(weights) == len(biases) == self.target.layers:
                raise ValueError(f"the {kind} maps must be {self.target.layers}, one a target layer")
            for t, chosen in enumerate(layers):
                if not chosen or any(not 0 <= layer < self.source.layers for layer in chosen):
                    raise ValueError(f"{kind}_layers[{t}] names source layers that do not exist: {chosen}")
        for name, shape in self.shapes().items():
            if tuple(self.tensor(name).shape) != shape:
                raise ValueError(f"{name} must have shape {shape}")

    @classmethod
    def identity(cls, spec: KVSpec) -> KVMapper:
        """The mapper of a model onto itself; the gate uses it to prove that the code path is exact."""
        layers = tuple((layer,) for layer in range(spec.layers))
        weight, bias = (torch.eye(spec.kv_width),) * spec.layers, (torch.zeros(spec.kv_width),) * spec.layers
        return cls(spec, spec, layers, layers, weight, bias, weight, bias, anchors=0, hold_back=1)

    @property
    def rank(self) -> int:
        """Coordinates that a target layer reads in the low-rank form (without the MLP's), 0 in the full form."""
        return self.reduce[0].shape[1] if self.reduce else 0

    @property
    def hidden(self) -> int:
        """Width of the MLP's hidden layers, 0 without one."""
        return self.mlp[0].shape[1] if self.mlp else 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of every tensor (as `tensor` takes it) -> the shape that it must have.

        Raises:
            ValueError: the layers or the number of thin matrices do not fit the form.
        """
        return expected_shapes(
            self.source, self.target, self.key_layers, self.value_layers, self.features,
            tuple(matrix.shape[-1] for matrix in self.reduce), self.hidden,
        )  # fmt: skip

    def tensor(self, name: str) -> Tensor:
        """One tensor by its name, such as `key_weight[3]`.

        Raises:
            ValueError: there is none of this name.
        """
        field, _, index = name.rstrip("]").partition("[")
        try:
            return getattr(self, field)[int(index)]
        except (AttributeError, IndexError) as error:
            raise ValueError(f"there is no tensor {name}") from error

    def with_tensors(self, tensors: dict[str, Tensor]) -> KVMapper:
        """The same mapper with all its tensors (by the names of `shapes`) replaced."""
        fields: dict[str, tuple[Tensor, ...]] = {}
        for name in self.shapes():
            field = name.partition("[")[0]
            fields[field] = (*fields.get(field, ()), tensors[name])
        return replace(self, **fields)  # type: ignore[arg-type]

    @cached_property
    def _familiar(self) -> frozenset[int]:
        return frozenset(self.familiar)

    def rare(self, ids: Sequence[int], start: int, stop: int) -> list[int]:
        """Positions from `start` to before `stop` whose tokens should run natively, since the map knows them badly."""
        if not self.familiar:
            return []
        return [position for position in range(start, stop) if ids[position] not in self._familiar]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and biases as they are held now."""
        tensors = [self.tensor(name) for name in self.shapes()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Every matrix that a token is multiplied with; those of layers that run natively are not."""
        first = self.native_layers
        if first == self.target.layers:
            return ()
        return (*self.reduce, *self.mlp[::2], *self.key_weight[first:], *self.value_weight[first:])

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the matrix products for one token, a multiply-add counted as two."""
        return 2 * sum(matrix.numel() for matrix in self.matrices)

    def to(self, dtype: torch.dtype | None = None, devices: Sequence[torch.device] | None = None) -> KVMapper:
        """The same mapper in another dtype, with each target layer's matrices on that layer's device.

        What all target layers share goes to the first one's device.

        Args:
            dtype: of all tensors, None to keep.
            devices: one a target layer, None to keep.
        """

        def moved(tensors: tuple[Tensor, ...], shared: bool = False) -> tuple[Tensor, ...]:
            places = [tensor.device for tensor in tensors]
            if devices:
                places = [devices[0]] * len(tensors) if shared else list(devices)
            return tuple(tensor.to(place, dtype) for tensor, place in zip(tensors, places, strict=True))

        return replace(
            self,
            key_weight=moved(self.key_weight),
            key_bias=moved(self.key_bias),
            value_weight=moved(self.value_weight),
            value_bias=moved(self.value_bias),
            reduce=moved(self.reduce, shared=True),
            mlp=moved(self.mlp, shared=True),
        )

    def coordinates(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the target layers read in the low-rank form; gradients flow.

        Args:
            keys: (n, k * source.kv_width) stripped keys of `key_layers[0]`, layer by layer.
            values: (n, k * source.kv_width) values of `value_layers[0]`.

        Returns:
            Two (n, rank + hidden), for keys and for values; one and the same with both features.
        """
        if self.features == "own":
            return keys @ self.reduce[0], values @ self.reduce[1]
        z = torch.cat((keys, values), dim=1) @ self.reduce[0]
        if self.mlp:
            z = torch.cat((z, hidden_coordinates(z, self.mlp)), dim=1)
        return z, z

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
        first_layer: int = 0,
    ) -> MapTimes:
        """Append tokens `start .. stop-1` of the source's cache, mapped, to the target's cache.

        All target layers are mapped unless `first_layer` says otherwise: what runs natively is the caller's business.

        Args:
            source_cache: holds at least `stop` tokens.
            target_cache: its layers from `first_layer` on hold exactly `start` tokens; each gets its new tokens on its
                own device. Our own growing cache is written in place; any of transformers' kinds that takes tensors
                will do.
            start: position of the first token to map.
            stop: position after the last.
            rotary_src: the source's rotary embedding.
            rotary_tgt: the target's.
            should_stop: asked before every layer.
            first_layer: the lowest target layer to map; those below are not touched.

        Returns:
            The time of each part.

        Raises:
            ValueError: when there is something to map and the caches do not hold what is said above.
            InputError: a target cache of a kind that cannot take mapped tokens, or without room for them.
            Cancelled: when asked to stop; the target's cache is then as it was before.
        """
        times = MapTimes()
        if start == stop or first_layer == self.target.layers:
            return times
        written = Cache(layers=target_cache.layers[first_layer:])
        if not 0 <= start < stop <= length(source_cache) or length(written) != start:
            raise ValueError(
                f"cannot map tokens {start} to {stop}: the source holds {length(source_cache)}, "
                f"the target {length(written)}"
            )
        check_takes(target_cache, stop)
        try:
            at_once = self.target.layers if self.reduce else LAYERS_AT_ONCE
            for first in range(first_layer, self.target.layers, at_once):
                layers = range(first, min(first + at_once, self.target.layers))
                clock = perf_counter()
                features = Features(self, source_cache, start, stop, rotary_src, layers)
                times.strip_ms += (perf_counter() - clock) * 1e3
                if self.reduce:
                    clock = perf_counter()
                    features.reduce(self)
                    times.product_ms += (perf_counter() - clock) * 1e3
                for t in layers:
                    if should_stop and should_stop():
                        raise Cancelled("The switch was stopped.")
                    self._map_layer(t, features, target_cache, start, rotary_tgt, times)
                del features  # before the next ones are made
        except BaseException:
            truncate(written, start)
            raise
        return times

    def _map_layer(
        self,
        t: int,
        features: Features,
        target_cache: Cache,
        start: int,
        rotary_tgt: Rotary,
        times: MapTimes,
    ) -> None:
        """One target layer: two matrix products, then straight into its slots of the target's cache."""
        clock = perf_counter()
        device = self.key_weight[t].device
        heads = self.target.kv_heads
        # `linear` and not `addmm`, which takes twice as long in bfloat16 on a CPU: it spreads the bias out first.
        k_pre = linear(features.of("key", t, device), self.key_weight[t].t(), self.key_bias[t])
        value = linear(features.of("value", t, device), self.value_weight[t].t(), self.value_bias[t])
        wait_for(device)
        after_product = perf_counter()
        n = k_pre.shape[0]
        key, value = head_by_head(k_pre, heads), head_by_head(value, heads)
        if grows_in_place(target_cache, t):
            key_slots, value_slots = target_cache.layers[t].append_slots(
                n, heads, self.target.head_dim, k_pre.dtype, device
            )
            rotary_tgt.rotate(key, start, out=key_slots, layer=t)
            value_slots.copy_(value)
        else:  # a cache of another kind takes tensors, and copies them
            target_cache.update(rotary_tgt.rotate(key, start, layer=t), value.contiguous(), t)
        wait_for(device)
        times.product_ms += (after_product - clock) * 1e3
        times.rotate_ms += (perf_counter() - after_product) * 1e3


def expected_shapes(
    source: KVSpec,
    target: KVSpec,
    key_layers: tuple[tuple[int, ...], ...],
    value_layers: tuple[tuple[int, ...], ...],
    features: str = "own",
    ranks: tuple[int, ...] = (),
    hidden: int = 0,
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors of a mapper, in the order in which they are stored.

    Args:
        source: geometry that is read.
        target: geometry that is written.
        key_layers: as in `KVMapper`.
        value_layers: as in `KVMapper`.
        features: as in `KVMapper`.
        ranks: columns of each matrix of `reduce`, () for the full form.
        hidden: width of the MLP, 0 for none.

    Raises:
        ValueError: what is asked for does not go together.
    """
    if features not in FEATURES:
        raise ValueError(f"features must be one of {', '.join(FEATURES)}, not {features!r}")
    if ranks and len(ranks) != (2 if features == "own" else 1):
        raise ValueError("own features need two thin matrices, both features one")
    if ranks and (len({*key_layers}) != 1 or len({*value_layers}) != 1):
        raise ValueError("in the low-rank form all target layers read the same source layers")
    if ranks and features == "both" and key_layers != value_layers:
        raise ValueError(
            "with both features in the low-rank form keys and values read the same source layers"
        )
    if hidden and len(ranks) != 1:
        raise ValueError("an MLP needs the low-rank form with both features")
    width = source.kv_width * (2 if features == "both" else 1)
    chosen = {"key": key_layers, "value": value_layers}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, rank in enumerate(ranks):
        layers = key_layers if index == 0 else value_layers
        shapes[f"reduce[{index}]"] = (len(layers[0]) * width, rank)
    if hidden:
        sizes = ((ranks[0], hidden), (hidden,), (hidden, hidden), (hidden,))
        shapes |= {f"mlp[{index}]": size for index, size in enumerate(sizes)}
    for number, (kind, layers) in enumerate(chosen.items()):
        for t in range(target.layers):
            rows = ranks[min(number, len(ranks) - 1)] + hidden if ranks else len(layers[t]) * width
            shapes[f"{kind}_weight[{t}]"] = (rows, target.kv_width)
        for t in range(target.layers):
            shapes[f"{kind}_bias[{t}]"] = (target.kv_width,)
    return shapes
