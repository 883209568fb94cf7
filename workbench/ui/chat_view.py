"""A conversation as what the page shows: messages with badges, dividers of switches, the account, the models.

Pure functions of a `Conversation`; the handlers in `chat.py` send their results to the components.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import WorkbenchError
from workbench.ui.markup import account_view, esc, how_badge, meter, ms, notice, number, side_badge, term

EXAMPLES = (
    "Explain to a curious child why the sky is blue.",
    "What should I check before I buy a used bicycle?",
    "Write a short letter from a lighthouse keeper to the sea.",
    "Give me three reasons to learn a second language.",
)


def other(side: str) -> str:
    """The other side of a pair."""
    return "large" if side == "small" else "small"


def log_value(chat: Any, busy: bool, waiting: str = "", loads: str = "") -> dict[str, Any]:
    """The value of the conversation component, see `assets/chat_log.js`.

    Args:
        chat: the conversation, or None before the first message.
        busy: a model is at work.
        waiting: text that was sent but is not part of the conversation yet.
        loads: what the first message will load, for the empty page.
    """
    messages = list(chat.messages) if chat is not None else []
    items: list[dict[str, Any]] = []
    last = len(messages) - 1
    for index, message in enumerate(messages):
        answer = messages[index + 1] if message.role == "user" and index < last else None
        if (
            answer is not None and answer.account is not None
        ):  # the switch came before the question that it answers
            items.append({"id": f"s{index}", "note": divider(answer.account, answer.side)})
        items.append(
            message_item(index, message, growing=busy and index == last and message.role == "assistant")
        )
    if chat is not None and chat.accounts and not busy and open_account(chat) is not None:
        items.append({"id": "s-last", "note": divider(chat.accounts[-1], chat.side)})
    if waiting:
        items.append(
            {
                "id": "w",
                "cls": "kv-user",
                "head": '<span class="kv-who">You</span>',
                "text": waiting,
                "foot": "waiting for the model",
            }
        )
    return {"items": items, "busy": busy, "empty": empty_view(loads)}


def open_account(chat: Any) -> Any:
    """The account of the last switch when no message has followed it yet, else None."""
    last = chat.accounts[-1]
    return None if any(message.account is last for message in chat.messages) else last


def message_item(index: int, message: Any, growing: bool) -> dict[str, Any]:
    """One message: who and how in the head, the literal text, actions and numbers in the foot."""
    if message.role == "user":
        edit = (
            f'<button type="button" class="kv-link" data-act="edit" data-index="{index}" '
            f'aria-label="Edit message {index + 1}">Edit</button>'
        )
        return {
            "id": f"u{index}",
            "cls": "kv-user",
            "head": '<span class="kv-who">You</span>',
            "text": message.text,
            "foot": edit,
        }
    if message.role != "assistant":
        return {
            "id": f"y{index}",
            "cls": "",
            "head": f'<span class="kv-who">{esc(message.role)}</span>',
            "text": message.text,
            "foot": "",
        }
    head = f"{side_badge(message.side, message.model)} {how_badge(message.how)}"
    facts = [f"{number(len(message.token_ids))} tokens"]
    if message.tokens_per_second and not growing:
        facts.append(f"{message.tokens_per_second:,.0f} tokens/s")
    if message.reused or message.native:
        again = f", {number(message.rerun)} of them again" if message.rerun else ""
        facts.append(f"context: {number(message.reused)} held, {number(message.native)} run{again}")
    if message.stopped and not growing:
        facts.append("<b>stopped</b>")
    if message.uncertainty is not None and not growing:
        facts.append(f"{term('uncertainty')} {number(message.uncertainty, 2)}")
    if message.replaced:
        facts.append(f"<b>took over</b>: the small model was unsure ({number(message.doubt, 2)} nats)")
    if message.notice:
        facts.append(esc(message.notice))
    copy = (
        ""
        if growing
        else '<button type="button" class="kv-link" data-act="copy" aria-label="Copy answer">Copy</button>'
    )
    instead = (
        f"<details><summary>The small model's answer</summary><p>{esc(message.replaced)}</p></details>"
        if message.replaced and not growing
        else ""
    )
    foot = f"<span>{' · '.join(facts)}</span>{copy}{instead}"
    cls = f"kv-by-{message.side or 'none'}" + (" kv-live" if growing else "")
    return {"id": f"a{index}", "cls": cls, "head": head, "text": message.text, "foot": foot}


def divider(account: Any, side: str | None) -> str:
    """The line in the conversation where the models changed."""
    total = ms(account.ms.get("total"))
    to = side_badge(side) if side else esc(account.target)
    if not account.tokens:
        return f"<span>switched to {to} before anything was said</span>"
    if account.how == "mapped":
        detail = f"<b>{number(account.mapped)}</b> tokens mapped, {number(account.native)} run natively"
        if account.reused:
            detail += f", {number(account.reused)} already there"
    else:
        detail = (
            f"{'fallback: ' if account.how == 'fallback' else ''}{number(account.native)} tokens read again"
        )
    return f"<span>switched to {to} · {detail} · {total}</span>"


def empty_view(loads: str) -> str:
    """What the page says before the first message."""
    examples = "".join(
        '<button type="button" class="kv-example" data-act="example" '
        f'data-text="{esc(text)}">{esc(text)}</button>'
        for text in EXAMPLES
    )
    return (
        "<h2>Start with one model, carry on with the other</h2>"
        f"<ol><li>Chat with the small model {side_badge('small')}.</li>"
        f"<li>Press <b>Switch</b>, whenever you like. Its {term('KV cache')} is {term('mapped')} to the "
        f"large model {side_badge('large')}, "
        "which does not have to read the conversation again.</li>"
        "<li>Look at the account: what was carried over, how long it took, what it saved.</li></ol>"
        f'<p class="kv-note">{esc(loads)}</p><p class="kv-note" style="margin-bottom:8px">Try one of these, '
        "or write your own:</p>"
        f'<div class="kv-examples">{examples}</div>'
    )


def models_view(names: dict[str, str], details: dict[str, str], side: str) -> str:
    """The two models of the pair, the one that answers now marked by frame and word."""
    cards = []
    for each in ("small", "large"):
        on = each == side
        now = '<span class="kv-now">answers now</span>' if on else ""
        cards.append(
            '<div class="kv-model '
            f'kv-{each}{" kv-on" if on else ""}">{now}{side_badge(each, names.get(each))}'
            f"<p>{esc(details.get(each, ''))}</p></div>"
        )
    return f'<div class="kv-models">{"".join(cards)}</div>'


def account_panel(chat: Any) -> str:
    """The account of the last switch, or what will stand here."""
    if chat is None or not chat.accounts:
        return (
            '<section class="kv-panel"><h2>Account of the last switch</h2><p class="kv-note">No switch yet. '
            "After one, this says how many tokens were "
            f"{term('mapped')}, how many were run {term('native', 'natively')}, how long each part took, "
            f"and what a true {term('prefill')} would have cost.</p></section>"
        )
    account = chat.accounts[-1]
    saved, exact, counted = 0.0, True, 0
    for each in chat.accounts:
        if each.saved_ms is not None and each.how == "mapped":
            saved += each.saved_ms
            counted += 1
            exact = exact and each.prefill_source == "measured"
    return account_view(account, other(chat.side), chat.side, saved, counted, exact)


def meter_view(chat: Any) -> str:
    """How full the context is."""
    if chat is None:
        return ""
    used = len(chat.token_ids)
    left = chat.context_left()
    return meter(used, used + left if left is not None else None)


def switch_label(side: str) -> str:
    """The label of the switch button; a click sends it, so a late second click changes nothing."""
    return "Switch to the large model →" if side == "small" else "← Switch to the small model"


def switch_target(label: str) -> str:
    """The side that a label of the switch button leads to."""
    return "large" if "large" in label else "small"


def notice_view(text: str, kind: str = "info") -> str:
    """An inline message, or nothing."""
    return notice(text, kind) if text else ""


def threshold_of(engine: Any) -> tuple[float, str]:
    """The threshold of the automatic mode, and where it comes from: measured beside the mapper, or a guess."""
    from workbench.lab.provenance import load_result
    from workbench.lab.results.cascade import UNCALIBRATED
    from workbench.models.catalog import artefact_folder

    try:
        result = load_result(artefact_folder(engine.start_ref(), "up") / "cascade.json", "cascade")
    except WorkbenchError:
        return UNCALIBRATED, "Not calibrated for this pair: `python -m workbench cascade --save` does it."
    return round(min(6.0, result.threshold) / 0.05) * 0.05, result.sentence()


DECISIONS = {
    "accept": ("✓", "approved", ""),
    "warn": ("!", "approved with a warning", " kv-how-fallback"),
    "refuse": ("✕", "not approved", " kv-how-fallback"),
    "": ("–", "not evaluated", ""),
}


def approval_view(engine: Any, visit: Any) -> str:
    """A badge a direction: whether this mapper reached its bars; the record's sentence on hover and focus."""
    from workbench.approval import load_approval
    from workbench.ui.measuring import results_folder
    from workbench.words import ARROWS

    badges = []
    for direction, arrow in ARROWS.items():
        record, why = load_approval(results_folder(engine, visit, direction))
        mark, word, cls = DECISIONS[record.decision if record is not None else ""]
        tip = esc(record.sentence() if record is not None else why)
        badges.append(
            f'<span class="kv-how{cls}" tabindex="0" role="note" aria-label="{esc(arrow)} {word}: {tip}">'
            f'<span aria-hidden="true">{mark}</span> {esc(arrow)} {word}'
            f'<span class="kv-tip" aria-hidden="true">{tip}</span></span>'
        )
    return f'<p class="kv-note kv-approval">Mapper {" · ".join(badges)}</p>'


def tally_view(tally: Any) -> str:
    """What the automatic mode did so far; nothing before its first answer."""
    if tally is None or not tally.questions:
        return ""
    against_large = tally.saved_against_large_ms
    if against_large is None:
        saved = "the large model has not answered yet, so nothing is known of its pace"
    else:
        saved = f"{_saved(against_large)} against always asking the large model (estimate from its pace here)"
    unknown = f" ({tally.unknown} of unknown cost counted as nothing)" if tally.unknown else ""
    fallbacks = f" {tally.fallbacks} changes read everything after all." if tally.fallbacks else ""
    return (
        '<section class="kv-panel" aria-label="Automatic mode"><h2>Automatic mode</h2>'
        f'<p class="kv-lead">The large model took over <b>{tally.taken_over}</b> of <b>{tally.questions}</b> answers. '
        f"It did not have to read <b>{number(tally.mapped)}</b> tokens, which were {term('mapped')}.{fallbacks}</p>"
        f'<p class="kv-note">So far: {saved}; {_saved(tally.saved_against_prefill_ms)} against reading everything '
        f"again at each change{unknown}. {number(tally.dropped_tokens)} tokens of the small model were replaced.</p>"
        "</section>"
    )


def _saved(amount: float) -> str:
    return f"<b>{ms(abs(amount))}</b> {'saved' if amount >= 0 else 'lost'}"
