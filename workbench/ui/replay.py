"""A recorded conversation that plays again at its real speed, in the browser and without any model."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from workbench.ui.chat_view import divider
from workbench.ui.engine import SIDES
from workbench.ui.markup import account_view, esc, how_badge, number, side_badge
from workbench.ui.theme import ASSETS, html

TEMPLATE = (
    '<section class="kv-replay" aria-label="Recorded conversation" hidden>'
    '<header class="kv-replay-bar"><p class="kv-replay-label"></p>'
    '<div role="group" aria-label="Replay"><button type="button" class="kv-small-button" data-play="toggle">Pause'
    '</button><button type="button" class="kv-small-button" data-play="restart">From the start</button>'
    '<label>Speed <select data-play="speed"><option value="1">as recorded</option><option value="4">4 times'
    '</option><option value="1000">at once</option></select></label>'
    '<button type="button" class="kv-small-button" data-play="close">Close</button></div></header>'
    '<div class="kv-replay-body"><div class="kv-log" tabindex="0" role="region" aria-label="Recorded messages">'
    '</div><div class="kv-replay-account"></div></div><p class="kv-sr" role="status"></p></section>'
)


def script(*names: str) -> str:
    """Scripts of a component, one after the other."""
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def replay(value: Any) -> Any:
    """The component; hidden until somebody presses a button with `data-replay`."""
    return html(
        value,
        html_template=TEMPLATE,
        js_on_load=script("player.js", "replay.js"),
        elem_id="kv-replay",
    )


def replay_value(recording: Any) -> dict[str, Any] | None:
    """What `assets/player.js` plays; None when there is no recording.

    Args:
        recording: a `Recording`.
    """
    if recording is None:
        return None
    origin = recording.provenance
    when = origin.measured[:16].replace("T", " ")
    saved, exact, counted, items = 0.0, True, 0, []
    for turn in recording.turns:
        account = as_account(turn.account) if turn.account else None
        switch = None
        if account is not None:
            if account.saved_ms is not None and account.how == "mapped":
                saved, counted = saved + account.saved_ms, counted + 1
                exact = exact and account.prefill_source == "measured"
            other = next(a for a, b in SIDES.values() if b == turn.side)
            switch = {
                "ms": account.ms.get("total", 0.0),
                "note": divider(account, turn.side),
                "account": account_view(account, other, turn.side, saved, counted, exact),
            }
        rate = 1000 * turn.tokens / turn.ms if turn.ms else 0
        word = "token" if turn.tokens == 1 else "tokens"
        facts = [f"{number(turn.tokens)} {word}", f"{rate:,.0f} tokens/s with reading"] if turn.tokens else []
        items.append(
            {
                "say": turn.say,
                "cls": f"kv-by-{turn.side}",
                "head": f"{side_badge(turn.side, turn.model)} {how_badge(turn.how)}",
                "foot": f"<span>{' · '.join(facts)}</span>",
                "pieces": [[at, text] for at, text in turn.pieces],
                "ms": turn.ms,
                "switch": switch,
            }
        )
    label = (
        f"<b>Recorded</b> on {esc(when)} UTC, {esc(origin.where)}. Every token comes when it came then; nothing is "
        f"computed now.{f' {esc(origin.note)}' if origin.note else ''}"
    )
    return {"turns": items, "label": label}


class RecordedAccount(SimpleNamespace):
    """An account's JSON with the attributes of an `Account`; what an older recording lacks is None."""

    def __getattr__(self, name: str) -> Any:
        """Only asked for names that are not there."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def as_account(data: Mapping[str, Any]) -> RecordedAccount:
    """An account as the screens take it."""
    return RecordedAccount(**data)
