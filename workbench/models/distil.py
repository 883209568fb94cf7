"""Healing a model that lost layers: the small one learns to predict what the large one predicts.

    loss = KL(teacher || student) over the whole vocabulary, a mean over tokens; nothing on hidden states

Embeddings and head are shared with the teacher and stay frozen, so both models keep one vocabulary and one
output space. The gradient of the loss with respect to the student's last hidden states is written down by
hand, a chunk of tokens at a time: `(q - p) @ head`, so that no `(tokens, vocabulary)` tensor outlives its
chunk.

Every step takes one block of text and one chat. Which ones is a pure function of the step, so a run that was
killed and resumed ends in the same state as one that was not.

Shapes: ids `(rows, length)`, hidden states `(tokens, hidden)`.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from workbench.models.devices import choose_dtype

Progress = Callable[[float, str], None]
CHUNK = 256


@dataclass(frozen=True)
class Block:
    """One training or held-out sequence: ids `(n,)`, of which the first `skip` predictions do not count."""

    ids: torch.Tensor
    skip: int = 0


@dataclass(frozen=True)
class DistilOptions:
    """`tokens` is the plan that the schedule follows: warm-up, constant, linear decay in the last half."""

    tokens: int
    rate: float = 2e-4
    warmup_steps: int = 10
    decay_share: float = 0.5
    ema: float = 0.98
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 50_000
    measure_every: int = 5
    checkpoint_seconds: float = 240.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.rate <= 0 or not 0 <= self.decay_share <= 1:
            raise ValueError("tokens and rate must be positive and decay_share a share")

    def rate_at(self, step: int, tokens: int) -> float:
        """Learning rate of a step that starts after `tokens` tokens."""
        left = max(0.0, 1 - tokens / self.tokens) / max(self.decay_share, 1e-9)
        return self.rate * min(1.0, (step + 1) / self.warmup_steps, max(left, 0.02))


def autocast() -> Any:
    """bfloat16 autocast where the processor multiplies it natively, else off."""
    fast, _ = choose_dtype(torch.device("cpu"))
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast is torch.bfloat16)


def stack(blocks: Sequence[Block]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids `(rows, length)` and the mask of predictions that count, `(rows, length - 1)`.

    Padding on the right needs no attention mask: a causal model's earlier positions do not see it.
    """
    length = max(len(b.ids) for b in blocks)
    ids = torch.stack([F.pad(b.ids, (0, length - len(b.ids))) for b in blocks])
    where = torch.arange(length - 1)
    counts = torch.stack([(where >= b.skip) & (where < len(b.ids) - 1) for b in blocks])
    return ids, counts


def hidden_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states after the final norm, `(rows, length, hidden)`."""
    with autocast():
        return model.model(input_ids=ids, use_cache=False).last_hidden_state


def kl_and_gradient(
    teacher: torch.Tensor, student: torch.Tensor, head: torch.Tensor, measure: bool = True
) -> tuple[float, torch.Tensor]:
    """Mean KL(teacher || student) in nats and its gradient with respect to `student`, both (tokens, hidden).

    The loss itself costs as much again as the gradient, which does not need it: without `measure` it is NaN.
    """
    total, gradient = 0.0 if measure else math.nan, torch.empty_like(student, dtype=torch.float32)
    for start in range(0, len(student), CHUNK):
        part = slice(start, start + CHUNK)
        with autocast():
            target, guess = F.linear(teacher[part], head), F.linear(student[part], head)
        p, q = target.softmax(-1, dtype=torch.float32), guess.softmax(-1, dtype=torch.float32)
        if measure:
            log_p = target.log_softmax(-1, dtype=torch.float32)
            total += float((p * (log_p - guess.log_softmax(-1, dtype=torch.float32))).sum())
        with autocast():
            gradient[part] = (q.sub_(p) @ head).float()
    return total / len(student), gradient / len(student)


@torch.inference_mode()
def cross_entropy(model: Any, blocks: Sequence[Block], rows: int = 4) -> float:
    """Mean next-token loss in nats over all predictions that count."""
    total, count, head = 0.0, 0, model.lm_head.weight
    for start in range(0, len(blocks), rows):
        ids, mask = stack(blocks[start : start + rows])
        hidden, targets = hidden_states(model, ids)[:, :-1][mask], ids[:, 1:][mask]
        for at in range(0, len(targets), CHUNK):
            with autocast():
                logits = F.linear(hidden[at : at + CHUNK], head)
            total += float(F.cross_entropy(logits.float(), targets[at : at + CHUNK], reduction="sum"))
        count += len(targets)
    return total / max(count, 1)


class Distiller:
    """The state of a run: student, optimiser, average of the weights, position. Saves and resumes itself."""

    def __init__(
        self,
        teacher: Any,
        student: Any,
        texts: Sequence[Block],
        chats: Sequence[Block],
        options: DistilOptions,
        folder: Path,
    ) -> None:
        fast, _ = choose_dtype(torch.device("cpu"))
        self.teacher, self.student = copy.deepcopy(teacher).eval().to(fast), student.train()
        self.options, self.folder = options, folder
        self.pools = [list(texts), list(chats)]
        self.head = self.teacher.lm_head.weight.detach()
        for p in [*self.teacher.parameters(), *student.parameters()]:
            p.requires_grad_(False)
        self.trained = {
            n: p
            for n, p in student.named_parameters()
            if n.startswith("model.layers.") or n == "model.norm.weight"
        }
        for p in self.trained.values():
            p.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(
            self.trained.values(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.average = {n: p.detach().clone() for n, p in self.trained.items()}
        self.step = self.tokens = 0
        self.stopping = False

    def blocks(self, step: int) -> list[Block]:
        """One block of every pool; each pool is gone through in a new order every epoch."""
        chosen = []
        for number, pool in enumerate(self.pools):
            epoch, at = divmod(step, len(pool))
            order = list(range(len(pool)))
            random.Random(self.options.seed * 1009 + epoch * 31 + number).shuffle(order)
            chosen.append(pool[order[at]])
        return chosen

    def train_step(self) -> float:
        """One step over two blocks; returns the mean KL in nats before it, NaN where it was not measured."""
        ids, mask = stack(self.blocks(self.step))
        with torch.inference_mode():
            target = hidden_states(self.teacher, ids)[:, :-1][mask]
        output = hidden_states(self.student, ids)[:, :-1][mask]
        with torch.no_grad():
            measure = self.step % self.options.measure_every == 0
            loss, gradient = kl_and_gradient(target.clone(), output.detach(), self.head, measure)
        output.backward(gradient.to(output.dtype))
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.options.clip)
        if not norm.isfinite():
            raise FloatingPointError(f"the gradient's norm is {norm} at step {self.step}")
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.rate_at(self.step, self.tokens)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        keep = min(self.options.ema, self.step / (self.step + 4))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.values()), [p.detach() for p in self.trained.values()], 1 - keep
            )
        self.step, self.tokens = self.step + 1, self.tokens + int(mask.sum())
        return loss

    def run(
        self,
        held: Mapping[str, Sequence[Block]],
        large: dict[str, float],
        progress: Progress,
        until: int | None = None,
    ) -> None:
        """Trains up to the plan (or `until` tokens); measures, logs and saves on the way."""
        goal, saved, started, first = (
            until or self.options.tokens,
            time.monotonic(),
            time.monotonic(),
            self.tokens,
        )
        recent: list[float] = []
        while self.tokens < goal and not self.stopping:
            before = self.tokens
            if math.isfinite(loss := self.train_step()):
                recent = [*recent[-9:], loss]
                rate = self.options.rate_at(self.step, self.tokens)
                self.log(step=self.step, tokens=self.tokens, kl=loss, rate=rate)
            speed = (self.tokens - first) / (time.monotonic() - started)
            every = self.options.evaluate_every
            if self.tokens // every > before // every or self.tokens >= goal:
                small = {name: cross_entropy(self.student, blocks) for name, blocks in held.items()}
                self.log(tokens=self.tokens, ce={"large": large, "small": small})
                progress(
                    min(1.0, self.tokens / goal), f"held out: small {_show(small)}, large {_show(large)}"
                )
            if time.monotonic() - saved > self.options.checkpoint_seconds:
                self.save()
                saved = time.monotonic()
            if self.step % 10 == 0 and recent:
                mean = sum(recent) / len(recent)
                progress(
                    self.tokens / goal,
                    f"step {self.step}, {self.tokens} tokens, KL {mean:.3f}, {speed:.0f} tokens/s",
                )
        self.save()

    def log(self, **values: Any) -> None:
        """Appends one line to `distil.jsonl`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "distil.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time()), **values}) + "\n")

    def save(self) -> None:
        """Writes `state.safetensors` in one rename: a kill leaves the last whole state."""
        tensors: dict[str, torch.Tensor] = {}
        for name, p in self.trained.items():
            tensors[f"weight/{name}"], tensors[f"average/{name}"] = p.detach(), self.average[name]
            if state := self.optimiser.state.get(p):
                tensors[f"first/{name}"], tensors[f"second/{name}"] = state["exp_avg"], state["exp_avg_sq"]
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / ".state.safetensors.new"
        position = {"step": str(self.step), "tokens": str(self.tokens), "plan": str(self.options.tokens)}
        save_file(tensors, temporary, metadata={**position, "rate": str(self.options.rate)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self.folder / "state.safetensors")

    def load(self) -> bool:
        """Takes up the saved state; False where there is none."""
        path = self.folder / "state.safetensors"
        if not path.exists():
            return False
        with safe_open(path, "pt") as file, torch.no_grad():
            position = file.metadata()
            self.step, self.tokens = int(position["step"]), int(position["tokens"])
            for name, p in self.trained.items():
                p.copy_(file.get_tensor(f"weight/{name}"))
                self.average[name].copy_(file.get_tensor(f"average/{name}"))
                if self.step:
                    self.optimiser.state[p] = {
                        "step": torch.tensor(float(self.step)),
                        "exp_avg": file.get_tensor(f"first/{name}"),
                        "exp_avg_sq": file.get_tensor(f"second/{name}"),
                    }
        return True


def read_weights(path: Path, average: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The trained weights, or their average, of a saved state; and its position."""
    kind = "average/" if average else "weight/"
    with safe_open(path, "pt") as file:
        names = [n for n in file.keys() if n.startswith(kind)]  # noqa: SIM118 (not a dict)
        weights = {n.removeprefix(kind): file.get_tensor(n) for n in names}
        return weights, dict(file.metadata())


def _show(values: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in values.items())
