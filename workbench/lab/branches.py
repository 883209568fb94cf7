"""Many variants of one context cache in one forward pass: some heads true, the others mapped, or the other way round.

The following tokens of a text read a cache of which a variant has single heads' keys or values exchanged. Variants lie
along the batch dimension; only the layers in which something is exchanged are copied, all others are one tensor that
every row sees. What lies below the lowest exchanged layer is the same for all of them and for the base, so it is not
run again: the pass begins with the base's hidden states at that layer. Nothing but the following tokens ever runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from workbench.kv.cache import layer_tensors
from workbench.kv.forward import input_device, only_layers

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel

Cell = tuple[int, int, str]
"""(layer, KV head, "k" or "v") whose tensor is exchanged."""
Exchange = frozenset[Cell]
"""All cells that one variant exchanges."""
BASES = ("mapped", "true")
ROWS = 24  # variants in one forward pass


@dataclass(eq=False)
class Branches:
    """One text whose following tokens are run over variants of its context's cache.

    Args:
        target: the model that reads.
        mapped: its cache of the context as the handoff makes it.
        true: its own cache of the context, as long.
        ids: the tokens that run over the context.
        keep: how many of their last logits are compared.
    """

    target: LoadedModel
    mapped: Cache
    true: Cache
    ids: Sequence[int]
    keep: int

    def __post_init__(self) -> None:
        self._caches = {"mapped": self.mapped, "true": self.true}
        self._hidden: dict[str, list[Tensor]] = {}
        start = self.mapped.get_seq_length()
        device = input_device(self.target.model)
        self._positions = torch.arange(start, start + len(self.ids), device=device)[None]
        logits: dict[str, Tensor] = {}
        with torch.inference_mode():
            for base in BASES:
                output = self.target.model(
                    input_ids=torch.tensor([list(self.ids)], device=device),
                    position_ids=self._positions,
                    cache=self._cache(base, [frozenset()], self.true),
                    use_cache=True,
                    logits_to_keep=self.keep,
                    output_hidden_states=True,
                )
                self._hidden[base] = list(output.hidden_states[: self.target.spec.layers])
                logits[base] = output.logits[0].float()
        self._native = logits["true"].clone()  # outside of inference mode: gradients may flow past it
        self._log_p = self._native.log_softmax(-1)
        self._p = self._log_p.exp()
        self.base_kl = float(self._kl(logits["mapped"][None])[0])

    def kl(self, base: str, variants: Sequence[Exchange], donor: Cache | None = None) -> list[float]:
        """Mean KL to the native run of each variant, in the order given.

        Args:
            base: "mapped" or "true": the cache in which cells are replaced by those of the other one.
            variants: what each one exchanges; those of one call should begin at about the same layer.
            donor: a third cache of the context to take the cells from, None for the other base.
        """
        donor = donor or (self.true if base == "mapped" else self.mapped)
        found: dict[Exchange, float] = {frozenset(): self.base_kl if base == "mapped" else 0.0}
        todo = sorted({v for v in variants if v}, key=lambda v: min(v))
        for start in range(0, len(todo), ROWS):
            batch = todo[start : start + ROWS]
            found |= dict(zip(batch, self._run(base, batch, donor), strict=True))
        return [found[variant] for variant in variants]

    def kl_of(self, cache: Cache) -> Tensor:
        """Mean KL(native ‖ over this cache of the context), () float32, through which gradients flow to the cache."""
        logits = self.target.model(
            input_ids=torch.tensor([list(self.ids)], device=self._positions.device),
            position_ids=self._positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=self.keep,
        ).logits[0]
        difference = logits.to(self._native.device, torch.float32) - self._native
        return ((difference + self._log_p).logsumexp(-1) - (self._p * difference).sum(-1)).mean()

    @torch.inference_mode()
    def _run(self, base: str, batch: Sequence[Exchange], donor: Cache) -> list[float]:
        first = min(min(variant)[0] for variant in batch)
        hidden = self._hidden[base][first]
        with only_layers(self.target.model, slice(first, None)):
            logits = self.target.model(
                inputs_embeds=hidden.expand(len(batch), -1, -1),
                position_ids=self._positions,
                cache=self._cache(base, batch, donor),
                use_cache=True,
                logits_to_keep=self.keep,
            ).logits
        return self._kl(logits).tolist()

    def _cache(self, base: str, batch: Sequence[Exchange], donor: Cache) -> Cache:
        """The base's cache once a row, with each row's cells taken from the donor."""
        exchanged = {layer for variant in batch for layer, _, _ in variant}
        layers = []
        for index in range(self.target.spec.layers):
            rows = [t.expand(len(batch), -1, -1, -1) for t in layer_tensors(self._caches[base], index)]
            if index in exchanged:
                rows = [t.clone() for t in rows]
                theirs = layer_tensors(donor, index)
                for row, variant in enumerate(batch):
                    for layer, head, kind in variant:
                        if layer == index:
                            which = "kv".index(kind)
                            rows[which][row, head] = theirs[which][0, head]
            layer_cache = DynamicLayer()
            layer_cache.lazy_initialization(*rows)
            layer_cache.keys, layer_cache.values = rows
            layers.append(layer_cache)
        return Cache(layers=layers)

    def _kl(self, logits: Tensor) -> Tensor:
        """(rows, keep, vocab) -> (rows,) mean KL(native ‖ row), float64.

        With z' = z + d: KL = log sum p exp(d) - sum p d, which stays exact in float32 where both are close.
        """
        found = []
        for row in logits:
            difference = row.to(self._native.device, torch.float32) - self._native
            mean = (
                self._p[:, None] @ difference[..., None]
            ).flatten()  # one pass, nothing in between is stored
            kl = difference.add_(self._log_p).logsumexp(-1) - mean
            found.append(kl.double().clamp_min(0.0).mean())
        return torch.stack(found).cpu()


def cells(layers: Sequence[int], heads: Sequence[int], kinds: str) -> Exchange:
    """All cells of these layers and heads; kinds is "k", "v" or "kv"."""
    return frozenset((layer, head, kind) for layer in layers for head in heads for kind in kinds)
