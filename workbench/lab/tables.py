"""Results as tables: a row an observation, for CSV files and reports. Imports no torch.

Known kinds of results get columns of their own; any other result is written as (path, value) rows of its
JSON, so that a new measurement can be exported on the day it is added.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from workbench.lab.results import (
    METRICS,
    Comparison,
    Evaluation,
    HeadMaps,
    LatencyBench,
    Recording,
    Variants,
)
from workbench.lab.results.common import jsonable

Rows = tuple[list[str], list[list[Any]]]
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def rows(result: Any, metric: str | None = None) -> Rows:
    """A result as a table.

    Args:
        result: any result with `to_json`.
        metric: of `HeadMaps`, only this one.

    Returns:
        (column names, rows).
    """
    if isinstance(result, Comparison):
        return _comparison(result)
    if isinstance(result, HeadMaps):
        return _heads(result, metric)
    if isinstance(result, LatencyBench):
        return _latency(result)
    if isinstance(result, Evaluation):
        return _quality(result)
    if isinstance(result, Variants):
        return _variants(result)
    if isinstance(result, Recording):
        head = ["turn", "side", "how", "ms", "text"]
        return head, [
            [number, turn.side, turn.how, at, text]
            for number, turn in enumerate(result.turns, start=1)
            for at, text in turn.pieces
        ]
    data = {key: value for key, value in result.to_json().items() if key != "provenance"}
    return ["path", "value"], [[path, value] for path, value in _leaves(data)]


def csv_text(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    """A table as CSV (RFC 4180). Text that a spreadsheet would run as a formula is made plain text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([plain_cell(cell) for cell in head])
    writer.writerows([plain_cell(cell) for cell in jsonable(list(row))] for row in body)
    return out.getvalue()


def plain_cell(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula; numbers stay numbers, None is an empty cell."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        text = cell.encode("utf-8", "replace").decode("utf-8")
        return f"'{text}" if text.lstrip(" \n").startswith(FORMULA) else text
    return cell


def _comparison(result: Comparison) -> Rows:
    """One row a token of the true prefill's text."""
    columns = list(result.kl)
    head = ["token", "text"]
    for column in columns:
        head += [f"kl_{column}_nats", f"top1_{column}"]
    body = []
    for at, piece in enumerate(result.pieces["prefill"]):
        row: list[Any] = [at + 1, piece]
        for column in columns:
            known = at < len(result.kl[column])
            row += [result.kl[column][at] if known else None, result.top1[column][at] if known else None]
        body.append(row)
    return head, body


def _heads(result: HeadMaps, metric: str | None) -> Rows:
    """One row a metric, layer and head."""
    names = [metric] if metric else list(result.metrics)
    body = [
        [name, METRICS[name].unit, layer, METRICS[name].per, head, value]
        for name in names
        for layer, line in enumerate(result.metrics[name].tolist())
        for head, value in enumerate(line)
    ]
    return ["metric", "unit", "layer", "head_kind", "head", "value"], body


def _latency(result: LatencyBench) -> Rows:
    """One row a context length, medians in milliseconds."""
    names = ["tokens", "map_ms", "handoff_ms", "prefill_ms", "prefill_first_ms", "ratio", "net_saving_ms"]
    return names, [[getattr(cell, name) for name in names] for cell in result.cells]


def _quality(result: Evaluation) -> Rows:
    """One row a setting and arm, with 95 % intervals."""
    head = ["anchors", "hold_back", "arm", "passages"]
    for measure in ("ce", "kl", "top1"):
        head += [measure, f"{measure}_low", f"{measure}_high"]
    body = []
    for at, setting in enumerate(result.settings):
        for name, arm in result.arms(at).items():
            row: list[Any] = [setting.anchors, setting.hold_back, name, arm.n]
            for measure in ("ce", "kl", "top1"):
                figure = getattr(arm, measure)
                row += figure.to_json()
            body.append(row)
    return head, body


def _variants(result: Variants) -> Rows:
    """One row a mapper variant: its settings, what it keeps with 95 % intervals, the mean of every head metric."""
    settings = list(dict.fromkeys(name for one in result.variants for name in one.settings))
    metrics = list(dict.fromkeys(name for one in result.variants for name in one.metrics))
    head = ["pair", "direction", "variant", "reread", *settings]
    for outcome in ("retention", "kl", "gap_recovered"):
        head += [outcome, f"{outcome}_low", f"{outcome}_high"]
    body = []
    for one in result.variants:
        row: list[Any] = [result.provenance.pair, result.provenance.direction, one.name, one.reread]
        row += [one.settings.get(name) for name in settings]
        for figure in (one.retention, one.kl, one.gap_recovered):
            row += figure.to_json()
        body.append(row + [one.metrics.get(name) for name in metrics])
    return [*head, *metrics], body


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar of nested data with the path that leads to it."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for at, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{at}]")
    else:
        yield path, value
