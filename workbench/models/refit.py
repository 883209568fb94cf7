"""First aid after layers are dropped, in closed form: every kept layer's last matrix is fitted again.

Going up through the student, layer by layer, its `down_proj` W is replaced by the ridge solution of

    min_W  sum over tokens  weight * | x + attention + W a - h |^2  +  lambda * s * | W - W_0 |^2

where `a` is what enters `down_proj` in the student as it is by then, and `h` the large model's hidden state
just before the next kept layer (so what the dropped layers in between would have added is part of the
target). Each token has the weight 1 / |h|^2, because the norms that follow look at directions only; the first
tokens, whose states are hundreds of times larger, are left out. Cost: one pass over some ten thousand tokens,
as much as a few training steps.

Shapes: ids `(rows, length)`, states `(tokens, hidden)`, activations `(tokens, intermediate)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

SINKS = 4


@torch.inference_mode()
def refit_down_projections(
    large: Any,
    student: Any,
    kept: Sequence[int],
    ids: torch.Tensor,
    counts: torch.Tensor,
    strength: float = 0.03,
    progress: Callable[[float, str], None] | None = None,
) -> list[float]:
    """Changes the student's `down_proj` matrices in place.

    Args:
        kept: the large model's layers that the student has, ascending.
        ids: token ids, padded on the right.
        counts: `(rows, length)`, False where a token is padding.
        strength: lambda, relative to the mean diagonal `s` of the weighted second moment of `a`.

    Returns:
        for every layer the relative squared error of its output before and after, as `after / before`.
    """
    use = counts.clone()
    use[:, :SINKS] = False
    rotary = large.model.rotary_emb(large.model.embed_tokens(ids[:1]), torch.arange(ids.shape[1])[None])
    truth = large.model.embed_tokens(ids)
    state, done, ratios = truth.clone(), 0, []
    for new, _ in enumerate(kept):
        goal = kept[new + 1] if new + 1 < len(kept) else len(large.model.layers)
        for index in range(done, goal):
            truth = _through(large.model.layers[index], truth, rotary)
        done = goal
        layer = student.model.layers[new]
        gram, cross, before, after = None, None, 0.0, 0.0
        kept_rows = []
        for row in range(len(ids)):
            x = state[row : row + 1]
            normed = layer.input_layernorm(x)
            middle = x + layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
            h = layer.post_attention_layernorm(middle)
            a = F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h)
            kept_rows.append((middle, a))
            select = use[row]
            target = truth[row][select]
            weight = target.square().mean(-1, keepdim=True).rsqrt()
            wrong = (target - middle[0][select] - layer.mlp.down_proj(a[0][select])) * weight
            scaled = a[0][select] * weight
            before += float(wrong.square().sum())
            gram = scaled.T @ scaled if gram is None else gram + scaled.T @ scaled
            cross = scaled.T @ wrong if cross is None else cross + scaled.T @ wrong
        assert gram is not None and cross is not None
        gram, cross = gram.double(), cross.double()
        ridge = strength * gram.diagonal().mean()
        gram.diagonal().add_(ridge)
        change = torch.cholesky_solve(cross, torch.linalg.cholesky(gram)).T
        layer.mlp.down_proj.weight.add_(change.to(layer.mlp.down_proj.weight.dtype))
        for row, (middle, a) in enumerate(kept_rows):
            state[row] = (middle + layer.mlp.down_proj(a))[0]
            select = use[row]
            target = truth[row][select]
            error = (target - state[row][select]) * target.square().mean(-1, keepdim=True).rsqrt()
            after += float(error.square().sum())
        ratios.append(after / max(before, 1e-12))
        if progress is not None:
            progress((new + 1) / len(kept), f"refitted layer {new}: error {ratios[-1]:.2f} of what it was")
    return ratios


def _through(layer: Any, x: torch.Tensor, rotary: Any) -> torch.Tensor:
    return layer(x, attention_mask=None, position_embeddings=rotary)
