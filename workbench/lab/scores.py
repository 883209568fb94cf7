"""Does the target still do the tasks on a mapped cache? Every arm answers the same questions.

The items are those of `workbench.lab.tasks`; a context is read once by each model and handed over once an arm, all
its questions are then scored together, over the caches of all arms that are equally long (`rows.py`). On the processor
a few contexts are worked on side by side (`workers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from workbench.errors import Cancelled, InputError
from workbench.kv.cache import length
from workbench.lab import tasks as items
from workbench.lab.arms import ArmCaches, Recipe
from workbench.lab.corpus import Document
from workbench.lab.intervals import Bootstrap, mcnemar
from workbench.lab.provenance import models_of, text_hash, trace
from workbench.lab.questions import Context, Question
from workbench.lab.results.common import Step
from workbench.lab.results.quality import ARMS
from workbench.lab.results.tasks import TASKS, TaskArm, TaskResult, TaskScores
from workbench.lab.rows import Plan, Scored, Span
from workbench.lab.tasks import DEFAULT_ITEMS
from workbench.lab.workers import workers

if TYPE_CHECKING:
    from transformers import Cache

    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None


@dataclass
class Answers:
    """Of one task and arm, one entry an item."""

    correct: list[float] = field(default_factory=list)
    ce: list[float] = field(default_factory=list)


def stream(
    host: PairHost,
    direction: str,
    names: Sequence[str] | None = None,
    limit: int = DEFAULT_ITEMS,
    seed: int = 0,
    anchors: int | None = None,
    hold_back: int | None = None,
    recipe: Recipe | None = None,
    texts: Sequence[Document] | None = None,
    should_stop: ShouldStop = None,
) -> Iterator[Step | TaskScores]:
    """Ask every arm all questions.

    Args:
        host: the pair.
        direction: "up" or "down".
        names: tasks, None for all.
        limit: items a task.
        seed: of items and intervals.
        anchors, hold_back: of the handoffs, None for the mapper's own choice.
        recipe: a mapper of the published recipe, for an arm of its own.
        texts: other texts than the held-out ones (tests).
        should_stop: asked before every context.

    Yields:
        A `Step` a context; the `TaskScores` last.

    Raises:
        InputError: for an unknown task, or too few items.
        Cancelled: when asked to stop.
    """
    if limit < 2:
        raise InputError("At least 2 items a task are needed.", "Give a larger --limit.")
    started = perf_counter()
    source, target = models_of(host, direction)
    mapper, _ = host.mapper(direction)
    contexts = items.build(target.tokenizer, names, limit, seed, texts)
    if len(contexts) < 2:
        raise InputError("One context is not enough: a wrong document is needed as a control.")
    maker = ArmCaches(source, target, mapper, anchors, hold_back, recipe, should_stop)
    found: dict[tuple[str, str], Answers] = {}
    asked: dict[str, list[tuple[str, Question]]] = {}
    total = 0
    with host.holding_lane(should_stop):
        wrong = maker.read(contexts[-1].ids)
    with workers((source, target), mapper.native_layers) as several:
        for first in range(0, len(contexts), several.count):
            if should_stop and should_stop():
                raise Cancelled("The evaluation was stopped.")
            group = contexts[first : first + several.count]
            others = [contexts[first - 1], *group[:-1]]  # the wrong documents
            plans = [Plan(context.ids[-1], spans_of(context)) for context in group]
            with host.holding_lane(should_stop):
                own = several.map(maker.read, [context.ids for context in group])
                answers = several.map(
                    lambda context, plan, own, other, wrong: answer(
                        plan, maker.caches(context.ids, own, other.ids, wrong)
                    ),
                    group, plans, own, others, [wrong, *own[:-1]],
                )  # fmt: skip
            wrong = own[-1]
            for context, plan, by_arm in zip(group, plans, answers, strict=True):
                for question in context.questions:
                    asked.setdefault(question.task, []).append((context.document, question))
                total += len(context.ids) + sum(len(span.ids) for span in plan.spans)
                for arm, scored in by_arm:
                    mark(context, arm, scored, found)
            done = first + len(group)
            yield Step(done / len(contexts), f"context {done} of {len(contexts)}")
    results = {
        task: task_result(
            task, asked[task], {arm: a for (name, arm), a in found.items() if name == task}, seed
        )
        for task in asked
    }
    order = sorted(results, key=lambda name: (not results[name].informative, results[name].retention.value))
    yield TaskScores(
        tasks={name: results[name] for name in order},
        absent=maker.absent,
        anchors=maker.anchors,
        hold_back=maker.hold_back,
        limit=limit,
        seed=seed,
        seconds=perf_counter() - started,
        provenance=trace(
            host, direction, total, [("tasks", ",".join(context.sha256 for context in contexts))]
        ),
    )


def spans_of(context: Context) -> list[Span]:
    """All choices of all questions."""
    return [Span((*q.prefix, *c), len(q.prefix)) for q in context.questions for c in q.choices]


def answer(plan: Plan, arms: Iterable[tuple[str, LoadedModel, Cache]]) -> list[tuple[str, list[Scored]]]:
    """Ask all arms of a context; those of one model whose caches are equally long answer together."""
    alike: dict[tuple[int, int], list[tuple[str, LoadedModel, Cache]]] = {}
    for arm in arms:
        alike.setdefault((id(arm[1]), length(arm[2])), []).append(arm)
    found: list[tuple[str, list[Scored]]] = []
    for group in alike.values():
        scored = plan.run_all(group[0][1], [cache for _, _, cache in group])
        found += zip((name for name, _, _ in group), scored, strict=True)
    return found


def mark(context: Context, arm: str, scored: list[Scored], found: dict[tuple[str, str], Answers]) -> None:
    """Add an arm's answers to all questions of a context."""
    place = 0
    for question in context.questions:
        choices = scored[place : place + len(question.choices)]
        place += len(question.choices)
        right = choices[question.answer]
        answers = found.setdefault((question.task, arm), Answers())
        answers.ce.append(-right.mean)
        if len(choices) == 1:
            answers.correct.append(float(right.hit.double().mean()))
        else:
            best = max(range(len(choices)), key=lambda i: choices[i].mean)
            answers.correct.append(float(best == question.answer))


def task_result(
    task: str, asked: Sequence[tuple[str, Question]], answers: dict[str, Answers], seed: int
) -> TaskResult:
    """Intervals, tests and shares of one task."""
    boot = Bootstrap([document for document, _ in asked], seed)
    chance = TASKS[task].chance
    arms = {
        name: TaskArm(
            boot.mean(answers[name].correct),
            boot.mean(answers[name].ce),
            tuple(answers[name].correct),
            tuple(answers[name].ce),
        )
        for name in ARMS
        if name in answers
    }
    mapped, native, source = (answers[name].correct for name in ("mapped", "native", "source"))
    choices = chance > 0
    gained = sum(native) > sum(source)
    return TaskResult(
        arms=arms,
        chance=chance,
        informative=arms["native"].accuracy.low > arms["no_context"].accuracy.high,
        retention=boot.ratio(mapped, native),
        retention_floor=boot.ratio([a - chance for a in mapped], [a - chance for a in native]),
        source_gap=boot.ratio(
            [a - b for a, b in zip(mapped, source, strict=True)],
            [a - b for a, b in zip(native, source, strict=True)],
        )
        if gained
        else None,
        p_value={name: mcnemar(mapped, answers[name].correct) for name in arms if name != "mapped"}
        if choices
        else {},
        depths=tuple(q.depth for _, q in asked if q.depth is not None),
        sha256=text_hash(str([(q.prefix, q.choices, q.answer) for _, q in asked])),
    )
