"""A visitor without a browser, and a server process to visit: what load and soak share.

The visitor speaks the page's own protocol over plain HTTP: a cookie, a session, events by name, a stream of what
came of them. Answers are put together from the stream as the page does it, so texts can be compared exactly.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from gradio_client.utils import apply_diff

ROOT = Path(__file__).resolve().parents[2]
TO_LARGE, TO_SMALL = "Switch to the large model →", "← Switch to the small model"


class Gone(Exception):
    """The visitor left in the middle, as it was told to."""


class Visitor:
    """One tab.

    Attributes:
        lines: everything that the server sent about this visitor's events.
        status: the status line of the last event, as HTML.
    """

    def __init__(self, url: str, tokens: int = 8, session: str | None = None) -> None:
        # The server closes connections that are idle for 5 seconds: let go of them before, or both may act at once.
        self.http = httpx.Client(
            base_url=url,
            timeout=600,
            headers={"origin": url.rstrip("/")},
            limits=httpx.Limits(keepalive_expiry=2),
        )
        self.http.get("/")
        config = self.http.get("/config").json()
        self.functions = {d["api_name"]: d["id"] for d in config["dependencies"] if d["api_name"]}
        self._inputs = {d["api_name"]: d["inputs"] for d in config["dependencies"]}
        self._outputs = {d["id"]: d["outputs"] for d in config["dependencies"]}
        self._components = {c["id"]: c["props"] for c in config["components"]}
        self._places = {
            c["props"]["elem_id"]: c["id"] for c in config["components"] if c["props"].get("elem_id")
        }
        self.session = session or secrets.token_hex(8)
        self.settings = self.fill("run_send", {"Longest answer, in tokens": tokens})
        self.lines: list[str] = []
        self.items: list[Any] = []
        self.status = ""
        if session is None and "arrive" in self.functions:
            self.call("arrive")  # what every page sends when it opens

    def fill(self, name: str, values: dict[str, Any]) -> list[Any]:
        """Inputs of an event as the page shows them at first, some of them (by label or element id) changed."""
        filled = []
        for component in self._inputs[name]:
            props = self._components[component]
            keys = [key for key in (props.get("label"), props.get("elem_id")) if key in values]
            filled.append(values[keys[0]] if keys else props.get("value"))
        return filled

    def join(self, name: str, *data: Any) -> httpx.Response:
        """Asks for an event."""
        body = {"data": list(data), "fn_index": self.functions[name], "session_hash": self.session}
        headers = {"content-type": "application/json"}
        return self.http.post("/gradio_api/queue/join", content=json.dumps(body), headers=headers)

    def call(self, name: str, *data: Any, leave_after: int | None = None) -> dict[str, Any]:
        """One event to its end; its last message.

        Args:
            name: of the event.
            data: its inputs.
            leave_after: drop the connection after so many messages of growing output.

        Raises:
            Gone: it was dropped.
        """
        if name.startswith("run_"):  # a model step; the page then asks what there is to show
            ended = self._call(name, *data, leave_after=leave_after)
            shown = self._call(name.replace("run_", "end_", 1), None)
            return shown if "refused" not in ended else ended
        return self._call(name, *data, leave_after=leave_after)

    def _call(self, name: str, *data: Any, leave_after: int | None = None) -> dict[str, Any]:
        answer = self.join(name, *data)
        if answer.status_code != 200:
            return {"success": False, "refused": answer.status_code, "output": answer.json()}
        event, function = answer.json()["event_id"], self.functions[name]
        current: list[Any] | None = None
        grown = 0
        with self.http.stream(
            "GET", "/gradio_api/queue/data", params={"session_hash": self.session}
        ) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data:"):
                    continue
                self.lines.append(line)
                message = json.loads(line[5:])
                if message.get("event_id") != event:
                    continue
                if message["msg"] == "process_generating" and message.get("success"):
                    values = message["output"]["data"]  # whole at first, then only what changed
                    current = values if current is None else list(map(apply_diff, current, values))
                    self._look(function, current)
                    grown += 1
                    if leave_after is not None and grown >= leave_after:
                        raise Gone
                if message["msg"] == "process_completed":
                    if message.get("success") and current is None:
                        self._look(function, message["output"]["data"])
                    return dict(message)
        raise ConnectionError("the stream ended before the event did")

    def _look(self, function: int, values: list[Any]) -> None:
        """Keeps the conversation and the status line of an event's outputs."""
        shown = dict(zip(self._outputs[function], values, strict=False))
        log = _value(shown.get(self._places["kv-chat"]))
        if isinstance(log, dict) and "items" in log:
            self.items = copy.deepcopy(log["items"])
        status = _value(shown.get(self._places["kv-status"]))
        if isinstance(status, str):
            self.status = status

    def say(self, text: str, **options: Any) -> str:
        """Sends a message; the answer's text."""
        self.call("ask_send", None, text)
        self.call("run_send", *self.settings, **options)
        return (self.texts() or [""])[-1]

    def switch(self, to: str) -> None:
        """Presses the switch button."""
        self.call("ask_switch", None, TO_LARGE if to == "large" else TO_SMALL, False)
        self.call("run_switch", *self.settings)

    def press(self, kind: str) -> None:
        """Undo, retry or clear."""
        self.call(f"ask_{kind}", None)
        self.call(f"run_{kind}", *self.settings)

    def texts(self) -> list[str]:
        """Texts of all messages that are shown."""
        return [item["text"] for item in self.items if "text" in item]

    def close_tab(self) -> None:
        """What a browser does when its tab is closed: the heartbeat ends."""
        with self.http.stream("GET", f"/gradio_api/heartbeat/{self.session}") as stream:
            next(stream.iter_lines())
        self.http.close()


def _value(output: Any) -> Any:
    """The value in an output, which may be an update of several properties."""
    if isinstance(output, dict) and output.get("__type__") == "update":
        return output.get("value")
    return output


class Server:
    """`app.py` in a process of its own."""

    def __init__(self, arguments: list[str], port: int = 0) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            port = int(probe.getsockname()[1])
        self.port = port
        self.url = f"http://127.0.0.1:{port}/"
        self.log = Path(os.environ.get("LOAD_LOG", "out/load-server.log"))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "app.py", "--port", str(port), *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, seconds: float = 240) -> None:
        """Until the page is there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"The server ended at once; {self.log} says why.")
            try:
                httpx.get(self.url, timeout=5)
                return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise SystemExit("The server did not answer.")

    def rss_mb(self) -> float:
        """Resident memory now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    def handles(self) -> int:
        """Open file handles now."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def tracebacks(self) -> int:
        """How many errors that nobody expected the log has."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def end(self) -> None:
        """Stops the process."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(arguments: list[str]) -> Iterator[Server]:
    """A server, as long as it is needed."""
    server = Server(arguments)
    try:
        server.wait()
        yield server
    finally:
        server.end()
