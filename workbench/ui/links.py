"""Addresses that bring a view back: `?pair=…&tab=…&direction=…&metric=…&layer=…&head=…`.

What stands in an address comes from strangers: every part is checked against what there is, and what does not
fit is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from workbench.lab.results import METRICS
from workbench.models.catalog import DIRECTIONS, PairRef
from workbench.ui.engine import Engine
from workbench.ui.gallery import measured_pairs
from workbench.ui.session import Visit

LARGEST = 1024  # layers or heads; no model has more
PUT = """(value) => {
  const url = new URL(location.href);
  url.searchParams.set("NAME", value);
  history.replaceState(null, "", url);
  return value;
}"""


@dataclass(frozen=True)
class Link:
    """What an address asks for; None where it asks for nothing that there is."""

    pair: PairRef | None = None
    tab: str | None = None
    direction: str | None = None
    metric: str | None = None
    head: tuple[int, int] | None = None

    def choose(self, engine: Engine, visit: Visit) -> None:
        """Gives the visitor the pair and the head of the address; nothing is loaded for it."""
        visit.head = self.head
        if self.pair is not None and self.pair != engine.start_ref():
            visit.wanted = self.pair

    def values(self, tabs: Mapping[str, Any]) -> dict[Any, Any]:
        """Values of the tabs' components."""
        values = {tab.direction: self.direction for tab in tabs.values()} if self.direction else {}
        if self.metric:
            values[tabs["heads"].metric] = self.metric
        return values


def read(query: Mapping[str, str], tabs: Sequence[str]) -> Link:
    """The address of a visit.

    Args:
        query: its parameters.
        tabs: names of the tabs that there are.
    """

    def one(name: str, allowed: Sequence[str]) -> str | None:
        value = str(query.get(name, ""))
        return value if value in allowed else None

    known = {pair.name: pair for pair, _, _ in measured_pairs()} if "pair" in query else {}
    layer, head = (_index(query.get(name)) for name in ("layer", "head"))
    return Link(
        pair=known.get(str(query.get("pair"))),
        tab=one("tab", tabs),
        direction=one("direction", DIRECTIONS),
        metric=one("metric", tuple(METRICS)),
        head=(layer, head) if layer is not None and head is not None else None,
    )


def outputs(tabs: Mapping[str, Any]) -> list[Any]:
    """Components that an address can set."""
    return [tab.direction for tab in tabs.values()] + [tabs["heads"].metric]


def remember(tabs: Mapping[str, Any]) -> None:
    """Writes what is chosen into the address, so that it can be sent to somebody."""
    for tab in tabs.values():
        tab.direction.input(None, [tab.direction], None, js=PUT.replace("NAME", "direction"))
    metric: gr.Dropdown = tabs["heads"].metric
    metric.input(None, [metric], None, js=PUT.replace("NAME", "metric"))


def _index(text: str | None) -> int | None:
    """A number between 0 and `LARGEST`."""
    short = str(text or "")[:6]
    return int(short) if short.isascii() and short.isdigit() and int(short) < LARGEST else None
