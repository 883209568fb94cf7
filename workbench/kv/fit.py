"""Fitting a mapper: calibration text -> captured caches -> moments -> closed form -> `KVMapper` and its manifest.

`workbench.kv.gather` reads the text with both models. Then, for keys and values of every target layer, source layers and
ridge are chosen by tokens that are held out for that, and `workbench.kv.solve` solves the map: one matrix per target layer
(`workbench.kv.ridge`), or with `rank` a low-rank map that all target layers share (`workbench.kv.lowrank`), in the plain
metric or in one that knows attention (`workbench.kv.attention`). An MLP (`workbench.kv.mlp`) and a few hundred steps of
gradient descent (`workbench.kv.polish`) can follow. Last, token ids are counted, so that rare tokens can be re-read at a
switch (`workbench.kv.familiar`). What is reported comes from tokens that neither fitted nor chose.
"""

from __future__ import annotations

import hashlib
import math
import random
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import Cancelled, InputError
from workbench.kv import distributed, lowrank
from workbench.kv.artefact import Manifest
from workbench.kv.checkpoint import Checkpoint
from workbench.kv.familiar import familiar_ids
from workbench.kv.features import hidden_coordinates
from workbench.kv.gather import Gatherer, part_of
from workbench.kv.manifest import FORMAT, NATIVE_FORMAT
from workbench.kv.mapper import KVMapper
from workbench.kv.options import FitOptions, FitReport, cut_pieces, cut_sequences
from workbench.kv.ridge import columns_of, head_r2
from workbench.kv.solve import Check, Progress, metric_of, outputs_of, solve_full, solve_low_rank
from workbench.kv.spec import check_pair
from workbench.kv.state import FitState

if TYPE_CHECKING:
    from workbench.kv.polish import Polished
    from workbench.models.loading import LoadedModel


def fit(
    source: LoadedModel,
    target: LoadedModel,
    texts: Sequence[str],
    options: FitOptions,
    *,
    direction: str,
    calibration: str = "",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    state_file: Path | None = None,
    resume: bool = False,
    keep_state: bool = False,
    back_file: Path | None = None,
    polish_texts: Sequence[str] = (),
) -> tuple[KVMapper, Manifest, FitReport]:
    """Fit a mapper from `source` to `target`.

    Args:
        source: the model whose cache will be read.
        target: the model whose cache will be written.
        texts: calibration documents.
        options: how to fit.
        direction: "up" or "down", for the manifest.
        calibration: a name for the texts, for the manifest.
        progress: called with a share of 1 and a sentence.
        should_stop: asked before every sequence and every target layer.
        state_file: where the sums are kept while they are gathered, so that a killed fit can go on.
        resume: go on from `state_file` where it holds sums of the same texts, models and anchors.
        keep_state: leave the complete sums in `state_file`, so that a fit with another `top_k` or `ridge` can resume
            from them without reading anything again.
        back_file: the sums of the opposite direction go here, from the same reading: its fit can resume from them.
        polish_texts: more documents to polish on, beside `texts`; their token ids are counted too.

    Returns:
        The mapper (float32), its manifest (without the tensors' sum, which saving fills in) and the report.

    Raises:
        IncompatiblePairError: when the two cannot be paired.
        InputError: when there is too little text, or more native layers than the target has.
        Cancelled: when asked to stop.
        ShareDone: in every process but the first, when several share the reading (see `distributed`).
    """
    check_pair(source.spec, target.spec)
    tell = progress or (lambda share, text: None)

    def check() -> None:
        if should_stop and should_stop():
            raise Cancelled("The fit was stopped.")

    if options.native_layers > target.spec.layers:
        raise InputError(
            f"{target.name} has no {options.native_layers} layers to run natively, only {target.spec.layers}."
        )
    sequences = cut_sequences(source.tokenizer, texts, options)
    gatherers = [Gatherer(source, target, options)]
    states = [_state(state_file, sequences, options, source, target)]
    if back_file:
        gatherers.append(Gatherer(target, source, options))
        states.append(_state(back_file, sequences, options, target, source))
    gatherer, state = gatherers[0], states[0]
    done = _restore(gatherers, states) if resume else 0

    clock = perf_counter()
    for index in range(done, len(sequences)):
        check()
        if not distributed.mine(index):
            continue
        gatherer.add(sequences[index], part_of(index), *gatherers[1:])
        for each, kept in zip(gatherers, states, strict=True):
            if kept:
                kept.save_if_due(each.parts, index + 1)
        tell(0.7 * (index + 1) / len(sequences), f"read {index + 1} of {len(sequences)} sequences")
    seconds = {"capture": perf_counter() - clock}
    for each, kept, keep in zip(gatherers, states, (keep_state, True), strict=False):
        if kept and keep and done < len(sequences):
            kept.save(each.parts, len(sequences))
    if not all([distributed.collect(each.parts) for each in gatherers]):
        if state and not keep_state:
            state.discard()
        raise distributed.ShareDone
    del gatherers, states

    clock = perf_counter()
    solve = solve_low_rank if options.rank else solve_full
    mapper, ridges = solve(gatherer, options, lambda share, text: tell(0.7 + 0.15 * share, text), check)
    extra: dict[str, Any] = {}
    if options.mlp:
        mapper, extra["mlp"] = _add_mlp(mapper, gatherer, options, state, tell, check)
    seconds["solve"] = perf_counter() - clock
    polish_text: dict[str, Any] = {}
    if options.polish:
        clock = perf_counter()
        polished, pieces = _polish(
            mapper, gatherer, sequences, [*texts, *polish_texts], options, state, tell, check
        )
        mapper = polished.mapper
        polish_text = {"polish_pieces": len(pieces), "polish_sha256": _sum(pieces)}
        extra |= {"polish_kl": polished.kl, "polish_quotes_kl": polished.quotes_kl}
        seconds["polish"] = perf_counter() - clock

    familiar, reread_share = familiar_ids(
        source.tokenizer, [*dict.fromkeys([*texts, *polish_texts])], sequences, options.reread
    )
    mapper = replace(mapper, familiar=familiar, native_layers=options.native_layers)
    report = _report(gatherer, mapper, seconds, extra | {"reread_share": reread_share})
    manifest = Manifest(
        direction=direction,
        source=source.identity,
        target=target.identity,
        objective=options.objective,
        top_k=options.top_k or "auto",
        ridge=options.ridge or "auto",
        anchors=options.anchors,
        hold_back=options.hold_back,
        key_layers=mapper.key_layers,
        value_layers=mapper.value_layers,
        calibration={
            "name": calibration, "sha256": _sum(sequences), "tokens": report.tokens, "stride": options.stride,
            "sequences": len(sequences), "length": options.length, "seed": options.seed,
            **polish_text,
        },
        held_out={
            "r2_k": report.r2_k, "r2_v": report.r2_v, "tokens": report.heldout_tokens,
            "features": report.features, "p_over_n": report.p_over_n, "ridges": ridges,
            "chosen_by_tokens": report.chosen_tokens, "reread_share": report.reread_share,
        },
        versions={name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
        selection=options.selection,
        polish=options.polish,
        features=mapper.features,
        ranks=tuple(matrix.shape[1] for matrix in mapper.reduce),
        hidden=mapper.hidden,
        familiar=mapper.familiar,
        native_layers=mapper.native_layers,
        format=NATIVE_FORMAT if mapper.native_layers else FORMAT,
    )  # fmt: skip
    if state and not keep_state:
        state.discard()
    return mapper, manifest, report


def _state(
    path: Path | None,
    sequences: list[list[int]],
    options: FitOptions,
    source: LoadedModel,
    target: LoadedModel,
) -> FitState | None:
    digest = _digest(sequences, options, source, target)
    rank, size = distributed.world()
    if size > 1:  # a share of the sums is no good to another number of processes
        digest = f"{digest}-{rank}-of-{size}"
    return FitState(distributed.own(path), digest) if path else None


def _restore(gatherers: list[Gatherer], states: list[FitState | None]) -> int:
    """How many sequences all the states hold; where they hold different numbers the reading begins again."""
    done = {
        state.restore(gatherer.parts) if state else 0
        for gatherer, state in zip(gatherers, states, strict=True)
    }
    if len(done) == 1:
        return done.pop()
    for gatherer in gatherers:
        gatherer.parts = Gatherer(gatherer.source, gatherer.target, gatherer.options).parts
    return 0


def _digest(sequences: list[list[int]], options: FitOptions, source: LoadedModel, target: LoadedModel) -> str:
    """Of everything that the gathered sums depend on; what is only solved from them is left out."""
    gathered = (sequences, options.anchors, options.stride, options.features, options.objective, bool(options.mlp),
                source.identity, target.identity)  # fmt: skip
    return hashlib.sha256(repr(gathered).encode()).hexdigest()


def _add_mlp(
    mapper: KVMapper,
    gatherer: Gatherer,
    options: FitOptions,
    state: FitState | None,
    tell: Progress,
    check: Check,
) -> tuple[KVMapper, dict[str, float]]:
    """The same mapper with hidden layers, and its held-out R² without and with them."""
    from workbench.kv.mlp import train_mlp

    spec, source = mapper.target, mapper.source
    linear = lowrank.LowRank(
        mapper.reduce[0],
        torch.cat((*mapper.key_weight, *mapper.value_weight), dim=1),
        torch.cat((*mapper.key_bias, *mapper.value_bias)),
    )
    columns = columns_of(mapper.key_layers[0], source.kv_width, source.layers, 2)
    trained = train_mlp(
        linear, columns, gatherer.rows("both_fitted"), gatherer.rows("both_choose"), metric_of(gatherer, "both"),
        options.mlp, device=gatherer.target.layer_devices[0],
        checkpoint=_checkpoint(state, "mlp", str(options)),
        progress=lambda share, text: tell(0.85 + 0.05 * share, text), check=check,
    )  # fmt: skip
    readouts = trained.readout.split(spec.kv_width, dim=1)
    with_mlp = replace(
        mapper,
        mlp=trained.layers,
        key_weight=tuple(
            torch.cat(pair) for pair in zip(mapper.key_weight, readouts[: spec.layers], strict=True)
        ),
        value_weight=tuple(
            torch.cat(pair) for pair in zip(mapper.value_weight, readouts[spec.layers :], strict=True)
        ),
    )
    compared = {}
    for name, each in (("without", mapper), ("with", with_mlp)):
        for kind, r2 in held_out_r2(each, gatherer).items():
            compared[f"r2_{kind[0]}_{name}"] = float(torch.tensor(r2).mean())
    return with_mlp, compared | {"choose_error_share": min(trained.errors)}


def _polish(
    mapper: KVMapper,
    gatherer: Gatherer,
    sequences: list[list[int]],
    texts: Sequence[str],
    options: FitOptions,
    state: FitState | None,
    tell: Progress,
    check: Check,
) -> tuple[Polished, list[list[int]]]:
    """Polish on all pieces of the texts but those that choose and report; the former judge. Also the joined pieces."""
    from workbench.kv.polish import MOST_JUDGED, joined, lessons, long_enough, polish

    source, target, anchors, back = gatherer.source, gatherer.target, options.anchors, options.hold_back

    def usable(found: Iterable[list[int]]) -> list[list[int]]:
        return [ids for ids in found if long_enough(ids, anchors, back)]

    apart = {tuple(ids) for index, ids in enumerate(sequences) if part_of(index) != "fit"}
    choosing = usable(ids for index, ids in enumerate(sequences) if part_of(index) == "choose")[:MOST_JUDGED]
    pieces = usable(ids for ids in cut_pieces(source.tokenizer, texts, options) if tuple(ids) not in apart)
    if not pieces or not choosing:
        raise InputError("The pieces of text are too short to polish on.", "Use a larger length.")
    start, draw = len(source.tokenizer("")["input_ids"]), random.Random(options.seed)
    pieces, choosing = joined(pieces, start, draw), [*choosing, *joined(choosing, start, draw)]
    judged = lessons(source, target, choosing, anchors, back, options.seed)
    done = polish(
        mapper, target, partial(lessons, source, target, pieces, anchors, back, options.seed),
        [*islice(judged, 2 * len(choosing))], options.polish,
        checkpoint=_checkpoint(state, "polish", f"{options} {_sum(pieces)}"),
        progress=lambda share, text: tell(0.9 + 0.1 * share, text), check=check,
    )  # fmt: skip
    return done, pieces


def _checkpoint(state: FitState | None, name: str, digest: str) -> Checkpoint | None:
    """A file beside the sums, for what is trained from them."""
    if state is None:
        return None
    return Checkpoint(state.path.with_name(f"{state.path.name}.{name}"), f"{state.digest} {digest}")


def _sum(pieces: list[list[int]]) -> str:
    return hashlib.sha256(repr(pieces).encode()).hexdigest()


@torch.inference_mode()
def held_out_r2(mapper: KVMapper, gatherer: Gatherer) -> dict[str, list[list[float]]]:
    """R² of keys (before rotation) and values on the reporting tokens: "key" and "value" -> [layer][head]."""
    spec, found = mapper.target, {}
    source_layers, width = mapper.source.layers, mapper.source.kv_width
    kinds = 1 + (mapper.features == "both")
    for kind in ("key", "value"):
        kept = gatherer.rows(f"{kind if kinds == 1 else 'both'}_report")
        layers, rows = getattr(mapper, f"{kind}_layers"), []
        z: Tensor | None = None
        read: tuple[int, ...] = ()
        for t in range(spec.layers):
            if z is None or layers[t] != read:
                read = layers[t]
                x, _ = kept.part(columns_of(layers[t], width, source_layers, kinds), slice(0, 0))
                z = x
                if mapper.reduce:
                    z = x @ mapper.reduce[0 if kind == "key" else -1].cpu()
                    if mapper.mlp:
                        z = torch.cat((z, hidden_coordinates(z, [part.cpu() for part in mapper.mlp])), dim=1)
            weight, bias = (
                getattr(mapper, f"{kind}_weight")[t].cpu(),
                getattr(mapper, f"{kind}_bias")[t].cpu(),
            )
            _, y = kept.part(slice(0, 0), outputs_of(gatherer, kind, t))
            rows.append(head_r2(y - torch.addmm(bias, z, weight), y, spec.kv_heads).tolist())
        found[kind] = rows
    return found


def _report(
    gatherer: Gatherer, mapper: KVMapper, seconds: dict[str, float], extra: dict[str, Any]
) -> FitReport:
    r2 = held_out_r2(mapper, gatherer)
    first = gatherer.kinds[0]
    tokens = gatherer.moments(first).count
    most = max(len(layers) for layers in (*mapper.key_layers, *mapper.value_layers))
    features = 1 + most * mapper.source.kv_width * (2 if mapper.features == "both" else 1)
    return FitReport(
        tokens=tokens,
        heldout_tokens=gatherer.rows(f"{first}_report").count,
        features=features,
        p_over_n=features / tokens,
        seconds=seconds,
        r2_k=float(torch.tensor(r2["key"]).mean()),
        r2_v=float(torch.tensor(r2["value"]).mean()),
        r2_k_by_head=r2["key"],
        r2_v_by_head=r2["value"],
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        chosen_tokens=gatherer.rows(f"{first}_choose").count,
        parameters=sum(math.prod(shape) for shape in mapper.shapes().values() if len(shape) == 2),
        flops_per_token=mapper.flops_per_token,
        **extra,
    )
