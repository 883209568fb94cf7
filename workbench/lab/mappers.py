"""Mappers against each other: the published recipe, the pair's own, the best there is, on the same passages in one run.

    recipe_k6, recipe_k8   arXiv 2608.03893: ridge .01, the 6 or 8 best source layers (each scored alone), fitted on all
                           tokens, no anchors; the hold-back is the default's, so that only the mapper differs
    default                the pair's own mapper, as the chat uses it
    best                   without regard to cost: everything from keys and values of all source layers
    NAME=FOLDER            any other artefact of this pair and direction

What has no folder yet is fitted on the calibration text (never on what is measured here) and kept in one, so that the next
run reads it. A mapper's own anchors and hold-back are used, and the native arms are shared. `map_flops_share` is matrix
products of the mapping over those of the target's prefill of the same context, without embedding and head; what the
target runs natively instead, lowest layers and rare tokens, is a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from workbench.chat.account import Account
from workbench.chat.handoff import hand_over
from workbench.errors import InputError
from workbench.kv import artefact
from workbench.kv.cache import new_cache
from workbench.kv.fit import fit
from workbench.kv.forward import forward
from workbench.kv.manifest import Manifest
from workbench.kv.mapper import KVMapper
from workbench.kv.options import FitOptions
from workbench.lab.corpus import Document, Passage, documents, passages
from workbench.lab.intervals import Bootstrap
from workbench.lab.provenance import models_of, text_hash, trace
from workbench.lab.results.common import Step
from workbench.lab.results.mappers import REREAD, CurvePoint, MapperEntry, MapperTable
from workbench.lab.retention import FIXED, _Arms, _check, _Scores
from workbench.words import lowest

if TYPE_CHECKING:
    from transformers import Cache

    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
NAMES = ("recipe", "default", "best")
CURVE_ANCHORS, CURVE_HOLD_BACK = (0, 1, 2, 4, 8, 16), (1, 16, 32, 64)
CURVE_FAMILIAR = (1.0, 0.5, 0.2, 0.05)  # of the familiar ids, the most frequent ones
RECIPES = {"recipe_k6": 6, "recipe_k8": 8}
BEST = FitOptions(top_k=10**6, ridge=0.01, features="both", objective="attention", reread=0.3)


@dataclass(frozen=True, eq=False)
class Contestant:
    """A mapper on the target's devices, and what is known about it."""

    name: str
    mapper: KVMapper
    manifest: Manifest | None


def expand(names: Sequence[str]) -> list[str]:
    """`recipe` stands for both sizes of the recipe."""
    return [one for name in names for one in (list(RECIPES) if name == "recipe" else [name])]


def contestants(
    host: PairHost,
    direction: str,
    names: Sequence[str],
    folders: dict[str, Path],
    keep: Path,
    sequences: int = 96,
    progress: Callable[[float, str], None] | None = None,
    should_stop: ShouldStop = None,
) -> list[Contestant]:
    """The mappers to compare; what is neither given nor kept from an earlier run is fitted now.

    Args:
        host: the pair.
        direction: "up" or "down".
        names: of `NAMES`, `RECIPES` or `folders`, in the order of the table.
        folders: name -> artefact.
        keep: folder where fitted ones are kept, each under its name, with the sums that they share.
        sequences: pieces of calibration text to fit on.
        progress: of the fits.
        should_stop: asked while fitting.

    Raises:
        InputError: for an unknown name.
        ArtefactError: an artefact that does not belong to the pair.
    """
    source, target = models_of(host, direction)
    own, own_manifest = host.mapper(direction)
    found = []
    for name in dict.fromkeys(expand(names)):
        if name == "default" and name not in folders:
            found.append(Contestant(name, own, own_manifest))
            continue
        folder = folders.get(name, keep / name)
        if name not in folders and not (folder / artefact.MANIFEST).is_file():
            options = _options(name, own, sequences)
            fit_and_keep(
                host, direction, folder, options, keep / f"{options.features}.sums", progress, should_stop
            )
        mapper, manifest = artefact.load(folder, source.identity, target.identity, direction)
        found.append(Contestant(name, mapper.to(target.dtype, target.layer_devices), manifest))
    return found


def fit_and_keep(
    host: PairHost,
    direction: str,
    folder: Path,
    options: FitOptions,
    sums: Path,
    progress: Callable[[float, str], None] | None = None,
    should_stop: ShouldStop = None,
) -> None:
    """Fit on the built-in calibration text and save; what was read stays in `sums` for fits with the same reading."""
    source, target = models_of(host, direction)
    texts = [document.text for document in documents("calibration")]
    fitted, manifest, _ = fit(
        source, target, texts, options, direction=direction, calibration="built-in calibration text", progress=progress,
        should_stop=should_stop, state_file=sums, resume=True, keep_state=True,
    )  # fmt: skip
    artefact.save(folder, fitted, manifest)


def _options(name: str, default: KVMapper, sequences: int) -> FitOptions:
    if name in RECIPES:
        return FitOptions(
            sequences, top_k=RECIPES[name], ridge=0.01, anchors=0, hold_back=default.hold_back, selection="ranked",
            objective="plain", features="own", rank=0, polish=0, reread=0.0,
        )  # fmt: skip
    if name == "best":
        return replace(BEST, sequences=sequences, anchors=default.anchors, hold_back=default.hold_back)
    raise InputError(f"There is no mapper {name!r}.", f"Use {', '.join(NAMES)}, or NAME=FOLDER.")


def stream(
    host: PairHost,
    direction: str,
    compared: Sequence[Contestant],
    texts: Sequence[Document] | None = None,
    limit: int = 24,
    context: int = 256,
    following: int = 64,
    seed: int = 0,
    curve: bool = False,
    system_prompt: int = 0,
    should_stop: ShouldStop = None,
) -> Iterator[Step | MapperTable]:
    """Compare mappers.

    Args:
        host: the pair.
        direction: "up" or "down".
        compared: see `contestants`.
        texts: to measure on, None for the held-out ones.
        limit: at most so many passages.
        context: context tokens of a passage.
        following: teacher-forced tokens after it.
        seed: of the bootstrap.
        curve: measure the first mapper named "default" (else the first) over anchors and hold-back too.
        system_prompt: tokens at the start of every passage that are a system prompt: one more point of the curve.
        should_stop: asked before every arm.

    Yields:
        A `Step` a passage; the `MapperTable` last.

    Raises:
        InputError: for texts or settings that cannot be measured.
        Cancelled: when asked to stop.
    """
    source, target = models_of(host, direction)
    main = next((one for one in compared if one.name == "default"), compared[0])
    points = _curve_settings(main.mapper, context, system_prompt) if curve else []
    settings = [(one.mapper.anchors, one.mapper.hold_back) for one in compared]
    longest = min(source.spec.max_positions, target.spec.max_positions)
    _check(
        [*settings, *((point.anchors, point.hold_back) for point in points)],
        context,
        following,
        limit,
        longest,
    )
    cut = passages(target.tokenizer, texts or documents("heldout"), context + following, limit)
    if system_prompt:
        cut = [passage for passage in cut if passage.start == 0]
    if len(cut) < 2:
        raise InputError("One passage is not enough for an interval.", "Give more text.")

    arms = _Arms(source, target, main.mapper, context, should_stop)
    fixed = {name: _Scores() for name in FIXED}
    scores = [_Scores() for _ in compared]
    curved = [_Scores() for _ in points]
    accounts: list[list[Account]] = [[] for _ in compared]
    reread: list[list[int]] = [[] for _ in points]
    for number, passage in enumerate(cut, start=1):
        ids = passage.ids[context:]
        with host.holding_lane(should_stop):
            native, found, own = arms.fixed(passage)
            for name, logits in found.items():
                fixed[name].add(logits, native, ids)
        for index, one in enumerate(compared):
            with host.holding_lane(should_stop):
                logits, account = _mapped(
                    source, target, one.mapper, passage, own, context, *settings[index], should_stop
                )
            scores[index].add(logits, native, ids)
            accounts[index].append(account)
        for index, point in enumerate(points):
            with host.holding_lane(should_stop):
                logits, account = _mapped(
                    source,
                    target,
                    point.mapper,
                    passage,
                    own,
                    context,
                    point.anchors,
                    point.hold_back,
                    should_stop,
                )
            curved[index].add(logits, native, ids)
            reread[index].append(account.reread)
        yield Step(number / len(cut), f"passage {number} of {len(cut)}")

    boot = Bootstrap([passage.document for passage in cut], seed)

    def figures(of: _Scores) -> dict[str, Any]:
        gap = boot.gap(fixed["no_context"].ce, of.ce, fixed["native"].ce)
        means = {name: boot.mean(getattr(of, name)) for name in ("kl", "top1", "ce")}
        return means | {"gap_recovered": gap}

    prefill = prefill_flops_per_token(target, context)
    yield MapperTable(
        fixed={name: of.arm(boot) for name, of in fixed.items()},
        mappers={
            one.name: MapperEntry(
                **figures(of),
                map_flops_share=one.mapper.flops_per_token / prefill,
                map_ms=median(_mapping_ms(account) for account in told),
                artefact_mb=artefact_bytes(one.mapper) / 1e6,
                anchors=one.mapper.anchors,
                hold_back=one.mapper.hold_back,
                form=describe(one),
                fitted_tokens=(one.manifest.calibration.get("tokens") if one.manifest else None),
                reread_share=mean(account.reread for account in told) / context,
                native_share=prefill_flops_per_token(target, context, one.mapper.native_layers) / prefill,
            )
            for one, of, told in zip(compared, scores, accounts, strict=True)
        },
        curve=tuple(
            CurvePoint(
                point.anchors,
                point.hold_back,
                **figures(of),
                label=point.label,
                reread_share=mean(read) / context,
            )
            for point, of, read in zip(points, curved, reread, strict=True)
        ),
        passages=tuple({"name": passage.name, "sha256": text_hash(passage.ids)} for passage in cut),
        context=context,
        following=following,
        seed=seed,
        provenance=trace(
            host,
            direction,
            len(cut) * (context + following),
            [(passage.name, passage.ids) for passage in cut],
        ),
    )


@dataclass(frozen=True, eq=False)
class _Point:
    """A setting of the main mapper that the curve asks for."""

    mapper: KVMapper
    anchors: int
    hold_back: int
    label: str = ""


def _curve_settings(mapper: KVMapper, context: int, system_prompt: int) -> list[_Point]:
    """Over anchors, over hold-back, and over the share that is re-read; only what leaves something to map.

    Fewer of the most frequent ids count as familiar where more is to be re-read, and none are asked for where nothing is.
    """
    asked = [(anchors, mapper.hold_back, "") for anchors in CURVE_ANCHORS]
    if system_prompt:
        asked.append((system_prompt, mapper.hold_back, "system prompt"))
    asked += [(mapper.anchors, hold_back, "") for hold_back in CURVE_HOLD_BACK]
    points = [_Point(mapper, *one) for one in dict.fromkeys(asked) if one[0] + one[1] < context]
    ids = mapper.familiar
    for few in ((), *(ids[: max(1, int(part * len(ids)))] for part in CURVE_FAMILIAR)) if ids else ():
        points.append(_Point(replace(mapper, familiar=few), mapper.anchors, mapper.hold_back, REREAD))
    return points


def _mapping_ms(account: Account) -> float:
    return sum(account.ms[part] for part in ("map_strip", "map_product", "map_rotate"))


def _mapped(
    source: LoadedModel,
    target: LoadedModel,
    mapper: KVMapper,
    passage: Passage,
    own: Cache,
    context: int,
    anchors: int,
    hold_back: int,
    should_stop: ShouldStop,
) -> tuple[torch.Tensor, Account]:
    """Logits (following, vocab) after the real handoff, and its account."""
    cache, ids = new_cache(target.spec.layers), passage.ids
    first, account = hand_over(
        ids[:context], own, target, cache, mapper, source, anchors, hold_back, should_stop
    )
    if len(ids) == context + 1:
        return first, account
    rest = forward(target.model, ids[context:-1], cache, keep=len(ids) - context - 1)
    assert rest is not None
    return torch.cat((first, rest)), account


def prefill_flops_per_token(model: LoadedModel, context: int, lowest: int | None = None) -> float:
    """Operations a token of a true prefill of `context` tokens, without embedding and head; or of its lowest layers.

    Two for every number in the layers' matrices, and four for every channel of every query head and token attended to, of
    which there are context / 2 on average.
    """
    spec = model.spec
    layers = model.model.base_model.layers[:lowest]
    matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim > 1)
    return 2 * matrices + 4 * len(layers) * spec.query_heads * spec.head_dim * context / 2


def artefact_bytes(mapper: KVMapper) -> int:
    """Bytes of the tensors as they are saved: matrices in half precision, the rest in float32."""
    return sum(
        mapper.tensor(name).numel() * (2 if len(shape) == 2 else 4) for name, shape in mapper.shapes().items()
    )


def describe(one: Contestant) -> str:
    """What kind of mapper it is, in a few words."""
    mapper, manifest = one.mapper, one.manifest
    layers = sorted({len(chosen) for chosen in (*mapper.key_layers, *mapper.value_layers)})
    parts = [
        f"{'–'.join(dict.fromkeys((str(layers[0]), str(layers[-1]))))} of {mapper.source.layers} source layers"
    ]
    if mapper.rank:
        parts.append(f"rank {mapper.rank}")
    if mapper.features == "both":
        parts.append("from keys and values")
    if manifest is not None:
        parts.append(f"ridge {manifest.ridge}")
        if manifest.objective != "plain":
            parts.append(f"{manifest.objective} objective")
        if manifest.selection != "ranked":
            parts.append(manifest.selection)
        if manifest.polish:
            parts.append(f"polished {manifest.polish} steps")
    if mapper.native_layers:
        parts.append(f"{lowest(mapper.native_layers)} native")
    if mapper.hidden:
        parts.append(f"MLP of width {mapper.hidden}")
    return ", ".join(parts)
