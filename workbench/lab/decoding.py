"""Our token loop against transformers' `generate`, in one run: same model, same tokens, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from workbench.chat.decode import Sampling, TextStream, decode
from workbench.errors import WorkbenchError
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward, input_device

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel


def decode_speed(model: LoadedModel, ids: Sequence[int], tokens: int, repeats: int) -> dict[str, Any]:
    """Greedy decoding by our loop, by `generate`, and by our loop with text made of every token as a page needs it.

    Args:
        model: decodes; stop ids are ignored, so that all write the same number of tokens.
        ids: the context.
        tokens: how many to write.
        repeats: timed rounds; one more comes first to warm up. The three take turns.

    Returns:
        Medians: "tokens", "context", "ours", "generate", "with_text" (tokens per second), "ratio" (ours / generate)
        and "text_overhead" (share that the text adds); "same_tokens" says whether all wrote the same.

    Raises:
        WorkbenchError: `generate` wrote another number of tokens.
    """
    endless = replace(model, stop_ids=frozenset())
    runs: dict[str, list[float]] = {"ours": [], "generate": [], "with_text": []}
    written: dict[str, list[int]] = {}
    for number in range(repeats + 1):
        names = list(runs)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            clock = perf_counter()
            if name == "generate":
                written[name] = _generate(model, ids, tokens)
            else:
                written[name] = _ours(endless, ids, tokens, name == "with_text")
            if len(written[name]) != tokens:
                raise WorkbenchError(f"{len(written[name])} tokens were written instead of {tokens}.")
            if number:
                runs[name].append(perf_counter() - clock)
    middle = {name: median(times) for name, times in runs.items()}
    return {
        "tokens": tokens,
        "context": len(ids),
        **{name: tokens / seconds for name, seconds in middle.items()},
        "ratio": middle["generate"] / middle["ours"],
        "text_overhead": middle["with_text"] / middle["ours"] - 1,
        "same_tokens": written["ours"] == written["generate"],
    }


def _ours(model: LoadedModel, ids: Sequence[int], tokens: int, with_text: bool) -> list[int]:
    cache = new_cache(model.spec.layers, len(ids) + tokens)
    logits = forward(model.model, ids, cache)
    assert logits is not None  # one row was asked for
    stream, found = TextStream(model.tokenizer), []
    for token in decode(model, logits, cache, Sampling(max_new_tokens=tokens)):
        found.append(token)
        if with_text:
            stream.push(token)
    return found


def _generate(model: LoadedModel, ids: Sequence[int], tokens: int) -> list[int]:
    given = torch.tensor([list(ids)], device=input_device(model.model))
    with torch.inference_mode():
        out = model.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=model.spec.vocab_size,  # no token ends it early
        )
    return out[0, len(ids) :].tolist()
