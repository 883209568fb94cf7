"""HTML of the page's small parts: badges, the account of a switch, tables, progress, provenance.

Everything that a person or a model wrote passes `esc`; nothing else on the page builds HTML from data.
Message text itself is not HTML at all: the browser gets it as text (see `assets/chat_log.js`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.words import TERMS, lowest

SIDES = {"small": ("●", "small"), "large": ("◆", "large")}

HOW = {
    "native": ("native", "This model ran every token of the context itself."),
    "mapped": (
        "mapped context",
        "The context came from the other model's KV cache, through the mapper; the answer was run natively.",
    ),
    "prefill": (
        "true prefill",
        "After the switch this model read the whole context again, as without a mapper.",
    ),
    "fallback": (
        "fallback",
        "Mapping was not possible, so this model read the whole context again. The account says why.",
    ),
}

PARTS = (
    ("map_strip", "Strip rotation", "strip"),
    ("map_product", "Matrix products", "product"),
    ("map_rotate", "Rotate", "rotate"),
    ("map", "Mapping", "product"),
    ("anchors", "Anchors, native", "anchors"),
    ("bottom", "Lowest layers, native", "prefill"),
    ("hold_back", "Last tokens, native", "hold"),
    ("ends", "First, rare and last tokens, native", "hold"),
    ("cache", "New cache", "other"),
    ("prefill", "Prefill", "prefill"),
)


def esc(text: object) -> str:
    """Escaped for HTML text and attributes; lone surrogates become a replacement mark."""
    clean = str(text).encode("utf-8", "replace").decode("utf-8")
    return html.escape(clean, quote=True)


def term(word: str, shown: str | None = None) -> str:
    """A word with its plain explanation on hover and on keyboard focus."""
    tip = TERMS[word]
    label = shown or word
    return (
        f'<span class="kv-term" tabindex="0" role="note" aria-label="{esc(label)}: {esc(tip)}">'
        f'{esc(label)}<span class="kv-tip" aria-hidden="true">{esc(tip)}</span></span>'
    )


def number(value: float | int | None, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "–"
    if value and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:,.{digits}f}"


def ms(value: float | None) -> str:
    """Milliseconds, or seconds when they are many."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if abs(value) >= 10 else f"{value:,.1f} ms"


def megabytes(count: float | None) -> str:
    """Bytes as MB or GB."""
    if not count:
        return ""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def side_badge(side: str | None, name: str | None = None) -> str:
    """Which weights: shape, word and colour."""
    if side not in SIDES:
        return f'<span class="kv-badge">{esc(name or "unknown model")}</span>'
    mark, word = SIDES[side]
    tail = f' <span class="kv-badge-name">{esc(name)}</span>' if name else ""
    return f'<span class="kv-badge kv-{side}"><span aria-hidden="true">{mark}</span> {word}{tail}</span>'


def how_badge(how: str | None) -> str:
    """How the message got its context."""
    if how not in HOW:
        return ""
    word, tip = HOW[how]
    return (
        f'<span class="kv-how kv-how-{how}" tabindex="0" role="note" aria-label="{esc(word)}: {esc(tip)}">'
        f'{esc(word)}<span class="kv-tip" aria-hidden="true">{esc(tip)}</span></span>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", numeric: bool = True) -> str:
    """A plain table. Cells are HTML already; the first column is the row's heading."""
    cap = f"<caption>{caption}</caption>" if caption else ""
    ths = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        "<tr>" + f'<th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    kind = " kv-numeric" if numeric else ""
    return (
        f'<div class="kv-scroll" tabindex="0" role="region" aria-label="Table">'
        f'<table class="kv-table{kind}">{cap}<thead><tr>{ths}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def notice(text: str, kind: str = "info") -> str:
    """One sentence in a box; `kind` is info, warn or error. The text is escaped here."""
    mark = "" if kind == "info" else '<b aria-hidden="true">!</b>'
    role = "alert" if kind == "error" else "status"
    return f'<div class="kv-notice kv-{kind}" role="{role}">{mark}<span>{esc(text)}</span></div>'


def progress(text: str, done: float | None = None, total: float | None = None) -> str:
    """A labelled progress bar; without numbers it only says that work goes on."""
    if done is not None and total:
        share = min(max(done / total, 0.0), 1.0)
        bar = f'<progress max="1" value="{share:.4f}" aria-label="{esc(text)}"></progress>'
        tail = f"<span>{share:.0%}</span>"
    else:
        bar = f'<progress aria-label="{esc(text)}"></progress>'
        tail = ""
    return f'<div class="kv-progress" role="status"><span>{esc(text)}</span>{bar}{tail}</div>'


def bar(
    label: str, parts: Sequence[tuple[str, float, str]], scale: float, value: str, extra: str = ""
) -> str:
    """One row of a bar figure. `parts` are (name, amount, css class); `scale` is the amount of a full row."""
    segments = "".join(
        f'<i class="kv-seg kv-seg-{cls}" style="width:{100 * amount / scale:.3f}%" title="{esc(name)}"></i>'
        for name, amount, cls in parts
        if amount > 0 and scale > 0
    )
    return (
        f'<div class="kv-bar {extra}"><span class="kv-bar-label">{label}</span>'
        f'<span class="kv-bar-track" aria-hidden="true">{segments}</span><span '
        f'class="kv-bar-value">{value}</span></div>'
    )


def provenance(result: Any) -> str:
    """The line under every figure: measured here or precomputed, when, on what, how many tokens."""
    origin = getattr(result, "provenance", None)
    if origin is None:
        return ""
    here = origin.origin == "measured here"
    bits = [
        origin.sentence().removesuffix("."),
        f"{origin.source} → {origin.target}",
        origin.measured_on(),
        f"mapper {origin.mapper.removeprefix('sha256:')[:10]}" if origin.mapper else "",
    ]
    line = " · ".join(esc(bit) for bit in bits if bit)
    return f'<p class="kv-provenance"><span aria-hidden="true">{"◉" if here else "○"}</span> {line}</p>'


def account_parts(account: Any) -> list[tuple[str, float, str]]:
    """The parts of a switch's time that the account names, and the rest as "other"."""
    times = account.ms
    parts = [(name, times[key], cls) for key, name, cls in PARTS if times.get(key)]
    rest = times.get("total", 0.0) - sum(part[1] for part in parts)
    if rest > 0.05:
        parts.append(("Other", rest, "other"))
    return parts


def account_view(
    account: Any, from_side: str, to_side: str, saved_ms: float, switches: int, exact: bool
) -> str:
    """The account of the last switch: one sentence, two bars, one table, the sum saved so far."""
    total = account.ms.get("total", 0.0)
    parts = account_parts(account)
    prefill_ms = account.prefill_ms if account.how == "mapped" else None
    scale = max(total, prefill_ms or 0.0, 1e-9)
    measured = account.prefill_source == "measured"
    arrow = '<span aria-hidden="true">→</span>'
    title = f"{side_badge(from_side)} {arrow} {side_badge(to_side)} {how_badge(account.how)}"
    lead = account_sentence(account)
    if not account.tokens:
        return (
            '<section class="kv-account" aria-label="Account of the last switch"><div '
            f'class="kv-account-title">{title}</div>'
            f'<p class="kv-lead">{lead}</p></section>'
        )
    bars = [bar("This switch", parts, scale, ms(total))]
    if prefill_ms is not None:
        label = "True prefill" + ("" if measured else " (estimate)")
        cls = "prefill" if measured else "estimate"
        bars.append(
            bar(
                label, [("True prefill", prefill_ms, cls)], scale, ("" if measured else "≈ ") + ms(prefill_ms)
            )
        )
    legend = "".join(
        f'<li><i class="kv-key kv-seg-{cls}" aria-hidden="true"></i>{esc(name)} {ms(value)}</li>'
        for name, value, cls in parts
    )
    counts = [
        ("already held by the target", account.reused, "–"),
        (
            term("mapped"),
            account.mapped,
            ms(_sum(account.ms, "map_strip", "map_product", "map_rotate", "map")),
        ),
        (
            f"run {term('native', 'natively')}",
            account.native,
            ms(_sum(account.ms, "anchors", "bottom", "hold_back", "ends", "prefill")),
        ),
    ]
    if account.mapped_ahead:
        counts.insert(1, ("of these, mapped before the switch", account.mapped_ahead, ms(account.ahead_ms)))
    rows = [(name, number(int(tokens)), time) for name, tokens, time in counts]
    rows.append(("<b>context</b>", f"<b>{number(int(account.tokens))}</b>", f"<b>{ms(total)}</b>"))
    numbers = table(["Tokens", "count", "time"], rows)
    reason = notice(f"Fallback: {account.reason}", "warn") if account.reason else ""
    sum_line = ""
    if switches:
        word = "switch" if switches == 1 else "switches"
        sign = "saved" if saved_ms >= 0 else "lost"
        about = "" if exact else " (with estimates)"
        sum_line = f'<p class="kv-sum">So far {switches} {word} {sign} <b>{ms(abs(saved_ms))}</b>{about}</p>'
    setting = f"{account.anchors} {term('anchors')}, {account.hold_back} {term('hold-back')}"
    if account.reread:
        setting += f", {number(int(account.reread))} rare tokens {term('re-read')}"
    if account.native_layers:
        setting += f", {term('native layers', lowest(account.native_layers))} run natively"
    return (
        '<section class="kv-account" aria-label="Account of the last switch"><div '
        f'class="kv-account-title">{title}</div>'
        f'<p class="kv-lead">{lead}</p>{reason}<div class="kv-bars">{"".join(bars)}</div><ul '
        f'class="kv-legend">{legend}</ul>'
        f'{numbers}<p class="kv-note">{setting}</p>{sum_line}</section>'
    )


def account_sentence(account: Any) -> str:
    """What the account says, in words; also what a screen reader hears instead of the bars."""
    total = account.ms.get("total", 0.0)
    if not account.tokens:
        return "Nothing had been said yet, so there was nothing to carry over."
    if account.how == "mapped":
        new = account.mapped + account.native
        if new <= 1 and account.reused:
            text = f"Nothing to carry over: the model already held all {number(int(account.tokens))} tokens"
        else:
            mapped, tokens = number(int(account.mapped)), number(int(account.tokens))
            text = f"{mapped} of {tokens} tokens came from the other model's cache"
        text += f"; ready after <b>{ms(total)}</b>."
    else:
        text = f"The model read {number(int(account.native))} tokens itself in <b>{ms(total)}</b>."
    if account.how == "mapped" and account.prefill_ms is not None and total > 0:
        kind = "took" if account.prefill_source == "measured" else "would take about"
        ratio = account.prefill_ms / total
        text += f" Reading everything again {kind} <b>{ms(account.prefill_ms)}</b>"
        text += f" ({ratio:.1f}× as long)." if ratio >= 1 else " (less: at this length mapping does not pay)."
    return text


def _sum(times: dict[str, float], *keys: str) -> float | None:
    found = [times[key] for key in keys if key in times]
    return sum(found) if found else None


def meter(used: int, limit: int | None) -> str:
    """How full the context is; the smaller limit of the two models rules."""
    if not limit:
        return f'<div class="kv-meter"><span>{number(used)} tokens of context</span></div>'
    share = min(used / limit, 1.0)
    level = " kv-meter-full" if share > 0.9 else ""
    text = f"{number(used)} of {number(limit)} tokens of context used"
    return (
        f'<div class="kv-meter{level}"><span>{text}</span>'
        f'<span role="meter" aria-valuemin="0" aria-valuemax="{limit}" aria-valuenow="{used}" '
        f'aria-label="{text}"><i style="width:{share:.2%}"></i></span></div>'
    )
