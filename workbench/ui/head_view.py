"""HTML of the Heads tab: one sentence for the grid, the panel of a head, what predicts, what is marked.

Everything that a person or a model wrote passes `esc`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.ui.markup import bar, esc, number, table, term
from workbench.words import lowest

SOURCES_SHOWN = 8


def number_of(value: float, kind: Any) -> str:
    """A metric's value as people read it: powers of ten where its scale is one of ratios."""
    return f"{value:.2g}" if kind.log and math.isfinite(value) else number(value)


def summary(result: Any, metric: str) -> str:
    """The grid in one sentence."""
    import numpy as np

    from workbench.lab.results import METRICS

    kind = METRICS[metric]
    values = result.metrics[metric]
    if np.isnan(values).all():
        return "No head could be measured."
    worst = result.worst(metric)
    with np.errstate(invalid="ignore"):
        by_layer = np.array([_mean(row) for row in values])
    at = int(np.nanargmin(by_layer) if kind.better == "high" else np.nanargmax(by_layer))
    dead = int(np.isnan(values).sum())
    return (
        f"Mean over all heads {number_of(float(np.nanmean(values)), kind)}; weakest head: layer {worst[0]}, head "
        f"{worst[1]} ({number_of(float(values[worst]), kind)}); weakest layer on average: {at} "
        f"({number_of(float(by_layer[at]), kind)}). {f'{dead} without a value (–). ' if dead else ''}"
        f"{number(result.tokens)} tokens, {number(result.features)} parameters per output; the first "
        f"{result.anchors} tokens of each text are run natively and left out."
    )


def prediction_line(patches: Any, metric: str) -> str:
    """Whether this metric foresees what interventions found, and which one does best."""
    from workbench.lab.results import METRICS

    prediction = patches.prediction if patches is not None else None
    if prediction is None or not prediction.best_metric:
        return (
            '<p class="kv-note">No head has been patched for this mapper yet, so it is not known which metric foresees '
            "what happens. Tick “Patch every head too” and measure.</p>"
        )
    best = prediction.best_metric
    if metric == best:
        curve, chance = prediction.repair[best]["10"], prediction.repair["random"]["10"]
        return (
            f'<p class="kv-lead"><b>This metric predicts best what happens:</b> its worst 10 % of heads, made right, '
            f"win back {curve:.0%} of the {term('KL')}; random heads {chance:.0%}, the heads' own patch gains "
            f"{prediction.repair['causal']['10']:.0%}. Rank correlation with the patch gain "
            f"{number(prediction.rank_correlation[best], 2)}.</p>"
        )
    if METRICS[metric].causal:
        return '<p class="kv-note">This is what interventions found: the truth that the other metrics predict.</p>'
    order = sorted(
        (n for n in prediction.repair if n in METRICS), key=lambda n: -_or_low(prediction.repair[n]["10"])
    )
    if metric not in order:
        return ""
    return (
        f'<p class="kv-note">As a prediction of what happens this metric is number {order.index(metric) + 1} of '
        f"{len(order)}: its worst 10 % of heads win back {prediction.repair[metric]['10']:.0%} of the KL. Best is "
        f"{esc(METRICS[best].title)} ({prediction.repair[best]['10']:.0%}).</p>"
    )


def head_view(
    result: Any, metric: str, layer: int, head: int, patches: Any = None, marked: Sequence[Any] = ()
) -> str:
    """All numbers of one head, what patching it wins, and where its keys and values come from."""
    from workbench.lab.results import METRICS

    group = result.query_heads // result.kv_heads
    per = METRICS[metric].per
    kv = kv_head(result, metric, head)
    queries = range(kv * group, (kv + 1) * group)
    rows = []
    for name, kind in METRICS.items():
        if name not in result.metrics:
            continue
        values = result.metrics[name][layer]
        if kind.per == "kv":
            shown = number_of(float(values[kv]), kind)
        else:
            cells = {q: number_of(float(values[q]), kind) for q in queries}
            if per == "query":
                cells[head] = f"<b>{cells[head]}</b>"
            shown = " &nbsp; ".join(cells.values())
        label = f"<b>{esc(kind.title)}</b>" if name == metric else esc(kind.title)
        rows.append((label, shown, number_of(_mean(result.metrics[name][layer]), kind), esc(kind.unit)))
    which = f" (query head{'s' if group > 1 else ''} {queries[0]}{f'–{queries[-1]}' if group > 1 else ''})"
    mark = ' <span class="kv-badge">marked</span>' if (layer, kv) in marked else ""
    body = table(["Metric", "this head", "mean of the layer", "unit"], rows)
    return (
        f'<section class="kv-panel" aria-live="polite" aria-label="One head">'
        f'<h2>Layer {layer}, KV head {kv}<span class="kv-note">{which}</span>{mark}</h2>'
        f"{gain_line(patches, layer, kv)}{body}{sources(result.details, layer, kv)}</section>"
    )


def gain_line(patches: Any, layer: int, head: int) -> str:
    """What patching one head wins, keys and values apart, beside the whole."""
    if patches is None or layer >= patches.layers or head >= patches.kv_heads:
        return ""
    gain = {kind: float(patches.gain[kind][layer, head]) for kind in ("kv", "k", "v")}
    error = float(patches.gain_error[layer, head])
    about = "" if math.isnan(error) else f" ± {number(error, 4)}"
    rank = patches.order().index((layer, head)) + 1
    share = f" ({gain['kv'] / patches.base_kl:.1%})" if patches.base_kl > 0 else ""
    return (
        f'<p class="kv-lead">Made right in the mapped cache, this head wins <b>{number(gain["kv"], 4)}</b>{about} of '
        f"{number(patches.base_kl, 4)} nats{share}, number {rank} of {patches.gain['kv'].size}; its keys alone "
        f"{number(gain['k'], 4)}, its values alone {number(gain['v'], 4)}. Mapped alone in a true cache it costs "
        f"{number(float(patches.damage['kv'][layer, head]), 4)} nats.</p>"
    )


def sources(details: Any, layer: int, head: int) -> str:
    """The source layers that a head's keys and values are made of, by their share of the map's squared norm."""
    if details is None:
        return ""
    parts = []
    for kind in ("key", "value"):
        shares = getattr(details, f"{kind}_sources")[layer, head]
        order = [int(i) for i in (-shares).argsort(kind="stable")[:SOURCES_SHOWN] if shares[i] > 0]
        bars = "".join(
            bar(
                f"layer {i}",
                [(f"layer {i}", float(shares[i]), "product")],
                float(shares[order[0]]),
                f"{shares[i]:.0%}",
            )
            for i in order
        )
        parts.append(f'<div><h3>{kind.title()}s come from source</h3><div class="kv-bars">{bars}</div></div>')
    return f'<div class="kv-two">{"".join(parts)}</div>'


def tokens_view(details: Any, layer: int, head: int) -> str:
    """The tokens at which a head's output is farthest from the truth, in their context."""
    if details is None:
        return ""
    hits = details.tokens[layer][head]
    items = "".join(
        f'<li><span class="kv-hit">{esc(hit.before)}<mark class="kv-diff">{esc(visible(hit.token))}</mark>'
        f'{esc(hit.after)}</span> <span class="kv-note">{hit.error:.1%} of the residual stream, '
        f"{esc(hit.text)}, position {hit.position}</span></li>"
        for hit in hits
    )
    return (
        '<section class="kv-panel" aria-label="Tokens that suffer most"><h2>Tokens that suffer most</h2>'
        '<p class="kv-note">Where the error of this head\'s output is largest beside the residual stream, worst first.</p>'
        f'<ol class="kv-hits">{items}</ol></section>'
    )


def visible(token: str) -> str:
    """A token of white space as signs, so that it can be seen."""
    return token if token.strip() else token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


def prediction_view(patches: Any) -> str:
    """Every metric's rank correlation and repair curve as a table, and what the lowest layers win."""
    from workbench.lab.results import METRICS
    from workbench.plots.patch import title

    prediction = patches.prediction
    if prediction is None:
        return ""
    shares = list(prediction.heads_restored)
    names = sorted(prediction.repair, key=lambda n: -_or_low(prediction.repair[n]["10"]))
    rows = [
        (
            f"<b>{esc(title(name))}</b>" if name == prediction.best_metric else esc(title(name)),
            number(prediction.rank_correlation.get(name), 2),
            number(prediction.rank_correlation_damage.get(name), 2),
            *(_percent(prediction.repair[name][share]) for share in shares),
        )
        for name in names
    ]
    head = [
        "Heads in the order of", "r with the gain", "r with the damage",
        *(f"worst {share} % ({prediction.heads_restored[share]})" for share in shares),
    ]  # fmt: skip
    caption = (
        f"Share of the KL ({number(patches.base_kl, 4)} nats) that is won back when the worst heads are made right "
        f"together. {patches.texts} texts, {patches.context} tokens of context, {patches.following} predicted; "
        f"random: mean of {prediction.draws} draws. Best: {METRICS[prediction.best_metric].title}."
    )
    bottoms = ", ".join(
        f"{m}: {_percent((patches.base_kl - kl) / patches.base_kl)}"
        for m, kl in patches.native_bottom.items()
    )
    native = f'<p class="kv-note">Won back with so many of the lowest layers run natively: {bottoms}.</p>'
    return table(head, rows, esc(caption)) + (native if patches.base_kl > 0 else "")


def marks_view(marks: Any, kv_heads: int, native: int = 0) -> str:
    """What is marked, and what repairing it wins; `native` of the lowest layers run natively with this mapper."""
    now = f" A switch with this mapper runs {lowest(native)} natively." if native else ""
    if marks is None or not marks.heads:
        return f'<p class="kv-note">Nothing is marked in this mapper.{now}</p>'
    names = ", ".join(f"{layer}.{head}" for layer, head in marks.heads)
    text = f"<b>{len(marks.heads)} marked</b> (layer.head): {esc(names)}."
    gain = marks.gain
    if gain is not None and gain.base_kl > 0:
        text += (
            f" Made right together they win back <b>{gain.recovered:.0%}</b> of the KL ({number(gain.base_kl, 4)} → "
            f"{number(gain.kl, 4)} nats, {gain.texts} texts); as many random heads {gain.recovered_random:.0%}."
        )
        if gain.recovered_refit is not None:
            text += f" Taken from the second mapper instead they win back <b>{gain.recovered_refit:.0%}</b>."
        if gain.native_layers:
            text += (
                f" The lowest {gain.native_layers} of {gain.layers} layers are marked wholly: the target can run them "
                f"natively over the context, for about {gain.native_layers / gain.layers:.0%} of a prefill."
            )
    return f'<p class="kv-lead">{text}{now}</p>'


def kv_head(result: Any, metric: str, head: int) -> int:
    """The KV head that a cell of a metric's grid belongs to."""
    from workbench.lab.results import METRICS

    return head if METRICS[metric].per == "kv" else head // (result.query_heads // result.kv_heads)


def mappers_line(manifest: Mapping[str, Any]) -> str:
    """What distinguishes a mapper, from its manifest."""
    calibration = manifest.get("calibration") or {}
    tokens = calibration.get("tokens")
    bits = [
        f"rank {max(manifest['ranks'])}" if manifest.get("ranks") else f"k {manifest.get('top_k')}",
        f"ridge {manifest.get('ridge')}",
        str(manifest.get("objective")),
        "MLP" if manifest.get("hidden") else "",
        f"{lowest(manifest['native_layers'])} native" if manifest.get("native_layers") else "",
        f"{tokens:,} tokens" if isinstance(tokens, int) else "",
    ]
    return ", ".join(bit for bit in bits if bit)


def _percent(value: float) -> str:
    return f"{round(value, 2) + 0.0:.0%}" if math.isfinite(value) else "–"  # no -0 %


def _or_low(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _mean(values: Any) -> float:
    import numpy as np

    return math.nan if np.isnan(values).all() else float(np.nanmean(values))
