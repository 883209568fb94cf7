"""The first screen: what this is in one sentence and one picture, and what was measured with which pair."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from workbench.lab.results import KINDS
from workbench.lab.summary import Run, gather, key_figures
from workbench.models.catalog import DIRECTIONS, PAIRS, PairRef, artefact_folder
from workbench.ui.engine import SIDES
from workbench.ui.markup import esc, side_badge, term

SENTENCE = (
    "Talk to a small model, then let a large one carry on <b>without reading the conversation again</b>: its "
    "memory of the text is computed from the small one's, by one matrix per layer."
)

# On a phone the chat comes first: picture and gallery wait behind this button, see `assets/welcome.js`.
MORE = (
    '<button type="button" class="kv-small-button kv-more-button" aria-expanded="false" '
    'aria-label="More about this, and what was measured">More</button>'
)


def measured_pairs() -> list[tuple[PairRef, str, Path]]:
    """Every pair and direction that something was measured with, in the catalog's order."""
    return [
        (pair, direction, folder)
        for pair in PAIRS.values()
        for direction in DIRECTIONS
        for folder in [artefact_folder(pair, direction)]
        if any((folder / f"{kind}.json").is_file() for kind in KINDS)
    ]


def welcome() -> str:
    """Sentence, picture, buttons and the gallery."""
    runs = [gather(pair.name, pair.title, direction, folder) for pair, direction, folder in measured_pairs()]
    cards = "".join(card(run) for run in runs if run.results)
    gallery = (
        f'<h2 class="kv-gallery-title">Measured so far</h2><ul class="kv-gallery">{cards}</ul>'
        if cards
        else '<p class="kv-note">Nothing has been measured yet; the tabs can do it here.</p>'
    )
    return (
        f'<section class="kv-welcome" aria-label="What this is"><div class="kv-picture">{picture()}</div>'
        f'<div class="kv-welcome-text"><p class="kv-claim">{SENTENCE}</p><p class="kv-welcome-buttons">'
        '<button type="button" class="kv-small-button" data-replay hidden>▶ Watch a recorded switch</button>'
        f"{MORE}"
        f'<span class="kv-note">New here? {term("KV cache")}, {term("prefill")} and {term("handoff")}: rest on a '
        f"dotted word to read what it means.</span></p></div>"
        f'<div class="kv-gallery-box">{gallery}</div></section>'
    )


def card(run: Run) -> str:
    """One pair in one direction: key figures, and when and where they were measured."""
    origin = run.provenance
    first, second = SIDES[run.direction]
    query = urlencode({"pair": run.pair, "direction": run.direction, "tab": "quality"})
    figures = "".join(
        f"<li><b>{esc(figure.shown)}</b> <span>{esc(figure.label)}</span></li>"
        for figure in key_figures(run.results)[:3]
    )
    when = f"Measured {esc(origin.measured[:10])} on {esc(origin.where)}" if origin else ""
    arrow = '<span aria-hidden="true">→</span><span class="kv-sr">to</span>'
    return (
        f'<li class="kv-card"><h3>{side_badge(first)} {arrow} {side_badge(second)} <span>{esc(run.title)}</span></h3>'
        f'<ul>{figures}</ul><p class="kv-note">{when}</p>'
        f'<a href="?{esc(query)}">Look closer<span class="kv-sr"> at {esc(run.title)}, {first} to {second}</span>'
        "</a></li>"
    )


def picture() -> str:
    """The handoff as a drawing: two caches, one matrix between them, and the long way round."""

    def cells(x: int, y: int, rows: int, kind: str) -> str:
        made = []
        for row in range(rows):
            for column in range(7):
                exact = kind == "small" or column in (0, 6)
                look = f"kv-cell-{kind}{'' if exact else ' kv-cell-mapped'}"
                made.append(
                    f'<rect class="{look}" x="{x + 16 * column}" y="{y + 15 * row}" width="13" height="12" rx="2"/>'
                )
        return "".join(made)

    return (
        '<svg viewBox="0 0 420 178" role="img" aria-labelledby="kv-pic-title"><title id="kv-pic-title">The small '
        "model's cache goes through one matrix per layer into the large model's cache; the first and last tokens are "
        "run by the large model itself; reading everything again is the long way round.</title>"
        '<text class="kv-pic-small" x="14" y="22">● small model</text>'
        '<text class="kv-pic-large" x="296" y="22">◆ large model</text>'
        f"{cells(14, 52, 3, 'small')}{cells(296, 36, 5, 'large')}"
        '<path class="kv-pic-line" d="M132 73H176M244 73H286" marker-end="url(#kv-tip)"/>'
        '<rect class="kv-pic-map" x="182" y="46" width="56" height="54" rx="8"/>'
        '<text class="kv-pic-w" x="210" y="80" text-anchor="middle">W</text>'
        '<text class="kv-pic-note" x="210" y="116" text-anchor="middle">one matrix per layer</text>'
        '<path class="kv-pic-long" d="M70 104C90 158 330 164 352 120" marker-end="url(#kv-tip-long)"/>'
        '<text class="kv-pic-note kv-pic-warn" x="210" y="170" text-anchor="middle">the long way: read everything '
        "again</text>"
        '<defs><marker id="kv-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="kv-pic-tip" d="M0 0 8 4 0 8z"/></marker><marker id="kv-tip-long" viewBox="0 0 8 8" refX="7" '
        'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="kv-pic-tip-long" d="M0 0 8 4 0 8z"/>'
        "</marker></defs></svg>"
    )
