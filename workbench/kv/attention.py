"""An objective that knows attention: which errors of keys and values the target's own attention would notice.

The error e of a key is seen by a query as the change `q_rot' e_rot` of a logit, the error of a value as a change of what
the output projection W adds to the hidden state. To first order an error at a token that gets the attention p changes
the attention output by

    keys     p * scaling * (q_rot' e_rot) * W (v - out)        values     p * W e

so the squared change is `e' M e` with, per layer and KV head,

    M_v = sum over the group's query heads  W_g' W_g
    M_k = scaling² * sum over the group  E[q q'] * tr(W_g Cov(v) W_g')

Queries meet *rotated* keys while the map is fitted before the rotation. With a query i tokens after its key,
`q_rot' e_rot = (R(i) q_pre)' e_pre`: so the second moment of the queries without their rotation is turned by many distances
and averaged, `E[q q'] = mean over i of R(i) E[q_pre q_pre'] R(i)'`. The average wipes out what depends on one distance only
(fast frequencies become isotropic within their pair) and keeps the slow ones. Pairs of one distance need not be gathered.

Where ridge has full rank, the output metric M does not change its solution; it does change which directions a map of low
rank keeps, and how keys and values, heads and layers weigh against each other there. What changes every solution is
the weight of the tokens: the attention that a token gets from those more than `NEAR` tokens after it, per later query,
tempered by a power so that a few sinks do not take everything.

Each layer's metric is divided by the mean energy of what its attention adds, so that all layers count alike.
Memory: two (head_dim, head_dim) sums a head; nothing grows with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.kv.capture import attention_modules, capture_attention, o_proj_weight
from workbench.kv.forward import forward
from workbench.kv.spec import KVSpec

if TYPE_CHECKING:
    from workbench.kv.rope import Rotary
    from workbench.models.loading import LoadedModel

TEMPER = 0.5  # power of the attention that a token gets, as its weight
NEAR = 16  # tokens right behind a key: after a switch these are held back, and run natively
DISTANCES = 32  # relative positions over which the queries' moment is averaged
FARTHEST = 1024


class AttentionSums:
    """Streamed sums over the target's queries and values, and the weights of the last sequence's tokens."""

    def __init__(self, spec: KVSpec) -> None:
        shape = (spec.layers, spec.kv_heads, spec.head_dim)
        self.queries = torch.zeros(
            *shape, spec.head_dim, dtype=torch.float64
        )  # sum of q_pre q_pre', whole group
        self.values = torch.zeros(*shape, spec.head_dim, dtype=torch.float64)  # sum of v v'
        self.value_sum = torch.zeros(*shape, dtype=torch.float64)
        self.outputs = torch.zeros(spec.layers, spec.query_heads, spec.head_dim, dtype=torch.float64)
        self.tokens = 0
        self.token_weight = torch.zeros(0)

    def watch(self, model: LoadedModel, ids: Sequence[int], cache: Any) -> None:
        """Run the model over one sequence into an empty cache, and add what its attention does.

        Afterwards `token_weight` (tokens,) holds this sequence's weights, with a mean of 1.
        """
        received = torch.zeros(len(ids))
        scaling = scalings(model)

        def visit(layer: int, q_rot: Tensor, k_rot: Tensor, v: Tensor, out: Tensor) -> None:
            heads, n, dim = k_rot.shape[1], q_rot.shape[2], q_rot.shape[3]
            q_pre = model.rotary.strip(q_rot, layer=layer).float()[0].reshape(heads, -1, dim)
            self.queries[layer] += (q_pre.transpose(1, 2) @ q_pre).cpu().double()
            values = v[0].float()
            self.values[layer] += (values.transpose(1, 2) @ values).cpu().double()
            self.value_sum[layer] += values.sum(1).cpu().double()
            self.outputs[layer] += out[0].float().square().sum(0).cpu().double()
            index = torch.arange(n, device=k_rot.device)
            hidden = index > index[:, None]
            far = index <= index[:, None] - NEAR
            for head in range(heads):
                group = q_rot[0].float().reshape(heads, -1, n, dim)[head]
                scores = (group @ k_rot[0, head].float().T).mul_(scaling[layer])
                attention = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
                received.add_((attention * far).sum((0, 1)).cpu())

        with capture_attention(model.model, visit):
            forward(model.model, ids, cache, keep=0)
        self.tokens += len(ids)
        later = (len(ids) - NEAR - torch.arange(len(ids))).clamp_min(1)
        weight = (received / later).clamp_min(1e-9).pow(TEMPER)
        self.token_weight = weight / weight.mean()

    def metrics(self, model: LoadedModel, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """M of keys (before rotation) and of values, each (layers, kv_heads, head_dim, head_dim) float64."""
        spec = model.spec
        group = spec.query_heads // spec.kv_heads
        mean = self.value_sum / self.tokens
        spread = self.values / self.tokens - mean[..., None] * mean[..., None, :]
        moments = self.queries / self.tokens / group
        turned = averaged_over_distances(moments, rotary)
        for layer in rotary.unrotated:
            turned[layer] = moments[layer]
        keys, values = torch.zeros_like(turned), torch.zeros_like(turned)
        for layer, scaling in enumerate(scalings(model)):
            weight = o_proj_weight(model.model, layer).cpu().double()
            parts = weight.view(weight.shape[0], spec.kv_heads, group, spec.head_dim)
            values[layer] = torch.einsum("ohgd,ohge->hde", parts, parts)
            moved = (values[layer] * spread[layer]).sum((1, 2))  # tr(W Cov(v) W') of the group
            keys[layer] = turned[layer] * (scaling**2 * moved)[:, None, None]
            columns = (
                parts.square().sum(0).reshape(-1, spec.head_dim)
            )  # |W e_i|² of each query head's channel
            energy = (columns * self.outputs[layer] / self.tokens).sum().clamp_min(1e-12)
            keys[layer] /= energy
            values[layer] /= energy
        return keys, values

    def state(self) -> dict[str, Tensor]:
        """Everything as named tensors."""
        names = ("queries", "values", "value_sum", "outputs")
        return {name: getattr(self, name) for name in names} | {"tokens": torch.tensor(self.tokens)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> AttentionSums:
        """The inverse of `state`."""
        sums = cls.__new__(cls)
        for name, tensor in state.items():
            setattr(sums, name, int(tensor) if name == "tokens" else tensor)
        sums.token_weight = torch.zeros(0)
        return sums


def scalings(model: LoadedModel) -> list[float]:
    """The factor on the logits of every layer."""
    default = model.spec.head_dim**-0.5
    return [float(getattr(module, "scaling", default)) for module in attention_modules(model.model)]


def averaged_over_distances(moments: Tensor, rotary: Rotary) -> Tensor:
    """Second moments (..., d, d) of unrotated queries, as keys that stand before them meet them.

    The mean over distances i of R(i) M R(i)', with R(i) the target's own rotation by i positions: spread evenly from
    `NEAR` to `FARTHEST`.
    """
    dim = moments.shape[-1]
    total = torch.zeros_like(moments)
    steps = torch.linspace(NEAR, FARTHEST, DISTANCES).long().tolist()
    basis = torch.eye(dim)[:, None]  # (d, 1, d): every unit vector as a key of one token
    for step in steps:
        turn = (
            rotary.rotate(basis, start=step)[:, 0].double().T / rotary.scaling
        )  # R(step): columns are turned vectors
        total += turn @ moments @ turn.T
    return total / len(steps)


def root(metric: Tensor) -> Tensor:
    """(..., d, d) symmetric D with D D = M; directions that are hardly read keep a millionth of the largest."""
    values, vectors = torch.linalg.eigh(metric.double())
    values = values.clamp_min(1e-6 * values.amax(-1, keepdim=True).clamp_min(1e-12)).sqrt()
    return vectors @ torch.diag_embed(values) @ vectors.transpose(-1, -2)
