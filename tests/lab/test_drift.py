"""Alternating handoffs: exact mappers do not drift, each handoff maps only what is new, the recommendation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.errors import InputError
from workbench.lab import drift
from workbench.lab.results import finish
from workbench.lab.results.drift import Drift
from workbench.lab.results.figure import Figure
from workbench.models.pair import PairHost

CHATS = [
    [
        {"role": role, "content": f"{word} {i}"}
        for i in range(3)
        for role, word in (
            ("user", "Why is the river old"),
            ("assistant", "It is the king of water, and so on"),
        )
    ]
    for _ in range(2)
]


def test_exact_mappers_do_not_drift_and_map_only_what_is_new(same: PairHost) -> None:
    result = finish(drift.stream(same, "up", turns=3, limit=2, chats=CHATS))
    assert [(turn.n, turn.side) for turn in result.turns] == [(1, "large"), (2, "small"), (3, "large")]
    for turn in result.turns:
        assert turn.kl.value < 1e-5 and turn.top1.value == 1.0 and turn.kl_once.value < 1e-5
        assert turn.recall == turn.recall_never and turn.ce == pytest.approx(turn.ce_never, abs=1e-3)
    first, second, third = result.turns
    assert second.new > 0 and third.new < third.tokens / 2 < first.tokens + second.tokens
    data = result.to_json()
    assert Drift.from_json(data).to_json() == data
    assert {"n", "kl", "top1"} <= set(data["turns"][0])


def test_other_mappers_drift_and_the_other_direction_starts_with_the_large_one(host: PairHost) -> None:
    result = finish(drift.stream(host, "down", turns=2, limit=1, chats=CHATS))
    assert [turn.side for turn in result.turns] == ["small", "large"]
    assert result.turns[0].kl.value == pytest.approx(result.turns[0].kl_once.value, rel=1e-3)
    assert result.turns[0].kl.value > 1e-3
    with pytest.raises(InputError):
        finish(drift.stream(host, "up", turns=0))
    with pytest.raises(InputError, match="turns"):
        finish(drift.stream(host, "up", turns=9, chats=CHATS))


def test_the_recommendation(host: PairHost) -> None:
    result = finish(drift.stream(host, "up", turns=1, limit=1, chats=CHATS))
    turn = result.turns[0]

    def at(n: int, kl: float) -> object:
        return replace(turn, n=n, kl=Figure(kl, kl, kl), kl_once=Figure(0.1, 0.1, 0.1))

    calm = replace(result, turns=(at(1, 0.1), at(2, 0.15)))
    assert calm.re_prefill_after is None and calm.ratio == pytest.approx(1.5) == calm.ratio_first
    assert "nothing here says" in calm.sentence()
    wild = replace(result, turns=(at(1, 0.1), at(2, 0.25), at(3, 0.3)))
    assert wild.re_prefill_after == 2 and "switch 2" in wild.sentence()
