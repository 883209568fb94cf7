"""The six slides of the presentation, drawn from saved results. Pure functions: a `Run` in, HTML out.

One idea a slide, in a sentence that can be read from the last row; what was not measured says so and names
the command that measures it.
"""

from __future__ import annotations

import math
from typing import Any

from workbench.lab.results import METRICS
from workbench.lab.results.common import nan_mean
from workbench.lab.summary import Run
from workbench.models.catalog import PAIRS
from workbench.ui.engine import SIDES
from workbench.ui.head_grid import grid_value
from workbench.ui.markup import bar, esc, ms, number, provenance, side_badge, term
from workbench.ui.side_by_side import columns_view

VIRIDIS = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))
COMMANDS = {"latency": "bench", "quality": "evaluate", "heads": "heads", "compare": "compare"}


def slides(run: Run, loaded: bool, question: str) -> list[str]:
    """All six, in order.

    Args:
        run: saved results and manifest.
        loaded: whether both models are in memory, so that a live switch starts at once.
        question: what the live conversation asks first.
    """
    made = (
        ("The cost of a switch", cost(run)),
        ("The map", mapping(run)),
        ("The switch, live", live(run, loaded, question)),
        ("Side by side", beside(run)),
        ("The heads that pay", heads(run)),
        ("What it saves", savings(run)),
    )
    return [
        f'<section class="kv-slide" data-step="{at}" aria-label="{at} of {len(made)}: {title}">'
        f'<p class="kv-slide-name">{title}</p>{body}</section>'
        for at, (title, body) in enumerate(made, start=1)
    ]


def cost(run: Run) -> str:
    """1: reading again grows with the conversation."""
    bench = run.results.get("latency")
    if bench is None or not bench.cells:
        return missing(run, "latency")
    scale = max(cell.prefill_ms for cell in bench.cells)
    bars = "".join(
        bar(
            f"{cell.tokens:,} tokens",
            [("true prefill", cell.prefill_ms, "prefill")],
            scale,
            ms(cell.prefill_ms),
        )
        for cell in bench.cells
    )
    longest = bench.cells[-1]
    return (
        f"<h2>Change the model, and it reads everything again: <b>{ms(longest.prefill_ms)}</b> for "
        f'{number(longest.tokens)} tokens.</h2><div class="kv-bars kv-slide-wide">{bars}</div>'
        f"<p>That reading is called {term('prefill')}. The new model writes nothing before it has ended.</p>"
        f"{provenance(bench)}"
    )


def mapping(run: Run) -> str:
    """2: which layers of the source each layer of the target is computed from."""
    chosen = run.manifest.get("key_layers")
    if not chosen:
        return missing(run, "heads", "No mapper of this pair is kept here.", "fit")
    held = run.manifest.get("held_out", {})
    tokens = run.manifest.get("calibration", {}).get("tokens")
    layers = sorted({layer for each in chosen for layer in each})
    most = max(len(each) for each in chosen)
    polish = run.manifest.get("polish", 0)
    explained = (
        f"On text it has never seen it explains <b>{held['r2_k']:.0%}</b> of the {term('key', 'keys')} and "
        f"<b>{held['r2_v']:.0%}</b> of the {term('value', 'values')} ({term('R²')})."
        if "r2_k" in held and "r2_v" in held
        else ""
    )
    if polish:  # R² says nothing about a polished map
        explained = f"Then polished for {number(polish)} steps, so that the target goes on as it would have by itself."
    return (
        "<h2>Instead, every layer's memory is computed from the other model's, by one matrix.</h2>"
        f'<div class="kv-slide-wide">{map_picture(chosen, max(layers) + 1, SIDES[run.direction])}</div>'
        f"<p>Each of {len(chosen)} layers reads up to {most} of {max(layers) + 1} source layers. Solved in closed form "
        f"from {number(tokens) if tokens else 'a few thousand'} tokens. {explained}</p>"
    )


def map_picture(chosen: list[list[int]], sources: int, sides: tuple[str, str]) -> str:
    """Source layers above, target layers below, a line for every layer that is read."""
    width, top, bottom = 960, 42, 258

    def x(index: int, count: int) -> float:
        return 40 + (width - 80) * (index + 0.5) / count

    lines = "".join(
        f'<line x1="{x(source, sources):.1f}" y1="{top}" x2="{x(layer, len(chosen)):.1f}" y2="{bottom}"/>'
        for layer, each in enumerate(chosen)
        for source in each
    )
    dots = "".join(
        f'<circle class="kv-cell-{sides[0]}" cx="{x(i, sources):.1f}" cy="{top}" r="8"/>'
        for i in range(sources)
    ) + "".join(
        f'<circle class="kv-cell-{sides[1]}" cx="{x(i, len(chosen)):.1f}" cy="{bottom}" r="8"/>'
        for i in range(len(chosen))
    )
    return (
        f'<svg viewBox="0 0 {width} 300" role="img" aria-label="Lines from {sources} source layers to {len(chosen)} '
        f'target layers"><g class="kv-map-lines">{lines}</g>{dots}<text x="40" y="22">layers of the {sides[0]} model'
        f'</text><text x="40" y="292">layers of the {sides[1]} model</text></svg>'
    )


def live(run: Run, loaded: bool, question: str) -> str:
    """3: a conversation that changes models now, or the recorded one."""
    first, second = SIDES[run.direction]
    wait = "" if loaded else " (loads the models first)"
    recorded = "recording" in run.results
    play = (
        '<button type="button" class="kv-small-button" data-live="recorded">Play the recording</button>'
        if recorded
        else '<span class="kv-note">No recording was saved for this pair.</span>'
    )
    return (
        f"<h2>{side_badge(first)} speaks, then {side_badge(second)} carries on.</h2>"
        f'<p class="kv-live-bar"><button type="button" class="kv-small-button" data-live="live">Switch live{wait}</button>'
        f'{play}<span class="kv-live-label" role="status">The question: “{esc(question)}”</span></p>'
        '<div class="kv-live-body"><div class="kv-log" tabindex="0" role="log" aria-live="off" '
        'aria-label="Conversation on the stage"></div><div class="kv-live-account" tabindex="0" role="region" '
        'aria-label="Account"></div></div>'
    )


def beside(run: Run) -> str:
    """4: the same text continued three ways."""
    result = run.results.get("compare")
    if result is None:
        return missing(run, "compare")
    same = result.top1_share()
    # What is too long for the stage scrolls, so the keyboard must reach it.
    columns = columns_view(result).replace('class="kv-text"', 'class="kv-text" tabindex="0"')
    agree = (
        "" if math.isnan(same) else f"In <b>{same:.0%}</b> of the places it would say the same next token. "
    )
    return (
        "<h2>Mapped memory against true memory: the same text, continued.</h2>"
        f'<div class="kv-slide-columns">{columns}</div>'
        f"<p>{agree}Mean {term('KL')} <b>{number(result.mean_kl())}</b> nats; the other model alone "
        f"{number(result.mean_kl('source'))}.</p>{provenance(result)}"
    )


def heads(run: Run) -> str:
    """5: which heads the map serves badly."""
    result = run.results.get("heads")
    name = next((n for n in ("cosine", "r2_k") if result is not None and n in result.metrics), None)
    if result is None or name is None:
        return missing(run, "heads")
    kind, values = METRICS[name], result.metrics[name]
    word = "KV head" if kind.per == "kv" else "query head"
    order = sorted(
        (
            (float(v), layer, head)
            for layer, row in enumerate(values.tolist())
            for head, v in enumerate(row)
            if v == v
        ),
        reverse=kind.better == "low",
    )
    worst = "".join(
        f"<li>layer {layer}, {word} {head}: <b>{number(value, 2)}</b></li>"
        for value, layer, head in order[:5]
    )
    heading = term("attention-output cosine") if name == "cosine" else esc(kind.title)
    return (
        f"<h2>The error is not spread evenly: a few heads pay for it.</h2>"
        f'<div class="kv-heads-slide"><div>{heat_picture(result, name)}</div><div><p>{heading}, weakest of '
        f"{values.size} heads:</p><ol>{worst}</ol><p>Mean of all: <b>{number(nan_mean(values), 2)}</b>. Bright is "
        f"better.</p></div></div>{provenance(result)}"
    )


def heat_picture(result: Any, metric: str) -> str:
    """Layers along, heads down, on the metric's fixed colour scale."""
    value = grid_value(result, metric, None)
    columns, rows = value["layers"], value["heads"]
    cell = 960 / columns
    parts = []
    for layer, line in enumerate(value["values"]):
        for head, x in enumerate(line):
            fill = "var(--kv-wash)" if x is None else colour(position(x, value))
            parts.append(
                f'<rect x="{layer * cell:.1f}" y="{head * cell:.1f}" width="{cell - 2:.1f}" height="{cell - 2:.1f}" '
                f'rx="2" fill="{fill}"/>'
            )
    return (
        f'<svg viewBox="0 0 960 {rows * cell + 26:.0f}" role="img" aria-label="{esc(value["label"])}: {columns} layers '
        f'by {rows} heads">{"".join(parts)}<text x="0" y="{rows * cell + 20:.0f}">layer 0</text><text x="958" '
        f'y="{rows * cell + 20:.0f}" text-anchor="end">layer {columns - 1}</text></svg>'
    )


def position(x: float, value: dict[str, Any]) -> float:
    """Where a number stands between the ends of its scale, 0 worst and 1 best."""
    low, high = value["low"], value["high"]
    if value["log"]:
        x, low, high = (math.log(max(each, 1e-9)) for each in (x, low, high))
    share = min(max((x - low) / (high - low), 0.0), 1.0)
    return 1 - share if value["reverse"] else share


def colour(share: float) -> str:
    """Viridis at a share between 0 and 1."""
    place = share * (len(VIRIDIS) - 1)
    low = min(int(place), len(VIRIDIS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True))
    return f"rgb({','.join(map(str, mixed))})"


def savings(run: Run) -> str:
    """6: the whole handoff against the whole prefill, and what of the context survives."""
    bench, quality = run.results.get("latency"), run.results.get("quality")
    if bench is None or not bench.cells:
        return missing(run, "latency")
    longest = bench.cells[-1]
    scale = max(longest.prefill_ms, longest.handoff_ms)
    parts = [
        ("mapping", longest.map_ms, "product"),
        ("anchors, hold-back and the rest", max(longest.handoff_ms - longest.map_ms, 0.0), "anchors"),
    ]
    rows = bar("Whole handoff", parts, scale, ms(longest.handoff_ms)) + bar(
        "True prefill", [("true prefill", longest.prefill_ms, "prefill")], scale, ms(longest.prefill_ms)
    )
    legend = "".join(
        f'<li><i class="kv-key kv-seg-{cls}" aria-hidden="true"></i>{esc(name)} {ms(value)}</li>'
        for name, value, cls in parts
    )
    ratios = "".join(
        f'<div class="kv-stat"><b>{cell.ratio:.1f}×</b><span>{number(cell.tokens)} tokens</span></div>'
        for cell in bench.cells
    )
    kept = origin = ""
    if quality is not None:
        main = quality.settings[0]
        kept = (
            f"<p><b>{main.gap_recovered.value:.0%}</b> of what the context is worth survives ({term('gap recovered')}); "
            f"{term('KL')} <b>{number(main.arms['mapped'].kl.value)}</b> nats.</p>"
        )
        origin = provenance(quality)
    even = bench.break_even
    pays = "" if even is None else f" It pays from about {number(int(even))} tokens on." if even else ""
    return (
        f"<h2><b>{longest.ratio:.1f} times</b> faster at {number(longest.tokens)} tokens, everything counted.</h2>"
        f'<div class="kv-bars kv-slide-wide">{rows}</div><ul class="kv-legend">{legend}</ul>'
        f'<div class="kv-stats kv-slide-wide">{ratios}</div>'
        f"<p>The handoff counts {term('anchors')}, mapping, {term('hold-back')} and the first logits.{pays}</p>"
        f"{provenance(bench)}{kept}{origin}"
    )


def missing(
    run: Run, kind: str, why: str = "This was not measured for this pair yet.", command: str = ""
) -> str:
    """What stands in place of a slide's figure: the command that measures it, for this pair where it has a name."""
    which = f" --pair {run.pair} --direction {run.direction}" if run.pair in PAIRS else ""
    line = f"python -m workbench {command or COMMANDS[kind] + ' --save'}{which}"
    return f"<h2>{why}</h2><p>It comes from <code>{line}</code>.</p>"
