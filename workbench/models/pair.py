"""The two models of a pair and their mappers, loaded when first needed and shared by all visitors.

Whoever computes with the models holds `host.lane`. It is re-entrant, so a job that holds it may call into the
chat, which takes it again for each prefill and each token; it is never held while a message waits for its
reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.errors import ArtefactError, Cancelled, IncompatiblePairError, InputError, WorkbenchError
from workbench.kv import artefact
from workbench.kv.manifest import Manifest
from workbench.kv.mapper import KVMapper
from workbench.kv.spec import KVSpec, check_pair, check_tokenizers
from workbench.models.catalog import SIDES, PairRef, artefact_folder, other_side, source_side, target_side
from workbench.models.loading import LoadedModel, load, read_spec

Progress = Callable[[float, str], None]
IDENTITY = Path("identity")  # in place of a mapper's folder


class PairHost:
    """Models and mappers of one pair.

    Attributes:
        pair: the references.
        lane: held during any model work.
    """

    def __init__(
        self,
        pair: PairRef,
        device_map: str | dict[str, Any] = "auto",
        dtype: str = "auto",
        max_memory: str | dict[Any, Any] | None = None,
        mappers: Mapping[str, Path] | None = None,
        by_side: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            pair: which two models.
            device_map: as for `load`, for both models.
            dtype: as for `load`.
            max_memory: as for `load`.
            mappers: folders of artefacts by direction, instead of the usual places; the path `IDENTITY` takes the
                source's cache over unmapped.
            by_side: what of these differs for "small" or "large", such as {"large": {"device_map": "cuda:1"}}.
        """
        self.pair = pair
        self.lane = threading.RLock()
        common: dict[str, Any] = {"device_map": device_map, "dtype": dtype, "max_memory": max_memory}
        self._options = {side: common | dict((by_side or {}).get(side, {})) for side in SIDES}
        self._folders = dict(mappers or {})
        self._models: dict[str, LoadedModel] = {}
        self._mappers: dict[str, tuple[KVMapper, Manifest]] = {}
        self._positions: dict[str, int] = {}
        self._loading = threading.RLock()
        self._in_memory = False

    @classmethod
    def from_models(
        cls,
        small: LoadedModel,
        large: LoadedModel,
        mappers: Mapping[str, tuple[KVMapper, Manifest | None]] | None = None,
        name: str = "memory",
    ) -> PairHost:
        """A host of models that are loaded already; a direction without a mapper has none."""
        host = cls(PairRef(name, small.ref, large.ref, f"{small.name} and {large.name}"))
        host._adopt("small", small)
        host._adopt("large", large)
        for direction, (mapper, manifest) in (mappers or {}).items():
            host.use_mapper(direction, mapper, manifest)
        host._in_memory = True
        return host

    def model(self, side: str, progress: Progress | None = None) -> LoadedModel:
        """The model of a side, loaded now if it is not yet.

        Raises:
            InputError: no such side.
            WorkbenchError: it cannot be had, or does not fit the other one; the sentence says why.
        """
        if side not in SIDES:
            raise InputError(f"There is no side {side!r}.", "Use small or large.")
        with self._loading:
            if side not in self._models:
                self._adopt(
                    side,
                    load(
                        self.pair.ref(side),
                        progress=progress,
                        check=partial(self._compare, side),
                        **self._options[side],
                    ),
                )
            return self._models[side]

    def _adopt(self, side: str, model: LoadedModel) -> None:
        """Keep a model, after it was compared with the other one."""
        if self._models.get(other_side(side)) is not model:
            self._compare(side, model.spec, model.tokenizer, model.identity.tokenizer)
        self._models[side] = model

    def _compare(self, side: str, spec: KVSpec, tokenizer: Any, identity: str = "") -> None:
        """Refuses a model that does not share its token ids with the other side's, where that one is loaded."""
        other = self._models.get(other_side(side))
        if other is None:
            return
        specs, tokenizers = (spec, other.spec), (tokenizer, other.tokenizer)
        check_pair(*(specs if side == "small" else specs[::-1]))
        if identity != other.identity.tokenizer:
            check_tokenizers(*(tokenizers if side == "small" else tokenizers[::-1]))

    def is_loaded(self, side: str) -> bool:
        """Whether a side's weights are in memory."""
        return side in self._models

    def name(self, side: str) -> str:
        """What people call a side's model: its name once it is loaded, the end of its reference before."""
        return (
            self._models[side].name
            if side in self._models
            else self.pair.ref(side).rstrip("/").rpartition("/")[2]
        )

    def mapper(self, direction: str) -> tuple[KVMapper, Manifest]:
        """The mapper of a direction, verified against both models, on the target's devices and in its dtype.

        Raises:
            ArtefactError: there is none, it is damaged, or it belongs to something else; names the field.
        """
        source_side(direction)
        with self._loading:
            if direction not in self._mappers:
                folder = self.mapper_folder(direction)
                if folder == IDENTITY and not folder.is_dir():
                    self.use_mapper(direction, self._identity(direction), None)
                    return self._mappers[direction]
                if self._in_memory or not (folder / artefact.MANIFEST).is_file():
                    raise ArtefactError(
                        f"There is no mapper for {self.pair.name} {direction}.",
                        "Make one with `python -m workbench fit`.",
                    )
                source, target = self.model(source_side(direction)), self.model(target_side(direction))
                mapper, manifest = artefact.load(folder, source.identity, target.identity, direction)
                self.use_mapper(direction, mapper, manifest)
            return self._mappers[direction]

    def _identity(self, direction: str) -> KVMapper:
        """The map that changes nothing: the baseline of two models of one geometry (a base and an adapter over it).

        Raises:
            IncompatiblePairError: the caches differ in shape.
        """
        source, target = (self.model(side(direction)).spec for side in (source_side, target_side))
        shapes = [(spec.layers, spec.kv_heads, spec.head_dim) for spec in (source, target)]
        if shapes[0] != shapes[1]:
            raise IncompatiblePairError(
                "The cache of one model cannot be taken over by the other unmapped: their layers, heads or head sizes "
                f"differ ({' x '.join(map(str, shapes[0]))} and {' x '.join(map(str, shapes[1]))})."
            )
        return replace(KVMapper.identity(target), source=source, anchors=4, hold_back=16)

    def use_mapper(self, direction: str, mapper: KVMapper, manifest: Manifest | None) -> None:
        """Use this mapper from now on; a chat that is mapping at the moment finishes with the old one."""
        target = self.model(target_side(direction))
        moved = mapper.to(target.dtype, target.layer_devices)
        self._mappers[direction] = (moved, manifest)  # type: ignore[assignment]

    def forget_mapper(self, direction: str) -> None:
        """Read the artefact again when it is next needed, for example after a new fit. One given in memory stays."""
        if self._in_memory:
            return
        with self._loading:
            self._mappers.pop(direction, None)

    def mapper_folder(self, direction: str) -> Path:
        """Where the artefact of a direction is expected."""
        return self._folders.get(direction) or artefact_folder(self.pair, direction)

    def max_positions(self) -> int:
        """Longest context in tokens: the smaller limit of both models, as far as configs here tell.

        A conversation may be handed over at any time, so the limit of the model that is not in use counts
        too.
        """
        known = [limit for limit in map(self._limit_of, SIDES) if limit]
        if not known:
            raise WorkbenchError("Neither model of the pair can be read.")
        return min(known)

    def _limit_of(self, side: str) -> int:
        """Longest context of one side, 0 when its config is not on this machine."""
        if side in self._models:
            return self._models[side].spec.max_positions
        if side not in self._positions:
            try:
                self._positions[side] = read_spec(self.pair.ref(side), fetch=False)[0].max_positions
            except WorkbenchError:
                return 0
        return self._positions[side]

    @contextmanager
    def stopping_between_layers(self, should_stop: Callable[[], bool]) -> Iterator[None]:
        """This thread's passes through the models in memory end before their next layer once it says so.

        A pass over thousands of tokens takes longer than anybody waits for a stop. Other threads' passes do not ask.

        Args:
            should_stop: asked before every layer; the pass then ends with `Cancelled`.
        """
        thread = threading.get_ident()

        def ask(*_: Any) -> None:
            if threading.get_ident() == thread and should_stop():
                raise Cancelled("Stopped.")

        with ExitStack() as hooks:
            for loaded in {id(model): model for model in self._models.values()}.values():
                for layer in loaded.model.base_model.layers:
                    hooks.callback(layer.register_forward_pre_hook(ask).remove)
            yield

    @contextmanager
    def holding_lane(self, should_stop: Callable[[], bool] | None = None) -> Iterator[None]:
        """Hold the lane; while waiting for it, look at the stop flag.

        Raises:
            Cancelled: when asked to stop while waiting.
        """
        while not self.lane.acquire(timeout=0.05):
            if should_stop is not None and should_stop():
                raise Cancelled("Stopped while waiting for another chat.")
        try:
            yield
        finally:
            self.lane.release()
