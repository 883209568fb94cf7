"""The cascade: who answers, what is counted, and what happens when the large model fails; its calibration."""

from __future__ import annotations

import math

import pytest

from tests.lab.conftest import make_host
from workbench.chat.cascade import Tally, ask
from workbench.chat.conversation import Conversation
from workbench.chat.decode import Sampling, entropy
from workbench.errors import Cancelled
from workbench.lab import cascade
from workbench.lab.results import finish
from workbench.lab.results.cascade import Calibration
from workbench.models.pair import PairHost


@pytest.fixture(scope="module")
def pair() -> PairHost:
    return make_host()


def fresh(pair: PairHost) -> Conversation:
    return Conversation(pair, Sampling(max_new_tokens=5))


def test_a_sure_answer_stands_and_an_unsure_one_is_replaced(pair: PairHost) -> None:
    chat, tally = fresh(pair), Tally()
    list(ask(chat, "hello", math.inf, tally))
    assert [m.side for m in chat.messages] == [None, "small"] and chat.side == "small"
    first = chat.messages[-1]
    assert first.uncertainty is not None and 0 < first.uncertainty < math.log(320)
    assert (tally.questions, tally.taken_over) == (1, 0) and tally.saved_against_large_ms is None

    list(ask(chat, "and now", 0.0, tally))
    assert [m.side for m in chat.messages] == [None, "small", None, "large"]
    last = chat.messages[-1]
    assert (
        last.replaced
        and last.doubt is not None
        and last.how == "mapped"
        and last.account is chat.accounts[-1]
    )
    assert (tally.questions, tally.taken_over) == (2, 1) and tally.mapped == chat.accounts[-1].mapped > 0
    assert tally.large_tokens == len(last.token_ids) and tally.saved_against_large_ms is not None

    list(ask(chat, "go on", math.inf, tally))
    assert [a.target for a in chat.accounts] == ["large", "small"] and chat.messages[-1].side == "small"
    assert tally.questions == 3 and tally.taken_over == 1


def test_the_same_as_sending_by_hand(pair: PairHost) -> None:
    by_hand = fresh(pair)
    list(by_hand.send("hello"))
    by_hand.switch("large")
    list(by_hand.send("and now"))
    chat, tally = fresh(pair), Tally()
    list(ask(chat, "hello", math.inf, tally))
    list(ask(chat, "and now", 0.0, tally))
    assert chat.token_ids == by_hand.token_ids


def test_when_the_large_model_fails_the_small_ones_answer_stays(
    pair: PairHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, tally = fresh(pair), Tally()
    list(ask(chat, "hello", math.inf, tally))

    def stopped(*args: object, **options: object) -> None:
        raise Cancelled("Stopped.")

    monkeypatch.setattr(chat, "switch", stopped)
    with pytest.raises(Cancelled):
        list(ask(chat, "and now", 0.0, tally))
    assert [m.side for m in chat.messages] == [None, "small", None, "small"] and chat.side == "small"
    assert chat.messages[-1].text and tally.taken_over == 0
    monkeypatch.undo()
    list(ask(chat, "again", math.inf, tally))
    assert len(chat.messages) == 6 and chat.messages[-1].how == "native"


def test_entropy_and_calibration(pair: PairHost) -> None:
    import torch

    assert entropy(torch.zeros(8)) == pytest.approx(math.log(8), abs=1e-5)
    assert entropy(torch.tensor([0.0, -1e5])) == pytest.approx(0.0, abs=1e-6)
    result = finish(cascade.stream(pair, 4, 4, 0.25, questions=["hello", "why", "the river", "a song on"]))
    assert sum(value > result.threshold for value in result.uncertainty) == 1 and len(result.surprise) == 4
    assert Calibration.from_json(result.to_json()).to_json() == result.to_json()
    assert f"{result.threshold:.2f}" in result.sentence()
