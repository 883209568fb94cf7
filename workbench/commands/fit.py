"""`fit`: calibrate a mapper for one direction of a pair and save it."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workbench.errors import InputError, WorkbenchError

# The defaults of `FitOptions`, written out so that `--help` needs no imports; a test compares the two.
DEFAULTS: dict[str, Any] = {
    "top_k": "4", "ridge": "0.01", "selection": "ranked", "objective": "attention", "features": "own", "rank": 0,
    "polish": 0, "reread": 0.15, "native_layers": 0,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the fit; the pair and the direction are common to all commands."""
    parser.add_argument("--out", type=Path, help="folder for the mapper (default: with your other mappers)")
    parser.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text files, or `fineweb-edu` from the model hub (default: the built-in texts)",
    )
    parser.add_argument("--sequences", type=int, default=96, help="pieces of text to read (default: 96)")
    parser.add_argument("--length", type=int, default=512, help="tokens a piece (default: 512)")
    parser.add_argument("--stride", type=int, default=1, help="use every S-th token (default: 1)")
    parser.add_argument(
        "--top-k",
        default=DEFAULTS["top_k"],
        metavar="K|all|auto",
        help=f"source layers a target layer reads (default: {DEFAULTS['top_k']})",
    )
    parser.add_argument(
        "--ridge",
        default=DEFAULTS["ridge"],
        metavar="X|auto",
        help=f"ridge strength, without unit (default: {DEFAULTS['ridge']})",
    )
    parser.add_argument(
        "--selection",
        choices=["ranked", "greedy"],
        default=DEFAULTS["selection"],
        help=f"how source layers are put in order: each alone, or what each adds (default: {DEFAULTS['selection']})",
    )
    parser.add_argument(
        "--objective",
        choices=["plain", "attention"],
        default=DEFAULTS["objective"],
        help=f"which errors count: all alike, or as the target's attention sees them (default: {DEFAULTS['objective']})",
    )
    parser.add_argument(
        "--features",
        choices=["own", "both"],
        default=DEFAULTS["features"],
        help=f"own: keys from keys, values from values; both: each from both (default: {DEFAULTS['features']})",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=DEFAULTS["rank"],
        metavar="R",
        help=f"low rank: coordinates that all target layers share; 0: a matrix each (default: {DEFAULTS['rank']})",
    )
    parser.add_argument(
        "--mlp",
        type=int,
        nargs="?",
        const=256,
        default=0,
        metavar="WIDTH",
        help="add two hidden layers (WIDTH 256 unless given) to a low-rank map with both features",
    )
    parser.add_argument(
        "--polish",
        type=int,
        default=DEFAULTS["polish"],
        metavar="STEPS",
        help=f"steps of gradient descent on the target's own KL afterwards (default: {DEFAULTS['polish']})",
    )
    parser.add_argument(
        "--polish-text", type=Path, nargs="+", metavar="FILE",
        help="more text to polish on, beside all of the calibration text; a .jsonl file holds chats",
    )  # fmt: skip
    parser.add_argument(
        "--reread",
        type=float,
        default=DEFAULTS["reread"],
        metavar="SHARE",
        help="share of the tokens that a switch reads again instead of mapping them, the rarest ones "
        f"(default: {DEFAULTS['reread']})",
    )
    parser.add_argument(
        "--native-layers",
        type=int,
        default=DEFAULTS["native_layers"],
        metavar="M",
        help="lowest layers of the target that a switch runs natively instead of mapping them "
        f"(default: {DEFAULTS['native_layers']})",
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
        help="keep what was gathered from the text here: with --resume another --top-k, --ridge, --rank or --selection "
        "is fitted at once",
    )  # fmt: skip
    parser.add_argument(
        "--back-sums", type=Path, metavar="FILE",
        help="gather for the opposite direction too, from the same reading: there, --sums FILE --resume reads nothing",
    )  # fmt: skip


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Fit and save; see the module docstring of `workbench.kv.fit`."""
    from workbench.chat.handoff import gate
    from workbench.commands.common import host_from_args
    from workbench.kv import distributed
    from workbench.kv.artefact import save
    from workbench.kv.fit import fit
    from workbench.kv.options import FitOptions, cut_sequences
    from workbench.lab import corpus
    from workbench.lab.calibration import calibration_texts
    from workbench.models.place import home

    if args.device_map == "auto":  # one device a process, where several share the reading
        args.device_map = distributed.device() or "auto"
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
        selection=args.selection,
        objective=args.objective,
        features=args.features,
        rank=args.rank,
        mlp=args.mlp,
        polish=args.polish,
        reread=args.reread,
        native_layers=args.native_layers,
    )
    out = args.out or home() / "mappers" / host.pair.name / direction
    check_writable(out)
    texts, name = calibration_texts(args.calibration, options.sequences * options.length)

    if args.polish_text and not args.polish:
        raise InputError("--polish-text is text to polish on.", "Add --polish with a number of steps.")
    polish_files = args.polish_text or []
    polish_texts = [
        d.text for path in polish_files if path.suffix != ".jsonl" for d in corpus.read_file(path)
    ]

    source, target = host.model(source_side, progress), host.model(target_side, progress)
    for path in polish_files:
        if path.suffix == ".jsonl":
            polish_texts += [chat.text for chat in corpus.chats(target.tokenizer, path=path)]
    check = gate(target, cut_sequences(target.tokenizer, texts, options)[0][:64])
    if not check.ok:
        raise WorkbenchError(
            f"{target.name} does not pass the gate: its own cache through the handoff path changes its "
            f"log-probabilities by up to {check.max_abs_error:.3g}.",
            "This model cannot be handed over to; please report it.",
        )
    try:
        with distributed.joined():
            mapper, manifest, report = fit(
                source, target, texts, options, direction=direction, calibration=name, progress=progress,
                state_file=args.sums or out.parent / f".{out.name}.fit.safetensors", resume=args.resume,
                keep_state=args.sums is not None, back_file=args.back_sums, polish_texts=polish_texts,
            )  # fmt: skip
    except distributed.ShareDone:
        raise SystemExit(0) from None  # the first process solves, saves and reports
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
        f"{result['parameters']:,} numbers, {result['flops_per_token'] / 1e6:.1f} million operations a token",
        f"{seconds['capture']:.0f} s reading, {seconds['solve']:.0f} s solving, {result['peak_rss_mb']:.0f} MB at most",
    ]
    if result["reread_share"]:
        lines.append(f"{result['reread_share']:.1%} of other text's tokens are rare and would be read again")
    if result["mlp"]:
        mlp = result["mlp"]
        lines.append(
            f"MLP: held-out R² of keys {mlp['r2_k_without']:.3f} without and {mlp['r2_k_with']:.3f} with it, "
            f"of values {mlp['r2_v_without']:.3f} and {mlp['r2_v_with']:.3f}"
        )
    if result["polish_kl"]:
        plain, quotes = result["polish_kl"], result["polish_quotes_kl"]
        lines.append(
            f"polish: KL on held-out pieces {plain[0]:.4f} before, {plain[-1]:.4f} after, on quotes {quotes[0]:.4f} and "
            f"{quotes[-1]:.4f}, {seconds['polish']:.0f} s"
        )
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
