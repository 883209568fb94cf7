"""Which diagnostic foretells what a mapper keeps? Many variants of one direction's mapper, measured on the same texts.

The variants are those of `workbench.lab.variant_fits`. For each the head metrics are taken on some held-out documents, as
means over layers and heads; what it keeps is taken on the other documents and on the held-out chats: KL of following text,
and accuracy in two recall tasks. What no mapper changes (native caches and answers) is computed once and shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from workbench.errors import Cancelled, InputError
from workbench.kv.cache import new_cache
from workbench.kv.capture import capture_attention
from workbench.kv.forward import forward
from workbench.lab import mappers
from workbench.lab import tasks as items
from workbench.lab.arms import ArmCaches
from workbench.lab.corpus import Document, Passage, documents, passages
from workbench.lab.head_sums import HeadSums, layer_inputs
from workbench.lab.intervals import Bootstrap
from workbench.lab.provenance import models_of, trace
from workbench.lab.questions import Question
from workbench.lab.results.common import Step, nan_mean
from workbench.lab.results.figure import Figure
from workbench.lab.results.tasks import TaskResult
from workbench.lab.results.variants import Variant, Variants
from workbench.lab.rows import Plan
from workbench.lab.scores import Answers, answer, mark, spans_of, task_result
from workbench.lab.variant_fits import DEFAULT_SEQUENCES, Candidate

if TYPE_CHECKING:
    from transformers import Cache

    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
TASKS = ("fact_recall", "multi_turn_recall")
MEASURED = (
    "r2_k", "r2_v", "cosine", "cosine_worst", "attention_kl", "k_error_in_q", "v_error_in_o", "output_error",
)  # fmt: skip
"""Head metrics that one pass gives without gradients; see `workbench.lab.heads`."""
DEFAULT_ITEMS, MOST_PASSAGES, HEAD_PASSAGES = 80, 12, 6
LENGTH, FOLLOWING = 256, 64  # tokens of a passage, and of the text that follows it


def stream(
    host: PairHost,
    direction: str,
    compared: Sequence[Candidate],
    texts: Sequence[Document] | None = None,
    limit: int = DEFAULT_ITEMS,
    sequences: int = DEFAULT_SEQUENCES,
    length: int = LENGTH,
    following: int = FOLLOWING,
    seed: int = 0,
    should_stop: ShouldStop = None,
) -> Iterator[Step | Variants]:
    """Measure every variant.

    Args:
        host: the pair.
        direction: "up" or "down".
        compared: see `workbench.lab.variant_fits.candidates`.
        texts: to measure on, None for the held-out ones; every third one is for head metrics, the others for outcomes.
        limit: items a task, and at most so many passages (never more than `MOST_PASSAGES`).
        sequences: that the variants were fitted on, for the record.
        length: tokens of a passage.
        following: tokens after it.
        seed: of items and intervals.
        should_stop: asked before every passage and variant.

    Yields:
        A `Step` a passage or context; the `Variants` last.

    Raises:
        InputError: for texts or settings that cannot be measured.
        Cancelled: when asked to stop.
    """
    if limit < 2:
        raise InputError("At least 2 items a task are needed.", "Give a larger --limit.")
    started = perf_counter()
    texts = list(texts) if texts is not None else documents("heldout")
    for_heads = texts[::3]
    for_outcomes = [text for number, text in enumerate(texts) if number % 3]
    few = min(limit, MOST_PASSAGES)
    _, target = models_of(host, direction)
    item: Any
    metrics: dict[str, dict[str, float]] = {}
    tokens = 0
    cut = passages(target.tokenizer, for_heads, length, min(few, HEAD_PASSAGES))
    for item in head_metrics(host, direction, compared, cut, should_stop):
        if isinstance(item, Step):
            yield Step(0.2 * item.fraction, f"heads: {item.text}")
        else:
            metrics, tokens = item
    table: Any = None
    contestants = [mappers.Contestant(one.name, one.mapper, None) for one in compared]
    for item in mappers.stream(
        host, direction, contestants, for_outcomes, few, length, following, seed, should_stop=should_stop
    ):
        if isinstance(item, Step):
            yield Step(0.2 + 0.2 * item.fraction, f"following text: {item.text}")
        else:
            table = item
    asked = _Asked()
    for step in ask(host, direction, compared, for_outcomes, limit, seed, asked, should_stop):
        yield Step(0.4 + 0.6 * step.fraction, f"recall: {step.text}")
    results = asked.results([one.name for one in compared], seed)
    first = results[compared[0].name]
    informative = {task: result.informative for task, result in first.items()}
    arms: dict[str, dict[str, Figure]] = {
        arm: {task: result.arms[arm].accuracy for task, result in first.items()}
        for arm in ("native", "source", "no_context")
    }
    yield Variants(
        variants=tuple(
            Variant(
                name=one.name,
                settings=one.settings,
                metrics=metrics[one.name],
                retention=asked.retention(one.name, [task for task in informative if informative[task]], seed),
                kl=table.mappers[one.name].kl,
                gap_recovered=table.mappers[one.name].gap_recovered,
                accuracy={task: result.arms["mapped"].accuracy for task, result in results[one.name].items()},
                reread=one.reread,
            )
            for one in compared
        ),
        **arms,
        informative=informative,
        counts={
            "head_texts": len(cut), "head_tokens": tokens, "passages": len(table.passages),
            "following_tokens": len(table.passages) * following, **{task: result.n for task, result in first.items()},
        },
        sequences=sequences,
        seed=seed,
        seconds=perf_counter() - started,
        provenance=trace(
            host, direction, tokens + table.provenance.tokens + asked.tokens,
            [*((passage.name, passage.ids) for passage in cut), ("tasks", ",".join(asked.hashes))],
        ),
    )  # fmt: skip


def head_metrics(
    host: PairHost,
    direction: str,
    compared: Sequence[Candidate],
    cut: Sequence[Passage],
    should_stop: ShouldStop = None,
) -> Iterator[Step | tuple[dict[str, dict[str, float]], int]]:
    """Means over layers and heads of every metric in `MEASURED`, of all variants in one native pass a passage.

    Yields:
        A `Step` a passage; ({name: {metric: mean}}, tokens measured) last.
    """
    source, target = models_of(host, direction)
    sums = [HeadSums(target, len(cut[0].ids)) for _ in compared]
    for number, passage in enumerate(cut, start=1):
        with host.holding_lane(should_stop):
            _measure_heads(sums, source, target, compared, passage.ids, should_stop)
        yield Step(number / len(cut), f"passage {number} of {len(cut)}")
    found, reads = {}, sums[0].output_moment()
    for one, each in zip(compared, sums, strict=True):
        values = each.metrics(reads)
        found[one.name] = {name: nan_mean(values[name].numpy()) for name in MEASURED}
    yield found, sums[0].tokens


def _measure_heads(
    sums: Sequence[HeadSums],
    source: LoadedModel,
    target: LoadedModel,
    compared: Sequence[Candidate],
    ids: Sequence[int],
    should_stop: ShouldStop,
) -> None:
    """Add one passage to all variants' sums; source cache and native pass are computed once."""
    read = new_cache(source.spec.layers, len(ids))
    forward(source.model, ids, read, keep=0)
    watched = []
    with layer_inputs(target.model) as residual:
        for one, each in zip(compared, sums, strict=True):
            _check(should_stop)
            anchors = one.mapper.anchors
            mapped = new_cache(target.spec.layers, len(ids))
            if anchors:
                forward(target.model, ids[:anchors], mapped, keep=0)
            one.mapper.map_into(read, mapped, anchors, len(ids), source.rotary, target.rotary, should_stop)
            watched.append(each.watcher(each.begin(len(ids), anchors, mapped), target.rotary, residual))

        def visit(*call: Any) -> None:
            _check(should_stop)
            for watch in watched:
                watch(*call)

        with capture_attention(target.model, visit):
            forward(target.model, ids, new_cache(target.spec.layers, len(ids)), keep=0)
    for one, each in zip(compared, sums, strict=True):
        each.tokens += len(ids) - one.mapper.anchors


@dataclass
class _Asked:
    """Answers of all arms to all questions: "native", "source", "no_context", and every variant by its name."""

    questions: dict[str, list[tuple[str, Question]]] = field(default_factory=dict)
    answers: dict[tuple[str, str], Answers] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)
    tokens: int = 0

    def results(self, names: Sequence[str], seed: int) -> dict[str, dict[str, TaskResult]]:
        """Variant -> task -> its result, the variant being the mapped arm."""
        return {
            name: {
                task: task_result(
                    task, asked,
                    {arm: self.answers[task, name if arm == "mapped" else arm]
                     for arm in ("native", "mapped", "source", "no_context")},
                    seed,
                )
                for task, asked in self.questions.items()
            }
            for name in names
        }  # fmt: skip

    def retention(self, name: str, counted: Sequence[str], seed: int) -> Figure:
        """Accuracy of a variant over native's, over the items of several tasks; documents are drawn."""
        if not counted:
            return Figure(float("nan"), float("nan"), float("nan"))
        boot = Bootstrap([document for task in counted for document, _ in self.questions[task]], seed)
        mapped, native = (
            [value for task in counted for value in self.answers[task, arm].correct]
            for arm in (name, "native")
        )
        return boot.ratio(mapped, native)


def ask(
    host: PairHost,
    direction: str,
    compared: Sequence[Candidate],
    texts: Sequence[Document],
    limit: int,
    seed: int,
    found: _Asked,
    should_stop: ShouldStop = None,
) -> Iterator[Step]:
    """Ask all arms the questions of `TASKS`; native, source and no_context once, whatever the number of variants.

    Args:
        found: is filled; the other arguments are as for `stream`.
    """
    source, target = models_of(host, direction)
    contexts = items.build(target.tokenizer, TASKS, limit, seed, texts)
    makers = {one.name: ArmCaches(source, target, one.mapper, should_stop=should_stop) for one in compared}
    fixed = next(iter(makers.values()))
    for number, context in enumerate(contexts, start=1):
        plan = Plan(context.ids[-1], spans_of(context))
        for question in context.questions:
            found.questions.setdefault(question.task, []).append((context.document, question))
        found.hashes.append(context.sha256)
        found.tokens += len(context.ids) + sum(len(span.ids) for span in plan.spans)
        with host.holding_lane(should_stop):
            own = fixed.read(context.ids)

            def arms(
                ids: Sequence[int] = context.ids, own: Cache = own
            ) -> Iterator[tuple[str, LoadedModel, Cache]]:
                for arm in ("native", "no_context", *makers, "source"):
                    _check(should_stop)
                    made, name = (makers[arm], "mapped") if arm in makers else (fixed, arm)
                    yield arm, *made.make(name, ids, own, ids, own)

            for arm, scored in answer(plan, arms()):
                mark(context, arm, scored, found.answers)
        yield Step(number / len(contexts), f"context {number} of {len(contexts)}")


def _check(should_stop: ShouldStop) -> None:
    if should_stop and should_stop():
        raise Cancelled("The measurement was stopped.")
