"""The Side by side tab: one context, three columns that stream together, and how far they drift apart."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import gradio as gr

from workbench.ui.engine import SIDES, Engine
from workbench.ui.export import figure_export
from workbench.ui.markup import esc, ms, notice, number, progress, provenance, side_badge, term
from workbench.ui.measuring import (
    QUICK,
    direction_choice,
    measure,
    run_and_stop,
    saved,
    visit_of,
    wire_job,
)
from workbench.ui.theme import html

TITLES = {
    "mapped": ("Mapped", "the target on the mapped cache"),
    "prefill": ("True prefill", "the target after reading the whole context: the reference"),
    "source": ("Source alone", "no switch at all"),
}
SAMPLE = (
    "The lighthouse had stood on the rock for a hundred and forty years before anyone thought to ask who "
    "had built it. "
    "The villagers knew the keeper, a quiet man who came ashore twice a month for flour and lamp oil, and "
    "they knew the "
    "light, which had never once failed. But the question of the builder was raised by a child at school, "
    "and nobody could "
    "answer. So the teacher wrote to the county archive, and after three weeks a letter came back. It said "
    "that"
)
CONTEXT_END = 160  # characters


class SideTab:
    """Handlers and layout of the comparison."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def build(self, key: gr.State) -> Any:
        """Lays the tab out; returns the tab, so that the page can open it."""
        with gr.Tab("Side by side", id="side") as tab:
            html(
                '<div class="kv-intro"><p>The same text, continued three ways, always with the most likely '
                "token. The first column reads the "
                f"{term('mapped')} cache, the second has done a true {term('prefill')}, the third is the "
                "other model alone. "
                f"Tokens that differ from the true prefill are underlined.</p></div>"
            )
            with gr.Row():
                with gr.Column(scale=7, min_width=320):
                    self.text = gr.Textbox(
                        SAMPLE, label="Context", lines=6, max_lines=12, elem_id="kv-side-text"
                    )
                    with gr.Row():
                        self.use_chat = gr.Button("Use the current chat", size="sm", min_width=120)
                        self.use_sample = gr.Button("Use a held-out sample", size="sm", min_width=120)
                with gr.Column(scale=4, min_width=280):
                    self.direction = direction_choice("side")
                    self.tokens = gr.Slider(8, 256, 48, step=8, label="Tokens to write")
                    self.as_message = gr.Checkbox(
                        False, label="Answer it as a message", info="Else the text is simply continued."
                    )
                    with gr.Accordion("Anchors and hold-back", open=False):
                        self.recommended = gr.Checkbox(True, label="As the mapper recommends")
                        self.anchors = gr.Slider(0, 64, 4, step=1, label="Anchors")
                        self.hold_back = gr.Slider(1, 256, 16, step=1, label="Hold-back")
            self.run, self.stop = run_and_stop("side", "Write all three", "primary")
            self.status = html("", elem_id="kv-side-status")
            self.columns = html(columns_view(None), elem_id="kv-side-columns")
            self.summary = html("", elem_id="kv-side-summary")
            self.figure = gr.Plot(show_label=False, visible=False, elem_id="kv-side-figure")
            self.origin = html("", elem_id="kv-side-origin")
            figure_export(self.engine, "compare").build(key, [self.direction])
        api = {"api_visibility": self.engine.settings.api_visibility}
        shown = [self.status, self.columns, self.summary, self.figure, self.origin]
        inputs = [
            key,
            self.text,
            self.direction,
            self.tokens,
            self.as_message,
            self.recommended,
            self.anchors,
            self.hold_back,
        ]
        wire_job(self.engine, key, self.run, self.stop, self.status, self.compare, inputs, shown, "compare")
        self.use_chat.click(
            self.chat_text, [key], [self.text, self.status], api_name="chat_text", **QUICK, **api
        )
        self.use_sample.click(
            self.sample, [key, self.text], [self.text, self.status], api_name="sample_text", **QUICK, **api
        )
        for event in (tab.select, self.direction.change):
            event(self.open, [key, self.direction], shown, api_name="open_side", **QUICK, **api)
        return tab

    def open(self, key: str | None, direction: str) -> dict[Any, Any]:
        """What is there already: this visitor's last comparison, or the precomputed one."""
        result, _ = saved(self.engine, key, direction, "compare")
        return {
            **self.show(result),
            **({} if result is not None else {self.columns: columns_view(None, direction)}),
        }

    def compare(
        self,
        key: str | None,
        text: str,
        direction: str,
        tokens: float,
        as_message: bool,
        recommended: bool,
        anchors: float,
        hold_back: float,
    ) -> Generator[dict[Any, Any], None, None]:
        """Writes the three columns, streaming."""
        text = text or ""
        limit = self.engine.settings.max_prompt_chars
        if len(text) > limit:
            yield {
                self.status: notice(
                    f"The context has {len(text):,} characters; at most {limit:,} are accepted.", "warn"
                )
            }
            return
        m, h = (None, None) if recommended else (int(anchors), int(hold_back))

        def start(host: Any, should_stop: Any) -> Iterator[Any]:
            from workbench.lab.compare import stream

            return stream(host, direction, text, int(tokens), m, h, should_stop, chat=as_message)

        for status, result, finished in measure(self.engine, key, direction, "compare", start):
            if result is None:
                yield {self.status: status}
            elif finished:
                yield {**self.show(result), self.status: status}
            else:
                written = max(map(len, result.token_ids.values()))
                yield {
                    self.status: progress(f"Token {written} of {int(tokens)}", written, int(tokens)),
                    self.columns: columns_view(result),
                }

    def show(self, result: Any) -> dict[Any, Any]:
        """The whole tab for a complete result."""
        if result is None:
            return {
                self.status: "",
                self.columns: columns_view(None),
                self.summary: "",
                self.figure: gr.update(visible=False),
                self.origin: "",
            }
        from workbench import plots

        figure = plots.comparison(result)
        return {
            self.status: "",
            self.columns: columns_view(result),
            self.summary: context_view(result) + summary_view(result),
            self.figure: gr.update(value=figure, visible=True),
            self.origin: f'<p class="kv-sr">{esc(plots.describe(result))}</p>{provenance(result)}',
        }

    def chat_text(self, key: str | None) -> tuple[Any, str]:
        """The current chat as plain text."""
        _, visit = visit_of(self.engine, key)
        if visit.chat is None or not visit.chat.messages:
            return gr.skip(), notice("There is no chat yet; write something in the Chat tab first.")
        lines = [f"{message.role}: {message.text}" for message in list(visit.chat.messages)]
        return "\n\n".join(lines), ""

    def sample(self, key: str | None, now: str) -> tuple[Any, str]:
        """The next held-out document, cut to a comfortable length."""
        del key
        from workbench.errors import WorkbenchError
        from workbench.lab.corpus import documents

        try:
            texts = [document.text[:1800] for document in documents("heldout", 24)]
        except WorkbenchError as error:
            return gr.skip(), notice(str(error), "warn")
        at = texts.index(now) + 1 if now in texts else 0
        return texts[at % len(texts)], ""


def columns_view(result: Any, direction: str = "up") -> str:
    """Three columns; tokens that differ from the reference are marked by underline and colour."""
    cards = []
    source, target = SIDES[result.provenance.direction if result is not None else direction]
    for name, (title, what) in TITLES.items():
        side = source if name == "source" else target
        if result is None:
            model, text = "", '<span class="kv-note">The text will appear here.</span>'
        else:
            model = f" · {esc(result.names[name])}"
            different = set(result.differing(name)) if name != "prefill" else set()
            text = "".join(
                f'<mark class="kv-diff">{esc(piece)}</mark>' if index in different and piece else esc(piece)
                for index, piece in enumerate(result.pieces[name])
            )
            count = len(result.token_ids[name])
            text += (
                f'<span class="kv-sr"> ({len(different)} of {count} tokens differ from the true '
                "prefill)</span>"
                if different
                else ""
            )
        cards.append(
            f'<section class="kv-column kv-col-{name} kv-top-{side}" '
            f'aria-label="{title}"><h2>{title}</h2><p>{side_badge(side)} {esc(what)}{model}</p>'
            f'<div class="kv-text" dir="auto">{text}</div></section>'
        )
    return f'<div class="kv-columns">{"".join(cards)}</div>'


def context_view(result: Any) -> str:
    """The end of the text that the columns continue; the field above may hold another one by now."""
    end = " ".join(result.context.split())
    end = f"… {end[-CONTEXT_END:]}" if len(end) > CONTEXT_END else end
    return f'<p class="kv-note" dir="auto">Continued from: “{esc(end)}”</p>' if end else ""


def summary_view(result: Any) -> str:
    """The numbers of a comparison: mapped against the true prefill, the source alone beside it."""

    def first(column: str) -> str:
        at = result.first_divergence(column)
        return "none" if at is None else f"token {at + 1}"

    def share(value: float) -> str:
        return "–" if math.isnan(value) else f"{value:.0%}"

    account = result.account
    total, prefill = account.get("ms", {}).get("total"), account.get("prefill_ms")
    speed = f"{ms(total)} against {ms(prefill)}" if total and prefill else "–"
    stats = [
        (
            number(result.mean_kl()),
            f"mean {term('KL')}, mapped <br>(source alone {number(result.mean_kl('source'))})",
        ),
        (
            share(result.top1_share()),
            f"same most likely token ({term('top-1')})<br>"
            f"(source alone {share(result.top1_share('source'))})",
        ),
        (first("mapped"), f"first difference<br>(source alone {first('source')})"),
        (speed, f"handoff against true prefill<br>({number(result.context_tokens)} tokens of context)"),
    ]
    return (
        '<div class="kv-stats">'
        + "".join(f'<div class="kv-stat"><b>{value}</b><span>{what}</span></div>' for value, what in stats)
        + "</div>"
    )
