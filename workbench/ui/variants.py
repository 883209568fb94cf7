"""In the Quality tab: does a head metric foretell what a mapper keeps? One dot a pair, direction and mapper variant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

from workbench.errors import WorkbenchError
from workbench.lab.results.variants import CLOSENESS, OUTCOMES, PAPER, RETENTION
from workbench.ui.engine import Engine
from workbench.ui.export import FIGURE_FORMATS, MIMES, Export, file_stem, report_file, said
from workbench.ui.gallery import measured_pairs
from workbench.ui.markup import esc, notice, number, provenance, table, term
from workbench.ui.measuring import QUICK, saved, visit_of
from workbench.ui.theme import html

HEADING = '<h2 class="kv-section">Does a diagnostic foretell what is kept?</h2>'
EMPTY = (
    '<p class="kv-lead">Not measured yet. <code>python -m workbench variants --save</code> fits some 20 mappers of this '
    "pair from one reading, and holds what the head metrics say of each against what the target keeps.</p>"
)
KEPT = {RETENTION: "Retention in recall tasks", CLOSENESS: "KL of following text"}


class VariantsPart:
    """The figure, its menus and its table."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def build(self, key: gr.State, direction: Any) -> None:
        """Lays the part out, inside the tab; `direction` is the tab's."""
        self.lead = html("", elem_id="kv-variants-lead")
        with gr.Row(visible=False) as self.menus:
            self.metric = gr.Dropdown([], value=None, label="Head metric", elem_id="kv-variants-metric")
            self.outcome = gr.Radio(
                [(title, name) for name, title in KEPT.items()],
                value=RETENTION,
                label="Against",
                elem_id="kv-variants-outcome",
            )
        self.figure = gr.Plot(show_label=False, visible=False, elem_id="kv-variants-figure")
        self.origin = html("", elem_id="kv-variants-origin")
        variants_export(self.engine).build(key, [direction, self.metric, self.outcome])
        self.table = html("", elem_id="kv-variants-table")

    def wire(self, key: gr.State, tab: Any) -> None:
        """Opens with the tab; the direction does not matter, since both are in the figure."""
        api = {"api_visibility": self.engine.settings.api_visibility}
        shown = [self.lead, self.menus, self.metric, self.outcome, self.figure, self.origin, self.table]
        for event in (tab.select, self.metric.input, self.outcome.input):
            event(
                self.open, [key, self.metric, self.outcome], shown, api_name="open_variants", **QUICK, **api
            )

    def open(self, key: str | None, metric: str | None, outcome: str) -> dict[Any, Any]:
        """Everything that was saved, with the chosen metric; the best one at first."""
        groups, problems = everything(self.engine, key)
        told = "".join(notice(problem, "warn") for problem in problems)
        if not groups:
            return {
                self.lead: f"{HEADING}{EMPTY}{told}",
                self.menus: gr.update(visible=False),
                self.figure: gr.update(visible=False),
                self.origin: "",
                self.table: "",
            }
        from workbench.plots.variants import describe_variants, variants

        outcome = outcome if outcome in OUTCOMES else RETENTION
        metric, choices = choose(groups, metric, outcome)
        sentence = describe_variants(groups, metric, outcome)
        return {
            self.lead: lead(groups, outcome) + told,
            self.menus: gr.update(visible=True),
            self.metric: gr.update(choices=choices, value=metric),
            self.outcome: gr.update(value=outcome),
            self.figure: gr.update(value=variants(groups, metric, outcome), visible=True),
            self.origin: f'<p class="kv-sr">{esc(sentence)}</p>' + "".join(map(provenance, groups)),
            self.table: view(groups, outcome),
        }


def everything(engine: Engine, key: str | None) -> tuple[list[Any], list[str]]:
    """The saved variants of all pairs and directions, the visitor's own pair among them; and what could not be read."""
    from workbench.lab.provenance import load_precomputed

    _, visit = visit_of(engine, key)
    own = engine.look(visit).ref
    found, problems = [], []
    for direction in ("up", "down"):
        result, _ = saved(engine, key, direction, "variants")
        if result is not None:
            found.append(result)
    for pair, direction, folder in measured_pairs():
        if pair.name == own.name:
            continue
        try:
            result = load_precomputed(pair.name, direction, "variants", folder)
        except WorkbenchError as error:
            problems.append(engine.sentence(error))
            continue
        if result is not None:
            found.append(result)
    return found, problems


def choose(groups: Sequence[Any], metric: str | None, outcome: str) -> tuple[str, list[tuple[str, str]]]:
    """The metric to show, and the menu: the most telling first, and marked as such."""
    from workbench.lab.results import METRICS
    from workbench.lab.results.variants import best, correlations
    from workbench.plots.variants import first_metric, together

    found = correlations(together(groups), outcome)
    winner = best(found)
    choices = [
        (METRICS[name].title + (" – foretells it best" if name == winner else ""), name) for name in found
    ]
    return (metric if metric in found else first_metric(groups, outcome)), choices


def lead(groups: Sequence[Any], outcome: str) -> str:
    """What it is for, and which metric does it best."""
    from workbench.lab.results import METRICS
    from workbench.lab.results.variants import best, correlations
    from workbench.plots.variants import together

    found = correlations(together(groups), outcome)
    winner = best(found)
    text = (
        f"A head metric is cheap; whether it means anything shows only over many mappers. Every dot is one "
        f"{term('mapper variant')}, measured on held-out texts: across, what the metric says; up, what the target keeps. "
        "Hollow dots are mappers as they are used, with rare tokens re-read: no head metric sees that, so they do not "
        "count."
    )
    if winner:
        text += (
            f" What foretells {'retention' if outcome == RETENTION else 'the KL'} best here is "
            f"<b>{esc(METRICS[winner].title)}</b> ({term('correlation', 'r')} "
            f"{found[winner].pearson.value:.2f} over {found[winner].n} mappers)."
        )
    else:
        text += " There are too few mappers here to say which metric foretells it."
    return f'{HEADING}<p class="kv-lead">{text}</p>'


def view(groups: Sequence[Any], outcome: str) -> str:
    """r of every metric, over all mappers together and of each pair and direction; the paper's beside it."""
    from workbench.lab.results import METRICS
    from workbench.lab.results.variants import correlations
    from workbench.plots.variants import name_of, together

    found = correlations(together(groups), outcome)
    single = [correlations(group.variants, outcome) for group in groups] if len(groups) > 1 else []
    rows = [
        (
            f"<b>{esc(METRICS[name].title)}</b><br><span class='kv-note'>{esc(METRICS[name].meaning)} "
            f"{'More' if METRICS[name].better == 'high' else 'Less'} is better.</span>",
            r(each.pearson),
            r(each.spearman),
            *(r(other[name].pearson) if name in other else "–" for other in single),
        )
        for name, each in found.items()
    ]
    n = max((each.n for each in found.values()), default=0)
    head = [
        "Head metric", f"{term('correlation', 'r')}, {n} mappers", term("rank correlation"),
        *(f"r, {esc(name_of(group))}" for group in (groups if single else ())),
    ]  # fmt: skip
    against = "retention" if outcome == RETENTION else "the KL with its sign turned, so that more is better"
    caption = f"Against {against}; with 95 % intervals over draws of mappers. The most telling one is first."
    return table(head, rows, caption) + f'<p class="kv-note">{PUBLISHED} {measured_on(groups)}</p>'


PUBLISHED = (
    f"The paper (arXiv 2608.03893), not measured here: r of R² with retention {PAPER['r2']:.2f}, of attention-output "
    f"cosine {PAPER['cosine']:+.2f}; other models, other tasks."
)


def measured_on(groups: Sequence[Any]) -> str:
    """What the figures were measured on, and what made the answers count."""
    from workbench.lab.results import TASKS
    from workbench.plots.variants import name_of

    told = []
    for group in groups:
        counts = group.counts
        tasks = ", ".join(
            f"{counts[task]} items of {TASKS[task].title.lower()}"
            + (
                f" (native {group.native[task].value:.0%}, source {group.source[task].value:.0%}, no context "
                f"{group.no_context[task].value:.0%}{'' if yes else '; the context does not matter, so it does not count'})"
            )
            for task, yes in group.informative.items()
        )
        told.append(
            f"{esc(name_of(group))}: heads on {number(counts['head_tokens'])} tokens, KL on "
            f"{number(counts['following_tokens'])}, retention on {tasks}; fitted on {number(group.sequences)} pieces of "
            "text."
        )
    return " ".join(told)


def r(figure: Any) -> str:
    """r with its interval."""
    value, low, high = (number(x, 2) for x in (figure.value, figure.low, figure.high))
    return f"{value} <span class='kv-note'>[{low}, {high}]</span>"


def variants_export(engine: Engine) -> Export:
    """The row under the figure: what it shows, which is of all pairs and directions; the report is of one."""

    def make(
        key: str | None, direction: str, metric: str | None, outcome: str, *, format: str
    ) -> dict[str, Any]:
        groups, _ = everything(engine, key)
        if not groups:
            return said("No mapper variants were measured.")
        if format == "report":
            return report_file(engine, visit_of(engine, key)[1], direction)
        outcome = outcome if outcome in OUTCOMES else RETENTION
        return variants_file(groups, choose(groups, metric, outcome)[0], outcome, format)

    return Export(engine, FIGURE_FORMATS, make, "Save this", "variants")


def variants_file(groups: Sequence[Any], metric: str, outcome: str, format: str) -> dict[str, Any]:
    """The figure in one format, as the browser saves it."""
    from workbench import report
    from workbench.lab import tables
    from workbench.plots.variants import describe_variants, variants

    stem = file_stem("variants", metric, outcome)
    if format == "json":
        data = {"results": [group.to_json() for group in groups]}
        text = json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False)
        return {"name": "variants.json", "mime": MIMES["json"], "text": text}
    if format == "csv":
        parts = [tables.rows(group) for group in groups]
        head = list(dict.fromkeys(name for names, _ in parts for name in names))
        body = [
            [dict(zip(names, row, strict=True)).get(name) for name in head]
            for names, rows in parts
            for row in rows
        ]
        return {"name": "variants.csv", "mime": MIMES["csv"], "text": tables.csv_text(head, body)}
    figure = report.on_paper(variants(groups, metric, outcome))
    if format == "html":
        sentence = describe_variants(groups, metric, outcome)
        text = report.figure_page(figure, sentence, groups[0], report.MARKER)
        return {"name": f"{stem}.html", "mime": MIMES["html"], "text": text, "plotly": True}
    return {"name": f"{stem}.{format}", "format": format, "figure": figure.to_json(), "width": 1000,
            "height": int(figure.layout.height)}  # fmt: skip
