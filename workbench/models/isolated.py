"""Files and chat templates from strangers, handled in a child process that can be killed.

Two things that a model brings are programs in all but name: a GGUF head says how much is to be read, and a chat
template can loop. A child works on them with a limit on its memory, no right to write files, and none of this
process's environment; whoever waits gives up after some seconds and ends it. So neither can hang the page or
fill the machine.

    ask("gguf", path, seconds=10)                      walk over the head; "gguf_read" lets the reader parse it
    ask("template", template, variables, seconds=2)    the rendered text

The same file is the child's program: it imports nothing heavy, and answers one JSON line for each that it reads.
One child is kept for the next question; after a failure there is a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 30.0
BUSY_FACTOR = 4  # on a busy machine a child gets its seconds of processor time within so many times as long
MEMORY_MB = 512  # of address space, besides a file that is mapped
ANSWER_BYTES = 16_000_000


class ChildError(Exception):
    """The child refused, and says why."""


class ChildLimitError(Exception):
    """The child ran into its limit of time or memory, or ended."""


class _Child:
    """One process and its two pipes."""

    def __init__(self, megabytes: int) -> None:
        self.megabytes = megabytes
        environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).resolve()), str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            close_fds=True,
        )
        self._budget = (START_SECONDS, 0.0, time.monotonic() + START_SECONDS)
        try:
            self.read(time.monotonic() + START_SECONDS)
        except ChildLimitError:
            self.kill()
            raise

    def ask(self, question: list[Any], seconds: float, patient: bool = False) -> Any:
        """The child's answer.

        Raises:
            ChildError: it refused.
            ChildLimitError: it took too long, or ended.
        """
        deadline = time.monotonic() + seconds
        self._budget = (seconds, self._cpu_seconds(), deadline + (BUSY_FACTOR - 1) * seconds * patient)
        assert self._process.stdin is not None
        line = json.dumps(question).encode() + b"\n"
        handle = self._process.stdin.fileno()
        os.set_blocking(handle, False)
        while line:
            _, ready, _ = select.select([], [handle], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ChildLimitError("took too long")
            try:
                line = line[os.write(handle, line[:65_536]) :]
            except BrokenPipeError:
                raise ChildLimitError("ended") from None
        kind, value = self.read(deadline)
        if kind == "refused":
            raise ChildError(value)
        if kind == "limit":
            raise ChildLimitError(value)
        return value

    def read(self, deadline: float) -> Any:
        """One JSON line."""
        assert self._process.stdout is not None
        handle, parts, size = self._process.stdout.fileno(), [], 0
        while True:
            while not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                deadline = self._extended(deadline)
            part = os.read(handle, 65_536)
            size += len(part)
            if not part or size > ANSWER_BYTES:
                raise ChildLimitError("ended" if not part else "wrote too much")
            parts.append(part)
            if part.endswith(b"\n"):
                return json.loads(b"".join(parts))

    def _extended(self, deadline: float) -> float:
        """A later deadline for a child that got less of a busy machine than it was granted, up to some times as late.

        Raises:
            ChildLimitError: it has had its time.
        """
        seconds, before, last = self._budget
        used = self._cpu_seconds() - before  # not a number where unknown: then the plain limit holds
        if not used < 0.7 * seconds or time.monotonic() >= last:
            raise ChildLimitError("took too long")
        return min(last, deadline + max(0.2, 0.7 * seconds - used))

    def _cpu_seconds(self) -> float:
        """Processor time that the child has used; endless where the system does not tell."""
        try:
            fields = (
                Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            )
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return float("inf")

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_lock = threading.Lock()
_kept: list[_Child] = []


def ask(what: str, *arguments: Any, seconds: float, megabytes: int = MEMORY_MB, patient: bool = False) -> Any:
    """Lets the child do something.

    Args:
        what: "gguf", "gguf_read" or "template".
        arguments: plain JSON types.
        seconds: then it is ended.
        megabytes: most memory.
        patient: on a busy machine, wait until it has had its seconds, though no more than `BUSY_FACTOR` times as long.

    Raises:
        ChildError: it refused, with the reason.
        ChildLimitError: it ran into a limit; the text completes "it …".
    """
    with _lock:
        child = _kept.pop() if _kept else None
        if child is not None and child.megabytes != megabytes:
            child.kill()
            child = None
        child = child or _Child(megabytes)
        try:
            answer = child.ask([what, *arguments], seconds, patient)
        except ChildError:
            _kept.append(child)
            raise
        except BaseException:
            child.kill()
            raise
        _kept.append(child)
        return answer


# --- the child's side ---


def _limit(megabytes: int) -> None:
    import resource

    for name, most in (
        ("RLIMIT_AS", megabytes * 1_000_000),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 64),
    ):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # not every system has every limit
            resource.setrlimit(getattr(resource, name), (most, most))


def _answer(what: str, *arguments: Any) -> Any:
    if what.startswith("gguf"):
        from workbench.models import gguf_check

        return (gguf_check.parse if what == "gguf" else gguf_check.read)(Path(arguments[0]))
    from workbench.models.template_child import render

    return render(*arguments)


def main() -> None:
    """Answers questions until there are no more."""
    sys.path.insert(0, str(ROOT))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not disturb the answers
    _limit(int(sys.argv[1]))

    def reply(kind: str, value: Any) -> None:
        answers.write(json.dumps([kind, value]).encode() + b"\n")
        answers.flush()

    reply("ready", None)
    for line in sys.stdin.buffer:
        try:
            value = _answer(*json.loads(line))
        except MemoryError:
            reply("limit", f"needed more than {sys.argv[1]} MB of memory")
        except Exception as error:
            message = str(getattr(error, "message", None) or error)
            reply("refused", " ".join(message.split())[:300] or type(error).__name__)
        else:
            short = not isinstance(value, str) or len(value) < ANSWER_BYTES // 4
            reply("done", value) if short else reply("limit", "wrote too much")


if __name__ == "__main__":
    main()
