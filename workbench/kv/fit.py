"""Fitting a mapper: calibration text -> captured caches -> moments -> ridge -> `KVMapper` and its manifest.

Both models read the same token ids. Their keys with the rotation removed, and their values, are added to moments: most
sequences to the ones that are fitted, every eighth to the ones that everything is judged by. The first `anchors` tokens
of a sequence are left out: they are attention sinks with unusual keys and values, which the target runs natively later.
"""

from __future__ import annotations

import hashlib
import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import Cancelled, InputError
from workbench.kv.artefact import Manifest
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper, side_by_side
from workbench.kv.moments import Moments
from workbench.kv.ridge import RidgeSolver, Solution
from workbench.kv.spec import check_pair
from workbench.kv.state import FitState

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel

HELD_OUT_EVERY = 8
SHORTEST_SEQUENCE = 32
P_OVER_N_WARNING = 0.2
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class FitOptions:
    """How to fit. `top_k` and `ridge` of None mean: chosen per target layer by held-out R².

    Attributes:
        sequences: how many pieces of text to read.
        length: tokens a piece.
        stride: use every `stride`-th token of a piece.
        top_k: source layers a target layer, at most all.
        ridge: strength, relative to the mean variance of the features.
        anchors: first tokens that are left out, and later run natively.
        hold_back: recommended number of last tokens to run natively.
        seed: of the choice of pieces.
    """

    sequences: int = 96
    length: int = 512
    stride: int = 1
    top_k: int | None = 6
    ridge: float | None = 0.01
    anchors: int = 4
    hold_back: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be fitted.

        Raises:
            InputError: naming the option.
        """
        if self.sequences < HELD_OUT_EVERY:
            raise InputError(
                f"At least {HELD_OUT_EVERY} sequences are needed, {self.sequences} were asked for."
            )
        if self.length < SHORTEST_SEQUENCE:
            raise InputError(f"A sequence must have at least {SHORTEST_SEQUENCE} tokens, not {self.length}.")
        if not 1 <= self.stride < self.length - self.anchors or not 0 <= self.anchors < self.length:
            raise InputError("The stride and the anchors must leave tokens of each sequence to fit on.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError("At least one source layer is needed (top_k 1 or more).")
        if self.ridge is not None and not 0 < self.ridge < 1e6:
            raise InputError("The ridge must be a number above 0.")
        if self.hold_back < 1:
            raise InputError("At least the last token must be held back (hold_back 1 or more).")


@dataclass(frozen=True)
class FitReport:
    """What a fit found. R² is held out, averaged over layers and heads; `r2_*_by_head` is [layer][head]."""

    tokens: int
    heldout_tokens: int
    features: int
    p_over_n: float
    seconds: dict[str, float]
    r2_k: float
    r2_v: float
    r2_k_by_head: list[list[float]]
    r2_v_by_head: list[list[float]]
    peak_rss_mb: float

    @property
    def warning(self) -> str:
        """A sentence when there were too few tokens for so many features, else ""."""
        if self.p_over_n <= P_OVER_N_WARNING:
            return ""
        return (
            f"{self.features} parameters per output were fitted on only {self.tokens} tokens "
            f"(p/n = {self.p_over_n:.2f}, above {P_OVER_N_WARNING}): use more text or fewer source layers."
        )


def cut_sequences(tokenizer: Any, texts: Sequence[str], options: FitOptions) -> list[list[int]]:
    """Cut documents into pieces of `options.length` tokens and pick `options.sequences` of them, spread by a seed.

    Every piece starts as a context does, with the start token where the tokenizer adds one.

    Raises:
        InputError: when the texts have too few tokens.
    """
    pieces: list[list[int]] = []
    first = list(tokenizer("")["input_ids"])
    step = options.length - len(first)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids), step):
            piece = first + ids[start : start + step]
            if len(piece) >= max(SHORTEST_SEQUENCE, options.anchors + options.stride + 1):
                pieces.append(piece)
    if len(pieces) < HELD_OUT_EVERY:
        raise InputError(
            f"The calibration text gives only {len(pieces)} pieces of {options.length} tokens, at least "
            f"{HELD_OUT_EVERY} are needed.",
            "Give more or longer text, or a smaller length.",
        )
    # Full pieces first: a document's short last piece would waste the budget.
    order = random.Random(options.seed)
    order.shuffle(pieces)
    pieces.sort(key=len, reverse=True)
    pieces = pieces[: options.sequences]
    order.shuffle(pieces)
    return pieces


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

    Returns:
        The mapper (float32), its manifest (without the tensors' sum, which saving fills in) and the report.

    Raises:
        IncompatiblePairError: when the two cannot be paired.
        InputError: when there is too little text.
        Cancelled: when asked to stop.
    """
    check_pair(source.spec, target.spec)
    tell = progress or (lambda share, text: None)
    sequences = cut_sequences(source.tokenizer, texts, options)
    gatherer = Gatherer(source, target, options)
    gathered = (sequences, options.anchors, options.stride, source.identity, target.identity)
    digest = hashlib.sha256(repr(gathered).encode()).hexdigest()
    state = FitState(state_file, digest) if state_file else None
    done = state.restore(gatherer.moments) if state and resume else 0

    clock = perf_counter()
    for index in range(done, len(sequences)):
        if should_stop and should_stop():
            raise Cancelled("The fit was stopped.")
        gatherer.add(sequences[index], held_out=index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1)
        if state:
            state.save_if_due(gatherer.moments, index + 1)
        tell(0.8 * (index + 1) / len(sequences), f"read {index + 1} of {len(sequences)} sequences")
    capture_seconds = perf_counter() - clock
    if state and keep_state and done < len(sequences):
        state.save(gatherer.moments, len(sequences))

    clock = perf_counter()
    solutions: dict[str, list[Solution]] = {}
    r2: dict[str, list[list[float]]] = {}
    for kind in ("key", "value"):
        moments = gatherer.moments
        solver = RidgeSolver(
            moments[kind], moments[f"{kind}_heldout"], source.spec.layers, target.spec.layers
        )
        solutions[kind], r2[kind] = [], []
        for t in range(target.spec.layers):
            if should_stop and should_stop():
                raise Cancelled("The fit was stopped.")
            solution = solver.choose(t, target.spec.kv_heads, options.top_k, options.ridge)
            solutions[kind].append(solution)
            r2[kind].append(solver.r2(t, solution, target.spec.kv_heads).tolist())
            share = (t + 1 + (kind == "value") * target.spec.layers) / (2 * target.spec.layers)
            tell(0.8 + 0.2 * share, f"solved the {kind}s of {t + 1} of {target.spec.layers} layers")
    solve_seconds = perf_counter() - clock

    mapper = _build(source, target, solutions, options)
    report = _report(gatherer, solutions, r2, capture_seconds, solve_seconds)
    text_sum = hashlib.sha256(repr(sequences).encode()).hexdigest()
    manifest = Manifest(
        direction=direction,
        source=source.identity,
        target=target.identity,
        objective="plain",
        top_k=options.top_k or "auto",
        ridge=options.ridge or "auto",
        anchors=options.anchors,
        hold_back=options.hold_back,
        key_layers=mapper.key_layers,
        value_layers=mapper.value_layers,
        calibration={
            "name": calibration, "sha256": text_sum, "tokens": report.tokens, "stride": options.stride,
            "sequences": len(sequences), "length": options.length, "seed": options.seed,
        },
        held_out={
            "r2_k": report.r2_k, "r2_v": report.r2_v, "tokens": report.heldout_tokens,
            "features": report.features, "p_over_n": report.p_over_n,
        },
        versions={name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
    )  # fmt: skip
    if state and not keep_state:
        state.discard()
    return mapper, manifest, report


class Gatherer:
    """Runs both models over token ids and adds their caches to moments, keys and values apart."""

    def __init__(self, source: LoadedModel, target: LoadedModel, options: FitOptions) -> None:
        self.source, self.target, self.options = source, target, options
        features = source.spec.layers * source.spec.kv_width
        outputs = target.spec.layers * target.spec.kv_width
        names = ("key", "value", "key_heldout", "value_heldout")
        self.moments = {name: Moments(features, outputs) for name in names}

    def add(self, ids: Sequence[int], held_out: bool) -> None:
        """Run both models over one sequence and count in every `stride`-th token after the anchors."""
        rows = slice(self.options.anchors, None, self.options.stride)
        key_x, value_x = cache_rows(self.source, ids, rows)
        key_y, value_y = cache_rows(self.target, ids, rows)
        ending = "_heldout" if held_out else ""
        self.moments[f"key{ending}"].add(key_x, key_y)
        self.moments[f"value{ending}"].add(value_x, value_y)


def cache_rows(model: LoadedModel, ids: Sequence[int], rows: slice) -> tuple[Tensor, Tensor]:
    """A model's keys before rotation and its values for the chosen tokens.

    Returns:
        Two float32 tensors (tokens, layers * kv_width) on the CPU, ordered by layer, then head.
    """
    cache = new_cache(model.spec.layers, len(ids))
    forward(model.model, ids, cache, keep=0)
    keys, values = [], []
    for layer in range(model.spec.layers):
        k_rot, v = layer_tensors(cache, layer)
        keys.append(side_by_side(model.rotary.strip(k_rot, layer=layer))[rows].to("cpu", torch.float32))
        values.append(side_by_side(v)[rows].to("cpu", torch.float32))
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)


def _build(
    source: LoadedModel, target: LoadedModel, solutions: dict[str, list[Solution]], options: FitOptions
) -> KVMapper:
    keys, values = solutions["key"], solutions["value"]
    return KVMapper(
        source=source.spec,
        target=target.spec,
        key_layers=tuple(solution.layers for solution in keys),
        value_layers=tuple(solution.layers for solution in values),
        key_weight=tuple(solution.weight.float() for solution in keys),
        key_bias=tuple(solution.bias.float() for solution in keys),
        value_weight=tuple(solution.weight.float() for solution in values),
        value_bias=tuple(solution.bias.float() for solution in values),
        anchors=options.anchors,
        hold_back=options.hold_back,
    )


def _report(
    gatherer: Gatherer,
    solutions: dict[str, list[Solution]],
    r2: dict[str, list[list[float]]],
    capture_seconds: float,
    solve_seconds: float,
) -> FitReport:
    tokens = gatherer.moments["key"].count
    features = 1 + max(solution.weight.shape[0] for kind in solutions.values() for solution in kind)
    return FitReport(
        tokens=tokens,
        heldout_tokens=gatherer.moments["key_heldout"].count,
        features=features,
        p_over_n=features / tokens,
        seconds={"capture": capture_seconds, "solve": solve_seconds},
        r2_k=float(torch.tensor(r2["key"]).mean()),
        r2_v=float(torch.tensor(r2["value"]).mean()),
        r2_k_by_head=r2["key"],
        r2_v_by_head=r2["value"],
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
