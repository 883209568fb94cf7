"""Which heads really cost something: interventions on single heads, and whether the cheap metrics foresee them.

For each text the target's cache of the context exists twice: as the handoff makes it (anchors native, the rest mapped)
and true. The following tokens are teacher-forced over variants of it (`workbench.lab.branches`); KL is KL(native ‖
variant), the mean over the following tokens.

    gain    KL(mapped) - KL(mapped, with this head's tensors replaced by the true ones)      what repairing it wins
    damage  KL(true, with this head's tensors replaced by the mapped ones)                   what it breaks alone

Gains of single heads do not add up: one may be negative where two errors cancelled each other. So the *repair curve*
restores the worst 1, 5, 10 and 20 % of the heads by a metric together, beside random ones and the order that the gains
themselves give. That order comes from the same texts, so it is a hard one to beat; the metrics may come from others.
One cheap metric is taken from the same texts too: the gain as `workbench.lab.attribution` estimates it from four gradients
a text, before anything is exchanged. It says whether patching could have been spared on the text at hand; the same estimate
from other texts says whether it can be foreseen.
`native_bottom` restores the lowest m layers together, which is what running them natively over the whole context
would win: nothing above is needed for their hidden states.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import Cache

from workbench.errors import Cancelled, InputError
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.lab.attribution import path_gains
from workbench.lab.branches import Branches, Exchange, cells
from workbench.lab.corpus import Document, Passage, documents, passages
from workbench.lab.provenance import models_of, trace, write_text
from workbench.lab.results.common import Step
from workbench.lab.results.correlation import spearman
from workbench.lab.results.heads import CHEAP, METRICS, SAME_TEXT, HeadMaps
from workbench.lab.results.patch import CAUSAL, KINDS, RANDOM, SHARES, HeadPatches, Prediction

if TYPE_CHECKING:
    from workbench.kv.mapper import KVMapper
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
DEFAULT_TEXTS, DEFAULT_CONTEXT, DEFAULT_FOLLOWING = 8, 256, 12
DRAWS = 20
STATE = ("base", "estimate", "gain", "damage")
"""What is kept of each text that is done: lists of numbers."""


@dataclass(frozen=True)
class PatchOptions:
    """What is patched, on how much text.

    Attributes:
        limit: at most so many texts.
        context: tokens of each context.
        following: tokens predicted after it.
        anchors: first tokens that stay native, None for the mapper's own choice.
        hold_back: last context tokens that are run natively, at least 1.
        skip: so many passages are left out first, so that metrics can come from other text.
        draws: random sets of heads for each share of the repair curve.
    """

    limit: int = DEFAULT_TEXTS
    context: int = DEFAULT_CONTEXT
    following: int = DEFAULT_FOLLOWING
    anchors: int | None = None
    hold_back: int = 1
    skip: int = 0
    draws: int = DRAWS

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            InputError: naming the option.
        """
        anchors = self.anchors or 0
        if self.limit < 1 or self.following < 1 or self.hold_back < 1 or anchors < 0 or self.skip < 0:
            raise InputError("At least one text, one following token and one held-back token are needed.")
        if anchors + self.hold_back >= self.context:
            raise InputError(
                f"{anchors} anchors and {self.hold_back} held-back tokens leave nothing to map of {self.context}.",
                "Use a longer context.",
            )


def stream(
    host: PairHost,
    direction: str,
    texts: Sequence[Document] | None = None,
    options: PatchOptions | None = None,
    metrics: HeadMaps | None = None,
    state_file: Path | None = None,
    resume: bool = False,
    should_stop: ShouldStop = None,
) -> Iterator[Step | HeadPatches]:
    """Patch all heads of a direction's mapper.

    Args:
        host: the pair.
        direction: "up" or "down".
        texts: to measure on, None for the held-out ones.
        options: how much.
        metrics: what the cheap metrics said; None leaves the prediction out.
        state_file: keeps what is done after every text; removed at the end.
        resume: go on from `state_file` where it belongs to this very measurement.
        should_stop: asked before every layer.

    Yields:
        A `Step` a layer; the `HeadPatches` last.

    Raises:
        InputError: texts and settings that leave nothing to measure.
        Cancelled: when asked to stop; the state stays.
    """
    options = options or PatchOptions()
    source, target = models_of(host, direction)
    mapper, manifest = host.mapper(direction)
    length = options.context + options.following
    if length > min(source.spec.max_positions, target.spec.max_positions):
        raise InputError(f"{length:,} tokens are beyond what both models can read.")
    cut = passages(target.tokenizer, texts or documents("heldout"), length, options.skip + options.limit)
    cut = cut[options.skip :] or cut[-options.limit :]  # few texts: rather the same ones than none
    identity = (
        options,
        [p.ids for p in cut],
        source.identity,
        target.identity,
        _fingerprint(mapper, manifest),
        STATE,
    )
    state = PatchState(state_file, hashlib.sha256(repr(identity).encode()).hexdigest())
    if resume:
        state.restore()
    clock = perf_counter()
    layers, heads = target.spec.layers, target.spec.kv_heads
    plan = Plan(layers, heads)
    share = 0.8 if metrics is not None else 0.95
    for number in range(len(state.done), len(cut)):
        with host.holding_lane(should_stop):
            branches = branch(source, target, mapper, cut[number], options, should_stop)
            estimate = path_gains(branches).sum(-1).flatten().tolist()
        found: dict[str, list[float]] = dict(zip(STATE, ([branches.base_kl], estimate, [], []), strict=True))
        for layer in range(layers):
            if should_stop and should_stop():
                raise Cancelled("The measurement was stopped.")
            with host.holding_lane(should_stop):
                found["gain"] += branches.kl("mapped", plan.of_layer(layer))
                found["damage"] += branches.kl("true", plan.of_layer(layer))
            done = (number + (layer + 1) / layers) / len(cut)
            yield Step(
                share * done, f"patching text {number + 1} of {len(cut)}, layer {layer + 1} of {layers}"
            )
        state.add(found, perf_counter() - clock)
        clock = perf_counter()
    result = plan.result(state.done)
    if metrics is not None:
        metrics = replace(metrics, metrics={**metrics.metrics, SAME_TEXT: result["estimate"]})

    sets = repair_sets(result["gain"]["kv"], metrics, options.draws)
    bottoms = {m: cells(range(m), range(heads), "kv") for m in bottom_layers(layers)}
    wanted = [*{exchange for curve in sets.values() for several in curve.values() for exchange in several}]
    kls = np.zeros((len(cut), len(wanted) + len(bottoms)))
    for number, passage in enumerate(cut):
        if should_stop and should_stop():
            raise Cancelled("The measurement was stopped.")
        with host.holding_lane(should_stop):
            branches = branch(source, target, mapper, passage, options, should_stop)
            kls[number] = branches.kl("mapped", [*wanted, *bottoms.values()])
        yield Step(
            share + (1 - share) * (number + 1) / len(cut), f"repairing text {number + 1} of {len(cut)}"
        )
    mean_kl = dict(zip([*wanted, *bottoms.values()], kls.mean(0).tolist(), strict=True))
    prediction = None
    if metrics is not None:
        prediction = predict(result, metrics, sets, mean_kl, options.draws)
    tokens = len(cut) * options.following
    yield HeadPatches(
        **result,
        native_bottom={m: mean_kl[exchange] for m, exchange in bottoms.items()},
        layers=layers,
        kv_heads=heads,
        texts=len(cut),
        context=options.context,
        following=options.following,
        anchors=mapper.anchors if options.anchors is None else options.anchors,
        hold_back=options.hold_back,
        seconds=state.seconds + perf_counter() - clock,
        prediction=prediction,
        provenance=trace(host, direction, tokens, [(passage.name, passage.ids) for passage in cut]),
    )
    state.discard()


def branch(
    source: LoadedModel,
    target: LoadedModel,
    mapper: KVMapper,
    passage: Passage,
    options: PatchOptions,
    should_stop: ShouldStop = None,
) -> Branches:
    """Both caches of a passage's context, ready to be exchanged head by head."""
    stop = options.context - options.hold_back
    mapped = mapped_context(source, target, mapper, passage, options, should_stop)
    true = new_cache(target.spec.layers, stop)
    forward(target.model, passage.ids[:stop], true, keep=0, chunk=512, should_stop=should_stop)
    return Branches(target, mapped, true, passage.ids[stop:-1], options.following)


def mapped_context(
    source: LoadedModel,
    target: LoadedModel,
    mapper: KVMapper,
    passage: Passage,
    options: PatchOptions,
    should_stop: ShouldStop = None,
) -> Cache:
    """The target's cache of a passage's context as the handoff makes it, without the held-back tokens."""
    anchors = mapper.anchors if options.anchors is None else options.anchors
    stop = options.context - options.hold_back
    if anchors >= stop:
        raise InputError(f"{anchors} anchors leave nothing to map of {options.context} tokens.")
    context = passage.ids[:stop]
    source_cache = new_cache(source.spec.layers, stop)
    forward(source.model, context, source_cache, keep=0, chunk=512, should_stop=should_stop)
    mapped = new_cache(target.spec.layers, stop)
    if anchors:
        forward(target.model, context[:anchors], mapped, keep=0)
    mapper.map_into(source_cache, mapped, anchors, stop, source.rotary, target.rotary, should_stop)
    return mapped


@dataclass(frozen=True)
class Plan:
    """The variants of every layer, in a fixed order: for each kind all heads, then the whole layer."""

    layers: int
    heads: int

    def of_layer(self, layer: int) -> list[Exchange]:
        """What is exchanged, variant by variant."""
        heads = range(self.heads)
        return [
            cells([layer], group, kind) for kind in KINDS for group in (*([head] for head in heads), [*heads])
        ]

    def result(self, texts: Sequence[Mapping[str, list[float]]]) -> dict[str, Any]:
        """Arrays of `HeadPatches` from the KL of every text and variant."""
        shape = (len(texts), self.layers, len(KINDS), self.heads + 1)
        base = np.array([text["base"][0] for text in texts])
        gain = base[:, None, None, None] - np.array([text["gain"] for text in texts]).reshape(shape)
        damage = np.array([text["damage"] for text in texts]).reshape(shape)
        estimate = np.array([text["estimate"] for text in texts]).reshape(len(texts), self.layers, self.heads)
        n = len(texts)
        both = gain[:, :, KINDS.index("kv"), : self.heads]
        error = both.std(0, ddof=1) / n**0.5 if n > 1 else np.full(both.shape[1:], np.nan)

        def split(values: np.ndarray, where: Any) -> dict[str, np.ndarray]:
            return {kind: values.mean(0)[:, place, where] for place, kind in enumerate(KINDS)}

        heads, layer = slice(0, self.heads), self.heads
        return {
            "base_kl": float(base.mean()),
            "gain": split(gain, heads),
            "gain_error": error,
            "damage": split(damage, heads),
            "estimate": estimate.mean(0),
            "layer_gain": split(gain, layer),
            "layer_damage": split(damage, layer),
        }


def bottom_layers(layers: int) -> list[int]:
    """How many lowest layers are restored together: 1, 2, 4, … and half of all."""
    return sorted({m for m in (1, 2, 4, 8, 16, 32, layers // 2) if 0 < m < layers})


def repair_sets(
    gain: np.ndarray, metrics: HeadMaps | None, draws: int, seed: int = 0
) -> dict[str, dict[str, list[Exchange]]]:
    """Which heads are restored together: name of an order -> per cent -> one set, of "random" several.

    Args:
        gain: (L, H) patch gains, for the order "causal".
        metrics: cheap metrics; None for no sets at all.
        draws: random sets for each share.
        seed: of the draws.
    """
    if metrics is None:
        return {}
    total, heads = gain.size, gain.shape[1]
    orders = {
        name: list(np.argsort(-badness(metrics, name).ravel(), kind="stable")) for name in cheap(metrics)
    }
    orders[CAUSAL] = list(np.argsort(-gain.ravel(), kind="stable"))
    random = np.random.default_rng(seed)
    shuffled = [list(random.permutation(total)) for _ in range(draws)]

    def first(order: Sequence[int], share: int) -> Exchange:
        chosen = order[: restored(total, share)]
        return frozenset((int(i) // heads, int(i) % heads, kind) for i in chosen for kind in "kv")

    sets = {name: {str(s): [first(order, s)] for s in SHARES} for name, order in orders.items()}
    sets[RANDOM] = {str(s): [first(order, s) for order in shuffled] for s in SHARES}
    return sets


def restored(heads: int, share: int) -> int:
    """How many heads a share (per cent) is, at least one."""
    return max(1, round(heads * share / 100))


def badness(metrics: HeadMaps, name: str) -> np.ndarray:
    """(L, H) of a metric, larger where it says that a head is worse; what has no value counts as harmless."""
    values = metrics.by_kv_head(name)
    signed = -values if METRICS[name].better == "high" else values
    return np.where(np.isnan(signed), -np.inf, signed)


def predict(
    result: Mapping[str, Any],
    metrics: HeadMaps,
    sets: Mapping[str, Mapping[str, Sequence[Exchange]]],
    mean_kl: Mapping[Exchange, float],
    draws: int,
) -> Prediction:
    """Hold the cheap metrics against the interventions."""
    base = result["base_kl"]

    def recovered(several: Sequence[Exchange]) -> float:
        left = float(np.mean([mean_kl[exchange] for exchange in several]))
        return (base - left) / base if base > 0 else float("nan")

    gain, damage = result["gain"]["kv"], result["damage"]["kv"]
    return Prediction(
        rank_correlation={name: spearman(badness(metrics, name), gain) for name in cheap(metrics)},
        rank_correlation_damage={name: spearman(badness(metrics, name), damage) for name in cheap(metrics)},
        repair={
            name: {s: recovered(several) for s, several in curve.items()} for name, curve in sets.items()
        },
        draws=draws,
        heads_restored={str(s): restored(gain.size, s) for s in SHARES},
        metric_tokens=metrics.tokens,
        metric_texts=tuple(text["name"] for text in metrics.provenance.texts),
    )


def cheap(metrics: HeadMaps) -> list[str]:
    """The metrics that were not found by intervention."""
    return [name for name in metrics.metrics if name in CHEAP or name == SAME_TEXT]


def _fingerprint(mapper: KVMapper, manifest: Any) -> str:
    """The saved mapper's sum; of one that was never saved, of its first matrix."""
    if manifest is not None and manifest.tensors_sha256:
        return str(manifest.tensors_sha256)
    return hashlib.sha256(mapper.key_weight[0].float().cpu().numpy().tobytes()).hexdigest()


@dataclass
class PatchState:
    """What is done so far, in one JSON file that is written whole or not at all.

    Attributes:
        path: None keeps nothing.
        digest: of texts, options, models and mapper; a file with another one is ignored.
        done: KL of every text that is done.
        seconds: that they took.
    """

    path: Path | None
    digest: str
    done: list[dict[str, list[float]]] = field(default_factory=list)
    seconds: float = 0.0

    def restore(self) -> None:
        """Go on from the file where it belongs to this measurement."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8")) if self.path else {}
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(data, dict) and data.get("digest") == self.digest:
            self.done, self.seconds = data["done"], data["seconds"]

    def add(self, text: dict[str, list[float]], seconds: float) -> None:
        """One more text is done."""
        self.done.append(text)
        self.seconds += seconds
        if self.path:
            state = {"digest": self.digest, "done": self.done, "seconds": self.seconds}
            write_text(json.dumps(state, allow_nan=False), self.path)

    def discard(self) -> None:
        """The measurement is complete."""
        if self.path:
            self.path.unlink(missing_ok=True)
