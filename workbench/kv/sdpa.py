"""Attention of several tokens over a filled cache, on the processor, without copies and without what nobody sees.

transformers repeats keys and values for every query head of a group as soon as there is a mask, and computes all keys for
all tokens. A switch runs few tokens, wherever they stand, over a long cache: there this costs more than the rest. Here the
kernel reads a group's keys where they are, and tokens go in blocks, each over the keys up to its last token. Everything
else (one token, no mask, an accelerator) is transformers' own function; so is the result, but for rounding.

`use` puts it into a model that attends by scaled dot product. The name must be known to `AttentionMaskInterface` too:
without a mask a chunk that runs over a filled cache is silently wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kv_workbench_blocks"
BLOCK = 64  # tokens


def use(model: Any) -> None:
    """Let a model attend this way, where it attends by scaled dot product and lets its attention be chosen."""
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation(NAME)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    query_positions: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Args:
        module: the attention.
        query: (batch, heads, m, head_dim).
        key, value: (batch, kv_heads, n, head_dim).
        attention_mask: (batch or 1, 1, m, n), causal, or None.
        query_positions: where the tokens stand among the n, ascending; None: they are the last ones.
        kwargs: as transformers gives them.

    Returns:
        (batch, m, heads, head_dim), and None for the weights.
    """
    m, n = query.shape[2], key.shape[2]
    special = any(kwargs.get(name) is not None for name in ("softcap", "position_bias")) or kwargs.get(
        "dropout"
    )
    if attention_mask is None or m == 1 or query.device.type != "cpu" or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if query_positions is None or query_positions[-1] != n - 1:
        query_positions = range(n - m, n)
    out = query.new_empty(query.shape[0], m, query.shape[1], value.shape[-1])
    for start in range(0, m, BLOCK):
        rows = slice(start, start + BLOCK)
        stop = query_positions[rows][-1] + 1
        part = scaled_dot_product_attention(
            query[:, :, rows], key[:, :, :stop], value[:, :, :stop], attention_mask[:, :, rows, :stop],
            scale=kwargs.get("scaling"), enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
        out[:, rows] = part.transpose(1, 2)
    return out, None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
