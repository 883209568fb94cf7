"""What is checked before a request reaches gradio: whose session it is, where it comes from, how large it is.

Gradio's session hash is a number that the browser makes up; whoever knows one could read along and act for its
owner. So the server gives every browser a secret in a cookie that scripts cannot read, and the first request of
a session binds the two: the same hash with another cookie is refused, on every route. A client without cookies
is bound to its address.

Requests that change something must come from the page itself, not from another site that happens to be open in
the same browser. A page on this machine alone answers only to this machine's names, so that no foreign name can
be pointed at it. Bodies have a limit that is counted, not believed. On a public page only the routes that the
page itself needs exist.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import OrderedDict
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from workbench.ui.settings import Settings

COOKIE = "kv_visitor"
SECRET = re.compile(r"[\w-]{32,64}\.[0-9a-f]{8}")  # and the start of the server that made it
SESSION = re.compile(r"[\w-]{1,64}")
BOUND = 100_000  # sessions whose owner is remembered
JSON_BYTES = 8_000_000  # a message of a million characters fits, so that it can be refused in words
UPLOAD_BYTES = 40_000_000
LOOPBACK = ("localhost", "127.0.0.1", "::1")
API = "/gradio_api/"
# What the page itself asks for; everything else that gradio serves does not exist on a public page.
PUBLIC_GET = re.compile(
    r"/(kv/[\w.-]+|config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static|svelte|pwa_icon)/.+)?"
    r"|/gradio_api/(info|startup-events|theme\.css|app_id|heartbeat/[\w-]+|queue/data)/?"
)
PUBLIC_POST = re.compile(r"/gradio_api/(queue/join|cancel|reset|run/[\w-]+)/?")


class _Refused(Exception):
    """A request that is answered here."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Guard:
    """ASGI middleware around the whole page."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self._owners: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request: checked, then passed on, or answered with one sentence."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        new_cookie = None
        try:
            self._check_place(scope, headers)
            owner, new_cookie = self._owner(scope, headers)
            receive = await self._body(scope, headers, receive, owner)
        except _Refused as refused:
            await _answer(send, refused)
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), *self._extra(headers, scope, new_cookie)],
                }
            await send(message)

        await self.app(scope, receive, sending)

    def _check_place(self, scope: Any, headers: dict[str, str]) -> None:
        """Route, host and origin."""
        path, method = scope["path"], scope["method"]
        host = headers.get("host", "")
        if self.settings.host in LOOPBACK and not self.settings.on_space and _name(host) not in LOOPBACK:
            raise _Refused(
                421, "This page answers to localhost only; start it with --host to give it a name."
            )
        if self.settings.public:
            allowed = {"GET": PUBLIC_GET, "HEAD": PUBLIC_GET, "POST": PUBLIC_POST}.get(method)
            if allowed is None or not allowed.fullmatch(path):
                raise _Refused(404, "There is nothing here.")
        if method in ("GET", "HEAD"):
            return
        origin = headers.get("origin")
        hosts = (host, headers.get("x-forwarded-host", host))
        foreign = origin is not None and urlsplit(origin).netloc not in hosts
        if foreign or headers.get("sec-fetch-site") == "cross-site":
            raise _Refused(403, "Requests from other sites are not answered.")

    def _owner(self, scope: Any, headers: dict[str, str]) -> tuple[str, str | None]:
        """Who asks: a hash of the browser's secret, else its address; and a new secret where one is due."""
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            found = None
        secret = found.value if found is not None and SECRET.fullmatch(found.value) else ""
        due = scope["path"] == "/" and not secret.endswith(f".{self.settings.run}")
        new = f"{secrets.token_urlsafe(32)}.{self.settings.run}" if due else None
        if secret:
            return hashlib.sha256(secret.encode()).hexdigest(), new
        client = scope.get("client") or ("?",)
        return f"address {client[0]}", new

    def _bind(self, session: Any, owner: str) -> None:
        """The first request of a session says whose it is."""
        if session is None:
            return
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise _Refused(400, "This is no session.")
        if self._owners.setdefault(session, owner) != owner:
            raise _Refused(403, "This session belongs to another browser. Load the page again.")
        self._owners.move_to_end(session)
        while len(self._owners) > BOUND:
            self._owners.popitem(last=False)

    async def _body(self, scope: Any, headers: dict[str, str], receive: Any, owner: str) -> Any:
        """Checks the session that path, query or body name; returns what the body can be read from."""
        path = scope["path"]
        parts = path.strip("/").split("/")
        if path.startswith(API) and len(parts) > 2 and parts[1] in ("heartbeat", "stream"):
            self._bind(parts[2], owner)
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        for session in query.get("session_hash", []):
            self._bind(session, owner)
        if scope["method"] != "POST":
            return receive
        is_json = "multipart/form-data" not in headers.get("content-type", "")
        limit = JSON_BYTES if is_json else UPLOAD_BYTES
        too_much = _Refused(413, f"The request is larger than {limit:,} bytes.")
        declared = headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > limit:
            raise too_much
        if not is_json:
            return _counted(receive, limit)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return _replay(message)
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                raise too_much
        if path.startswith(API) and body:
            try:
                data = json.loads(body)
            except (ValueError, RecursionError):
                raise _Refused(400, "The body is not JSON.") from None
            if isinstance(data, dict):
                self._bind(data.get("session_hash"), owner)
            if b"\\u" in body:  # half characters cannot be sent back to the page, so they become U+FFFD here
                text = json.dumps(data, ensure_ascii=False).encode("utf-16", "surrogatepass")
                body = bytearray(text.decode("utf-16", "replace").encode())
        return _replay({"type": "http.request", "body": bytes(body), "more_body": False}, receive)

    def _extra(self, headers: dict[str, str], scope: Any, cookie: str | None) -> list[tuple[bytes, bytes]]:
        """Headers of every answer."""
        frames = "'self' https://huggingface.co https://*.hf.space" if self.settings.on_space else "'self'"
        extra = [
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "same-origin"),
            ("content-security-policy", f"frame-ancestors {frames}"),
        ]
        if cookie is not None:
            secure = "https" in (scope.get("scheme"), headers.get("x-forwarded-proto"))
            # Inside a frame on another site only a partitioned cookie comes back.
            kind = "SameSite=None; Secure; Partitioned" if secure else "SameSite=Lax"
            extra.append(("set-cookie", f"{COOKIE}={cookie}; HttpOnly; Path=/; {kind}"))
        return [(name.encode(), value.encode()) for name, value in extra]


def from_before(request: Any, settings: Settings) -> bool:
    """Whether a request comes from a page that was loaded before this start of the server."""
    secret = getattr(request, "cookies", {}).get(COOKIE, "")
    return bool(SECRET.fullmatch(secret)) and not secret.endswith(f".{settings.run}")


def _name(host: str) -> str:
    """A host header without its port."""
    return (urlsplit(f"//{host}").hostname or "") if "@" not in host else ""


def _replay(message: Any, receive: Any = None) -> Any:
    """Gives a message that was read already, then whatever follows."""
    first = [message]

    async def again() -> Any:
        if first:
            return first.pop()
        return await receive() if receive is not None else {"type": "http.disconnect"}

    return again


def _counted(receive: Any, limit: int) -> Any:
    """Passes a body on, and ends it where it is larger than it may be."""
    size = 0

    async def counting() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        return message if size <= limit else {"type": "http.disconnect"}

    return counting


async def _answer(send: Any, refused: _Refused) -> None:
    body = json.dumps({"detail": refused.why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
