"""Log-likelihoods of several continuations over one cache, in few batches.

A cache holds one sequence, and a mapper maps one; the continuations of a context (choices of a question, questions
about one text) differ only behind it. So the cache is made once, repeated without copying the work, and all
continuations run over it as one batch, those of several caches of the same length too. A continuation that is the
beginning of another one is not run at all, and one whose choices are single tokens needs one row for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from workbench.kv.cache import layer_tensors, length
from workbench.kv.forward import input_device
from workbench.models.loading import LoadedModel

WASTE = 0.7  # a row joins a batch when it is at least this share of the longest one
MOST_LOGITS = 1 << 26  # of a batch: a quarter of a gigabyte in float32


@dataclass(frozen=True)
class Span:
    """A continuation of a context: `ids` run after it, and only those from `start` on are scored."""

    ids: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True)
class Scored:
    """Of one span, a value a scored token: log-probability (nats), and whether it was the likeliest one."""

    log_p: Tensor
    hit: Tensor

    @property
    def mean(self) -> float:
        """Mean log-likelihood: length does not count."""
        return float(self.log_p.mean())


class Plan:
    """Which rows to run for some spans; made once a context, used for every arm."""

    def __init__(self, last: int, spans: Sequence[Span]) -> None:
        """Args: last: the context's last token, which every row begins with; spans: what to score."""
        self.spans = list(spans)
        needed = sorted({(last, *span.ids[:-1]) for span in spans}, key=len, reverse=True)
        rows: list[tuple[int, ...]] = []
        for row in needed:
            if not any(longer[: len(row)] == row for longer in rows):
                rows.append(row)
        self.batches: list[list[tuple[int, ...]]] = []
        for row in rows:
            if self.batches and len(row) >= WASTE * len(self.batches[-1][0]):
                self.batches[-1].append(row)
            else:
                self.batches.append([row])
        self._place = []
        for span in spans:
            row = (last, *span.ids[:-1])
            place = next(
                (b, r)
                for b, batch in enumerate(self.batches)
                for r, longer in enumerate(batch)
                if longer[: len(row)] == row
            )
            self._place.append(place)
        # The LM head is a third of a small model's work: it runs only where something is scored.
        self._keep = [
            sorted(
                {
                    at
                    for span, (b, _) in zip(spans, self._place, strict=True)
                    if b == batch
                    for at in range(span.start, len(span.ids))
                }
            )
            for batch in range(len(self.batches))
        ]

    def run(self, model: LoadedModel, cache: Cache) -> list[Scored]:
        """Score all spans over a cache, which is left as it is.

        Args:
            model: whose cache it is.
            cache: of the context without its last token; may be empty.
        """
        return self.run_all(model, [cache])[0]

    @torch.inference_mode()
    def run_all(self, model: LoadedModel, caches: Sequence[Cache]) -> list[list[Scored]]:
        """Score all spans over each of several caches of one model and one length; a list for each cache."""
        found: list[dict[int, Scored]] = [{} for _ in caches]
        for number, (batch, keep) in enumerate(zip(self.batches, self._keep, strict=True)):
            here = [
                (index, row, torch.tensor([keep.index(i) for i in range(span.start, len(span.ids))]), span)
                for index, (span, (b, row)) in enumerate(zip(self.spans, self._place, strict=True))
                if b == number
            ]
            at_once = max(1, MOST_LOGITS // (len(batch) * len(keep) * model.spec.vocab_size))
            for first in range(0, len(caches), at_once):
                logits = _logits(model, caches[first : first + at_once], batch, keep)
                norm, likeliest = logits.logsumexp(-1), logits.argmax(-1)
                for index, row, at, span in here:
                    ids = torch.tensor(span.ids[span.start :])
                    log_p = (logits[:, row, at, ids] - norm[:, row, at]).double().cpu()
                    hit = likeliest[:, row, at].cpu() == ids
                    for scored, *of_cache in zip(found[first:], log_p, hit, strict=False):
                        scored[index] = Scored(*of_cache)
        return [[scored[index] for index in range(len(self.spans))] for scored in found]


def _logits(
    model: LoadedModel, caches: Sequence[Cache], rows: Sequence[Sequence[int]], keep: Sequence[int]
) -> Tensor:
    """Float32 logits (caches, rows, kept positions, vocab), on the model's device.

    Rows are padded on the right, where nothing that counts can see it.
    """
    width = max(map(len, rows))
    device = input_device(model.model)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long, device=device)
    repeated = DynamicCache()
    if length(caches[0]):
        layers = []
        for layer in range(len(caches[0].layers)):
            both = zip(*(layer_tensors(cache, layer) for cache in caches), strict=True)  # keys, values
            layers.append(
                tuple(torch.cat([t.expand(len(rows), -1, -1, -1) for t in of_all]) for of_all in both)
            )
        repeated = DynamicCache(layers)
    output = model.model(
        input_ids=ids.repeat(len(caches), 1),
        cache=repeated,
        use_cache=True,
        logits_to_keep=torch.tensor(list(keep), device=device),
    )
    return output.logits.float().unflatten(0, (len(caches), len(rows)))
