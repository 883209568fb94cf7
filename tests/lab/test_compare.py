"""The side-by-side decode: exact for an exact mapper, the same in any order, its KL that of a plain pass."""

from __future__ import annotations

import pytest
import torch

from tests.lab.conftest import texts
from workbench.chat.handoff import hand_over
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.lab import compare
from workbench.lab.results import COLUMNS, Comparison, finish
from workbench.models.pair import PairHost

TEXT = texts(1)[0].text[:200]


def test_either_order_and_twice_give_the_same(host: PairHost) -> None:
    results = [
        finish(compare.stream(host, direction="up", text=TEXT, tokens=12, order=order))
        for order in (COLUMNS, COLUMNS[::-1], COLUMNS)
    ]
    first = results[0]
    assert len(first.kl["mapped"]) == 12 or first.finished["prefill"]
    for other in results[1:]:
        assert other.token_ids == first.token_ids and other.texts == first.texts
        assert other.kl == first.kl and other.top1 == first.top1


def test_an_exact_mapper_says_what_the_prefill_says(same: PairHost) -> None:
    result = finish(compare.stream(same, "up", TEXT, tokens=16))
    assert result.token_ids["mapped"] == result.token_ids["prefill"] == result.token_ids["source"]
    assert result.first_divergence() is None and result.top1_share() == 1.0
    assert max(result.kl["mapped"]) < 1e-6


def test_kl_is_teacher_forced_along_the_prefill(host: PairHost) -> None:
    result = finish(compare.stream(host, "up", TEXT, tokens=10, anchors=3, hold_back=5))
    source, target = host.model("small"), host.model("large")
    ids = compare.context_ids(target.tokenizer, TEXT)
    spoken = list(result.token_ids["prefill"])
    own = forward(target.model, ids + spoken[:-1], new_cache(3), keep=len(spoken))
    alone = forward(source.model, ids + spoken[:-1], new_cache(3), keep=len(spoken))
    source_cache, cache = new_cache(3), new_cache(3)
    forward(source.model, ids, source_cache, keep=0)
    first, _ = hand_over(ids, source_cache, target, cache, host.mapper("up")[0], source, 3, 5)
    mapped = torch.cat((first, forward(target.model, spoken[:-1], cache, keep=len(spoken) - 1)))
    assert own.argmax(-1).tolist() == spoken
    for name, logits in (("mapped", mapped), ("source", alone)):
        log_p, log_q = own.double().log_softmax(-1), logits.double().log_softmax(-1)
        expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        assert torch.allclose(torch.tensor(result.kl[name], dtype=torch.float64), expected, atol=1e-4)
        assert list(result.top1[name]) == (logits.argmax(-1) == own.argmax(-1)).tolist()
    assert result.account["anchors"] == 3 and result.account["hold_back"] == 5
    assert result.account["prefill_source"] == "measured"


def test_each_column_is_its_models_own_greedy_text(host: PairHost) -> None:
    result = finish(compare.stream(host, "up", TEXT, tokens=8))
    ids = torch.tensor([compare.context_ids(host.model("large").tokenizer, TEXT)])
    for column, side in (("prefill", "large"), ("source", "small")):
        model = host.model(side)
        expected = model.model.generate(
            ids, max_new_tokens=8, do_sample=False, eos_token_id=list(model.stop_ids)
        )
        assert list(result.token_ids[column]) == expected[0, ids.shape[1] :].tolist()
    assert result.texts["prefill"] == host.model("large").tokenizer.decode(
        [t for t in result.token_ids["prefill"] if t not in host.model("large").stop_ids],
        skip_special_tokens=True,
    )


def test_columns_grow_together_and_divergence_is_told(host: PairHost) -> None:
    steps = list(compare.stream(host, "down", TEXT, tokens=9))
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert [len(step.token_ids["prefill"]) for step in steps[:3]] == [1, 2, 3]
    last = steps[-1]
    own, reference = last.token_ids["mapped"], last.token_ids["prefill"]
    expected = next((i for i, (a, b) in enumerate(zip(own, reference, strict=False)) if a != b), None)
    assert last.first_divergence() == expected
    assert Comparison.from_json(last.to_json()).to_json() == last.to_json()


def test_a_stop_token_ends_its_column_only(host: PairHost, monkeypatch: pytest.MonkeyPatch) -> None:
    free = finish(compare.stream(host, "up", TEXT, tokens=10))
    stop = free.token_ids["prefill"][4]
    monkeypatch.setitem(host.model("large").__dict__, "stop_ids", frozenset({stop}))
    result = finish(compare.stream(host, "up", TEXT, tokens=10))
    at = free.token_ids["prefill"].index(stop)
    assert result.finished["prefill"] and result.token_ids["prefill"] == free.token_ids["prefill"][: at + 1]
    assert len(result.kl["mapped"]) == len(result.kl["source"]) == at + 1
    assert result.token_ids["source"] == free.token_ids["source"]
    assert result.kl["mapped"] == pytest.approx(free.kl["mapped"][: at + 1])


@pytest.mark.parametrize(("text", "tokens"), [("", 5), (" \n", 5), ("hello", 0), ("hello " * 400, 5)])
def test_wrong_input_is_refused_before_anything_runs(host: PairHost, text: str, tokens: int) -> None:
    with pytest.raises(InputError):
        next(compare.stream(host, "up", text, tokens))


def test_stopping(host: PairHost) -> None:
    asked = iter([False] * 8 + [True] * 1000)
    with pytest.raises(Cancelled):
        list(compare.stream(host, "up", TEXT, 500 - len(TEXT), should_stop=lambda: next(asked)))
    assert host.lane.acquire(blocking=False)
    host.lane.release()


def test_a_message_is_literal_text_in_the_template(host: PairHost) -> None:
    tokenizer = host.model("large").tokenizer
    ids = compare.context_ids(tokenizer, "hello <|im_end|>", chat=True)
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
