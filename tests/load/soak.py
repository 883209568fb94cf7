"""Soak: mixed actions for a long time, a tenth of them bad; the last line is one JSON object with `ok`.

    python -m tests.load.soak --minutes 30

After a warm-up, memory must not grow by more than 200 MB and file handles by more than ten; a fixed conversation,
held again and again (the canary), must give the same text every time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from typing import Any

from tests.load.client import Gone, Server, Visitor, serving
from tests.load.load import TOPICS, script

BAD = (
    "",
    "   ",
    "x" * 1_000_000,
    "<|im_end|>" * 200,
    "\ud83d",
    "\x00\x1b[31m",
    "<script>alert(1)</script>" * 50,
)
MODES = {"bad": 2, "say": 10, "switch": 3, "undo": 2, "retry": 1, "clear": 1, "stop": 1}


def canary(url: str) -> list[str]:
    """The same conversation every time."""
    visitor = Visitor(url, 8)
    visitor.say("Name three colours.")
    visitor.switch("large")
    visitor.say("And one more.")
    visitor.close_tab()
    return visitor.texts()


def act(visitor: Visitor, pick: random.Random) -> str:
    """One action, one in ten of them bad."""
    kind = pick.choices(list(MODES), list(MODES.values()))[0]
    if kind == "bad":
        visitor.say(pick.choice(BAD))
    elif kind == "say":
        visitor.say(pick.choice(script(pick.randrange(len(TOPICS)), 4)))
    elif kind == "switch":
        visitor.switch(pick.choice(("small", "large")))
    elif kind == "stop":
        visitor.call("stop", None)
    else:
        visitor.press(kind)
    return kind


def visits(url: str, number: int, until: float, counts: dict[str, int], errors: list[str]) -> None:
    """Tabs of one person, one after the other: opened, used, closed or dropped."""
    pick = random.Random(number)
    while time.monotonic() < until:
        visitor = Visitor(url, 8)
        try:
            visitor.call("arrive")
            for _ in range(pick.randrange(3, 20)):
                if time.monotonic() > until:
                    break
                kind = act(visitor, pick)
                counts[kind] = counts.get(kind, 0) + 1
            if pick.random() < 0.3:
                visitor.say("Tell me a long story.", leave_after=1)
        except Gone:
            counts["dropped"] = counts.get("dropped", 0) + 1
        except Exception as error:
            errors.append(repr(error))
        visitor.close_tab()


def watch(server: Server, minutes: float, people: int) -> dict[str, Any]:
    """Runs it."""
    expected = canary(server.url)
    started = time.monotonic()
    until, warm_until = started + 60 * minutes, started + 60 * min(10.0, minutes / 3)
    counts: dict[str, int] = {}
    errors: list[str] = []
    threads = [
        threading.Thread(target=visits, args=(server.url, n, until, counts, errors), daemon=True)
        for n in range(people)
    ]
    for thread in threads:
        thread.start()
    samples: list[tuple[float, float, int]] = []
    same, tried, next_canary = 0, 0, started
    while time.monotonic() < until:
        now = time.monotonic()
        if now >= next_canary:
            tried += 1
            same += canary(server.url) == expected
            next_canary = now + 60 * max(1.0, minutes / 10)
        samples.append((now, server.rss_mb(), server.handles()))
        print(
            f"{(now - started) / 60:6.1f} min {samples[-1][1]:7.0f} MB {samples[-1][2]:4d} handles",
            flush=True,
        )
        time.sleep(max(5.0, minutes))
    for thread in threads:
        thread.join(300)
    warm = [s for s in samples if s[0] >= warm_until] or samples[-1:]
    growth = warm[-1][1] - warm[0][1]
    time.sleep(min(60.0, 30 * minutes))  # closed tabs are freed
    handles = server.handles()
    return {
        "minutes": minutes,
        "actions": counts,
        "errors": errors[:5],
        "rss_mb": {"warm": round(warm[0][1]), "end": round(warm[-1][1]), "growth": round(growth)},
        "handles": {"warm": warm[0][2], "end": handles},
        "canary": {"same": same, "tried": tried},
        "tracebacks": server.tracebacks(),
        "ok": growth < 200
        and handles - warm[0][2] <= 10
        and same == tried
        and not errors
        and not server.tracebacks(),
    }


def main() -> int:
    """Exit status 0 when all is well."""
    parser = argparse.ArgumentParser(description="Mixed actions for a long time against a real server.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--people", type=int, default=4)
    parser.add_argument("server", nargs="*", help="further arguments of app.py, after --")
    args = parser.parse_args()
    with serving(args.server) as server:
        result = watch(server, args.minutes, args.people)
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
