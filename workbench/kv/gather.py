"""Reading calibration text with both models: caches, keys without their rotation -> moments and held-out tokens.

Sequences go to three sets. Of every eight, six are *fitted*, one is what everything is *chosen* by (source layers, ridge;
afterwards it joins the fitted ones) and one is only *reported* on, so that no figure is flattered by a choice.

With own features keys and values are gathered apart ("key", "value"); with both, one set ("both") holds keys and values
side by side, for source and target alike. The first `anchors` tokens of a sequence are left out: they are attention
sinks with unusual keys and values, which the target runs natively later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.kv.attention import AttentionSums
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.features import side_by_side
from workbench.kv.forward import forward
from workbench.kv.moments import Moments, Rows

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel

PARTS_EVERY = 8
CHOOSE_AT, REPORT_AT = 3, 7  # which of every eight sequences
MOST_HELD_OUT = 8192  # tokens kept of each held-out set
MOST_FITTED = 16384  # tokens kept as they are for an MLP


def part_of(index: int) -> str:
    """Which set a sequence belongs to: "fit", "choose" or "report"."""
    return {CHOOSE_AT: "choose", REPORT_AT: "report"}.get(index % PARTS_EVERY, "fit")


class Gatherer:
    """Runs both models over token ids and adds their caches to what a fit needs to know about them.

    Attributes:
        parts: everything that is gathered, by name; each part has `state()` and `from_state()`.
        kinds: ("key", "value"), or ("both",).
    """

    def __init__(self, source: LoadedModel, target: LoadedModel, options: Any) -> None:
        """Args: options: anchors, stride, features, objective and mlp are used."""
        self.source, self.target, self.options = source, target, options
        self.kinds = ("both",) if options.features == "both" else ("key", "value")
        per_kind = 2 if options.features == "both" else 1
        features = per_kind * source.spec.layers * source.spec.kv_width
        outputs = per_kind * target.spec.layers * target.spec.kv_width
        self.parts: dict[str, Moments | Rows | AttentionSums] = {}
        for kind in self.kinds:
            self.parts[kind] = Moments(features, outputs)
            self.parts[f"{kind}_choose"] = Rows(features, outputs, MOST_HELD_OUT)
            self.parts[f"{kind}_report"] = Rows(features, outputs, MOST_HELD_OUT)
            if options.mlp:
                self.parts[f"{kind}_fitted"] = Rows(features, outputs, MOST_FITTED)
        if options.objective == "attention":
            self.parts["attention"] = AttentionSums(target.spec)

    def moments(self, kind: str) -> Moments:
        """Sums over the fitted tokens."""
        part = self.parts[kind]
        assert isinstance(part, Moments)
        return part

    def rows(self, name: str) -> Rows:
        """Tokens that are kept as they are, such as "key_choose"."""
        part = self.parts[name]
        assert isinstance(part, Rows)
        return part

    @property
    def attention(self) -> AttentionSums | None:
        """What the target's queries look at, with the attention objective."""
        part = self.parts.get("attention")
        assert part is None or isinstance(part, AttentionSums)
        return part

    def add(self, ids: Sequence[int], part: str, back: Gatherer | None = None) -> None:
        """Run both models over one sequence and count in every `stride`-th token after the anchors.

        Args:
            ids: of the sequence.
            part: "fit", "choose" or "report".
            back: of the opposite direction, with the same options: the same reading is counted in it as well.
        """
        rows = slice(self.options.anchors, None, self.options.stride)
        sides: list[dict[str, Tensor]] = []
        weights: list[Tensor | None] = []
        for model, gatherer in ((self.source, back), (self.target, self)):
            attention = gatherer.attention if gatherer and part == "fit" else None
            side = dict(zip(("key", "value"), cache_rows(model, ids, rows, attention), strict=True))
            if self.kinds == ("both",):
                side["both"] = torch.cat((side["key"], side["value"]), dim=1)
            sides.append(side)
            weights.append(attention.token_weight[rows] if attention is not None else None)
        self._count(sides[0], sides[1], weights[1], part)
        if back is not None:
            back._count(sides[1], sides[0], weights[0], part)

    def _count(self, x: dict[str, Tensor], y: dict[str, Tensor], weight: Tensor | None, part: str) -> None:
        for kind in self.kinds:
            if part == "fit":
                self.moments(kind).add(x[kind], y[kind], weight)
                if self.options.mlp:
                    self.rows(f"{kind}_fitted").add(x[kind], y[kind])
            else:
                self.rows(f"{kind}_{part}").add(x[kind], y[kind])

    def join_chosen(self) -> None:
        """The choices are made: count what they were made by in with the fitted tokens."""
        for kind in self.kinds:
            kept = self.rows(f"{kind}_choose")
            everything = slice(None)
            for start in range(0, kept.count, 1024):
                self.moments(kind).add(*kept.part(everything, everything, slice(start, start + 1024)))
            self.moments(kind).flush()


def cache_rows(
    model: LoadedModel, ids: Sequence[int], rows: slice, attention: AttentionSums | None = None
) -> tuple[Tensor, Tensor]:
    """A model's keys before rotation and its values for the chosen tokens.

    Args:
        model: is run over all ids.
        ids: of one sequence.
        rows: which of its tokens are wanted.
        attention: is added to, when given.

    Returns:
        Two float32 tensors (tokens, layers * kv_width) on the CPU, ordered by layer, then head.
    """
    cache = new_cache(model.spec.layers, len(ids))
    if attention is None:
        forward(model.model, ids, cache, keep=0)
    else:
        attention.watch(model, ids, cache)
    keys, values = [], []
    for layer in range(model.spec.layers):
        k_rot, v = layer_tensors(cache, layer)
        keys.append(side_by_side(model.rotary.strip(k_rot, layer=layer))[rows].to("cpu", torch.float32))
        values.append(side_by_side(v)[rows].to("cpu", torch.float32))
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)
