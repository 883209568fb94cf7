"""Which tokens are rare: those that a switch had better read again than map.

A linear map keeps what many tokens have in common and loses what sets a rare one apart: names, numbers, the word that a
later question asks for. Read natively over the mapped rest, such a token has nearly its own keys and values again. So a
fit counts token ids in its calibration text, and the mapper keeps the list of *familiar* ids; tokens with any other id
are re-read at a switch (`KVMapper.rare`). Re-computing a share of a reused cache is known from CacheBlend
(arXiv 2405.16444), which finds the tokens by their deviation in the first layers; here an id is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def familiar_ids(
    tokenizer: Any, texts: Sequence[str], judged: Sequence[Sequence[int]], share: float
) -> tuple[tuple[int, ...], float]:
    """The fewest ids, most frequent first, beyond which at most `share` of the tokens of other text lie.

    Args:
        tokenizer: of the pair.
        texts: the calibration text, all of it: counting is cheap, so more is counted than is fitted on.
        judged: token ids of pieces of it on which the share is measured, each by the counts of everything but itself.
        share: of tokens to re-read, at least 0 and below 1; 0 gives (), which re-reads nothing.

    Returns:
        The ids (all that occur where even these leave more than `share`), and the share that they leave.
    """
    if not share:
        return (), 0.0
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    elsewhere: list[int] = []  # of every judged token: how often its id occurs in the rest of the text
    for piece in judged:
        own = Counter(piece)
        elsewhere += [counts[token] - own[token] for token in piece]
    least = max(1, sorted(elsewhere)[int(share * len(elsewhere))])
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    left = sum(count < least for count in elsewhere) / len(elsewhere)
    return tuple(token for token, count in ordered if count >= least), left
