"""The page called over HTTP as the browser calls it: state stays on the server, visitors never meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradio_client import Client

SETTINGS = (True, 0.7, 0.95, 8, 0, True, 4, 16, False, False, False, 1.0)


@contextmanager
def client(server: Any) -> Iterator[Client]:
    made = Client(server.url, verbose=False)
    try:
        yield made
    finally:
        made.close()


def say(who: Client, text: str) -> str:
    who.predict(text, api_name="/ask_send")
    who.predict(*SETTINGS, api_name="/run_send")
    return str(who.predict(api_name="/end_send"))


def test_a_chat_over_http(server: Any) -> None:
    with client(server) as one, client(server) as two:
        shown = say(one, "the secret word is lamp")
        assert "secret" in shown and "kv-by-small" in shown
        assert "secret" not in say(two, "hello")
        one.predict("Switch to the large model →", False, api_name="/ask_switch")
        one.predict(*SETTINGS, api_name="/run_switch")
        assert "mapped context" in str(one.predict(api_name="/end_switch"))
        assert "kv-by-large" in say(one, "and on")
        assert "kv-by-large" not in say(two, "and on")


def test_keys_stay_on_the_server(server: Any) -> None:
    with client(server) as one:
        say(one, "hello")
        keys = list(server.engine.visits._visits)
        answer = str(one.predict("hello", api_name="/ask_send"))
        assert keys and not any(key in answer for key in keys)
