"""What a chat action computes, in the job thread and in the models' lane: load, switch, answer, measure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from workbench.errors import Cancelled
from workbench.ui.engine import Engine, import_libraries
from workbench.ui.jobs import StopFlag
from workbench.ui.session import Request, Visit


@dataclass(frozen=True)
class Choices:
    """The settings beside the chat.

    Attributes:
        sampling: arguments of `Sampling`.
        anchors, hold_back: of a switch, None for the mapper's own choice.
        measure_each: run a true prefill after every switch, to compare.
        incremental: map every turn ahead, if the other model is loaded.
        automatic: the small model answers, the large one takes over where that is unsure.
        threshold: from which mean entropy on, nats a token.
    """

    sampling: dict[str, Any]
    anchors: int | None
    hold_back: int | None
    measure_each: bool
    incremental: bool = False
    automatic: bool = False
    threshold: float = 0.0


def carry_out(
    engine: Engine,
    visit: Visit,
    request: Request,
    chosen: Choices,
    post: Callable[[Any], None],
    stop: StopFlag,
) -> str | None:
    """Does what was asked for.

    Args:
        engine: models and their lane.
        visit: whose conversation.
        request: what to do.
        chosen: settings.
        post: called with (text, done, total) for progress, and with True when an answer has grown; the page
            is drawn from the conversation itself.
        stop: asked at every token and layer.

    Returns:
        Text to put back into the message box, of an undo.

    Raises:
        Cancelled: when asked to stop before there was anything to keep.
        WorkbenchError: the conversation is then as it was.
    """
    if "torch" not in sys.modules:
        post(("Starting the model libraries",))
    import_libraries()
    from workbench.chat import cascade
    from workbench.chat.conversation import Conversation
    from workbench.chat.decode import CHAT_REPETITION_PENALTY, Sampling
    from workbench.chat.policy import judge
    from workbench.lab.estimate import saved_prefill_times
    from workbench.models.catalog import direction_to

    def tell(share: float, text: str) -> None:
        if stop():
            raise Cancelled("Stopped.")
        post((text, share, 1.0))

    with engine.model_lane(stop, visit, lambda text: post((text,))), ExitStack() as computing:

        def load(*sides: str) -> None:
            computing.enter_context(engine.loaded(host, sides, tell, stop))

        host = engine.host_of(visit)
        sampling = Sampling(**chosen.sampling, repetition_penalty=CHAT_REPETITION_PENALTY)
        if visit.chat is None:
            visit.chat = Conversation(host, sampling)
        chat = visit.chat
        chat.sampling, chat.anchors, chat.hold_back = sampling, chosen.anchors, chosen.hold_back
        chat.incremental, chat.policy = chosen.incremental, engine.settings.policy
        if request.kind == "clear":
            chat.clear()
            visit.tally = None
        elif request.kind == "undo":
            return str(chat.undo())
        elif request.kind == "measure":
            load(chat.side)
            chat.measure_prefill()
        elif request.kind == "switch":
            load(*((chat.side, request.to) if chat.messages else (request.to,)))
            post((f"Switching to the {request.to} model",))
            if request.to not in chat.prefill_times:
                chat.prefill_times = saved_prefill_times(host) | chat.prefill_times
            chat.switch(request.to, how=request.how, should_stop=stop)
            visit.last_switch = time.monotonic()
            warning = judge(host, direction_to(request.to), chat.policy, 0).warning
            if warning and request.how == "mapped":
                visit.notice = warning
            if chosen.measure_each and chat.accounts[-1].tokens:
                post(("Running a true prefill, to compare",))
                chat.measure_prefill()
        elif request.kind == "send" and chosen.automatic:
            load("small", "large")
            if not chat.prefill_times:
                chat.prefill_times = saved_prefill_times(host)
            visit.tally = visit.tally or cascade.Tally()
            post(("Reading",))
            for _ in cascade.ask(chat, request.text, chosen.threshold, visit.tally, stop):
                post(True)
        else:
            load(chat.side)
            post(("Reading",))
            if request.kind == "send":
                answers = chat.send(request.text, should_stop=stop)
            elif request.kind == "retry":
                answers = chat.retry(should_stop=stop)
            else:
                answers = chat.edit(request.index, request.text, should_stop=stop)
            for _ in answers:
                post(True)
        engine.make_room(visit)
    return None
