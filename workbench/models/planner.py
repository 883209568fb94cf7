"""What a pair needs before it is loaded, what the machine has, and where to put it.

Parameters are counted on a model built without memory from its config; the caches, the mapper and the sums of a fit
follow from the two geometries. The proposal fills devices in order: the large model first, since every answer after a
switch pays for it, then the small one; a model that fits on one GPU stays whole, one that does not is cut between
layers, over the GPUs, then the memory, then the disk. `--small-device-map FILE` and `--large-device-map FILE` take it
as it stands. All sizes are bytes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.errors import InputError, WorkbenchError
from workbench.kv.spec import KVSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SIDES = ("small", "large")
GPU_RESERVE, CPU_RESERVE = 600_000_000, 1_500_000_000  # the libraries' own, activations of a chunk
PlaceMap = dict[str, int | str]


@dataclass(frozen=True)
class ModelSize:
    """One model's weights, in parameters.

    Attributes:
        spec: geometry of its cache.
        edge: of everything outside the layers: embeddings, last norm, head.
        layers: of each layer, in order.
        names: of the modules outside the layers, as in a device map.
        prefix: of the layers, such as "model.layers".
    """

    spec: KVSpec
    edge: int
    layers: tuple[int, ...]
    names: tuple[str, ...]
    prefix: str

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.edge + sum(self.layers)

    @classmethod
    def of(cls, config: Any) -> ModelSize:
        """Counts on a model without memory.

        Raises:
            WorkbenchError: a model that cannot be paired, or is built in a way that is not known.
        """
        import torch
        from transformers import AutoModelForCausalLM

        spec = KVSpec.from_config(config)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        blocks = getattr(model.base_model, "layers", None)
        if blocks is None:
            raise InputError(f"The size of a {spec.family} model cannot be told from its config.")
        layers = tuple(sum(p.numel() for p in block.parameters()) for block in blocks)
        base = model.base_model_prefix
        names = [f"{base}.{name}" for name, _ in model.base_model.named_children() if name != "layers"]
        names += [name for name, _ in model.named_children() if name != base]
        edge = sum(p.numel() for p in model.parameters()) - sum(layers)
        return cls(spec, edge, layers, tuple(names), f"{base}.layers")


@dataclass(frozen=True)
class Device:
    """Where something can be put: "cuda:0", "cpu" or "disk", and how much is free there."""

    name: str
    free: int

    @property
    def key(self) -> int | str:
        """As a device map names it."""
        return int(self.name.partition(":")[2]) if self.name.startswith("cuda:") else self.name


@dataclass(frozen=True)
class Need:
    """What one model needs."""

    side: str
    name: str
    dtype: str
    parameters: int
    weights: int
    cache: int


@dataclass(frozen=True)
class Plan:
    """A pair on a machine.

    Attributes:
        tokens: length of the context that the caches are for.
        needs: of both models.
        mapper: of each direction, in the target's dtype.
        fit: of the sums that a fit of a direction keeps in memory, at most.
        devices: what the machine has, in the order in which it is filled.
        maps: a device map for each side.
        used: of each device.
        fits: whether all is in memory; False when the disk is needed or nothing suffices.
        sentence: the same for people.
    """

    tokens: int
    needs: dict[str, Need]
    mapper: dict[str, int]
    fit: dict[str, int]
    devices: tuple[Device, ...]
    maps: dict[str, PlaceMap]
    used: dict[str, int]
    fits: bool
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def machine() -> tuple[Device, ...]:
    """GPUs by free memory, then memory, then the disk that offloaded layers would go to."""
    import psutil
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        found.append(Device(f"cuda:{index}", free))
    found.sort(key=lambda device: -device.free)
    memory = psutil.virtual_memory().available
    return (*found, Device("cpu", memory), Device("disk", shutil.disk_usage(tempfile.gettempdir()).free))


def cache_bytes(spec: KVSpec, tokens: int, item: int) -> int:
    """Keys and values of so many tokens."""
    return 2 * spec.layers * spec.kv_width * tokens * item


def mapper_bytes(source: KVSpec, target: KVSpec, top_k: int | None, item: int) -> int:
    """Both matrices and biases of every target layer; None stands for all source layers."""
    features = min(top_k or source.layers, source.layers) * source.kv_width
    return 2 * target.layers * (features + 1) * target.kv_width * item


def fit_bytes(source: KVSpec, target: KVSpec) -> int:
    """The float64 sums of keys and values that a fit gathers: features by features and by outputs."""
    features, outputs = source.layers * source.kv_width, target.layers * target.kv_width
    return 2 * features * (features + outputs) * 8


def plan(
    sizes: dict[str, ModelSize],
    names: dict[str, str],
    dtypes: dict[str, str],
    devices: Sequence[Device],
    tokens: int = 4096,
    top_k: int | None = None,
) -> Plan:
    """Where to put a pair.

    Args:
        sizes: of "small" and "large".
        names: of both, for people.
        dtypes: of both, as in `ITEM_BYTES`.
        devices: see `machine`.
        tokens: length of the context.
        top_k: source layers a target layer, None for all.

    Raises:
        InputError: an unknown dtype, or no context.
    """
    unknown = [dtype for dtype in dtypes.values() if dtype not in ITEM_BYTES]
    if unknown or tokens < 1:
        raise InputError(
            f"A plan needs a context of at least one token and a dtype of {', '.join(ITEM_BYTES)}."
        )
    needs, mapper, sums = {}, {}, {}
    for side in SIDES:
        size, item = sizes[side], ITEM_BYTES[dtypes[side]]
        needs[side] = Need(side, names[side], dtypes[side], size.parameters, size.parameters * item,
                           cache_bytes(size.spec, tokens, item))  # fmt: skip
    for direction, source, target in (("up", "small", "large"), ("down", "large", "small")):
        pair = sizes[source].spec, sizes[target].spec
        mapper[direction] = mapper_bytes(*pair, top_k, ITEM_BYTES[dtypes[target]])
        sums[direction] = fit_bytes(*pair)
    room = _Room(devices)
    maps = {side: room.place(sizes[side], ITEM_BYTES[dtypes[side]], needs[side].cache, mapper[way])
            for side, way in (("large", "up"), ("small", "down"))}  # fmt: skip
    on_disk = any("disk" in places.values() for places in maps.values())
    fits = not on_disk and not room.missing
    return Plan(tokens, needs, mapper, sums, tuple(devices), maps, room.used, fits,
                _sentence(needs, mapper, room, on_disk))  # fmt: skip


@dataclass
class _Room:
    """What is left on each device while models are placed."""

    devices: Sequence[Device]
    left: dict[str, int] = field(init=False)
    used: dict[str, int] = field(init=False)
    missing: int = 0

    def __post_init__(self) -> None:
        reserve = {"cpu": CPU_RESERVE, "disk": 0}
        self.left = {d.name: max(0, d.free - reserve.get(d.name, GPU_RESERVE)) for d in self.devices}
        self.used = {device.name: 0 for device in self.devices}

    def place(self, size: ModelSize, item: int, cache: int, mapper: int) -> PlaceMap:
        """A device map of a model with its cache and the mapper into it, which stand beside its layers."""
        beside = (cache + mapper) // len(size.layers)  # cache and matrices are as large for each layer
        total = size.parameters * item + beside * len(size.layers)
        for device in self.devices:
            if device.name.startswith("cuda:") and total <= self.left[device.name]:
                self._take(device.name, total)
                return {"": device.key}
        layers = [count * item + beside for count in size.layers]
        first = next((d for d in self.devices if size.edge * item <= self.left[d.name]), None)
        if first is None:
            self.missing += total
            return {"": "cpu"}
        self._take(first.name, size.edge * item)
        places: PlaceMap = {name: first.key for name in size.names}
        order = [device for device in self.devices[self.devices.index(first) :]]
        for layer, needed in enumerate(layers):
            while order and needed > self.left[order[0].name]:
                order.pop(0)  # never back to an earlier device: the hidden state would travel there and back
            if not order:
                self.missing += needed
                places[f"{size.prefix}.{layer}"] = "disk"
                continue
            self._take(order[0].name, needed)
            places[f"{size.prefix}.{layer}"] = order[0].key
        return {"": first.key} if set(places.values()) == {first.key} else places

    def _take(self, name: str, needed: int) -> None:
        self.left[name] -= needed
        self.used[name] += needed


def _sentence(needs: dict[str, Need], mapper: dict[str, int], room: _Room, on_disk: bool) -> str:
    models = sum(need.weights for need in needs.values())
    caches = sum(need.cache for need in needs.values())
    total = f"{gigabytes(models)} of weights, {gigabytes(caches)} of caches, {gigabytes(sum(mapper.values()))} of mappers"
    where = ", ".join(f"{gigabytes(used)} on {name}" for name, used in room.used.items() if used)
    if room.missing:
        return f"Does not fit: {total}, and {gigabytes(room.missing)} have no place on this machine."
    if on_disk:
        return f"Fits only with layers on the disk, which is slow: {total} ({where})."
    return f"Fits: {total} ({where})."


def gigabytes(size: int) -> str:
    """A size for people, such as "3.1 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def pair_sizes(pair: Any, *, fetch: bool) -> dict[str, ModelSize]:
    """Sizes of both models, from the configs here or on the hub, else from what the catalog knows.

    Raises:
        WorkbenchError: a model that is neither here nor known, or that cannot be paired.
    """
    from workbench.models.loading import read_config
    from workbench.models.presets import preset_config

    sizes = {}
    for side in SIDES:
        try:
            config = read_config(pair.ref(side), fetch=fetch)[0]
        except WorkbenchError:
            config = preset_config(pair.ref(side))
            if config is None:
                raise
        sizes[side] = ModelSize.of(config)
    return sizes


def plan_pair(
    pair: Any,
    dtypes: dict[str, str] | None = None,
    *,
    tokens: int | None = None,
    top_k: int | None = None,
    fetch: bool = False,
    devices: Sequence[Device] | None = None,
) -> Plan:
    """`plan` of a pair by its references.

    Args:
        pair: a `PairRef`.
        dtypes: None for what `--dtype auto` would choose.
        tokens: length of the context, None for 4,096 or the shorter limit of both models.
        top_k: source layers a target layer, None for all.
        fetch: ask the hub for configs that are not here.
        devices: None for this machine's.

    Raises:
        WorkbenchError: see `pair_sizes` and `plan`.
    """
    sizes = pair_sizes(pair, fetch=fetch)
    limit = min(size.spec.max_positions for size in sizes.values())
    names = {side: os.path.basename(pair.ref(side).rstrip("/")) or pair.ref(side) for side in SIDES}
    return plan(sizes, names, dtypes or auto_dtypes(), machine() if devices is None else devices,
                min(4096, limit) if tokens is None else tokens, top_k)  # fmt: skip


def auto_dtypes(given: dict[str, str] | None = None) -> dict[str, str]:
    """Names of the dtypes that models are loaded in, for those that are "auto" or not given."""
    from workbench.models.devices import first_device, resolve_dtype

    chosen = {}
    for side in SIDES:
        dtype = (given or {}).get(side, "auto")
        chosen[side] = str(resolve_dtype(dtype, first_device("auto"))[0]).removeprefix("torch.")
    return chosen
