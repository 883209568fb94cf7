"""What people and models wrote is literal everywhere; numbers and accounts read as they should."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workbench.ui import chat_view, markup

NASTY = '<script>alert(1)</script><b onmouseover="x">&amp; \ud800'


def account(**changes: object) -> SimpleNamespace:
    base = {
        "source": NASTY,
        "target": NASTY,
        "how": "mapped",
        "tokens": 100,
        "reused": 10,
        "mapped": 70,
        "native": 20,
        "mapped_ahead": 0,
        "reread": 6,
        "native_layers": 2,
        "ahead_ms": 0.0,
        "anchors": 4,
        "hold_back": 16,
        "prefill_ms": 400.0,
        "prefill_source": "measured",
        "reason": "",
        "saved_ms": 300.0,
        "ms": {
            "map_strip": 5.0,
            "map_product": 20.0,
            "map_rotate": 5.0,
            "anchors": 30.0,
            "hold_back": 35.0,
            "total": 100.0,
        },
    }
    return SimpleNamespace(**{**base, **changes})


def message(role: str, text: str, **changes: object) -> SimpleNamespace:
    base = {
        "role": role,
        "text": text,
        "side": "large",
        "model": NASTY,
        "how": "mapped",
        "account": None,
        "stopped": False,
        "notice": "",
        "reused": 1,
        "native": 2,
        "rerun": 0,
        "tokens_per_second": 3.0,
        "token_ids": [1, 2],
        "uncertainty": None,
        "replaced": "",
        "doubt": None,
    }
    return SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize(
    "html",
    [
        markup.notice(NASTY),
        markup.progress(NASTY, 1, 2),
        markup.side_badge("large", NASTY),
        markup.account_view(account(how="fallback", reason=NASTY), "small", "large", 1.0, 1, True),
        chat_view.models_view({"small": NASTY, "large": NASTY}, {"small": NASTY, "large": NASTY}, "small"),
        chat_view.divider(account(), None),
        chat_view.message_item(0, message("assistant", NASTY), growing=False)["head"],
        chat_view.message_item(0, message("assistant", "", notice=NASTY), growing=False)["foot"],
    ],
)
def test_nothing_becomes_markup(html: str) -> None:
    assert "<script" not in html
    assert "<b onmouseover" not in html
    html.encode("utf-8")


def test_message_text_travels_as_text() -> None:
    chat = SimpleNamespace(
        messages=[message("user", NASTY), message("assistant", NASTY)], accounts=[], side="large"
    )
    items = chat_view.log_value(chat, False)["items"]
    assert [item["text"] for item in items] == [NASTY, NASTY]


def test_the_divider_stands_before_the_question_that_followed_the_switch() -> None:
    switch = account()
    turns = [
        message("user", "a"),
        message("assistant", "b"),
        message("user", "c"),
        message("assistant", "d", account=switch),
    ]
    chat = SimpleNamespace(messages=turns, accounts=[switch], side="large")
    kinds = [
        "divider" if "note" in item else item["text"] for item in chat_view.log_value(chat, False)["items"]
    ]
    assert kinds == ["a", "b", "divider", "c", "d"]
    turns[3].account = None
    assert "note" in chat_view.log_value(chat, False)["items"][-1]  # a switch that nothing has followed yet


def test_the_account_says_measured_or_estimated() -> None:
    measured = markup.account_view(account(), "small", "large", 300.0, 1, True)
    assert (
        "took <b>400 ms</b>" in measured and "4.0× as long" in measured and "saved <b>300 ms</b>" in measured
    )
    estimated = markup.account_view(account(prefill_source="estimated"), "small", "large", 300.0, 1, False)
    assert "would take about" in estimated and "(estimate)" in estimated and "with estimates" in estimated
    unknown = markup.account_view(
        account(prefill_ms=None, prefill_source="", saved_ms=None), "small", "large", 0.0, 0, True
    )
    assert "True prefill" not in unknown
    slower = markup.account_view(account(prefill_ms=50.0, saved_ms=-50.0), "small", "large", -50.0, 1, True)
    assert "does not pay" in slower and "lost <b>50 ms</b>" in slower


def test_the_parts_of_the_bar_add_up() -> None:
    parts = markup.account_parts(account())
    assert sum(amount for _, amount, _ in parts) == pytest.approx(100.0)


def test_a_click_sends_the_side_that_its_label_named() -> None:
    for side in ("small", "large"):
        assert chat_view.switch_target(chat_view.switch_label(side)) == chat_view.other(side)
