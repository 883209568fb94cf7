"""What the Heads tab reads and runs: which mappers there are, their saved results, and the measuring jobs.

Only the jobs load weights. A mapper is named by a label that the server made; whatever else comes from the page means
the mapper in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.errors import InputError, WorkbenchError
from workbench.lab.corpus import documents
from workbench.lab.marks import Marks, load_marks, save_marks
from workbench.lab.results.common import jsonable
from workbench.ui.engine import Engine
from workbench.ui.export import MIMES, Export, file_stem, said
from workbench.ui.head_view import mappers_line
from workbench.ui.measuring import results_folder, saved, visit_of

IN_USE = "the mapper in use"
EVERY_TEXT, OWN_TEXT = "all held-out texts", "my own text"
LENGTH, SHORTEST = 512, 48
MAPPERS_SHOWN = 40


def text_names() -> list[str]:
    """What can be measured on."""
    return [EVERY_TEXT, *(document.name for document in documents("heldout")), OWN_TEXT]


def mappers(engine: Engine, key: str | None, direction: str) -> dict[str, Path]:
    """Label -> folder of every mapper of a direction; the one in use comes first."""
    from workbench.models.catalog import PRECOMPUTED, own_artefact_folder

    _, visit = visit_of(engine, key)
    ref = engine.look(visit).ref
    used = results_folder(engine, visit, direction)
    found = {IN_USE: used}
    own = own_artefact_folder(ref, direction)
    beside = sorted(own.parent.iterdir()) if own.parent.is_dir() else []
    for folder in (PRECOMPUTED / ref.name / direction, *beside[:MAPPERS_SHOWN]):
        manifest = manifest_of(folder)
        if folder != used and manifest.get("direction") == direction:
            name = "shipped" if folder.parent.parent == PRECOMPUTED else folder.name
            found[f"{name}: {mappers_line(manifest)}"] = folder
    return found


def manifest_of(folder: Path) -> dict[str, Any]:
    """A mapper's manifest as it stands, {} when there is none that can be read."""
    try:
        data = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def result_of(engine: Engine, key: str | None, direction: str, label: str, kind: str) -> tuple[Any, str]:
    """The result of a mapper, measured here or saved beside it.

    Returns:
        (result or None, a sentence when there is none).
    """
    if label == IN_USE:
        return saved(engine, key, direction, kind)
    from workbench.lab.provenance import load_result

    _, visit = visit_of(engine, key)
    own = visit.results.get(place_of(engine.look(visit).ref.name, direction, kind, label))
    folder = mappers(engine, key, direction).get(label)
    if own is not None or folder is None:
        return own, "" if own is not None else "There is no such mapper any more."
    try:
        if (folder / f"{kind}.json").is_file():
            return load_result(folder / f"{kind}.json", kind), ""
    except WorkbenchError as error:
        return None, engine.sentence(error)
    return None, f"Nothing was measured yet for {label}. Measure it here."


def place_of(pair: str, direction: str, kind: str, label: str) -> tuple[str, str, str]:
    """Where a visitor's result is kept; what is not of the mapper in use stays out of reports about the pair."""
    return (pair, direction, kind) if label == IN_USE else (pair, f"{direction} of {label}", kind)


def with_patches(result: Any, patches: Any) -> Any:
    """Head maps with what interventions found, where both are of one mapper."""
    if patches is None or result is None or patches.gain["kv"].shape != (result.layers, result.kv_heads):
        return result
    if patches.provenance.mapper != result.provenance.mapper:
        return result
    return result.with_patches(patches)


def host_with(host: Any, direction: str, folder: Path | None) -> Any:
    """The same models with another mapper; the host itself when no folder is given.

    Raises:
        ArtefactError: the mapper is damaged, or belongs to something else.
    """
    if folder is None:
        return host
    from workbench.kv import artefact
    from workbench.lab.provenance import models_of
    from workbench.models.pair import PairHost

    source, target = models_of(host, direction)
    loaded = artefact.load(folder, source.identity, target.identity, direction)
    other = PairHost.from_models(
        host.model("small"), host.model("large"), {direction: loaded}, name=host.pair.name
    )
    other.lane = host.lane
    return other


def chosen_texts(tokenizer: Any, choice: str, own: str, limit: int, longest: int) -> tuple[Any, int, int]:
    """What to measure on: (documents or None for the held-out ones, passages, tokens a passage).

    Raises:
        InputError: the text is too short.
    """
    from workbench.lab.corpus import Document, encode

    if choice == OWN_TEXT:
        found = [Document("my own text", own)]
    else:
        found = [document for document in documents("heldout") if document.name == choice]
    if not found:
        return None, limit, LENGTH
    tokens = len(encode(tokenizer, found[0], longest))
    if tokens < SHORTEST:
        raise InputError(f"The text has only {tokens} tokens.", f"Give one of at least {SHORTEST}.")
    length = min(tokens, LENGTH)
    return found, max(1, min(limit, tokens // length)), length


def maps_job(
    visit: Any, direction: str, label: str, folder: Path | None, texts: tuple[str, str, int], patch: bool
) -> Callable[[Any, Any], Iterator[Any]]:
    """A job for `measure`: the metrics of a mapper, and the interventions too where they are asked for.

    Args:
        visit: keeps the interventions' result; the metrics are kept by `measure`.
        direction: "up" or "down".
        label: of the mapper.
        folder: of the mapper, None for the one in use.
        texts: choice, own text, passages.
        patch: patch every head too.
    """

    def start(host: Any, should_stop: Any) -> Iterator[Any]:
        from workbench.lab import heads
        from workbench.lab import patch as patching
        from workbench.lab.results import Step

        other = host_with(host, direction, folder)
        tokenizer = host.model("large").tokenizer
        found, limit, length = chosen_texts(tokenizer, *texts, longest=host.max_positions())
        share, maps = 0.25 if patch else 1.0, None
        for item in heads.stream(other, direction, found, limit, length, should_stop=should_stop):
            if isinstance(item, Step):
                yield Step(share * item.fraction, item.text)
            else:
                maps = item
        assert maps is not None  # a stream ends with its result
        if patch:
            short = min(patching.DEFAULT_CONTEXT + patching.DEFAULT_FOLLOWING, length)
            following = min(patching.DEFAULT_FOLLOWING, short // 4)
            options = patching.PatchOptions(
                limit=limit,
                context=short - following,
                following=following,
                skip=limit if found is None else 0,
            )
            for step in patching.stream(other, direction, found, options, maps, should_stop=should_stop):
                if isinstance(step, Step):
                    yield Step(share + (1 - share) * step.fraction, step.text)
                else:
                    visit.results[place_of(host.pair.name, direction, "patch", label)] = step
                    maps = maps.with_patches(step)
        yield maps

    return start


def restore_job(
    direction: str,
    folder: Path | None,
    heads: tuple[tuple[int, int], ...],
    limit: int,
    refit: Path | None = None,
) -> Callable[[Any, Any], Iterator[Any]]:
    """A job for `measure`: what repairing the marked heads wins, also with a refit's heads where one is named."""

    def start(host: Any, should_stop: Any) -> Iterator[Any]:
        from workbench.lab import patch, restore

        options = patch.PatchOptions(limit=limit)
        other = None if refit is None else host_with(host, direction, refit).mapper(direction)[0]
        return restore.stream(
            host_with(host, direction, folder), direction, heads, None, options, other, should_stop
        )

    return start


def head_export(engine: Engine) -> Export:
    """The row under a head's figures; `build` it with (direction, mapper, name of the head)."""

    def make(key: str | None, direction: str, label: str, name: str | None, *, format: str) -> dict[str, Any]:
        from workbench import plots, report

        result, why = result_of(engine, key, direction, label, "heads")
        known = {} if result is None else head_names(result)
        if result is None or result.details is None or name not in known:
            return said(why or "Open a head first.")
        layer, head = known[name]
        stem = file_stem(result.provenance.pair, direction, name)
        if format == "json":
            data = {**result.details.of(layer, head), "provenance": result.provenance.to_json()}
            text = json.dumps(jsonable(data), ensure_ascii=False, indent=1, allow_nan=False)
            return {"name": f"{stem}.json", "mime": MIMES["json"], "text": text}
        figure = report.on_paper(plots.one_head(result.details, layer, head))
        if format == "html":
            text = report.figure_page(figure, f"{result.provenance.pair}, {name}", result, report.MARKER)
            return {"name": f"{stem}.html", "mime": MIMES["html"], "text": text, "plotly": True}
        return {
            "name": f"{stem}.{format}",
            "format": format,
            "figure": figure.to_json(),
            "width": 1000,
            "height": int(figure.layout.height),
        }

    return Export(engine, ("html", "svg", "png", "json"), make, "Save this head", "one-head")


def head_names(result: Any) -> dict[str, tuple[int, int]]:
    """Every KV head as the menu names it -> (layer, KV head)."""
    return {f"layer {t}, KV head {h}": (t, h) for t in range(result.layers) for h in range(result.kv_heads)}


def marks_of(engine: Engine, key: str | None, direction: str, label: str) -> tuple[Marks, Path]:
    """The marks of a mapper and its folder; a visitor of a public page has marks of their own."""
    _, visit = visit_of(engine, key)
    folder = mappers(engine, key, direction).get(label) or results_folder(engine, visit, direction)
    mapper = str(manifest_of(folder).get("tensors_sha256", ""))
    own = visit.results.get(marks_place(engine, visit, direction, label))
    if own is not None and own.mapper == mapper:
        return own, folder
    return (Marks(mapper) if engine.settings.public else load_marks(folder, mapper)), folder


def marks_place(engine: Engine, visit: Any, direction: str, label: str) -> tuple[str, str, str]:
    """Where a visitor's marks are kept."""
    return engine.look(visit).ref.name, f"{direction} of {label}", "marks"


def keep_marks(
    engine: Engine, key: str | None, direction: str, label: str, marks: Marks, folder: Path
) -> str:
    """Keep marks for the visitor, and beside the mapper where the page is not public and the mapper is saved.

    Returns:
        A sentence when they could not be written, else "".
    """
    _, visit = visit_of(engine, key)
    visit.results[marks_place(engine, visit, direction, label)] = marks
    if engine.settings.public or not marks.mapper or not (folder / "manifest.json").is_file():
        return ""
    try:
        save_marks(folder, marks)
    except WorkbenchError as error:
        return engine.sentence(error)
    return ""


def native_now(folder: Path) -> int:
    """How many of the lowest layers a switch with the mapper in a folder runs natively."""
    layers = manifest_of(folder).get("native_layers")
    return layers if type(layers) is int else 0


def run_natively(engine: Engine, key: str | None, direction: str, label: str, layers: int) -> str:
    """Save a mapper so that its lowest layers run natively, as the mapper in use where it came with the project.

    Returns:
        Its label from now on.

    Raises:
        WorkbenchError: one sentence that says why it cannot be done.
    """
    from workbench.lab.restore import run_natively
    from workbench.models.catalog import PRECOMPUTED, own_artefact_folder

    _, visit = visit_of(engine, key)
    marks, folder = marks_of(engine, key, direction, label)
    if engine.settings.public or not (folder / "manifest.json").is_file():
        raise InputError("This mapper cannot be changed here.", "Run the page on a machine of your own.")
    ref, out = engine.look(visit).ref, folder
    if folder.resolve().is_relative_to(PRECOMPUTED.resolve()):
        out = own_artefact_folder(ref, direction)
        if out.exists():
            raise InputError(
                "You have a mapper of your own, which this one would replace.", "Choose that one and mark it."
            )
    run_natively(folder, out, layers, marks)
    engine.host_of(visit).forget_mapper(direction)
    for kind in ("latency", "quality", "compare", "mappers"):
        visit.results.pop((ref.name, direction, kind), None)
    labels = {path: name for name, path in mappers(engine, key, direction).items()}
    again = labels.get(out, IN_USE)
    for kind in ("heads", "patch"):  # what was measured of the map still holds
        known = visit.results.get(place_of(ref.name, direction, kind, label))
        if known is not None:
            visit.results[place_of(ref.name, direction, kind, again)] = known
    return again
