"""The variants of one direction's mapper that `workbench.lab.variants` measures: fitted ones, and spoilt ones.

    k1 k2 k4 all                    1, 2, 4 or all source layers a target layer (ranked, ridge .01, attention objective)
    ridge_0.001 ridge_0.1 ridge_1   another ridge, with 4 source layers
    rank_32 rank_128 rank_384       so many coordinates out of all source layers
    plain_k1 plain_k4               errors that all count alike
    default                         the pair's own matrices
    noise_2 noise_5 noise_10 noise_20   these with gaussian noise, in percent of each matrix's root mean square
    shipped                         the pair's own mapper as it is used, where it re-reads tokens or runs layers natively

All but the last map everything between anchors and held-back tokens: re-reading would hide differences, and no head metric
sees it. Everything that is fitted comes from one reading of the calibration text for each objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.kv import artefact
from workbench.kv.mapper import KVMapper
from workbench.kv.options import FitOptions
from workbench.lab.mappers import fit_and_keep
from workbench.lab.provenance import models_of

if TYPE_CHECKING:
    from workbench.models.pair import PairHost

EVERY = 10**6  # source layers: all there are
FITTED: dict[str, dict[str, Any]] = {
    "k1": {"top_k": 1},
    "k2": {"top_k": 2},
    "k4": {"top_k": 4},
    "all": {"top_k": EVERY},
    "ridge_0.001": {"top_k": 4, "ridge": 0.001},
    "ridge_0.1": {"top_k": 4, "ridge": 0.1},
    "ridge_1": {"top_k": 4, "ridge": 1.0},
    "rank_32": {"top_k": EVERY, "rank": 32},
    "rank_128": {"top_k": EVERY, "rank": 128},
    "rank_384": {"top_k": EVERY, "rank": 384},
    "plain_k1": {"top_k": 1, "objective": "plain"},
    "plain_k4": {"top_k": 4, "objective": "plain"},
}
NOISE = (0.02, 0.05, 0.1, 0.2)
DEFAULT_SEQUENCES = 48


@dataclass(frozen=True, eq=False)
class Candidate:
    """A mapper on the target's devices, and how it came about."""

    name: str
    mapper: KVMapper
    settings: dict[str, Any]
    reread: bool = False


def candidates(
    host: PairHost,
    direction: str,
    keep: Path,
    sequences: int = DEFAULT_SEQUENCES,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[Candidate]:
    """All variants; what a stopped run has fitted and read is taken from `keep`.

    Args:
        host: the pair.
        direction: "up" or "down".
        keep: folder for artefacts, each under its name, and for the sums they come from.
        sequences: pieces of calibration text to fit on.
        seed: of the noise.
        progress: of the fits.
        should_stop: asked while fitting.
    """
    source, target = models_of(host, direction)
    own, manifest = host.mapper(direction)
    common = FitOptions(
        sequences, ridge=0.01, anchors=own.anchors, hold_back=own.hold_back, selection="ranked", objective="attention",
        features="own", rank=0, mlp=0, polish=0, reread=0.0,
    )  # fmt: skip
    found = []
    for number, (name, change) in enumerate(FITTED.items()):
        options, folder = replace(common, **change), keep / name
        share = number / len(FITTED)
        if not (folder / artefact.MANIFEST).is_file():

            def tell(part: float, text: str, name: str = name, share: float = share) -> None:
                if progress:
                    progress(share + part / len(FITTED), f"{name}: {text}")

            fit_and_keep(
                host, direction, folder, options, keep / f"{options.objective}.sums", tell, should_stop
            )
        mapper, _ = artefact.load(folder, source.identity, target.identity, direction)
        settings = {
            "k": min(change["top_k"], source.spec.layers), "ridge": options.ridge, "rank": options.rank,
            "objective": options.objective, "noise": 0.0,
        }  # fmt: skip
        found.append(Candidate(name, mapper.to(target.dtype, target.layer_devices), settings))
    for sums in keep.glob("*.sums*"):  # everything is fitted: they are large, and nothing needs them any more
        sums.unlink(missing_ok=True)
    about_own: dict[str, Any] = {
        "k": max(map(len, own.key_layers)),
        "rank": own.reduce[0].shape[1] if own.reduce else 0,
    }
    if manifest is not None:
        about_own |= {"ridge": manifest.ridge, "objective": manifest.objective}
    plain = bare(own)
    found.append(Candidate("default", plain, {**about_own, "noise": 0.0}))
    for share in NOISE:
        settings = {**about_own, "noise": share}
        found.append(Candidate(f"noise_{100 * share:g}", noisy(plain, share, seed), settings))
    if own is not plain:
        found.append(Candidate("shipped", own, {**about_own, "noise": 0.0}, reread=True))
    return found


def bare(mapper: KVMapper) -> KVMapper:
    """The same matrices with nothing re-read or run natively; the mapper itself where that changes nothing."""
    return (
        replace(mapper, familiar=(), native_layers=0) if mapper.familiar or mapper.native_layers else mapper
    )


def noisy(mapper: KVMapper, share: float, seed: int) -> KVMapper:
    """The same mapper with gaussian noise in every matrix, `share` of the matrix's root mean square."""
    generator = torch.Generator().manual_seed(seed)

    def disturbed(matrix: Tensor) -> Tensor:
        noise = torch.randn(matrix.shape, generator=generator).to(matrix.device)
        return (matrix.float() + share * matrix.float().square().mean().sqrt() * noise).to(matrix.dtype)

    parts: dict[str, Any] = {
        name: tuple(map(disturbed, getattr(mapper, name)))
        for name in ("key_weight", "value_weight", "reduce")
    }
    return replace(mapper, **parts)
