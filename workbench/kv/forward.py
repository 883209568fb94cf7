"""Run token ids through a model on top of a cache: the one place where the product calls a model.

Positions continue where the cache ends. Long inputs go in chunks, between which a person can stop; only the
last chunk runs the LM head, and only for the tokens that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers.cache_utils import Cache

from workbench.errors import Cancelled
from workbench.kv import sdpa
from workbench.kv.cache import length, places


def forward(
    model: Any,
    ids: Sequence[int],
    cache: Cache,
    keep: int = 1,
    chunk: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Tensor | None:
    """Append `ids` to the cache and return the logits of the last `keep` of them.

    Args:
        model: a `transformers` causal language model, possibly spread over devices by accelerate.
        ids: token ids, at least one; they stand at positions length(cache), length(cache)+1, ...
        cache: is lengthened by len(ids) tokens. After an exception it may hold a part of them, layers of
            unequal length included: cut it back with `cache.truncate`.
        keep: how many logits are wanted; 0 runs the model without its LM head.
        chunk: tokens per forward pass; None runs all at once.
        should_stop: asked before every chunk.

    Returns:
        `(keep, vocab)` float32 on the CPU, free to be changed; None for keep = 0.

    Raises:
        ValueError: no ids, or keep is negative or larger than their number.
        Cancelled: `should_stop` said so.
    """
    n = len(ids)
    if n == 0:
        raise ValueError("no token ids to run")
    if not 0 <= keep <= n:
        raise ValueError(f"cannot keep the logits of {keep} out of {n} tokens")
    tokens = torch.tensor(list(ids), dtype=torch.long, device=input_device(model)).unsqueeze(0)
    output: Any = None
    for start, stop in _chunks(n, keep, chunk):
        if should_stop is not None and should_stop():
            raise Cancelled("Stopped.")
        with torch.inference_mode():
            if stop < n or keep == 0:
                model.base_model(input_ids=tokens[:, start:stop], cache=cache, use_cache=True)
            else:
                # One token alone is no slice: a decoding step needs nothing of this.
                with _plain_head(model) if stop - start > 1 else nullcontext():
                    output = model(
                        input_ids=tokens[:, start:stop], cache=cache, use_cache=True, logits_to_keep=keep
                    )
    # Copied outside of inference mode, so that the caller may change the logits in place.
    return None if output is None else output.logits[0].to("cpu", torch.float32, copy=True)


def forward_at(
    model: Any,
    ids: Sequence[int],
    positions: Sequence[int],
    cache: Cache,
    keep: int = 1,
    chunk: int = 512,
    should_stop: Callable[[], bool] | None = None,
) -> Tensor | None:
    """Run some tokens of a context, wherever they stand, over a cache that holds the others.

    A pass over few tokens costs what reading the weights costs, so one pass for all of them is cheaper than one for each
    stretch. Every token sees what stands before it: what this call computed where it did, what the cache had elsewhere.

    Args:
        model: a `transformers` causal language model that attends by scaled dot product or eagerly.
        ids: the whole context.
        positions: of the tokens to run, ascending. Those that the cache has are overwritten; those that follow its end,
            without a gap, are appended.
        cache: of layers that grow in place.
        keep: 1 for the logits of the last one, 0 to run the model without its LM head.
        chunk: tokens a pass.
        should_stop: asked before every pass.

    Returns:
        `(1, vocab)` float32 on the CPU, or None.

    Raises:
        Cancelled: `should_stop` said so; some positions are then overwritten and some appended.
    """
    device, dtype = input_device(model), model.get_input_embeddings().weight.dtype
    output: Any = None
    for start in range(0, len(positions), chunk):
        if should_stop is not None and should_stop():
            raise Cancelled("Stopped.")
        part, held = positions[start : start + chunk], length(cache)
        inside = [position for position in part if position < held]
        at = torch.tensor(part)
        stop = part[-1] + 1  # no token of this pass sees what stands behind its last one
        seen = torch.arange(stop) <= at[:, None]
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        arguments = {
            "input_ids": torch.tensor([[ids[position] for position in part]], device=device),
            "position_ids": at[None].to(device),
            "attention_mask": mask[None, None].to(device),
            "cache": cache,
            "use_cache": True,
            "query_positions": part,  # for `sdpa.attend`
        }
        with torch.inference_mode(), places(cache, inside, stop):
            if keep == 0 or start + chunk < len(positions):
                model.base_model(**arguments)
            else:
                with _plain_head(model):
                    output = model(**arguments, logits_to_keep=1)
    return None if output is None else output.logits[0].to("cpu", torch.float32, copy=True)


def forward_lowest(
    model: Any,
    ids: Sequence[int],
    cache: Cache,
    layers: int,
    chunk: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Append `ids` to the lowest layers of the cache alone; their keys and values need nothing of the layers above.

    Args:
        model: as for `forward`, one for which `has_layers` holds. Nobody else may run it meanwhile.
        ids: token ids; they stand where the lowest layers end.
        cache: its lowest layers hold the context so far; those above are not touched, and may hold any number of tokens.
        layers: how many of the lowest layers run.
        chunk: as for `forward`.
        should_stop: asked before every chunk.

    Raises:
        Cancelled: `should_stop` said so; a part of the ids may then have been appended.
    """
    lowest = Cache(layers=cache.layers[:layers])  # positions and masks follow from what these hold
    with only_layers(model, slice(layers)):
        forward(model, ids, lowest, keep=0, chunk=chunk, should_stop=should_stop)


@contextmanager
def only_layers(model: Any, which: slice) -> Iterator[None]:
    """Within the block the model runs only these of its layers; nobody else may run it meanwhile."""
    base = model.base_model
    every = base.layers
    try:
        base.layers = ModuleList(list(every)[which])
        yield
    finally:
        base.layers = every


def has_layers(model: Any, layers: int) -> bool:
    """Whether the model keeps all its layers in one list, as `only_layers` needs it."""
    found = getattr(model.base_model, "layers", None)
    return isinstance(found, ModuleList) and len(found) == layers


def takes_masks(model: Any) -> bool:
    """Whether the model's attention takes a mask of one's own, as `forward_at` needs it."""
    return getattr(model.config, "_attn_implementation", None) in (sdpa.NAME, "sdpa", "eager")


@contextmanager
def _plain_head(model: Any) -> Iterator[None]:
    """Give the LM head a tensor of its own instead of a slice of the hidden states.

    The strides of a slice make a linear layer without bias fall back to a batched product, which copies the whole
    weight first: 0.3 s a call for a vocabulary of 49,152.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(
        lambda _, inputs: (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:])
    )
    try:
        yield
    finally:
        handle.remove()


def input_device(model: Any) -> torch.device:
    """Where a model wants its token ids: the device on which the embedding runs, also when offloaded."""
    embedding = model.get_input_embeddings()
    if embedding.weight.device.type != "meta":
        return embedding.weight.device
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return torch.device(device if device is not None else "cpu")


def _chunks(n: int, keep: int, chunk: int | None) -> list[tuple[int, int]]:
    """Pieces of at most `chunk` tokens; the last one holds all `keep` tokens, so it may be longer."""
    starts = list(range(0, n, chunk or n))
    while n - starts[-1] < keep:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True))
