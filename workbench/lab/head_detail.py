"""What one head is made of and where it fails, out of the sums of a streaming pass: see `HeadDetails`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.kv.mapper import KVMapper
from workbench.lab.corpus import Passage
from workbench.lab.head_sums import HeadSums, spectrum
from workbench.lab.results.head_details import HeadDetails, TokenHit
from workbench.lab.results.heads import ZONES

AROUND = 9  # tokens of context on either side of one that suffers


def details(sums: HeadSums, mapper: KVMapper, tokenizer: Any, texts: Sequence[Passage]) -> HeadDetails:
    """Everything that a click on a head opens.

    Args:
        sums: of all texts.
        mapper: that was measured.
        tokenizer: of the target.
        texts: in the order in which they were added to the sums.
    """
    key_read, key_error = spectrum(sums.keys.error, sums.queries)
    value_read, value_error = spectrum(sums.values.error, sums.output_moment())
    bins = slice(0, -len(ZONES))
    positions = {
        name: energy.relative(sums.tokens, sums.counts)[..., bins].numpy()
        for name, energy in (("key_position", sums.keys), ("value_position", sums.values))
    }
    spec = sums.target.spec
    return HeadDetails(
        key_read=key_read.numpy(),
        key_error=key_error.numpy(),
        value_read=value_read.numpy(),
        value_error=value_error.numpy(),
        edges=tuple(sums.edges),
        bin_tokens=tuple(int(count) for count in sums.counts[bins]),
        **positions,
        key_sources=source_shares(mapper, "key"),
        value_sources=source_shares(mapper, "value"),
        tokens=tuple(
            tuple(_hits(sums, layer, head, tokenizer, texts) for head in range(spec.kv_heads))
            for layer in range(spec.layers)
        ),
    )


def source_shares(mapper: KVMapper, kind: str) -> np.ndarray:
    """(target layers, KV heads, source layers) share of the squared norm of a head's map that each source layer has.

    A layer's keys and values count together where the mapper reads both; of an MLP only the linear part is counted.

    Args:
        mapper: in any of its forms.
        kind: "key" or "value".
    """
    target, halves = mapper.target, 2 if mapper.features == "both" else 1
    weights, layers = getattr(mapper, f"{kind}_weight"), getattr(mapper, f"{kind}_layers")
    shares = np.zeros((target.layers, target.kv_heads, mapper.source.layers))
    for t, chosen in enumerate(layers):
        weight = weights[t].float().cpu()
        if mapper.reduce:
            thin = mapper.reduce[0 if kind == "key" else -1].float().cpu()
            weight = thin @ weight[: mapper.rank]
        blocks = weight.square().view(
            halves, len(chosen), mapper.source.kv_width, target.kv_heads, target.head_dim
        )
        parts = blocks.sum((0, 2, 4))  # (chosen, heads)
        shares[t][:, list(chosen)] = (parts / parts.sum(0).clamp_min(1e-30)).T.double().numpy()
    return shares


def _hits(
    sums: HeadSums, layer: int, head: int, tokenizer: Any, texts: Sequence[Passage]
) -> tuple[TokenHit, ...]:
    found = []
    for error, text, position in zip(
        sums.worst.error[layer, head].tolist(),
        sums.worst.text[layer, head].tolist(),
        sums.worst.position[layer, head].tolist(),
        strict=True,
    ):
        if text < 0:
            continue  # the texts have fewer tokens than places
        ids = texts[text].ids
        before, token, after = _around(tokenizer, ids, position)
        found.append(TokenHit(texts[text].name, position, before, token, after, error))
    return tuple(found)


def _around(tokenizer: Any, ids: Sequence[int], position: int) -> tuple[str, str, str]:
    """What stands before a token, the token, and what follows; characters that a cut splits become marks."""

    def text(start: int, stop: int) -> str:
        return str(tokenizer.decode(list(ids[max(0, start) : stop]), clean_up_tokenization_spaces=False))

    return (
        text(position - AROUND, position),
        text(position, position + 1),
        text(position + 1, position + 1 + AROUND),
    )
