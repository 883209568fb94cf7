"""What would it win to have these heads right? The chosen heads true in an otherwise mapped cache, beside random ones.

A head can be right in two ways: its layer is among the lowest, which the target can run natively over the whole
context since nothing above is needed for it; or it is fitted again. The gain measured here is exact for the
first and an upper bound for the second; `run_natively` saves a mapper so that its switches do the first. A mapper that
was fitted again, with another objective or rank say, can be given: then the heads are also taken from what that one
makes, and the rest from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import Cancelled, InputError
from workbench.kv import artefact
from workbench.lab.corpus import Document, documents, passages
from workbench.lab.marks import Marks, save_marks
from workbench.lab.patch import PatchOptions, branch, mapped_context
from workbench.lab.provenance import models_of, trace, write_text
from workbench.lab.results.common import Step
from workbench.lab.results.restored import Restored, native_layers

if TYPE_CHECKING:
    from workbench.kv.manifest import Manifest
    from workbench.kv.mapper import KVMapper
    from workbench.models.pair import PairHost

ABOUT_THE_MAP = ("heads.json", "patch.json")
"""Results that hold whether or not a switch makes use of the whole map."""


def stream(
    host: PairHost,
    direction: str,
    heads: Sequence[tuple[int, int]],
    texts: Sequence[Document] | None = None,
    options: PatchOptions | None = None,
    refit: KVMapper | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Step | Restored]:
    """Measure what restoring heads wins.

    Args:
        host: the pair.
        direction: "up" or "down".
        heads: (layer, KV head) each.
        texts: to measure on, None for the held-out ones.
        options: how much; `draws` random sets of as many heads are the control.
        refit: another mapper of this direction, on the target's devices, to take the same heads from.
        should_stop: asked before every text.

    Yields:
        A `Step` a text; the `Restored` last.

    Raises:
        InputError: no heads, or heads that there are not.
        Cancelled: when asked to stop.
    """
    options = options or PatchOptions()
    source, target = models_of(host, direction)
    layers, kv_heads = target.spec.layers, target.spec.kv_heads
    chosen = sorted(set(heads))
    if not chosen or any(not (0 <= t < layers and 0 <= h < kv_heads) for t, h in chosen):
        raise InputError(
            "There are no such heads.",
            f"Name layers 0 to {layers - 1} and KV heads 0 to {kv_heads - 1}.",
        )
    mapper, _ = host.mapper(direction)
    random = np.random.default_rng(0)
    draws = [random.permutation(layers * kv_heads)[: len(chosen)].tolist() for _ in range(options.draws)]
    groups = [chosen, *([divmod(index, kv_heads) for index in draw] for draw in draws)]
    variants = [frozenset((t, h, kind) for t, h in group for kind in "kv") for group in groups]
    length = options.context + options.following
    cut = passages(target.tokenizer, texts or documents("heldout"), length, options.skip + options.limit)
    cut = cut[options.skip :] or cut[-options.limit :]
    base, kls, again = [], [], []
    for number, passage in enumerate(cut):
        if should_stop and should_stop():
            raise Cancelled("The measurement was stopped.")
        with host.holding_lane(should_stop):
            branches = branch(source, target, mapper, passage, options, should_stop)
            base.append(branches.base_kl)
            kls.append(branches.kl("mapped", variants))
            if refit is not None:
                donor = mapped_context(source, target, refit, passage, options, should_stop)
                again += branches.kl("mapped", variants[:1], donor)
        yield Step((number + 1) / len(cut), f"restoring heads in text {number + 1} of {len(cut)}")
    means = np.mean(kls, axis=0)
    yield Restored(
        heads=tuple(chosen),
        base_kl=float(np.mean(base)),
        kl=float(means[0]),
        random_kl=float(means[1:].mean()) if options.draws else float("nan"),
        refit_kl=float(np.mean(again)) if again else None,
        native_layers=native_layers(chosen, kv_heads),
        layers=layers,
        kv_heads=kv_heads,
        texts=len(cut),
        provenance=trace(host, direction, len(cut) * options.following, [(p.name, p.ids) for p in cut]),
    )


def run_natively(folder: Path, out: Path, layers: int, marked: Marks) -> Manifest:
    """Save a mapper so that switches run its lowest layers natively; what is known about its heads goes along.

    Args:
        folder: of the mapper.
        out: where to save; may be the same.
        layers: how many of the lowest layers, 0 to map all of them again.
        marked: its marks, which are kept for the mapper that is saved.

    Returns:
        The manifest as it was written.

    Raises:
        ArtefactError: the mapper cannot be read or saved.
        InputError: the marks or the results cannot be written.
    """
    known = {name: (folder / name).read_text("utf-8") for name in ABOUT_THE_MAP if (folder / name).is_file()}
    manifest = artefact.save_with_native_layers(folder, out, layers)
    for name, text in known.items():
        write_text(text, out / name)
    save_marks(out, replace(marked, mapper=manifest.tensors_sha256))
    return manifest
