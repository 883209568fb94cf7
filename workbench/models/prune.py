"""Depth pruning: which layers of a model to keep, and the smaller model that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from workbench.models import embedded
from workbench.models.distil import hidden_states

Progress = Callable[[float, str], None]


@torch.inference_mode()
def choose_layers(
    model: Any, material: tuple[torch.Tensor, torch.Tensor], keep: int, report: Progress, tries: int = 5
) -> tuple[list[int], list[float]]:
    """Drops one layer at a time, each time the one without which KL(whole model || rest) is least.

    Hidden states below a candidate are kept from the round before. From the second round on only the `tries`
    layers that looked cheapest in their last trial are tried again.

    Args:
        material: ids `(rows, length)` and the mask of predictions that count.

    Returns:
        the kept layers, ascending, and the loss in nats after every removal.
    """
    ids, mask = material
    mask = mask & (torch.arange(mask.shape[1]) % 3 == 0)  # every third prediction: the head is the dear part
    head, layers = model.lm_head.weight, model.model.layers
    whole = F.linear(hidden_states(model, ids)[:, :-1][mask], head).log_softmax(-1)
    start = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(start, torch.arange(ids.shape[1])[None])

    def through(x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        for index in chosen:
            x = layers[index](x, attention_mask=None, position_embeddings=rotary)
        return x

    kept, losses = list(range(len(layers))), list[float]()
    last_seen = {i: 0.0 for i in kept}
    while len(kept) > keep:
        candidates = sorted(kept, key=lambda i: last_seen[i])
        candidates = sorted(candidates if not losses else candidates[:tries])
        x, below = start, 0
        for layer in candidates:
            at = kept.index(layer)
            x, below = through(x, kept[below:at]), at
            rest = model.model.norm(through(x, kept[at + 1 :]))[:, :-1][mask]
            guess = F.linear(rest, head).log_softmax(-1)
            last_seen[layer] = float(F.kl_div(guess, whole, log_target=True, reduction="sum")) / len(rest)
        worst = min(candidates, key=lambda i: last_seen[i])
        kept.remove(worst)
        losses.append(last_seen[worst])
        report(1 - (len(kept) - keep) / (len(layers) - keep), f"dropped layer {worst}, KL {losses[-1]:.3f}")
    return kept, losses


def new_student(path: Path, model: Any, kept: Sequence[int]) -> Any:
    """The kept layers of the large model as a model of its own, float32.

    Args:
        path: the large model's folder, for its configuration.
        model: the large model.
        kept: indices of its layers, ascending.
    """
    student = embedded.sibling_model(path, list(kept), torch.float32)
    own = student.state_dict()
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.layers."):
            own[name] = tensor
    for new, old in enumerate(kept):
        for name, tensor in model.model.layers[old].state_dict().items():
            own[f"model.layers.{new}.{name}"] = tensor
    student.load_state_dict(own)
    return student
