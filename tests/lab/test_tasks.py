"""Tasks: items with one right answer, batched scoring against plain passes, arms, tests, and what they keep."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from tests.lab.conftest import make_host, random_mapper
from workbench.errors import InputError
from workbench.kv.cache import length, new_cache
from workbench.kv.forward import forward
from workbench.lab import recall, rows, scores, tasks, workers
from workbench.lab.arms import ArmCaches, Recipe
from workbench.lab.corpus import Document, documents
from workbench.lab.intervals import Bootstrap, mcnemar
from workbench.lab.results import finish
from workbench.lab.results.tasks import TASKS, TaskScores
from workbench.lab.rows import Plan, Span
from workbench.models.pair import PairHost


def stories(count: int = 6) -> list[Document]:
    """Documents of whole sentences that share words, as real ones do."""
    nouns = ("river", "castle", "garden", "engine", "winter", "market", "bridge", "island")
    found = []
    for i in range(count):
        lines = [
            f"The {nouns[(i + j) % 8]} near the {nouns[(3 * i + j) % 8]} is older than the {nouns[(i + 2 * j) % 8]} "
            f"we saw, and nobody knows the {nouns[(5 * j + i) % 8]} better, than {j} people."
            for j in range(14)
        ]
        found.append(Document(f"story-{i}", " ".join(lines)))
    return found


@pytest.fixture(scope="module")
def small_host() -> PairHost:
    return make_host()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny tokenizer has a token for every letter or two: shorter stretches of text are enough."""
    for name, value in (("CONTEXT", 40), ("FOLLOWING", 48)):
        monkeypatch.setattr(tasks, name, value)
    monkeypatch.setattr(recall, "TALK", 10)
    monkeypatch.setattr(
        recall, "small_talk", lambda tokenizer: [("chat-1", "Why?", "It is."), ("chat-2", "So?", "No.")]
    )


def test_items_have_one_right_answer_and_the_same_seed_gives_the_same() -> None:
    tokenizer = make_host().model("large").tokenizer
    contexts = tasks.build(tokenizer, None, 4, seed=3, texts=stories())
    counts = Counter(question.task for context in contexts for question in context.questions)
    assert counts == dict.fromkeys(TASKS, 4)
    for context in contexts:
        for question in context.questions:
            assert (
                len(set(question.choices))
                == len(question.choices)
                == (4 if TASKS[question.task].chance else 1)
            )
            if question.task.endswith("recall"):
                told = tokenizer.decode(list(context.ids))
                value = tokenizer.decode(list(question.choices[question.answer]))
                assert f"{value}." in told and 0 < question.depth < 1
                wrong = [c for i, c in enumerate(question.choices) if i != question.answer]
                assert not any(f"{tokenizer.decode(list(choice))}." in told for choice in wrong)
    again = tasks.build(tokenizer, None, 4, seed=3, texts=stories())
    assert [c.sha256 for c in again] == [c.sha256 for c in contexts]
    assert [c.sha256 for c in tasks.build(tokenizer, None, 4, seed=4, texts=stories())] != [
        c.sha256 for c in contexts
    ]


def test_questions_of_a_text_go_on_where_the_context_ends() -> None:
    tokenizer = make_host().model("large").tokenizer
    text = {document.name: document.text for document in stories()}
    for context in tasks.build(tokenizer, ["next_sentence", "last_word"], 10, texts=stories()):
        for question in context.questions:
            right = tokenizer.decode([*context.ids, *question.prefix, *question.choices[question.answer]])
            assert right in text[context.document]


def test_the_held_out_texts_give_enough_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CONTEXT", 300)
    tokenizer = make_host().model("large").tokenizer
    names = ["next_sentence", "last_word", "fact_recall"]
    contexts = tasks.build(
        tokenizer, names, 10, texts=[Document(d.name, d.text[:3000]) for d in documents("heldout")]
    )
    counts = Counter(question.task for context in contexts for question in context.questions)
    assert counts == dict.fromkeys(names, 10)
    assert len({context.document for context in contexts}) > 8
    with pytest.raises(InputError, match="no task"):
        tasks.build(tokenizer, ["arc"])


def test_rows_equal_one_pass_each_and_leave_the_cache(small_host: PairHost) -> None:
    model = small_host.model("large")
    ids = [5, 6, 7, 8, 9, 10, 11]
    spans = [
        Span((1, 2, 3, 4), 0),
        Span((1, 2, 9), 2),
        Span((1, 2, 8), 2),
        Span((7,) * 9, 4),
        Span((4, 4), 1),
    ]
    cache = new_cache(model.spec.layers)
    forward(model.model, ids[:-1], cache, keep=0)
    plan = Plan(ids[-1], spans)
    assert sum(map(len, plan.batches)) == 3, "three of the five need no row of their own"
    for span, scored in zip(spans, plan.run(model, cache), strict=True):
        logits = forward(model.model, [*ids, *span.ids], new_cache(model.spec.layers), keep=len(span.ids) + 1)
        log_p = logits[:-1].log_softmax(-1)[range(len(span.ids)), list(span.ids)][span.start :]
        assert torch.allclose(scored.log_p.float(), log_p, atol=1e-4)
    assert length(cache) == len(ids) - 1
    (alone,) = Plan(3, [Span((1, 2))]).run(model, new_cache(model.spec.layers))
    plain = forward(model.model, [3, 1], new_cache(model.spec.layers), keep=2).log_softmax(-1)
    assert torch.allclose(alone.log_p.float(), plain[[0, 1], [1, 2]], atol=1e-4)


def test_several_caches_at_once_equal_one_after_the_other(
    small_host: PairHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spans = small_host.model("large"), [Span((1, 2, 3, 4)), Span((1, 2, 9), 2), Span((7,) * 9, 4)]
    caches = []
    for first in (5, 6, 7):
        caches.append(new_cache(model.spec.layers))
        forward(model.model, [first, 8, 9], caches[-1], keep=0)
    plan = Plan(11, spans)
    single = [plan.run(model, cache) for cache in caches]
    for most in (rows.MOST_LOGITS, 2 * 9 * model.spec.vocab_size, 1):  # all at once, some, one by one
        monkeypatch.setattr(rows, "MOST_LOGITS", most)
        for alone, together in zip(single, plan.run_all(model, caches), strict=True):
            for a, b in zip(alone, together, strict=True):
                assert torch.allclose(a.log_p, b.log_p, atol=1e-5) and torch.equal(a.hit, b.hit)
    assert [length(cache) for cache in caches] == [3, 3, 3]
    assert not torch.allclose(single[0][0].log_p, single[1][0].log_p)


def test_an_exact_mapper_answers_as_the_target_does(same: PairHost) -> None:
    result = finish(scores.stream(same, "up", limit=3, texts=stories(4)))
    assert isinstance(result, TaskScores) and "identity" not in result.absent
    for name, task in result.tasks.items():
        assert set(task.arms) == {
            "native", "mapped", "source", "identity", "no_context", "zero", "wrong_document"
        }, "one held-back token is no arm of its own"  # fmt: skip
        for arm in ("mapped", "source", "identity"):
            assert task.arms[arm].ce.value == pytest.approx(task.arms["native"].ce.value, abs=1e-3), name
        assert task.arms["zero"].ce.value != pytest.approx(task.arms["native"].ce.value, abs=1e-3)
        assert task.source_gap is None and task.n == 3
    json.dumps(result.to_json(), allow_nan=False)
    assert TaskScores.from_json(json.loads(json.dumps(result.to_json()))).to_json() == result.to_json()


def test_arms_that_cannot_be_are_named_with_the_reason(small_host: PairHost) -> None:
    source, target = small_host.model("small"), small_host.model("large")
    recipe = Recipe(random_mapper(source.spec, target.spec, seed=4, anchors=0, hold_back=1))
    result = finish(scores.stream(small_host, "up", ["fact_recall"], 5, recipe=recipe, texts=stories(4)))
    assert "1 KV heads in the source, 2 in the target" in result.absent["identity"]
    arms = result.tasks["fact_recall"].arms
    assert "recipe" in arms and "recipe" not in result.absent and "held_back_only" in arms
    assert list(arms)[:3] == ["native", "mapped", "recipe"]
    assert len(result.tasks["fact_recall"].depths) == 5
    assert sum(n for _, _, n in result.tasks["fact_recall"].by_depth("native")) == 5


def test_contexts_side_by_side_give_what_they_give_one_after_the_other(
    small_host: PairHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, found = torch.get_num_threads(), {}
    for most in (1, 2):
        monkeypatch.setattr(workers, "MOST", most)
        torch.set_num_threads(2)
        try:
            result = finish(scores.stream(small_host, "up", limit=5, texts=stories(5)))
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(threads)
        found[most] = {
            (name, arm): (task.arms[arm].ce_items, task.arms[arm].correct)
            for name, task in result.tasks.items()
            for arm in task.arms
        }
    assert found[1].keys() == found[2].keys() and len(found[1]) > 10
    for key, (ce, correct) in found[1].items():
        assert found[2][key][0] == pytest.approx(ce, abs=1e-4) and found[2][key][1] == correct, key


def test_workers_end_before_an_error_is_raised_and_leave_a_model_with_layers_of_its_own_alone(
    same: PairHost,
) -> None:
    models, done = (same.model("small"), same.model("large")), []

    def work(number: int) -> int:
        if number == 0:
            raise ValueError("no")
        done.append(number)
        return number

    with workers.workers(models) as several:
        assert several.map(work, range(1, 5)) == [1, 2, 3, 4]
        with pytest.raises(ValueError, match="no"):
            several.map(work, range(3))
        assert done == [1, 2, 3, 4, 1, 2]
    with workers.workers(models, native_layers=1) as several:
        assert several.count == 1


def test_the_arms_caches_hold_the_context_without_its_last_token(small_host: PairHost) -> None:
    source, target = small_host.model("small"), small_host.model("large")
    maker = ArmCaches(source, target, small_host.mapper("up")[0])
    ids, other = list(range(20, 50)), list(range(60, 72))
    lengths = {
        name: length(cache) for name, _, cache in maker.caches(ids, maker.read(ids), other, maker.read(other))
    }
    assert lengths == {
        "native": 29, "mapped": 29, "wrong_document": 13, "zero": 29, "held_back_only": 2, "no_context": 0,
        "source": 29,
    }  # fmt: skip


def test_mcnemar_and_ratios() -> None:
    assert mcnemar([1, 1, 0], [1, 1, 0]) == 1.0
    assert mcnemar([1] * 6, [0] * 6) == pytest.approx(2 / 2**6)
    assert mcnemar([1, 1, 1, 0], [0, 0, 0, 1]) == pytest.approx(2 * 5 / 16)
    boot = Bootstrap(["a", "b", "c"], 0)
    half = boot.ratio([1.0, 0.5, 2.0], [2.0, 1.0, 4.0])
    assert (half.value, half.low, half.high) == (0.5, 0.5, 0.5)
    assert boot.ratio([1, 1, 1], [0, 0, 0]).value != boot.ratio([1, 1, 1], [0, 0, 0]).value  # no number
