"""Look inside a model's attention while it runs, without changing what it computes.

Two context managers. `capture_attention` shows each attention call as the kernel sees it: rotated queries,
all cached keys and values, and the output per head. `capture_keys_pre` collects keys as they are right before
the rotation: what `Rotary.strip` must reproduce. Both take themselves out again, whatever happens inside.

The attention goes through transformers' own `sdpa` function under a name of our own. That name must be known
to `AttentionMaskInterface` too: without a mask a chunk that runs over a filled cache is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from workbench.errors import UnsupportedModelError

Visit = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""visit(layer, q_rot (1,Hq,nq,d), k_rot (1,H,nk,d), v (1,H,nk,d), out (1,nq,Hq,d) before `o_proj`)"""

_NAME = "kv_workbench_sdpa"
_ATTRIBUTE = (
    "_kv_workbench_visit"  # on the attention modules of the model that is being watched, nowhere else
)


def _watched_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    getattr(module, _ATTRIBUTE)(module.layer_idx, query, key, value, out)
    return out, None


AttentionInterface.register(_NAME, _watched_sdpa)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextmanager
def capture_attention(model: Any, visit: Visit) -> Iterator[None]:
    """Call `visit` at every attention call within the block.

    The tensors are the model's own, views on the cache among them: read them at once or clone them.

    Args:
        model: a `transformers` causal language model. Nobody else may run it meanwhile.
        visit: see `Visit`; what it raises ends the forward pass.

    Raises:
        UnsupportedModelError: the model does not let its attention be chosen.
    """
    modules = attention_modules(model)
    previous = model.config._attn_implementation
    outer = [getattr(module, _ATTRIBUTE, None) for module in modules]
    try:
        for module in modules:
            setattr(module, _ATTRIBUTE, visit)
        model.set_attn_implementation(_NAME)
        if model.config._attn_implementation != _NAME:
            raise UnsupportedModelError(f"The attention of {type(model).__name__} cannot be watched.")
        yield
    finally:
        model.set_attn_implementation(previous)
        for module, visitor in zip(modules, outer, strict=True):
            if visitor is None:
                delattr(module, _ATTRIBUTE)
            else:
                setattr(module, _ATTRIBUTE, visitor)


@contextmanager
def capture_keys_pre(model: Any) -> Iterator[dict[int, Tensor]]:
    """Collect the keys right before rotation of all tokens that run within the block.

    Yields:
        A dict that fills while the model runs: layer -> `(1, kv_heads, tokens, head_dim)`; what several
        forward passes add is joined.

    Raises:
        UnsupportedModelError: the model makes its keys in a way that is not known here.
    """
    keys: dict[int, Tensor] = {}
    handles = []
    try:
        for layer, module in enumerate(attention_modules(model)):
            source, read = _key_source(module, model)
            handles.append(source.register_forward_hook(_collector(keys, layer, read)))
        yield keys
    finally:
        for handle in handles:
            handle.remove()


def o_proj_weight(model: Any, layer: int) -> Tensor:
    """The projection from all heads' outputs to the hidden state.

    Returns:
        `(hidden_size, query_heads * head_dim)`; columns of head h are h*head_dim .. (h+1)*head_dim-1. The
        parameter itself, or a copy where accelerate keeps the weights elsewhere.

    Raises:
        UnsupportedModelError: the attention has no `o_proj` or `dense`.
    """
    attention = attention_modules(model)[layer]
    projection = getattr(attention, "o_proj", None) or getattr(attention, "dense", None)
    if projection is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no output projection that is known here.")
    if projection.weight.device.type != "meta":
        return projection.weight.detach()
    from accelerate.utils import align_module_device

    with align_module_device(projection, torch.device("cpu")):
        return projection.weight.detach().clone()


def attention_modules(model: Any) -> list[Any]:
    """The self-attention module of every layer, in order.

    Raises:
        UnsupportedModelError: the model is built in another way.
    """
    modules = [getattr(layer, "self_attn", None) for layer in getattr(model.base_model, "layers", ())]
    if not modules or any(module is None for module in modules):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its attention in a place that is not known."
        )
    return modules


def _key_source(attention: Any, model: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The module whose output is the keys before rotation, and how to read `(1, H, n, d)` out of it."""
    head_dim = attention.head_dim
    heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads

    def from_tokens(x: Tensor) -> Tensor:  # (1, n, H*d) or (1, n, H, d)
        return x.reshape(x.shape[0], x.shape[1], heads, head_dim).transpose(1, 2)

    def from_fused(x: Tensor) -> Tensor:  # (1, n, (Hq + 2H)*d): queries, keys, values
        queries = x.shape[-1] - 2 * heads * head_dim
        return from_tokens(x[..., queries : queries + heads * head_dim])

    sources: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("k_norm", from_tokens),
        ("k_layernorm", lambda x: x),  # works on (1, H, n, d) already
        ("k_proj", from_tokens),
        ("qkv_proj", from_fused),
    ]
    for name, read in sources:
        module = getattr(attention, name, None)
        if module is not None:
            return module, read
    raise UnsupportedModelError(f"{type(model).__name__} makes its keys in a way that is not known.")


def _collector(keys: dict[int, Tensor], layer: int, read: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
        new = read(output.detach())
        keys[layer] = torch.cat((keys[layer], new), dim=2) if layer in keys else new

    return hook
