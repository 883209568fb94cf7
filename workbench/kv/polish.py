"""Polishing: a map that was fitted in closed form is taken a few hundred steps towards what it is for.

Ridge makes the caches alike; what counts is that the target goes on as it would have. So every step takes a piece of
calibration text, cuts it somewhere, makes the target's cache of the first part as a switch does (anchors native, the rest
mapped, the last `hold_back` tokens run by the target) and lets the target predict the next tokens. The loss is

    KL(target on its own cache ‖ target on the mapped cache),  mean over the following tokens

and its gradient goes through the target, whose weights stay as they are, into the map's matrices (Adam, rates relative to
the size of each matrix, cosine schedule). Only the held-back and the following tokens run through the target, since its
own predictions are kept from one reading: a step costs about as much as a prefill of three times as many tokens.

Plain text seldom asks which word stood where, and a map that is good on it may still have lost that. So every piece of
text breaks off and goes on with *quotes*: short spans of itself, said again. The target finds them in its own cache and is
certain of them; over a closed-form map it is lost, at many times the KL of plain text. Steps learn from the quotes and from
the text before them in turn. Pieces are read when their turn comes, so that nothing is learnt by heart while there is text.
Some are longer, since a map that was polished on short contexts alone gets worse on longer ones.

Every `JUDGE_EVERY` steps the map is judged on both, in other pieces; the best one is kept, the closed form included.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.checkpoint import Checkpoint
from workbench.kv.features import head_by_head, side_by_side
from workbench.kv.forward import input_device
from workbench.kv.mapper import KVMapper
from workbench.kv.ridge import columns_of

if TYPE_CHECKING:
    from workbench.kv.rope import Rotary
    from workbench.models.loading import LoadedModel

FOLLOWING = 128  # tokens that are predicted at each cut, of a short piece a quarter
RATE = 4e-3  # of Adam, times the root mean square of the matrix
JUDGE_EVERY = 100
ADAM = ("exp_avg", "exp_avg_sq")  # what Adam keeps of each matrix
MOST_JUDGED = 12  # pieces
SHORTEST_MAPPED = 32
SHORTEST_QUOTE, LONGEST_QUOTE = 12, SHORTEST_MAPPED  # tokens
RUNS = (1, 2, 4)  # neighbouring pieces that become one


@dataclass(frozen=True, eq=False)
class Recording:
    """One piece of text, read by both models; half precision.

    Attributes:
        ids: its tokens.
        keys: (n, layers * kv_width) of the source, without rotation.
        values: the same for values.
        anchors: the target's own rotated keys and values of the first tokens, per layer (1, heads, anchors, head_dim).
        hidden: (n, hidden_size) of the target before its language-model head: what its predictions come from.
        quotes: position of the first token that quotes.
    """

    ids: tuple[int, ...]
    keys: Tensor
    values: Tensor
    anchors: tuple[tuple[Tensor, Tensor], ...]
    hidden: Tensor
    quotes: int


Lesson = tuple[Recording, int]
"""A piece of text and where the following tokens begin."""


@dataclass(frozen=True)
class Polished:
    """The mapper, and the mean KL on the judging pieces.

    `kl` is that of plain text, `quotes_kl` that of quotes: at the start, after every `JUDGE_EVERY` steps, and last that of
    the state that was kept.
    """

    mapper: KVMapper
    kl: tuple[float, ...]
    quotes_kl: tuple[float, ...]


def lessons(
    source: LoadedModel,
    target: LoadedModel,
    pieces: Sequence[Sequence[int]],
    anchors: int,
    hold_back: int,
    seed: int = 0,
    skip: int = 0,
) -> Iterator[Lesson]:
    """What to learn from, without end: all pieces in a new order each time, of each its quotes and then plain text.

    The first `skip` lessons, those of a polish that goes on, are left out without reading their pieces.
    """
    pause = source.tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    draw, number = random.Random(seed), 0
    while True:
        for ids in draw.sample(pieces, len(pieces)):
            quoted, cut = quoting(ids, anchors, hold_back, pause, draw)
            before = draw.randint(_first_cut(anchors, hold_back), cut - following(len(quoted)))
            cuts = (cut, before)[max(0, skip - number) :]
            number += 2
            if cuts:
                piece = record(source, target, quoted, anchors, cut)
                yield from ((piece, each) for each in cuts)


def joined(pieces: Sequence[Sequence[int]], start: int, draw: random.Random) -> list[list[int]]:
    """The same text in pieces of mixed length: one, two or four neighbours become one piece.

    Args:
        pieces: in the order of the text; neighbours may also be the end and the beginning of two documents.
        start: how many tokens each piece starts with that stand at the start of a context alone.
        draw: of how many become one.
    """
    long, left = [], list(pieces)
    while left:
        size = draw.choice(RUNS)
        run, left = left[:size], left[size:]
        long.append([*run[0][:start], *(token for piece in run for token in piece[start:])])
    return long


@torch.no_grad()
def record(
    source: LoadedModel, target: LoadedModel, ids: Sequence[int], anchors: int, quotes: int
) -> Recording:
    """Read one piece of text with both models."""
    own = new_cache(source.spec.layers, len(ids))
    _hidden(source.model, ids, own)
    layers = range(source.spec.layers)
    keys = [side_by_side(source.rotary.strip(layer_tensors(own, i)[0], layer=i)).cpu().half() for i in layers]
    values = [side_by_side(layer_tensors(own, i)[1]).cpu().half() for i in layers]
    cache = new_cache(target.spec.layers, len(ids))
    hidden = _hidden(target.model, ids, cache)[0].cpu().half()
    first = []
    for t in range(target.spec.layers):
        k, v = layer_tensors(cache, t)
        first.append((k[:, :, :anchors].clone(), v[:, :, :anchors].clone()))
    return Recording(tuple(ids), torch.cat(keys, 1), torch.cat(values, 1), tuple(first), hidden, quotes)


def quoting(
    ids: Sequence[int], anchors: int, hold_back: int, pause: Sequence[int], draw: random.Random
) -> tuple[list[int], int]:
    """A piece of text that breaks off and goes on with spans of itself, and where they begin.

    Args:
        ids: of the text, `long_enough`.
        anchors: first tokens that are not quoted.
        hold_back: last tokens of a context that the target runs.
        pause: tokens between two quotes, such as an empty line.
        draw: of where it breaks off and what it quotes.

    Returns:
        The ids up to the last that is predicted, and the position of the first that quotes.
    """
    n = following(len(ids))
    cut = draw.randint(max(_first_cut(anchors, hold_back) + n, len(ids) // 2), len(ids) - n)
    quotes: list[int] = []
    while len(quotes) < n:
        size = draw.randint(SHORTEST_QUOTE, LONGEST_QUOTE)
        start = draw.randint(anchors, cut - size)
        quotes += [*pause, *ids[start : start + size]]
    return [*ids[:cut], *quotes[:n]], cut


def polish(
    mapper: KVMapper,
    target: LoadedModel,
    learnt: Callable[[int], Iterator[Lesson]],
    judged: Sequence[Lesson],
    steps: int,
    *,
    rate: float = RATE,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[float, str], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Polished:
    """Take a mapper `steps` steps down the target's own KL.

    Args:
        mapper: float32, of any form; its anchors and hold_back are those of the handoff.
        target: the model that is handed over to.
        learnt: the lessons, one a step, without the first n.
        judged: others, to choose the best state by; quotes and plain text.
        steps: of Adam.
        rate: relative learning rate.
        checkpoint: keeps the state at every look; removed at the end.
        progress: called with a share and a sentence.
        check: called before every step; raises to stop.
    """
    device = input_device(target.model)
    names = [name for name in mapper.shapes()]
    tensors = {name: mapper.tensor(name).detach().float().to(device).clone() for name in names}
    groups = [
        {"params": [tensor], "lr": rate * float(tensor.square().mean().sqrt().clamp_min(1e-6))}
        for tensor in tensors.values()
    ]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.98))
    rates = [group["lr"] for group in adam.param_groups]

    def judge() -> list[float]:
        """Mean KL of plain text and of quotes."""
        found: list[list[float]] = [[], []]
        with torch.no_grad():
            state = mapper.with_tensors(tensors)
            for piece, cut in judged:
                found[cut == piece.quotes].append(float(_loss(state, target, piece, cut)))
        return [sum(kls) / len(kls) for kls in found]

    def worth(kls: list[float]) -> float:
        """What the best state is chosen by: halving either kind's KL is worth the same."""
        return float(math.prod(kls))

    best = {name: tensor.clone() for name, tensor in tensors.items()}
    history, first = [], 0
    like = {f"{part}.{name}": tensor for part in ("now", "best", *ADAM) for name, tensor in tensors.items()}
    if checkpoint and (kept := checkpoint.load(like)):
        history, first = kept["history"].tolist(), int(kept["step"])
        for name, tensor in tensors.items():
            tensor.copy_(kept[f"now.{name}"])
            best[name].copy_(kept[f"best.{name}"])
            adam.state[tensor] = {
                "step": kept["step"].clone(),
                **{part: kept[f"{part}.{name}"].to(device) for part in ADAM},
            }
    history = history or [judge()]
    taught = learnt(first)
    for step in range(first, steps):
        if check:
            check()
        piece, cut = next(taught)
        for group, full in zip(adam.param_groups, rates, strict=True):
            group["lr"] = full * _rate_at(step, steps)
        for tensor in tensors.values():
            tensor.requires_grad_(True)
        with torch.enable_grad():
            loss = _loss(mapper.with_tensors(tensors), target, piece, cut)
            adam.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(list(tensors.values()), 1.0)
        adam.step()
        for tensor in tensors.values():
            tensor.requires_grad_(False)
        if (step + 1) % JUDGE_EVERY == 0 or step + 1 == steps:
            history.append(judge())
            if worth(history[-1]) <= min(map(worth, history)):
                best = {name: tensor.clone() for name, tensor in tensors.items()}
            if checkpoint and step + 1 < steps:
                checkpoint.save({
                    "step": torch.tensor(float(step + 1)), "history": torch.tensor(history, dtype=torch.float64),
                    **{f"now.{name}": tensor for name, tensor in tensors.items()},
                    **{f"best.{name}": tensor for name, tensor in best.items()},
                    **{f"{part}.{name}": adam.state[tensor][part] for part in ADAM for name, tensor in tensors.items()},
                })  # fmt: skip
        if progress:
            progress(
                (step + 1) / steps,
                f"polish: step {step + 1} of {steps}, KL {_shown(history[-1])} (from {_shown(history[0])})",
            )
    if checkpoint:
        checkpoint.discard()
    moved = {name: tensor.to(mapper.tensor(name).device) for name, tensor in best.items()}
    history.append(min(history, key=worth))
    plain, quotes = zip(*history, strict=True)
    return Polished(mapper.with_tensors(moved), plain, quotes)


def following(tokens: int) -> int:
    """How many tokens of a piece are predicted."""
    return min(FOLLOWING, tokens // 4)


def long_enough(ids: Sequence[int], anchors: int, hold_back: int) -> bool:
    """Whether a piece has room for something mapped, the held-back and the following tokens, and for quotes."""
    return len(ids) >= _first_cut(anchors, hold_back) + 2 * following(len(ids))


def _first_cut(anchors: int, hold_back: int) -> int:
    return anchors + SHORTEST_MAPPED + hold_back


def _shown(kls: Sequence[float]) -> str:
    return " / ".join(f"{kl:.4f}" for kl in kls)


def _rate_at(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / min(20, max(1, steps // 5)))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / max(1, steps))))


def _loss(mapper: KVMapper, target: LoadedModel, piece: Recording, cut: int) -> Tensor:
    """Mean KL of the `following` tokens from `cut` on, the context before it handed over."""
    device = input_device(target.model)
    end = cut + following(len(piece.ids)) - 1
    stop = cut - mapper.hold_back
    mapped = slice(mapper.anchors, stop)
    read = _reader(mapper, piece.keys[mapped].float().to(device), piece.values[mapped].float().to(device))
    cos, sin = target.rotary.cos_sin(mapper.anchors, stop, device)
    heads, layers = target.spec.kv_heads, []
    for t, (first_k, first_v) in enumerate(piece.anchors):
        k_pre = head_by_head(torch.addmm(mapper.key_bias[t], read("key", t), mapper.key_weight[t]), heads)
        v = head_by_head(torch.addmm(mapper.value_bias[t], read("value", t), mapper.value_weight[t]), heads)
        turns = t not in target.rotary.unrotated
        k_rot = (turned(k_pre, cos, sin, target.rotary) if turns else k_pre).to(first_k.dtype)
        layers.append((torch.cat((first_k, k_rot), 2), torch.cat((first_v, v.to(first_v.dtype)), 2)))
    cache = DynamicCache(layers, config=target.model.config)
    ids = piece.ids[stop:end]
    hidden = _hidden(target.model, ids, cache)[0, mapper.hold_back - 1 :]
    head = target.model.get_output_embeddings()
    with torch.no_grad():
        truth = head(piece.hidden[cut - 1 : end].to(hidden)).float().log_softmax(-1)
    guess = head(hidden).float().log_softmax(-1)
    return (truth.exp() * (truth - guess)).sum(-1).mean()


def _reader(mapper: KVMapper, keys: Tensor, values: Tensor) -> Callable[[str, int], Tensor]:
    """What a target layer's keys or values are made of, out of all source layers' (n, layers * kv_width)."""
    width = mapper.source.kv_width
    if mapper.reduce:
        z = mapper.coordinates(
            keys[:, columns_of(mapper.key_layers[0], width)],
            values[:, columns_of(mapper.value_layers[0], width)],
        )
        return lambda kind, t: z[kind == "value"]
    sides = {"key": keys, "value": values}

    def read(kind: str, t: int) -> Tensor:
        columns = columns_of((mapper.key_layers if kind == "key" else mapper.value_layers)[t], width)
        kinds = tuple(sides) if mapper.features == "both" else (kind,)
        return torch.cat([sides[of][:, columns] for of in kinds], dim=1)

    return read


def turned(k_pre: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """Keys (1, heads, n, head_dim) rotated by cos and sin (n, rotary_dim), with gradients."""
    dim = rotary.rotary_dim
    turning, rest = k_pre[..., :dim], k_pre[..., dim:]
    half = torch.cat((-turning[..., dim // 2 :], turning[..., : dim // 2]), dim=-1)
    return torch.cat((turning * cos + half * sin, rest), dim=-1)


def _hidden(model: Any, ids: Sequence[int], cache: Any) -> Tensor:
    tokens = torch.tensor([list(ids)], device=input_device(model))
    return model.base_model(input_ids=tokens, cache=cache, use_cache=True).last_hidden_state
