"""`compare`: one context continued from the mapped cache, from a true prefill, and by the source alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import add_save_arguments, save, saved_line, shown
from workbench.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the comparison; the pair and the direction are common to all commands."""
    parser.add_argument("--text", type=Path, metavar="FILE", help="the context (default: a held-out text)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="its first N tokens (default: all, or 256 of the held-out)"
    )
    parser.add_argument("--chat", action="store_true", help="take it for a message and let the models answer")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write (default: 64)")
    parser.add_argument("--anchors", type=int, help="first tokens run natively (default: the mapper's)")
    parser.add_argument("--hold-back", type=int, help="last tokens run natively (default: the mapper's)")
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Compare; see `workbench.lab.compare`."""
    from workbench.commands.common import host_from_args
    from workbench.lab import compare, corpus
    from workbench.models.catalog import target_side

    host, direction = host_from_args(args)
    if args.text:
        text = "\n\n".join(document.text for document in corpus.read_files([args.text]))
    else:
        text = corpus.documents("heldout", limit=1)[0].text
    if args.context is not None and args.context < 1:
        raise InputError("--context must be at least 1.")
    limit = args.context or (None if args.text else 256)
    if limit is not None:
        tokenizer = host.model(target_side(direction), progress).tokenizer
        text = tokenizer.decode(corpus.encode(tokenizer, text, limit), skip_special_tokens=True)
    result = None
    for result in compare.stream(
        host, direction, text, args.tokens, args.anchors, args.hold_back, chat=args.chat
    ):
        done = len(result.token_ids["prefill"])
        progress(done / args.tokens, f"token {done} of {args.tokens}")
    assert result is not None
    return {**result.to_json(), **save(args, result, host, direction, "compare")}


def show(result: dict[str, Any]) -> str:
    """The three texts and their distances."""
    alone, account = result["source_alone"], result["account"]
    rows = [
        [name, shown(entry["kl"]), shown(entry["top1"]), "none" if at is None else at + 1]
        for name, entry in (("mapped", result), ("source alone", alone))
        for at in [entry["first_divergence"]]
    ]
    texts = [f"--- {name}: {result['names'][name]}\n{text}" for name, text in result["texts"].items()]
    handoff = (
        f"{result['context_tokens']} tokens of context: handoff {account['ms']['total']:.0f} ms, "
        f"true prefill {account['prefill_ms']:.0f} ms ({account['prefill_source']})"
    )
    return "\n".join(
        [
            *texts,
            "",
            table(["column", "KL (nats)", "top-1", "first difference"], rows),
            handoff,
            *saved_line(result),
        ]
    )
