"""`heads`: how well each layer and head of the target is mapped, on held-out text; `--patch`: what each really costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import add_save_arguments, save, saved_line, shown
from workbench.errors import InputError
from workbench.words import lowest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the measurement; the pair and the direction are common to all commands."""
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="texts (default: the held-out ones)"
    )
    parser.add_argument("--metrics", metavar="NAME,…", help="only these (default: all)")
    parser.add_argument("--limit", type=int, default=8, help="passages to measure on (default: 8)")
    parser.add_argument("--length", type=int, default=512, help="tokens a passage (default: 512)")
    parser.add_argument("--anchors", type=int, help="first tokens left native (default: the mapper's)")
    parser.add_argument("--head", metavar="LAYER,HEAD", help="show this KV head of a layer alone")
    group = parser.add_argument_group("interventions")
    group.add_argument(
        "--patch", action="store_true", help="also exchange every head's keys and values, and hold it against the metrics"
    )  # fmt: skip
    group.add_argument(
        "--context", type=int, default=256, help="context tokens of a patched text (default: 256)"
    )
    group.add_argument("--following", type=int, default=12, help="tokens predicted after it (default: 12)")
    group.add_argument(
        "--hold-back", type=int, default=1, help="last context tokens run natively (default: 1)"
    )
    group.add_argument("--resume", action="store_true", help="go on from interventions that were stopped")
    group.add_argument(
        "--restore", metavar="HEADS",
        help="only measure what it wins to have these right: LAYER.HEAD or LAYER with commas between, or 'marked'",
    )  # fmt: skip
    group.add_argument(
        "--refit", type=Path, metavar="DIR",
        help="another mapper of this direction: also try the heads of --restore as that one makes them",
    )  # fmt: skip
    group.add_argument(
        "--mark", action="store_true", help="mark the heads of --restore in the mapper, with what they win"
    )
    group.add_argument(
        "--native", type=Path, metavar="DIR",
        help="save the mapper here so that a switch runs the lowest layers natively that --restore names wholly; DIR may "
        "be the mapper's own folder",
    )  # fmt: skip
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Measure; see `workbench.lab.heads` and `workbench.lab.patch`."""
    from workbench.commands.common import host_from_args
    from workbench.lab import corpus, heads, patch
    from workbench.lab.results import finish

    options = patch.PatchOptions(
        limit=args.limit,
        context=args.context,
        following=args.following,
        anchors=args.anchors,
        hold_back=args.hold_back,
        skip=args.limit,  # the metrics come from the passages before
    )
    if (args.mark or args.native) and not args.restore:
        raise InputError("--mark and --native need heads.", "Name them with --restore.")
    if args.metrics and (args.patch or args.head):
        raise InputError("--metrics leaves out what --patch and --head need.", "Use it alone.")
    host, direction = host_from_args(args)
    texts = corpus.read_files(args.text) if args.text else None
    if args.restore:
        return restored(args, host, direction, texts, options, progress)
    names = [name.strip() for name in args.metrics.split(",")] if args.metrics else None
    share = 0.2 if args.patch else 1.0
    result = finish(
        heads.stream(host, direction, texts, args.limit, args.length, args.anchors, names),
        lambda done, what: progress(share * done, what),
    )
    if not args.patch:
        found = {**result.to_json(), **save(args, result, host, direction, "heads")}
        return {**found, "head": one_head(result, args.head)} if args.head else found
    from workbench.models.place import home

    state = home() / "patch" / f"{host.pair.name}-{direction}.json"
    patches = finish(
        patch.stream(host, direction, texts, options, result, state, args.resume),
        lambda done, what: progress(share + (1 - share) * done, what),
    )
    result = result.with_patches(patches)
    found = {**result.to_json(), **save(args, result, host, direction, "heads")}
    told = patches.to_json()
    top = {name: told[name] for name in ("rank_correlation", "repair", "best_metric")}
    if args.out is not None:
        args.out = args.out.with_name(f"{args.out.stem}-patch{args.out.suffix}")
    saved = save(args, patches, host, direction, "patch")
    return {**found, **top, "patch": {**told, **saved}}


def restored(
    args: argparse.Namespace, host: Any, direction: str, texts: Any, options: Any, progress: Any
) -> dict[str, Any]:
    """What it wins to have some heads right; see `workbench.lab.restore`."""
    from workbench.kv import artefact
    from workbench.lab import marks, restore
    from workbench.lab.provenance import models_of
    from workbench.lab.results import finish

    folder = host.mapper_folder(direction)
    _, manifest = host.mapper(direction)
    mapper = manifest.tensors_sha256 if manifest is not None else ""
    marked = marks.load_marks(folder, mapper)
    source, target = models_of(host, direction)
    refit = None
    if args.refit is not None:
        loaded, _ = artefact.load(args.refit, source.identity, target.identity, direction)
        refit = loaded.to(target.dtype, target.layer_devices)
    heads = marked.heads if args.restore == "marked" else named_heads(args.restore, target.spec.kv_heads)
    if not heads:
        raise InputError("No head is marked in this mapper.", "Name heads instead of 'marked'.")
    native = restore.native_layers(sorted(heads), target.spec.kv_heads)
    if args.native and not native:
        raise InputError(
            "The lowest layer is not wholly among these heads.",
            "Name layers from 0 on, like --restore 0,1,2.",
        )
    if args.native and not (folder / artefact.MANIFEST).is_file():
        raise InputError("This mapper is in no folder, so nothing can be saved.")
    result = finish(restore.stream(host, direction, heads, texts, options, refit), progress)
    found: dict[str, Any] = {"restored": result.to_json()}
    marked = marks.Marks(mapper, result.heads, result)
    if args.mark:
        found["marked"] = str(marks.save_marks(folder, marked))
    if args.native:
        saved = restore.run_natively(folder, args.native, native, marked)
        found["native"] = {"out": str(args.native), "layers": native, "mapper": saved.tensors_sha256}
    return found


def named_heads(text: str, kv_heads: int) -> list[tuple[int, int]]:
    """(layer, KV head) of "3.1,5": head 1 of layer 3, all heads of layer 5.

    Raises:
        InputError: something else.
    """
    found: list[tuple[int, int]] = []
    try:
        for part in text.split(","):
            layer, dot, head = part.strip().partition(".")
            heads = [int(head)] if dot else range(kv_heads)
            found += [(int(layer), each) for each in heads]
    except ValueError:
        raise InputError(
            f"--restore cannot read {text!r}.", "Write LAYER.HEAD or LAYER, like 3.1,5."
        ) from None
    return found


def one_head(result: Any, wanted: str) -> dict[str, Any]:
    """All numbers of one head.

    Args:
        result: a `HeadMaps`.
        wanted: "LAYER,HEAD".

    Raises:
        InputError: there is no such head.
    """
    try:
        layer, head = (int(part) for part in wanted.split(","))
        if not (0 <= layer < result.layers and 0 <= head < result.kv_heads):
            raise ValueError
    except ValueError:
        raise InputError(
            f"There is no head {wanted!r}.",
            f"Give LAYER,HEAD with layers 0 to {result.layers - 1} and KV heads 0 to {result.kv_heads - 1}.",
        ) from None
    metrics = {name: float(result.by_kv_head(name)[layer, head]) for name in result.metrics}
    return {"metrics": metrics, **result.details.of(layer, head)}


def show(result: dict[str, Any]) -> str:
    """Per metric the mean of each layer and of all, and the worst head; what patching found below."""
    from workbench.lab.results import METRICS

    if "restored" in result:
        return show_restored(result)
    if "head" in result:
        return show_head(result["head"])
    names = list(result["metrics"])
    rows = []
    for layer in range(result["layers"]):
        cells = [[value for value in result["metrics"][name][layer] if value is not None] for name in names]
        rows.append([layer, *(shown(sum(cell) / len(cell) if cell else None) for cell in cells)])
    rows.append(["all", *(shown(result["means"][name]) for name in names)])
    lines = [table(["layer", *names], rows), ""]
    for name in names:
        values = [
            (value, layer, head)
            for layer, row in enumerate(result["metrics"][name])
            for head, value in enumerate(row)
            if value is not None
        ]
        if values:
            value, layer, head = min(values) if METRICS[name].better == "high" else max(values)
            lines.append(f"worst {name}: {value:.3g} in layer {layer}, {METRICS[name].per} head {head}")
    lines.append(
        f"{result['tokens']} tokens of {result['texts']} passages, the first {result['anchors']} of each "
        f"left out; {result['features']} parameters per output"
    )
    lines += saved_line(result)
    if "patch" in result:
        lines += ["", *show_patch(result["patch"])]
    return "\n".join(lines)


def show_patch(patch: dict[str, Any]) -> list[str]:
    """Rank correlations, the repair curve, and the heads that cost most."""
    shares = list(next(iter(patch["repair"].values())))
    order = sorted(patch["repair"], key=lambda name: -(patch["repair"][name]["10"] or 0))
    rows = [
        [
            name,
            shown(patch["rank_correlation"].get(name)),
            shown(patch["rank_correlation_damage"].get(name)),
            *(shown(patch["repair"][name][share]) for share in shares),
        ]
        for name in order
    ]
    worst = sorted(
        (
            (gain, layer, head)
            for layer, row in enumerate(patch["gain"]["kv"])
            for head, gain in enumerate(row)
        ),
        reverse=True,
    )[:5]
    bottom = ", ".join(f"{m}: {shown(kl, 4)}" for m, kl in patch["native_bottom"].items())
    return [
        table(["metric", "r gain", "r damage", *(f"repair {share} %" for share in shares)], rows),
        "",
        f"KL of the mapped cache {patch['base_kl']:.4f}; {patch['texts']} texts, {patch['context']} tokens of "
        f"context, {patch['following']} predicted; {patch['seconds']:.0f} s",
        "costliest heads (layer.head: KL that its patch wins): "
        + ", ".join(f"{layer}.{head}: {gain:.4f}" for gain, layer, head in worst),
        f"KL left with the lowest layers native: {bottom}",
        f"best metric: {patch['best_metric']}",
        *saved_line(patch),
    ]


def show_restored(result: dict[str, Any]) -> str:
    """What the restored heads win, beside random ones."""
    told = result["restored"]
    names = ", ".join(f"{layer}.{head}" for layer, head in told["heads_restored"])
    lines = [
        f"restored {names}",
        f"KL {told['base_kl']:.4f} -> {told['kl']:.4f}: {told['recovered']:.1%} of it; as many random heads "
        f"{told['recovered_random']:.1%}; {told['texts']} texts",
    ]
    if told["refit_kl"] is not None:
        lines.append(
            f"as the other mapper makes them: KL {told['refit_kl']:.4f}, {told['recovered_refit']:.1%} of it"
        )
    if told["native_layers"]:
        lines.append(f"Among them: {lowest(told['native_layers'])}, which can be run natively")
    if "native" in result:
        native = result["native"]
        lines.append(f"Saved in {native['out']}: a switch runs {lowest(native['layers'])} natively")
    return "\n".join(lines + ([f"Marked in {result['marked']}"] if "marked" in result else []))


def show_head(head: dict[str, Any]) -> str:
    """One head in lines."""
    from workbench.lab.results import METRICS

    rows = [
        [name, "-" if value != value else f"{value:.4g}", METRICS[name].unit]
        for name, value in head["metrics"].items()
    ]
    tokens = [
        [
            hit["position"],
            f"{hit['error']:.3g}",
            " ".join(f"{hit['before']}[{hit['token']}]{hit['after']}".split()),
        ]
        for hit in head["tokens"]
    ]
    return "\n".join(
        [
            f"layer {head['layer']}, KV head {head['head']}",
            table(["metric", "value", "unit"], rows),
            "",
            table(["position", "error", "token that suffers, in its context"], tokens),
        ]
    )
