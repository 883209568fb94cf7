"""A fit as the page runs it, in the job thread and in the models' lane: load, gate, fit, save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from workbench.errors import Cancelled, WorkbenchError
from workbench.ui.engine import SIDES, Engine
from workbench.ui.jobs import StopFlag

if TYPE_CHECKING:
    from workbench.kv.options import FitOptions
    from workbench.models.catalog import PairRef


class RemainingTime:
    """How long a job that reports its share will still take, once that can be told."""

    def __init__(self) -> None:
        self._started: float | None = None

    def start(self) -> None:
        """The part that is reported in shares begins now."""
        self._started = monotonic()

    def after(self, share: float) -> str:
        """ ", about 3 min left", or "" while nothing can be said."""
        if self._started is None or not 0.02 < share < 0.8:
            return ""
        seconds = (monotonic() - self._started) * (1 - share) / share
        if seconds < 10:
            return ""
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


def fit_and_save(
    engine: Engine,
    ref: PairRef,
    direction: str,
    options: FitOptions,
    files: list[str],
    post: Callable[[Any], None],
    should_stop: StopFlag,
) -> Any:
    """Fits one direction of a pair and saves the mapper for everybody who uses this machine.

    On a public page nothing is saved: no stranger changes the mapper that all others use.

    Args:
        engine: models and their lane.
        ref: the pair.
        direction: "up" or "down".
        options: how to fit.
        files: calibration texts, none for the built-in ones.
        post: called with (text, share) for progress.
        should_stop: asked before every sequence and layer.

    Returns:
        (host, result of the gate, report of the fit).

    Raises:
        Cancelled: when asked to stop; the sums so far are kept, so that the same fit goes on from there.
        WorkbenchError: one sentence that says why it cannot be done.
    """
    from workbench.chat.handoff import gate
    from workbench.commands.fit import check_writable
    from workbench.kv.artefact import save
    from workbench.kv.fit import fit
    from workbench.kv.options import cut_sequences
    from workbench.lab.calibration import calibration_texts
    from workbench.models.catalog import own_artefact_folder

    clock = RemainingTime()

    def tell(share: float, text: str) -> None:
        if should_stop():
            raise Cancelled("Stopped.")
        post((f"{text}{clock.after(share)}", share))

    host = engine.host_for(ref)
    out = own_artefact_folder(ref, direction)
    keep = not engine.settings.public
    if keep:
        check_writable(out)
    post(("Reading the calibration text", 0.0))
    paths = [Path(name) for name in files]
    texts, name = calibration_texts(paths, options.sequences * options.length, should_stop)
    with (
        engine.model_lane(should_stop, tell=lambda text: post((text, 0.0))),
        engine.loaded(host, SIDES[direction], tell, should_stop),
        host.lane,
    ):
        source, target = (host.model(side) for side in SIDES[direction])
        tell(0.0, "Checking the gate")
        clock.start()
        passed = gate(target, cut_sequences(target.tokenizer, texts, options)[0][:64])
        if not passed.ok:
            raise WorkbenchError(
                f"{target.name} does not pass the gate: its own cache through the handoff path changes "
                f"its log-probabilities by up to {passed.max_abs_error:.3g}."
            )
        mapper, manifest, report = fit(
            source,
            target,
            texts,
            options,
            direction=direction,
            calibration=name,
            progress=tell,
            should_stop=should_stop,
            state_file=out.parent / f".{out.name}.fit.safetensors" if keep else None,
            resume=keep,
        )
        if keep:
            tell(1.0, "Saving")
            save(out, mapper, manifest)
            host.forget_mapper(direction)
    return host, passed, report
