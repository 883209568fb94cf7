"""How the sibling's difference is shipped: every form is built, run and measured; the smallest good one wins.

Candidates are 2, 3 and 4 bits a weight (`difference.py`), each rounded on its own or with its error made up
for by its neighbours (GPTQ), and a low-rank product of about 25 MB for comparison (never shipped: a matrix
product may round differently on another processor). "Good" means: at most `tolerance` nats more than the
unpacked bfloat16 weights, on held-out text and on held-out chats.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workbench.errors import InputError
from workbench.models import embedded
from workbench.models.difference import (
    FORMAT,
    QuantSettings,
    apply_difference,
    pack_bits,
    quantise,
    quantise_compensated,
)
from workbench.models.distil import Block, cross_entropy, hidden_states, read_weights, stack
from workbench.models.selfchat import write_atomically

Progress = Callable[[float, str], None]
LIMIT_BYTES = 40_000_000


@dataclass(frozen=True)
class PackOptions:
    """Where to, from which state; `average` None takes the running average until the decay is finished.

    `low_rank_bytes` 0 leaves the low-rank comparison out.
    """

    out: Path
    state: Path
    kept: list[int]
    average: bool | None = None
    tolerance: float = 0.02
    group: int = 64
    bits: tuple[int, ...] = (2, 3, 4)
    low_rank_bytes: int = 25_000_000


class _Inputs:
    """Second moments `E[x x^T]`, `(in, in)`, of what enters every matrix of the student."""

    def __init__(self, student: Any, blocks: Sequence[Block]) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        hooks = []
        for name, module in student.named_modules():
            if isinstance(module, torch.nn.Linear) and name.startswith("model.layers."):
                hooks.append(module.register_forward_pre_hook(self._adder(f"{name}.weight")))
        try:
            with torch.inference_mode():
                for start in range(0, len(blocks), 4):
                    hidden_states(student, stack(blocks[start : start + 4])[0])
        finally:
            for hook in hooks:
                hook.remove()

    def _adder(self, name: str) -> Callable[..., None]:
        def add(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            x = arguments[0].detach().float().flatten(0, -2)
            with torch.autocast("cpu", enabled=False):  # in bfloat16 the sums would not be positive definite
                self.sums[name] = self.sums.get(name, 0) + (x.T @ x) / len(x)

        return add


def pack(
    options: PackOptions,
    large: Any,
    student: Any,
    base: dict[str, torch.Tensor],
    train: Sequence[Block],
    held: Mapping[str, Sequence[Block]],
    report: Progress,
) -> dict[str, Any]:
    """Writes `sibling.safetensors` and `sibling.json`; returns `out`, `ce`, `bytes` and the comparison `table`.

    Args:
        options: candidates and tolerance.
        large: the large model.
        student: the small one, as it was trained.
        report: called with (share, text).
        base: the large model's checkpoint as it is on disk, bfloat16.
        train: blocks that measure the inputs of every matrix (never held-out ones).
        held: blocks by kind ("text", "chat") to measure on.
    """
    if not options.state.exists():
        raise InputError(f"{options.state} is missing; run the stage `distil` first.")
    weights, position = read_weights(options.state, average=False)
    done = int(position["tokens"]) >= int(position["plan"])
    averaged = not done if options.average is None else options.average
    if averaged:
        weights, _ = read_weights(options.state, average=True)

    def measure(state: dict[str, torch.Tensor]) -> dict[str, float]:
        student.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
        return {kind: cross_entropy(student.eval(), blocks) for kind, blocks in held.items()}

    shared = {n: t for n, t in base.items() if not n.startswith("model.layers.")}
    reference = {n: t.to(torch.bfloat16) for n, t in {**shared, **weights}.items()}
    plain = measure(reference)
    table: list[dict[str, Any]] = [
        {"form": "bfloat16", "bytes": sum(2 * w.numel() for w in weights.values()), "ce": plain}
    ]
    inputs = _Inputs(student, train).sums
    large_ce = {kind: cross_entropy(large, blocks) for kind, blocks in held.items()}
    report(0.1, f"large {_show(large_ce)}; unpacked {_show(plain)}")
    candidates: list[tuple[float, QuantSettings, str, dict[str, torch.Tensor], dict[str, float]]] = []
    for number, bits in enumerate(options.bits):
        settings = QuantSettings(bits, options.group)
        for form in ("rounded", "compensated"):
            tensors = encode(weights, base, options.kept, settings, inputs, form == "compensated")
            ce = measure(apply_difference(base, tensors, options.kept, settings))
            size = sum(t.numel() * t.element_size() for t in tensors.values())
            table.append({"form": f"{bits} bits, {form}", "bytes": size, "ce": ce})
            report(
                (number + 1) / (len(options.bits) + 2),
                f"{bits} bits, {form}: {size / 1e6:.1f} MB, {_show(ce)}",
            )
            if size <= LIMIT_BYTES:
                loss = max(ce[kind] - plain[kind] for kind in ce)
                candidates.append((loss, settings, form, tensors, ce))
        if any(loss <= options.tolerance for loss, *_ in candidates):
            break  # more bits only make it bigger
    if not candidates:
        raise InputError(f"No form of {options.bits} bits fits into {LIMIT_BYTES} bytes.")
    loss, settings, form, tensors, ce = min(candidates, key=lambda c: c[0])
    if options.low_rank_bytes and len(options.bits) > 1:  # one form asked for: no comparison wanted
        other = measure(low_rank(weights, base, options.kept, options.low_rank_bytes))
        table.append({"form": "low rank", "bytes": options.low_rank_bytes, "ce": other})
        report(0.95, f"low rank: {options.low_rank_bytes / 1e6:.1f} MB, {_show(other)}")
    manifest = {
        "recipe_version": embedded.RECIPE_VERSION,
        "gguf_sha256": embedded.GGUF_SHA256,
        "kept_layers": options.kept,
        "bits": settings.bits,
        "group": settings.group,
        "rounding": form,
        "averaged": averaged,
        "tokens": int(position["tokens"]),
        "planned_tokens": int(position["plan"]),
        "rate": float(position["rate"]),
        "ce": {"large": large_ce, "small": ce},
        "table": table,
        "made": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
    }
    write(options.out, tensors, manifest)
    return {"out": str(options.out), "ce": manifest["ce"], "bytes": manifest["bytes"], "table": table}


def encode(
    weights: dict[str, torch.Tensor],
    base: dict[str, torch.Tensor],
    kept: list[int],
    settings: QuantSettings,
    inputs: dict[str, torch.Tensor],
    compensate: bool,
) -> dict[str, torch.Tensor]:
    """The tensors to ship: codes and scales of every matrix, norm gains as they are (bfloat16)."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim == 1:
            tensors[name] = weight.to(torch.bfloat16)
            continue
        delta = weight.float() - base[_original(name, kept)].float()
        if compensate:
            codes, scales = quantise_compensated(delta, settings, inputs[name])
        else:
            codes, scales = quantise(delta, settings, inputs[name].diagonal())
        tensors[name + ".codes"], tensors[name + ".scales"] = pack_bits(codes, settings.bits), scales
    return tensors


def low_rank(
    weights: dict[str, torch.Tensor], base: dict[str, torch.Tensor], kept: list[int], budget: int
) -> dict[str, torch.Tensor]:
    """The state dict with every difference cut to one rank, whose float16 factors fill `budget` bytes."""
    matrices = [w for w in weights.values() if w.ndim == 2]
    rank = max(1, math.floor(budget / 2 / sum(sum(w.shape) for w in matrices)))
    state = {n: t for n, t in base.items() if not n.startswith("model.layers.")}
    for name, weight in weights.items():
        if weight.ndim == 1:
            state[name] = weight.to(torch.bfloat16)
            continue
        origin = base[_original(name, kept)].float()
        u, s, v = torch.linalg.svd(weight.float() - origin, full_matrices=False)
        product = (u[:, :rank] * s[:rank]).half().float() @ v[:rank].half().float()
        state[name] = (origin + product).to(torch.bfloat16)
    return state


def _original(name: str, kept: list[int]) -> str:
    """`model.layers.3.x` of the small model as the large model calls it."""
    head, layer, rest = "model.layers.", *name.removeprefix("model.layers.").split(".", 1)
    return f"{head}{kept[int(layer)]}.{rest}"


def write(out: Path, tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
    """Writes both files, each in one rename; the manifest last, with the sum of the tensors."""
    out.mkdir(parents=True, exist_ok=True)
    temporary, final = out / f".sibling.{os.getpid()}", out / "sibling.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items()}, temporary)
    os.chmod(temporary, 0o644)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    manifest |= {"format": FORMAT, "sha256": embedded.sha256_of(final), "bytes": final.stat().st_size}
    write_atomically(out / "sibling.json", json.dumps(manifest, indent=1) + "\n")


def _show(values: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in values.items())
