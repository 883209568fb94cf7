"""Take the rotation out of cached keys, or put it in, with a model's own rotary module.

A cache keeps keys *after* rotary embedding, so the same content looks different at each position. The mapper
works on keys without it: `strip` turns them back by their positions, `rotate` turns predicted keys forward
by the target's. cos and sin come from the model's own module and already contain its `attention_scaling` s:

    rotate(k) = k*cos + rotate_half(k)*sin              strip(k) = (k*cos - rotate_half(k)*sin) / s²

with rotate_half((a, b)) = (-b, a) over the two halves of the first `rotary_dim` dimensions; the others pass
unchanged (partial rotary). Layers without rotation (SmolLM3 has some) keep their keys as they are: there both
directions only copy. A wrong theta cancels in strip-then-rotate, so tests compare with keys captured
before the rotation. Shapes: `(..., tokens, head_dim)`, tokens at positions start, start+1, ...
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.errors import UnsupportedModelError

_FIRST_TABLE = 512  # positions; a table grows by doubling
_CPU_BLOCK = 1024  # tokens whose keys stay in the processor's cache between the passes over them


class _Table(NamedTuple):
    """Of positions 0..n-1: cos over the rotary dimensions, sin over their first half (halves are equal)."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """Rotation of one model's keys.

    Attributes:
        rotary_dim: how many of the first dimensions of a head turn.
        scaling: the factor s in cos and sin (not 1 for yarn).
        unrotated: layers whose keys are never turned.
    """

    def __init__(self, model: Any) -> None:
        """Find the model's rotary module and check that it turns halves, as the formula above says.

        Args:
            model: a `transformers` causal language model.

        Raises:
            UnsupportedModelError: no rotary module, or one that turns in another way (interleaved pairs).
        """
        base = model.base_model
        module = getattr(base, "rotary_emb", None)
        if module is None or not hasattr(module, "inv_freq"):
            raise UnsupportedModelError(f"{type(model).__name__} has no rotary module that can be used.")
        if getattr(module, "rope_type", "default") in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"Rotary type {module.rope_type!r} changes its frequencies while running."
            )
        self._module = module
        self.scaling = float(getattr(module, "attention_scaling", 1.0))
        self.unrotated = frozenset(
            index
            for index, layer in enumerate(getattr(base, "layers", ()))
            if not getattr(getattr(layer, "self_attn", None), "use_rope", True)
        )
        self._tables: dict[tuple[torch.device, torch.dtype], _Table] = {}
        cos, sin = self._own_tables(0, 4)
        self.rotary_dim = cos.shape[-1]
        half = self.rotary_dim // 2
        if not (torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])):
            raise UnsupportedModelError(
                f"{type(model).__name__} rotates interleaved pairs, which is not supported."
            )
        self._check_against(base, cos, sin)

    def strip(self, k_rot: Tensor, start: int = 0, out: Tensor | None = None, *, layer: int = 0) -> Tensor:
        """Keys without rotation.

        Args:
            k_rot: `(..., n, head_dim)`, as in a cache, at positions start..start+n-1.
            start: position of the first token.
            out: where to write, as for `rotate` (a slice of a feature matrix, for example).
            layer: whose keys these are; it matters only where some layers have no rotation.

        Returns:
            `out`, or a new tensor of the same shape and dtype. bfloat16 to bfloat16 is computed as the model itself
            does it, in bfloat16 (twice as fast; the error, 0.4 % of the keys, stays that of the model's own rotation);
            everything else in float32.
        """
        if layer in self.unrotated:
            return _copied(k_rot, out)
        return self._turned(k_rot, start, out, sign=-1, scale=1.0 / self.scaling**2)

    def rotate(self, k_pre: Tensor, start: int = 0, out: Tensor | None = None, *, layer: int = 0) -> Tensor:
        """Keys with rotation.

        Args:
            k_pre: `(..., n, head_dim)`, any strides.
            start: position of the first token.
            out: where to write, same shape, possibly of another dtype (slots of a cache). With float32
                input and output nothing else is allocated. It must not overlap the input.
            layer: as for `strip`.

        Returns:
            `out`, or a new tensor like `k_pre`.

        Raises:
            ValueError: `out` has another shape.
        """
        if layer in self.unrotated:
            return _copied(k_pre, out)
        return self._turned(k_pre, start, out, sign=1, scale=1.0)

    def cos_sin(self, start: int, stop: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions start..stop-1, as the model applies them.

        Returns:
            Two float32 tensors `(stop - start, rotary_dim)`.
        """
        table = self._table(stop, torch.device(device))
        sin = table.sin[start:stop]
        return table.cos[start:stop].clone(), torch.cat((sin, sin), dim=-1)

    def _turned(self, k: Tensor, start: int, out: Tensor | None, *, sign: int, scale: float) -> Tensor:
        """(a, b) -> (a*cos - sign*b*sin, b*cos + sign*a*sin) * scale, written into `out`."""
        out = _room_for(k, out)
        n = k.shape[-2]
        own = k.dtype == out.dtype == torch.bfloat16 and scale == 1.0
        table = self._table(start + n, k.device, torch.bfloat16 if own else torch.float32)
        cos, sin = table.cos[start : start + n], table.sin[start : start + n]
        if scale != 1.0:
            cos, sin = cos * scale, sin * scale
        block = _CPU_BLOCK if k.device.type == "cpu" else max(n, 1)
        for i in range(0, n, block):
            tokens = slice(i, i + block)
            _turn(k[..., tokens, :], cos[tokens], sin[tokens], sign, out[..., tokens, :])
        return out

    def _table(self, stop: int, device: torch.device, dtype: torch.dtype = torch.float32) -> _Table:
        table = self._tables.get((device, dtype))
        if table is None or table.cos.shape[0] < stop:
            size = max(_FIRST_TABLE, stop, 2 * table.cos.shape[0] if table else 0)
            cos, sin = self._own_tables(0, size)
            # Replaced as a whole: a reader in another thread sees the old table or the new one.
            half = sin[:, : self.rotary_dim // 2].contiguous()
            table = _Table(cos.to(device, dtype), half.to(device, dtype))
            self._tables[device, dtype] = table
        return table

    def _own_tables(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """What the model's module gives in float32: two tensors `(stop - start, rotary_dim)`."""
        device = self._module.inv_freq.device
        # Tables outlive the caller's inference mode and must stay usable in autograd.
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(start, stop, device=device).unsqueeze(0)
            cos, sin = self._module(torch.zeros(1, device=device, dtype=torch.float32), positions)
        return cos[0].float(), sin[0].float()

    def _check_against(self, base: Any, cos: Tensor, sin: Tensor) -> None:
        """Compare with the rotation function beside the model's attention class, on random keys."""
        attention = getattr(base.layers[0], "self_attn", None)
        function = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
        if attention is None or function is None:
            raise UnsupportedModelError(
                f"{type(base).__name__} does not apply rotary positions in a known way."
            )
        generator = torch.Generator().manual_seed(0)
        k = torch.randn(1, 1, cos.shape[0], self.rotary_dim, generator=generator).to(cos.device)
        with torch.no_grad():
            expected = function(k, k, cos[None], sin[None])[1]
        if not torch.allclose(self.rotate(k), expected, atol=1e-5):
            raise UnsupportedModelError(f"{type(base).__name__} rotates keys in a way that is not supported.")


def _room_for(k: Tensor, out: Tensor | None) -> Tensor:
    """`out` if it has the shape of the keys, or a new tensor."""
    if out is None:
        return torch.empty_like(k, memory_format=torch.contiguous_format)
    if out.shape != k.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the keys have {tuple(k.shape)}")
    return out


def _copied(k: Tensor, out: Tensor | None) -> Tensor:
    """The keys of a layer without rotation, in `out` or in a new tensor."""
    return _room_for(k, out).copy_(k)


def _turn(k: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> None:
    """One product over all rotary dimensions, then one addition for each half, written into `out`."""
    dim, half = cos.shape[-1], sin.shape[-1]
    work = k if k.dtype in (torch.float32, torch.float64, cos.dtype) else k.float()
    target = out if out.dtype == work.dtype else torch.empty_like(work)
    torch.mul(work[..., :dim], cos, out=target[..., :dim])
    target[..., :half].addcmul_(work[..., half:dim], sin, value=-sign)
    target[..., half:dim].addcmul_(work[..., :half], sin, value=sign)
    if dim < k.shape[-1]:
        target[..., dim:].copy_(work[..., dim:])
    if target is not out:
        out.copy_(target)
