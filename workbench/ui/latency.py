"""The Latency tab: what a switch costs over context lengths, against reading everything again."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import gradio as gr

from workbench.ui.engine import Engine
from workbench.ui.export import figure_export
from workbench.ui.markup import esc, ms, notice, number, provenance, table, term
from workbench.ui.measuring import (
    QUICK,
    direction_choice,
    measure,
    nothing_shown,
    run_and_stop,
    saved,
    wire_job,
)
from workbench.ui.theme import html

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
PAPER = "arXiv 2608.03893"
PUBLISHED = (
    ("small → large, 32,768 tokens", "277.6 ms", "6,975.3 ms", "25.1×"),
    ("large → small, 32,768 tokens", "427.1 ms", "2,952.7 ms", "6.9×"),
    ("64 to 32,768 tokens, 70 cells", "", "", "2.7× to 25.1×"),
)
"""What the paper says for 8 H100: what was timed, mapping, prefill, how many times faster."""


class LatencyTab:
    """Handlers and layout of the latency figure."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def build(self, key: gr.State) -> Any:
        """Lays the tab out; returns the tab."""
        with gr.Tab("Latency", id="latency") as tab:
            html(
                '<div class="kv-intro"><p>How long until the new model is ready to write? '
                f"<b>Handoff</b> is everything that a switch does: {term('anchors')}, mapping, "
                f"{term('hold-back')}, first logits. "
                "<b>True prefill</b> is reading the whole context again. Medians; the repeats of both take "
                "turns.</p></div>"
            )
            with gr.Row():
                self.direction = direction_choice("latency")
                self.lengths = gr.CheckboxGroup(
                    [(f"{n:,}", n) for n in LENGTHS],
                    value=[64, 256, 1024],
                    label="Context lengths to measure, in tokens",
                    elem_id="kv-latency-lengths",
                )
                self.repeats = gr.Slider(9, 25, 9, step=2, label="Repeats")
            self.run, self.stop = run_and_stop("latency")
            self.status = html("", elem_id="kv-latency-status")
            self.lead = html("", elem_id="kv-latency-lead")
            self.figure = gr.Plot(show_label=False, visible=False, elem_id="kv-latency-figure")
            self.origin = html("", elem_id="kv-latency-origin")
            figure_export(self.engine, "latency").build(key, [self.direction])
            self.numbers = html("", elem_id="kv-latency-numbers")
            self.parts = gr.Plot(show_label=False, visible=False, elem_id="kv-latency-parts")
            self.more = html("", elem_id="kv-latency-more")
        api = {"api_visibility": self.engine.settings.api_visibility}
        shown = [self.lead, self.figure, self.origin, self.status, self.numbers, self.parts, self.more]
        for event in (tab.select, self.direction.change):
            event(self.open, [key, self.direction], shown, api_name="open_latency", **QUICK, **api)
        wire_job(
            self.engine,
            key,
            self.run,
            self.stop,
            self.status,
            self.measure,
            [key, self.direction, self.lengths, self.repeats],
            shown,
            "measure_latency",
        )
        return tab

    def open(self, key: str | None, direction: str) -> dict[Any, Any]:
        """The saved measurement of a direction."""
        result, why = saved(self.engine, key, direction, "latency")
        if result is None:
            texts = (self.lead, self.origin, self.numbers, self.more)
            return {**nothing_shown(texts, (self.figure, self.parts)), self.status: notice(why)}
        return {**self.show(result), self.status: ""}

    def measure(
        self, key: str | None, direction: str, lengths: list[int], repeats: float
    ) -> Generator[dict[Any, Any], None, None]:
        """Measures here, with progress; the figure grows with each length."""
        chosen = [int(n) for n in lengths or () if int(n) in LENGTHS]
        if not chosen:
            yield {self.status: notice("Choose at least one context length.", "warn")}
            return

        def start(host: Any, should_stop: Any) -> Iterator[Any]:
            from workbench.lab.latency import stream

            return stream(host, direction, chosen, int(repeats), should_stop=should_stop)

        for status, result, finished in measure(self.engine, key, direction, "latency", start):
            if result is not None and result.cells and finished:
                yield {**self.show(result), self.status: status}
            else:
                yield {self.status: status}

    def show(self, result: Any) -> dict[Any, Any]:
        """Figure, sentence, table, origin."""
        from workbench import plots

        return {
            self.lead: lead(result),
            self.figure: gr.update(value=plots.latency(result), visible=True),
            self.origin: f'<p class="kv-sr">{esc(plots.describe(result))}</p>{provenance(result)}',
            self.numbers: numbers(result),
            self.parts: gr.update(value=plots.latency_parts(result), visible=bool(result.cells)),
            self.more: f'<p class="kv-sr">{esc(plots.describe_parts(result))}</p>'
            + besides(result)
            + published(result),
        }


def lead(result: Any) -> str:
    """The honest sentence: the whole handoff, what is not in it, and where it starts to pay."""
    if not result.cells:
        return ""
    cell = next((cell for cell in result.cells if cell.tokens == 1024), result.cells[-1])
    sooner = "faster" if cell.ratio >= 1 else "of the speed: here mapping does not pay"
    text = (
        f"At {number(cell.tokens)} tokens the whole handoff takes <b>{ms(cell.handoff_ms)}</b> and a true "
        f"prefill <b>{ms(cell.prefill_ms)}</b>: "
        f"<b>{cell.ratio:.1f}×</b> {sooner}. "
    )
    even = result.break_even
    if even is None:
        text += "Among the lengths measured, no handoff is faster than prefill. "
    elif even > 0:
        text += f"It pays from about {number(int(even))} tokens on. "
    if result.load_ms is not None:
        text += f"Not in these times: reading and checking the mapper once, {ms(result.load_ms)}"
        if not result.load_is_cold:
            text += " (from memory: the system would not let go of the file)."
        else:
            text += f" ({ms(result.load_warm_ms)} from memory)." if result.load_warm_ms is not None else "."
    return f'<p class="kv-lead">{text}</p>'


def numbers(result: Any) -> str:
    """All cells."""
    rows = [
        (
            number(cell.tokens),
            ms(cell.map_ms),
            ms(cell.handoff_ms),
            ms(cell.ahead_handoff_ms),
            ms(cell.prefill_ms),
            ms(cell.prefill_first_ms),
            f"{cell.ratio:.1f}×",
            ms(cell.net_saving_ms),
        )
        for cell in result.cells
    ]
    head = [
        "Tokens",
        "mapping alone",
        "whole handoff",
        "earlier turns mapped ahead",
        "prefill, no head",
        "prefill to first token",
        "prefill / handoff",
        "net saving",
    ]
    share = result.gemm_fraction
    foot = (
        f"{result.repeats} repeats per length; {result.anchors} anchors, {result.hold_back} held back. "
        + (f"Bare matrix products are {share:.0%} of the mapping." if share == share else "")
    )
    return (
        table(head, rows)
        + f'<p class="kv-note">{foot} “No head” leaves out the language-model head, as published figures do; '
        "the handoff includes it.</p>"
    )


def besides(result: Any) -> str:
    """What the net saving subtracts, and what else was measured."""
    if not result.cells:
        return ""
    cell = result.cells[-1]
    terms, at = cell.terms, f"at {number(cell.tokens)} tokens"
    way = {"memory": "through shared memory", "file": "through a file"}
    facts = [
        "<b>Net saving</b>: prefill − handoff − move between devices − delivery to another process "
        f"({way.get(terms.delivered, 'not counted: the cache stays here')}) − the mapper's load spread over "
        f"{number(terms.handoffs)} handoffs − prefills of rejected handoffs ({terms.rejection_rate:.0%} rejected). "
        f"Per accepted handoff {at}: {ms(cell.accepted_ms)}."
    ]
    if cell.turn_tokens:
        facts.append(
            f"<b>Mapped ahead</b> {at}: when all but the last {number(cell.turn_tokens)} tokens were mapped turn by turn "
            f"({ms(cell.ahead_ms)} before the click), the first token is ready {ms(cell.ahead_handoff_ms)} after the "
            f"click instead of {ms(cell.handoff_ms)}."
        )
    for name, time in cell.deliver_ms.items():
        facts.append(
            f"<b>Delivery {way[name]}</b> {at}: {number(cell.cache_bytes)} bytes in {ms(time)}; the receiver can begin "
            f"after {ms(cell.deliver_first_ms[name])}, with the first layer."
        )
    if cell.memory_over is not None:
        over = ", ".join(
            f"{each.memory_over:.2f} at {number(each.tokens)}" for each in result.cells if each.memory_over
        )
        facts.append(f"<b>Memory</b> at the worst moment of a switch, over both caches: {over} tokens.")
    if result.scaling_exponent == result.scaling_exponent:
        facts.append(
            f"<b>Growth</b>: the handoff grows with the {result.scaling_exponent:.2f}th power of the length, mapping alone "
            f"with the {result.map_exponent:.2f}th (1: linear)."
        )
    if result.decode:
        facts.append(
            f"<b>Decoding</b>: {result.decode['ours']:.0f} tokens a second, {result.decode['ratio']:.2f} of "
            f"transformers' own loop."
        )
    return '<ul class="kv-facts">' + "".join(f"<li>{fact}</li>" for fact in facts) + "</ul>"


def published(result: Any) -> str:
    """The paper's figures beside ours, each labelled as what it is."""
    rows = [(f"published: {what}", mapping, prefill, times) for what, mapping, prefill, times in PUBLISHED]
    if result.cells:
        cell = result.cells[-1]
        origin = f"ours, {esc(result.provenance.origin)}: {number(cell.tokens)} tokens"
        faster = cell.prefill_ms / cell.map_ms
        rows.insert(0, (f"{origin}, mapping alone", ms(cell.map_ms), ms(cell.prefill_ms), f"{faster:.1f}×"))
        rows.insert(
            1, (f"{origin}, whole handoff", ms(cell.handoff_ms), ms(cell.prefill_ms), f"{cell.ratio:.1f}×")
        )
    head = ["What", "mapping or handoff", "true prefill", "times faster"]
    return (
        table(head, rows, caption=f"Beside the published figures ({esc(PAPER)})")
        + '<p class="kv-note">The published rows were not measured by this program: other models, 8 H100, without the '
        "language-model head and without shipping the cache. They compare with the row “mapping alone”.</p>"
    )
