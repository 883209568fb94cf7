"""Load: real sessions at once against a real server; the last line is one JSON object with `ok`.

    python -m tests.load.load --sessions 10 --turns 10 --tokens 12

1. Conversations with one switch each, first alone, then all at once: every text must be the same, byte for byte,
   and the secret word of one must appear in no other's stream. Meanwhile the page is asked for, four times a second.
2. Forty messages at once against a queue of sixteen: whoever is let in gets a whole answer, the rest hear "busy".
3. Waves with stops and dropped connections: what was not stopped is exact, and the lane is free again at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.load.client import Gone, Server, Visitor, serving

TOPICS = ("lighthouses", "bicycles", "bread", "rain", "chess", "maps", "owls", "clocks", "rivers", "tea")
BUSY = "requests wait for the model already"


def script(number: int, turns: int) -> list[str]:
    """What session `number` says."""
    topic = TOPICS[number % len(TOPICS)]
    first = f"My secret word is zq{number}xv. Tell me something about {topic}."
    return [first, *(f"Tell me more about {topic}, part {turn}." for turn in range(2, turns + 1))]


def converse(url: str, number: int, turns: int, tokens: int) -> Visitor:
    """One whole session with a switch in the middle."""
    visitor = Visitor(url, tokens)
    for turn, text in enumerate(script(number, turns)):
        if turn == turns // 2:
            visitor.switch("large")
        visitor.say(text)
        until = time.monotonic() + 300
        while BUSY in visitor.status and time.monotonic() < until:
            time.sleep(0.5)
            visitor.say(text)
    visitor.http.close()
    return visitor


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of `work(0…count-1)`, each in a thread of its own; an error is a result too."""
    results: list[Any] = [None] * count

    def body(number: int) -> None:
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1200)
    return results


@contextmanager
def asking_for_the_page(url: str) -> Iterator[list[float]]:
    """Seconds that the page took, asked for four times a second meanwhile."""
    times: list[float] = []
    done = threading.Event()

    def body() -> None:
        with httpx.Client(timeout=30) as client:
            while not done.wait(0.25):
                started = time.monotonic()
                client.get(url)
                times.append(time.monotonic() - started)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        done.set()
        thread.join(30)


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return round(statistics.quantiles(values, n=20)[-1] if len(values) > 1 else max(values, default=0.0), 3)


def sessions(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Step 1."""
    url, shape = server.url, (args.turns, args.tokens)
    solo = [converse(url, number, *shape).texts() for number in range(args.solo)]
    found: dict[str, Any] = {"levels": {}}
    for level in args.levels:
        started = time.monotonic()
        with asking_for_the_page(url) as times:
            visitors = together(level, lambda number: converse(url, number, *shape))
        errors = [repr(v) for v in visitors if isinstance(v, Exception)]
        good = [(n, v) for n, v in enumerate(visitors) if isinstance(v, Visitor)]
        leaks = sum(
            f"zq{other}xv" in line
            for n, v in good
            for other in range(level)
            if other != n
            for line in v.lines
        )
        found["levels"][str(level)] = {
            "seconds": round(time.monotonic() - started, 1),
            "complete": sum(len(v.texts()) == 2 * args.turns for _, v in good),
            "equal_to_solo": sum(v.texts() == solo[n] for n, v in good if n < args.solo),
            "compared": min(level, args.solo),
            "leaks": leaks,
            "page_p95_s": p95(times),
            "errors": errors[:3],
        }
    found["ok"] = all(
        each["complete"] == int(level) and each["equal_to_solo"] == each["compared"] and not each["leaks"]
        for level, each in found["levels"].items()
    )
    found["page_ok"] = all(each["page_p95_s"] < 1 for each in found["levels"].values())
    return found


def crowd(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Step 2."""
    visitors = together(args.crowd, lambda number: Visitor(server.url, args.tokens))
    gate = threading.Barrier(args.crowd)

    def send(number: int) -> tuple[str, float]:
        visitor = visitors[number]
        gate.wait(60)
        started = time.monotonic()
        visitor.call("ask_send", None, f"Say something about {TOPICS[number % len(TOPICS)]}.")
        if BUSY not in visitor.status:
            visitor.call("run_send", *visitor.settings)
        return ("busy" if BUSY in visitor.status else "answered", time.monotonic() - started)

    with asking_for_the_page(server.url) as times:
        results = together(args.crowd, send)
    answered = [n for n, r in enumerate(results) if isinstance(r, tuple) and r[0] == "answered"]
    busy = [r[1] for r in results if isinstance(r, tuple) and r[0] == "busy"]
    whole = sum(len(visitors[n].texts()) == 2 and bool(visitors[n].texts()[1]) for n in answered)
    errors = [repr(r) for r in results if not isinstance(r, tuple)]
    for visitor in visitors:
        visitor.http.close()
    return {
        "sent": args.crowd,
        "answered": len(answered),
        "whole": whole,
        "busy": len(busy),
        "busy_p95_s": p95(busy),
        "page_p95_s": p95(times),
        "errors": errors[:3],
        "ok": not errors and whole == len(answered) >= args.queue and len(answered) + len(busy) == args.crowd,
        "page_ok": p95(times) < 1 and p95(busy) < 1,
    }


def cancels(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Step 3."""
    topics = [f"Say a little about {topic}." for topic in TOPICS]
    expected = {text: Visitor(server.url, args.tokens).say(text) for text in topics[: args.topics]}
    found = {"exact": 0, "exact_of": 0, "stopped": 0, "dropped": 0, "stop_s": [], "errors": []}

    def one(number: int) -> None:
        text = topics[number % args.topics]
        kind = "stop" if number % 10 == 0 else "drop" if number % 10 < 5 else "exact"
        visitor = Visitor(server.url, args.tokens if kind == "exact" else 1024)
        if kind == "exact":
            same = visitor.say(text) == expected[text]
            found["exact_of"] += 1
            found["exact"] += same
        elif kind == "drop":
            try:
                visitor.say(text, leave_after=2)
            except Gone:
                found["dropped"] += 1
            visitor.close_tab()
        else:
            visitor.call("ask_send", None, text)
            stopper = Visitor(server.url, session=visitor.session)
            stopper.http.cookies = visitor.http.cookies
            pressed: list[float] = []

            def press() -> None:
                while len(visitor.lines) < 4:
                    time.sleep(0.02)
                stopper.join("stop", None)
                pressed.append(time.monotonic())

            thread = threading.Thread(target=press, daemon=True)
            thread.start()
            visitor.call("run_send", *visitor.settings)
            thread.join(60)
            found["stopped"] += 1
            found["stop_s"].append(round(time.monotonic() - pressed[0], 2) if pressed else None)

    def guarded(number: int) -> None:
        try:
            one(number)
        except Exception as error:
            found["errors"].append(repr(error))

    waves = -(-args.cancels // 10)
    for wave in range(waves):
        together(10, lambda number, wave=wave: guarded(10 * wave + number))
    runner = Visitor(server.url, 1024)
    try:
        runner.say(topics[0], leave_after=2)
    except Gone:
        runner.close_tab()
    gone = time.monotonic()
    text = topics[0]
    after = Visitor(server.url, args.tokens)
    same = after.say(text) == expected[text]
    alone = time.monotonic() - gone
    found["errors"] = found["errors"][:3]
    waits = [s for s in found["stop_s"] if s is not None]
    return {
        **found,
        "stop_max_s": max(waits, default=None),
        "answer_after_a_drop_s": round(alone, 2),
        "ok": not found["errors"]
        and found["exact"] == found["exact_of"]
        and same
        and max(waits, default=0) < 5,
    }


def main() -> int:
    """Everything; exit status 0 when all is well."""
    parser = argparse.ArgumentParser(description="Real sessions at once against a real server.")
    parser.add_argument("--sessions", type=int, default=10, help="most sessions at once (default: 10)")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=12, help="longest answer (default: 12)")
    parser.add_argument("--solo", type=int, default=3, help="sessions that are also run alone (default: 3)")
    parser.add_argument("--crowd", type=int, default=40)
    parser.add_argument("--queue", type=int, default=16)
    parser.add_argument("--cancels", type=int, default=50)
    parser.add_argument("--topics", type=int, default=5, help=argparse.SUPPRESS)
    parser.add_argument("server", nargs="*", help="further arguments of app.py, after --")
    args = parser.parse_args()
    args.levels = sorted({level for level in (1, 2, 5, 10) if level <= args.sessions} | {args.sessions})
    args.solo = min(args.solo, args.sessions)
    with serving(["--queue", str(args.queue), *args.server]) as server:
        warm = Visitor(server.url)
        warm.say("Hello.")
        warm.switch("large")
        warm.say("Hello again.")
        before = {"rss_mb": round(server.rss_mb()), "handles": server.handles()}
        result: dict[str, Any] = {}
        for step in (sessions, crowd, cancels):
            print(f"{step.__name__} …", file=sys.stderr, flush=True)
            result[step.__name__] = step(server, args)
            print(json.dumps(result[step.__name__]), flush=True)
        result["process"] = {
            "before": before,
            "after": {"rss_mb": round(server.rss_mb()), "handles": server.handles()},
            "tracebacks": server.tracebacks(),
        }
    result["ok"] = (
        all(result[s.__name__]["ok"] for s in (sessions, crowd, cancels))
        and not result["process"]["tracebacks"]
    )
    result["page_ok"] = result["sessions"]["page_ok"] and result["crowd"]["page_ok"]
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
