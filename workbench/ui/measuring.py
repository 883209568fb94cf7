"""What the measuring tabs share: a saved result at first, and "Measure here" with progress and stop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import gradio as gr
from gradio.context import LocalContext

from workbench.errors import Cancelled, InputError, WorkbenchError
from workbench.ui.engine import SIDES, Engine
from workbench.ui.guard import from_before
from workbench.ui.jobs import Done, StopFlag, run_job
from workbench.ui.markup import notice, progress
from workbench.ui.session import Visit
from workbench.words import ARROWS

# The lane decides whose turn it is and who is turned away; handlers that wait for it only poll.
MODEL = {"concurrency_id": "model", "concurrency_limit": None, "show_progress": "hidden"}
LOST = (
    "The server does not hold this chat any more: it was started again, or made room for others. What you "
    "see can still be copied; your next message begins a new chat."
)
QUICK = {"queue": False, "show_progress": "hidden"}


def visit_of(engine: Engine, key: str | None) -> tuple[str, Visit]:
    """The visitor's own things; new ones when the server does not know the key (restarted, or dropped)."""
    visit = engine.visits.get(key)
    if visit is None:
        request = LocalContext.request.get(None)  # of the event that is being handled
        tab = getattr(request, "session_hash", None)
        own = engine.visits.of_tab(tab)  # its key is on its way to the page
        lost = LOST if own is None and (key or from_before(request, engine.settings)) else ""
        key = own or engine.visits.open(tab)
        visit = engine.visits.get(key)
        assert visit is not None
        visit.notice = lost or visit.notice
    return str(key), visit


def saved(engine: Engine, key: str | None, direction: str, kind: str) -> tuple[Any, str]:
    """The result to show: measured here by this visitor, else the one that came with the pair.

    Returns:
        (result or None, a sentence when there is none).
    """
    from workbench.lab.provenance import load_precomputed

    _, visit = visit_of(engine, key)
    pair = engine.look(visit).ref
    own = visit.results.get((pair.name, direction, kind))
    if own is not None:
        return own, ""
    try:
        folder = results_folder(engine, visit, direction)
        found = load_precomputed(
            pair.name, direction, kind, folder if (folder / f"{kind}.json").is_file() else None
        )
    except WorkbenchError as error:
        return None, engine.sentence(error)
    if found is None:
        way = ARROWS.get(direction, direction)
        return None, f"Nothing was measured yet for {pair.title}, {way}. “Measure here” does it."
    return found, ""


def results_folder(engine: Engine, visit: Visit, direction: str) -> Path:
    """Where the mapper of a visitor's pair and what was measured with it are kept; nothing is loaded for it."""
    from workbench.models.catalog import artefact_folder

    if visit.host is not None:
        return Path(visit.host.mapper_folder(direction))
    return artefact_folder(engine.look(visit).ref, direction)


def measure(
    engine: Engine,
    key: str | None,
    direction: str,
    kind: str,
    start: Callable[[Any, Callable[[], bool]], Iterator[Any]],
) -> Generator[tuple[str, Any, bool], None, None]:
    """Runs a measuring generator of `workbench.lab` in the models' lane.

    Args:
        engine: shared by all visitors.
        key: of the visitor.
        direction: "up" or "down".
        kind: under which the result is kept for the visitor.
        start: (host, should_stop) -> an iterator of `Step`s and partial results, the result last.

    Yields:
        (status HTML, newest partial or whole result or None, finished).
    """
    _, visit = visit_of(engine, key)
    if visit.job_stop is not None:
        yield notice("A measurement of yours is running already. Stop it first."), None, False
        return
    stop = take_flag(visit)
    host = engine.host_of(visit)

    def work(post: Callable[[Any], None], should_stop: StopFlag) -> Any:
        def tell(share: float, text: str) -> None:
            if should_stop():
                raise Cancelled("Stopped.")
            post((text, share))

        post(("Waiting for the model", None))
        with (
            engine.model_lane(stop, visit, lambda text: post((text, None))) as step_aside,
            engine.loaded(host, SIDES[direction], tell, should_stop),
        ):
            post(("Starting", 0.0))
            last = None
            for item in start(host, should_stop):
                if should_stop():
                    raise Cancelled("Stopped.")
                last = item
                fraction = getattr(item, "fraction", None)
                post(
                    (item.text, fraction, item.partial) if fraction is not None else ("Measuring", None, item)
                )
                step_aside()
            return last

    try:
        with closing(run_job(work, stop)) as items:
            for item in items:
                if item is None:
                    continue
                if not isinstance(item, Done):
                    text, share, *partial = item
                    yield progress(text, share, 1.0), partial[0] if partial else None, False
                elif item.error is None:
                    visit.results[host.pair.name, direction, kind] = item.result
                    yield "", item.result, True
                elif isinstance(item.error, Cancelled):
                    why = engine.time_is_up() if stop.timed_out else "Stopped; nothing was changed."
                    yield notice(why), None, True
                else:
                    mild = "warn" if isinstance(item.error, InputError) else "error"
                    yield notice(engine.sentence(item.error), mild), None, True
    finally:
        visit.job_stop = None


def take_flag(visit: Visit) -> StopFlag:
    """The flag of the job that begins now; it is up already when Stop was pressed in the queue."""
    visit.job_stop, visit.job_asked = visit.job_asked or StopFlag(), None
    return visit.job_stop


def direction_choice(name: str) -> gr.Radio:
    """Which way the tab `name` looks."""
    return gr.Radio(
        [(ARROWS[way], way) for way in ARROWS], value="up", label="Direction", elem_id=f"kv-{name}-direction"
    )


def run_and_stop(
    name: str, label: str = "Measure here", variant: Literal["primary", "secondary"] = "secondary"
) -> tuple[gr.Button, gr.Button]:
    """The row with the button that starts a job of the tab `name`, and its Stop; for `wire_job`."""
    with gr.Row():
        run = gr.Button(label, variant=variant, scale=3, elem_id=f"kv-{name}-run")
        stop = gr.Button(
            "Stop", interactive=False, scale=1, elem_classes="kv-stop", elem_id=f"kv-{name}-stop"
        )
    return run, stop


def nothing_shown(texts: Iterable[Any], figures: Iterable[Any]) -> dict[Any, Any]:
    """A tab for which nothing was saved: empty texts, hidden figures."""
    return dict.fromkeys(texts, "") | {figure: gr.update(visible=False) for figure in figures}


def wire_job(
    engine: Engine,
    key: gr.State,
    run: gr.Button,
    stop: gr.Button,
    status: Any,
    job: Any,
    inputs: list[Any],
    outputs: list[Any],
    name: str,
) -> None:
    """Wires a "Measure here" button and its Stop.

    Stop works from the click on, also while the job waits for its turn.
    """
    api = {"api_visibility": engine.settings.api_visibility}

    def arm(key: str | None) -> tuple[Any, ...]:
        key, visit = visit_of(engine, key)
        visit.job_asked = StopFlag()
        return (
            key,
            gr.update(interactive=True),
            gr.update(interactive=False),
            progress("Waiting for the model"),
        )

    def disarm() -> tuple[Any, Any]:
        return gr.update(interactive=False), gr.update(interactive=True)

    def stop_job(key: str | None) -> str:
        _, visit = visit_of(engine, key)
        flags = [flag for flag in (visit.job_stop, visit.job_asked) if flag is not None]
        for flag in flags:
            flag.set()
        return progress("Stopping") if flags else ""

    armed = run.click(arm, [key], [key, stop, run, status], api_name=f"ask_{name}", **QUICK, **api)
    done = armed.then(job, inputs, outputs, api_name=name, **MODEL, **api)
    done.then(disarm, None, [stop, run], api_name=f"end_{name}", **QUICK, **api)
    stop.click(stop_job, [key], [status], api_name=f"stop_{name}", **QUICK, **api)
