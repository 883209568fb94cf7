"""All saved results of a pair as one HTML file: opens offline, prints, and can stand beside another run's.

    results, manifest -> `gather` -> `Run` -> `render` -> text of one file

The file carries its data too (in `<script id="kv-data">`), so a report can be compared with an earlier
report as well as with a folder of results. Imports no torch.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import plots
from workbench.errors import InputError
from workbench.lab import tables
from workbench.lab.results import KINDS, HeadMaps, Recording, as_precomputed
from workbench.lab.summary import KeyFigure, Run, gather, key_figures
from workbench.words import ARROWS, TERMS

__all__ = ["CITATIONS", "MARKER", "figure_page", "gather", "load_other", "on_paper", "render"]

MARKER = "/*plotly.js*/"
"""Stands where the drawing library goes, when the browser puts it in (it has it already)."""

CITATIONS = (
    "Cross-Model KV Cache Transfer in LLM Families: A Closed-Form Linear Mapping for Prefill Reuse. "
    "arXiv 2608.03893, 2026. The method that is reproduced and extended here.",
    "Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks. "
    "arXiv 2309.17453, 2023. Why the first tokens (anchors) are special.",
    "Allal et al.: SmolLM2: When Smol Goes Big – Data-Centric Training of a Small Language Model. "
    "arXiv 2502.02737, 2025. The embedded pair's large model.",
    "Su et al.: RoFormer: Enhanced Transformer with Rotary Position Embedding. arXiv 2104.09864, 2021.",
)
TITLES = {
    "quality": "What mapping keeps",
    "latency": "What the switch costs",
    "heads": "Where the error sits",
    "compare": "Side by side",
    "drift": "Repeated switches",
    "patch": "What single heads cost",
    "mappers": "Mappers beside each other",
    "variants": "Which diagnostic foretells what is kept",
    "cascade": "When the large model takes over",
}
LONGEST_TABLE = 400
LONGEST_PRINTED = 60  # rows of a table that is unfolded on paper
LONGEST_WORD = 24
WORDS = ("KV cache", "prefill", "mapped", "anchors", "hold-back", "R²", "attention-output cosine", "KL", "top-1",
         "CE", "gap recovered", "held out", "control")  # fmt: skip

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def render(run: Run, other: Run | None = None, other_name: str = "other", library: str | None = None) -> str:
    """The report.

    Args:
        run: what is reported.
        other: another run, whose figures stand beside these.
        other_name: what to call it.
        library: text of the drawing library; None for plotly's own, `MARKER` to have it put in later.

    Returns:
        The text of one HTML file that asks for nothing from outside.
    """
    results = run.results
    if not results:
        raise InputError(
            f"Nothing was saved for {run.title}, {run.direction}.",
            "Measure first: heads, bench, evaluate and compare with --save.",
        )
    figures: list[str] = []
    sections = [_head(run, other, other_name), _keys(results, other, other_name)]
    for kind, result in results.items():
        theirs = other.results.get(kind) if other else None
        sections.append(_result(kind, result, figures, theirs, other_name if other else ""))
    sections += [_mapping(run.manifest), _environment(results), _glossary(), _citations()]
    body = "".join(sections) + _data(run)
    return _page(f"{run.title}, {run.direction}", body, figures, library)


def figure_page(figure: Any, sentence: str, result: Any, library: str | None = None) -> str:
    """One figure as a page of its own, with its origin under it."""
    drawing: list[str] = []
    body = _figure(figure, drawing) + f"<p>{esc(sentence)}</p>{_origin(result)}"
    return _page(sentence[:80], f"<section>{body}</section>", drawing, library)


def on_paper(figure: Any) -> Any:
    """The same figure with dark text on white, for a file that no theme surrounds; the given one is changed."""
    figure.update_layout(paper_bgcolor="#ffffff", plot_bgcolor="#ffffff", font={"color": "#1f2733"})
    figure.update_layout(title_font_color="#1f2733")
    figure.update_annotations(font_color="#1f2733")
    return figure


def load_other(place: Path, run: Run) -> Run:
    """The run to compare with.

    Args:
        place: a folder with saved results, or an earlier report.
        run: the one that is reported; lends its names to a folder.

    Raises:
        InputError: there is nothing that can be compared.
    """
    if place.is_dir():
        found = gather(run.pair, run.title, run.direction, place)
        if not found.results:
            raise InputError(f"{place.name!r} holds no saved results.", "Give a mapper's folder or a report.")
        return found
    try:
        text = place.read_text(encoding="utf-8")
        held = re.search(r'<script type="application/json" id="kv-data">(.*?)</script>', text, re.S)
        data = json.loads(held.group(1)) if held else {}
        results = {
            kind: as_precomputed(KINDS[kind].from_json(entry))
            for kind, entry in data["results"].items()
            if kind in KINDS
        }
        return Run(data["pair"], data["title"], data["direction"], results, dict(data["manifest"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            f"{place.name!r} is no report that can be read.", "Give a folder or a report."
        ) from None


def esc(text: object) -> str:
    """Escaped for HTML."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"), quote=True)


def _head(run: Run, other: Run | None, other_name: str) -> str:
    origin = run.provenance
    models = f"{esc(origin.source)} → {esc(origin.target)}" if origin else ""
    beside = f" Beside it: {esc(other_name)} ({esc(other.title)}, {esc(other.direction)})." if other else ""
    problems = "".join(f"<p><b>{esc(problem)}</b></p>" for problem in run.problems)
    return (
        f"<header><h1>{esc(run.title)}</h1><p>{ARROWS[run.direction]}: {models}.{beside}</p>"
        "<p class=\"note\">One model's KV cache is mapped to the other's, so that it can go on with a "
        "conversation without reading it again. This file is complete in itself: data, machine, mapper and "
        f"definitions are all below.</p>{problems}</header>"
    )


def _keys(results: Mapping[str, Any], other: Run | None, other_name: str) -> str:
    mine = key_figures(results)
    if not mine:
        return ""
    theirs = {figure.term: figure for figure in key_figures(other.results)} if other else {}

    def beside(figure: KeyFigure) -> str:
        there = theirs.get(figure.term)
        if there is None:
            return "<br>not measured there" if other else ""
        return f"<br>{esc(other_name)}: <strong>{esc(there.shown)}</strong> {esc(there.label)}"

    items = "".join(
        f"<li><b>{esc(figure.shown)}</b><span>{esc(figure.label)}{beside(figure)}</span></li>"
        for figure in mine
    )
    return f'<ul class="keys">{items}</ul>'


def _result(kind: str, result: Any, figures: list[str], other: Any, other_name: str) -> str:
    if isinstance(result, Recording):
        return _conversation(result)
    title = TITLES.get(kind, kind.replace("_", " ").capitalize())
    mine = _drawings(result, figures)
    body = "".join(mine.values())
    if other is not None:
        theirs, missing = _drawings(other, figures), '<p class="note">Not measured there.</p>'
        kind_of_row = "beside" if isinstance(result, HeadMaps) else "beside wide"
        body = "".join(
            f'<div class="{kind_of_row}"><div><h3>This run</h3>{mine.get(name, missing)}</div>'
            f"<div><h3>{esc(other_name)}</h3>{theirs.get(name, missing)}</div></div>"
            for name in {**mine, **theirs}
        )
    elif other_name:
        body += f'<p class="note">Not measured for {esc(other_name)}.</p>'
    head, rows = tables.rows(result)
    return f"<section><h2>{esc(title)}</h2>{body}{_table(head, rows)}</section>"


def _conversation(recording: Recording) -> str:
    """What was said, by which weights, and the switches between."""
    parts = []
    for turn in recording.turns:
        if turn.account:
            parts.append(f'<p class="note">{esc(plots.describe(turn.account))}</p>')
        if turn.say:
            parts.append(f"<p><b>Person:</b> {esc(turn.say)}</p>")
        if turn.pieces:
            who = f"{esc(turn.model)} ({esc(turn.side)}, {esc(turn.how)})"
            parts.append(f'<p class="said"><b>{who}:</b> {esc(turn.text)}</p>')
    return f"<section><h2>A recorded conversation</h2>{''.join(parts)}{_origin(recording)}</section>"


def _drawings(result: Any, figures: list[str]) -> dict[str | None, str]:
    """Every figure of a result with its sentence, by metric where there are several; where it comes from at the last."""
    metrics: Sequence[str | None] = list(result.metrics) if isinstance(result, HeadMaps) else [None]
    parts: dict[str | None, str] = {}
    for metric in metrics:
        options = {"metric": metric} if metric else {}
        try:
            figure = plots.figure(result, **options)
            sentence = plots.describe(result, metric)
        except (KeyError, TypeError, AttributeError):
            parts[metric] = '<p class="note">This kind of result has no figure yet; its numbers follow.</p>'
            continue
        parts[metric] = (
            f'<div class="drawing">{_figure(on_paper(figure), figures)}<p>{esc(sentence)}</p></div>'
        )
    parts[metrics[-1]] += _origin(result)
    return parts


def _figure(figure: Any, figures: list[str]) -> str:
    """A place for a figure, and its data at the end of the page."""
    name = f"figure-{len(figures) + 1}"
    figures.append(f'<script type="application/json" id="{name}">{_inert(figure.to_json())}</script>')
    height = int(figure.layout.height or 450)
    return f'<div class="figure" data-of="{name}" style="min-height:{height}px" role="img" aria-label="Figure"></div>'


def _origin(result: Any) -> str:
    origin = getattr(result, "provenance", None)
    if origin is None:
        return ""
    return (
        f'<p class="note">{esc(origin.sentence())} {esc(origin.source)} → {esc(origin.target)}; '
        f"{origin.measured_on()}; mapper {esc(origin.mapper[:16] or 'not saved')}.</p>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    ths = "".join(f'<th scope="col">{esc(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(_td(_cell(cell)) for cell in row) + "</tr>" for row in rows[:LONGEST_TABLE]
    )
    more = (
        f'<p class="note">{len(rows) - LONGEST_TABLE:,} more rows are in the data of this file.</p>'
        if len(rows) > LONGEST_TABLE
        else ""
    )
    long = " data-long" if len(rows) > LONGEST_PRINTED else ""
    return (
        f'<details{long}><summary>The numbers ({len(rows):,} rows)</summary><div class="scroll"><table><thead><tr>{ths}'
        f"</tr></thead><tbody>{body}</tbody></table></div>{more}</details>"
    )


def _td(text: str) -> str:
    """A cell; what has no place to break, as a hash, may break anywhere."""
    unbroken = max(map(len, text.split()), default=0) > LONGEST_WORD
    return f'<td class="long">{esc(text)}</td>' if unbroken else f"<td>{esc(text)}</td>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value == value else "–"
    return "–" if value is None else str(value)


def _mapping(manifest: Mapping[str, Any]) -> str:
    """The mapper's manifest, nested parts as JSON."""
    if not manifest:
        return "<section><h2>The mapper</h2><p>There is no manifest beside these results.</p></section>"
    rows = [
        f'<tr><th scope="row">{esc(name)}</th>{_td(_field(value))}</tr>' for name, value in manifest.items()
    ]
    return f"<section><h2>The mapper</h2><table><tbody>{''.join(rows)}</tbody></table></section>"


def _field(value: Any) -> str:
    """A manifest's field for people; of a list that nobody reads, such as the familiar ids, how long it is."""
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, (list, tuple)) and len(value) > LONGEST_TABLE:
        return f"{len(value):,} entries"
    return json.dumps(value, ensure_ascii=False)


def _environment(results: Mapping[str, Any]) -> str:
    rows = []
    for kind, result in results.items():
        origin = result.provenance
        versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        rows.append(
            [kind, origin.measured, origin.where, versions, origin.source_revision, origin.target_revision]
        )
    head = ["result", "measured", "machine", "libraries", "source weights", "target weights"]
    cells = "".join("<tr>" + "".join(map(_td, row)) + "</tr>" for row in rows)
    ths = "".join(f'<th scope="col">{name}</th>' for name in head)
    return (
        f'<section><h2>Where this was measured</h2><div class="scroll"><table><thead><tr>{ths}</tr></thead><tbody>'
        f"{cells}</tbody></table></div></section>"
    )


def _glossary() -> str:
    items = "".join(f"<dt>{esc(word)}</dt><dd>{esc(TERMS[word])}</dd>" for word in WORDS)
    return f'<section class="on"><h2>Words</h2><dl>{items}</dl></section>'


def _citations() -> str:
    link = r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>'
    items = "".join(f"<li>{re.sub(r'arXiv ([0-9.]+[0-9])', link, esc(text))}</li>" for text in CITATIONS)
    return f'<section class="on"><h2>References</h2><ol>{items}</ol></section>'


def _data(run: Run) -> str:
    """Everything above as data, for the next comparison."""
    data = {
        "pair": run.pair,
        "title": run.title,
        "direction": run.direction,
        "results": {kind: result.to_json() for kind, result in run.results.items()},
        "manifest": dict(run.manifest),
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return f'<script type="application/json" id="kv-data">{_inert(text)}</script>'


def _inert(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _page(title: str, body: str, figures: Sequence[str], library: str | None) -> str:
    if library is None:
        from plotly.offline import get_plotlyjs

        library = get_plotlyjs()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{esc(title)} · KV Handoff Workbench</title><style>{_asset('report.css')}</style></head>"
        f"<body><main>{body}</main>"
        f"{''.join(figures)}<script>{library}</script><script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
