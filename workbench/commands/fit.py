"""`fit`: calibrate a mapper for one direction of a pair and save it."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workbench.errors import InputError, WorkbenchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the fit; the pair and the direction are common to all commands."""
    parser.add_argument("--out", type=Path, help="folder for the mapper (default: with your other mappers)")
    parser.add_argument(
        "--calibration", type=Path, nargs="+", metavar="FILE", help="text files (default: the built-in)"
    )
    parser.add_argument("--sequences", type=int, default=96, help="pieces of text to read (default: 96)")
    parser.add_argument("--length", type=int, default=512, help="tokens a piece (default: 512)")
    parser.add_argument("--stride", type=int, default=1, help="use every S-th token (default: 1)")
    parser.add_argument(
        "--top-k", default="6", metavar="K|all|auto", help="source layers a target layer (default: 6)"
    )
    parser.add_argument(
        "--ridge", default="0.01", metavar="X|auto", help="ridge strength, without unit (default: 0.01)"
    )
    parser.add_argument(
        "--objective", choices=["plain"], default="plain", help="what is minimised (default: plain)"
    )
    parser.add_argument(
        "--anchors", type=int, default=4, help="first tokens left out and run natively (default: 4)"
    )
    parser.add_argument("--hold-back", type=int, default=16, help="last tokens to run natively (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of pieces (default: 0)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from a fit that was stopped, or from --sums"
    )
    parser.add_argument(
        "--sums", type=Path, metavar="FILE",
        help="keep what was gathered from the text here: with --resume another --top-k or --ridge is fitted at once",
    )  # fmt: skip


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Fit and save; see the module docstring of `workbench.kv.fit`."""
    from workbench.chat.handoff import gate
    from workbench.commands.common import host_from_args
    from workbench.kv.artefact import save
    from workbench.kv.fit import FitOptions, cut_sequences, fit
    from workbench.lab import corpus
    from workbench.models.place import home

    host, direction = host_from_args(args)
    source_side, target_side = ("small", "large") if direction == "up" else ("large", "small")
    options = FitOptions(
        sequences=args.sequences,
        length=args.length,
        stride=args.stride,
        top_k=_number(args.top_k, "--top-k", int, {"auto": None, "all": 10**6}),
        ridge=_number(args.ridge, "--ridge", float, {"auto": None}),
        anchors=args.anchors,
        hold_back=args.hold_back,
        seed=args.seed,
    )
    out = args.out or home() / "mappers" / host.pair.name / direction
    check_writable(out)
    documents = corpus.read_files(args.calibration) if args.calibration else corpus.documents("calibration")
    name = (
        ", ".join(path.name for path in args.calibration) if args.calibration else "built-in calibration text"
    )
    texts = [document.text for document in documents]

    source, target = host.model(source_side, progress), host.model(target_side, progress)
    check = gate(target, cut_sequences(target.tokenizer, texts, options)[0][:64])
    if not check.ok:
        raise WorkbenchError(
            f"{target.name} does not pass the gate: its own cache through the handoff path changes its "
            f"log-probabilities by up to {check.max_abs_error:.3g}.",
            "This model cannot be handed over to; please report it.",
        )
    mapper, manifest, report = fit(
        source, target, texts, options, direction=direction, calibration=name, progress=progress,
        state_file=args.sums or out.parent / f".{out.name}.fit.safetensors", resume=args.resume,
        keep_state=args.sums is not None,
    )  # fmt: skip
    save(out, mapper, manifest)
    result = asdict(report)
    by_head = {name: result.pop(name) for name in ("r2_k_by_head", "r2_v_by_head")}
    return {"out": str(out), **result, "warning": report.warning, "gate": asdict(check), **by_head}


def show(result: dict[str, Any]) -> str:
    """A few lines for people."""
    seconds = result["seconds"]
    lines = [
        f"Saved in {result['out']}",
        f"held-out R²: keys {result['r2_k']:.3f}, values {result['r2_v']:.3f}",
        f"{result['tokens']} tokens, {result['features']} parameters per output (p/n {result['p_over_n']:.3f})",
        f"{seconds['capture']:.0f} s reading, {seconds['solve']:.0f} s solving, {result['peak_rss_mb']:.0f} MB at most",
    ]
    return "\n".join(lines + ([f"Warning: {result['warning']}"] if result["warning"] else []))


def check_writable(folder: Path) -> None:
    """Say before hours of work, not after, that the result could not be saved.

    Raises:
        InputError: when nothing can be written there.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent) as probe:
            probe.write(b"x")
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder.name!r} is a file, not a folder.", "Choose another --out.")
    except OSError as error:
        raise InputError(
            f"Nothing can be saved in {folder.name!r}: {error.strerror}.", "Choose another --out."
        ) from error


def _number(text: str, option: str, kind: type, words: dict[str, Any]) -> Any:
    """A number, or one of the words that stand for something else.

    Raises:
        InputError: naming the option.
    """
    if text in words:
        return words[text]
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{option} must be a number or one of: {', '.join(words)}; not {text!r}.") from None
