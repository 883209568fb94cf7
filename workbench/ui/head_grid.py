"""A metric as the grid of `assets/heads_grid.js` draws it, of one mapper or as the difference of two, and its scale."""

from __future__ import annotations

import math
from typing import Any

from workbench.ui.markup import esc


def grid_value(result: Any, metric: str, pick: tuple[int, int] | None, marked: Any = ()) -> dict[str, Any]:
    """What `assets/heads_grid.js` draws."""
    from workbench.lab.results import METRICS

    kind = METRICS[metric]
    values = [[None if math.isnan(x) else float(x) for x in row] for row in result.metrics[metric].tolist()]
    low, high = (2.0**kind.low, 2.0**kind.high) if kind.log else (kind.low, kind.high)
    return {
        "layers": result.layers,
        "heads": len(values[0]),
        "values": values,
        "low": low,
        "high": high,
        "log": kind.log,
        "reverse": kind.better == "low",
        "head_word": "KV head" if kind.per == "kv" else "query head",
        "label": f"{kind.title}, layers by heads",
        "pick": list(pick) if pick else None,
        "marked": [list(head) for head in marked],
        "group": 1 if kind.per == "kv" else result.query_heads // result.kv_heads,
    }


def difference_value(
    result: Any, other: Any, metric: str, pick: tuple[int, int] | None, marked: Any = ()
) -> dict[str, Any]:
    """One mapper minus another on a fixed diverging scale, turned so that above 0 the first is better.

    Metrics on a scale of ratios are compared as such: 1 means twice as good.
    """
    import numpy as np

    from workbench.lab.results import METRICS

    kind = METRICS[metric]
    a, b = result.metrics[metric], other.metrics[metric]
    if kind.log:
        a, b = (np.log2(np.maximum(values, 1e-12)) for values in (a, b))
    gap = (a - b) * (1 if kind.better == "high" else -1)
    reach = 2.0 if kind.log else (kind.high - kind.low) / 4
    values = [[None if math.isnan(x) else round(x, 3) + 0.0 for x in row] for row in gap.tolist()]  # no -0
    return {
        **grid_value(result, metric, pick, marked),
        "values": values,
        "low": -reach,
        "high": reach,
        "log": False,
        "reverse": False,
        "diverging": True,
        "label": f"{kind.title}, difference of two mappers, layers by heads",
    }


def scale_view(kind: Any, diverging: bool = False) -> str:
    """The colour scale: bright is good, on a fixed range."""
    if diverging:
        reach = 2.0 if kind.log else (kind.high - kind.low) / 4
        unit = "log2 of the ratio" if kind.log else esc(kind.unit)
        return (
            f'<div class="kv-scale"><span>{-reach:g}</span><i class="kv-diverging" aria-hidden="true"></i>'
            f"<span>{reach:g} {unit}</span><span>violet: the second is better, orange: the first</span></div>"
        )
    low, high = (2.0**kind.low, 2.0**kind.high) if kind.log else (kind.low, kind.high)
    worst, best = (low, high) if kind.better == "high" else (high, low)
    return (
        f'<div class="kv-scale"><span>{worst:.2g}</span><i aria-hidden="true"></i>'
        f"<span>{best:.2g} {esc(kind.unit)}</span><span>bright is better</span>"
        '<span><i class="kv-dead" aria-hidden="true"></i> no value: the head does not vary</span></div>'
    )
