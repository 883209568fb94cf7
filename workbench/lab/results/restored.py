"""What it wins to have chosen heads right: the gain of a repair, before anybody builds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number

Heads = tuple[tuple[int, int], ...]
"""(layer, KV head) each."""


@dataclass(frozen=True)
class Restored:
    """A mapped cache in which some heads are true.

    Attributes:
        heads: that were restored.
        base_kl: KL of the mapped cache to the native run, nats a token.
        kl: what is left with these heads restored.
        random_kl: what is left with as many random heads restored, mean over draws: the control.
        native_layers: so many of the lowest layers are among them wholly; they can be run natively, exactly.
        layers: of the target.
        kv_heads: of the target.
        texts: number of texts.
        provenance: where and when.
        refit_kl: what is left with these heads taken from another mapper; None when there was none.
    """

    heads: Heads
    base_kl: float
    kl: float
    random_kl: float
    native_layers: int
    layers: int
    kv_heads: int
    texts: int
    provenance: Provenance
    refit_kl: float | None = None

    @property
    def recovered(self) -> float:
        """Share of the KL that these heads win back."""
        return self._share(self.kl)

    @property
    def recovered_random(self) -> float:
        """Share of the KL that as many random heads win back."""
        return self._share(self.random_kl)

    @property
    def recovered_refit(self) -> float | None:
        """Share of the KL that these heads win back when they come from another mapper; negative where it is worse."""
        return None if self.refit_kl is None else self._share(self.refit_kl)

    def _share(self, kl: float) -> float:
        return (self.base_kl - kl) / self.base_kl if self.base_kl > 0 else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return jsonable(
            {
                "heads_restored": [list(head) for head in self.heads],
                "base_kl": self.base_kl,
                "kl": self.kl,
                "random_kl": self.random_kl,
                "recovered": self.recovered,
                "recovered_random": self.recovered_random,
                "refit_kl": self.refit_kl,
                "recovered_refit": self.recovered_refit,
                "native_layers": self.native_layers,
                "layers": self.layers,
                "heads": self.kv_heads,
                "texts": self.texts,
                "provenance": self.provenance.to_json(),
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Restored:
        """The inverse of `to_json`."""
        kls = {name: number(data[name]) for name in ("base_kl", "kl", "random_kl")}
        return cls(
            heads=tuple((int(layer), int(head)) for layer, head in data["heads_restored"]),
            **kls,
            native_layers=data["native_layers"],
            layers=data["layers"],
            kv_heads=data["heads"],
            texts=data["texts"],
            provenance=Provenance.from_json(data["provenance"]),
            refit_kl=data.get("refit_kl"),
        )


def native_layers(heads: Sequence[tuple[int, int]], kv_heads: int) -> int:
    """How many of the lowest layers have all their heads in the list."""
    chosen, layer = set(heads), 0
    while all((layer, head) in chosen for head in range(kv_heads)):
        layer += 1
    return layer
