"""Servers and a browser for the page's tests. Everything is closed again, also when a test fails."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parent / "screenshots"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SIZES = {"wide": (1440, 900), "narrow": (390, 844)}


def chromium() -> str | None:
    """Path of an installed Chromium or Chrome."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A pair of tiny models with mappers."""
    from tests.ui.tiny import tiny_host

    return tiny_host()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of its own, so that no test writes into the user's; only as long as a module that asks for it runs."""
    folder = tmp_path_factory.mktemp("home")
    before = os.environ.get("KV_WORKBENCH_HOME")
    os.environ["KV_WORKBENCH_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["KV_WORKBENCH_HOME"]
    else:
        os.environ["KV_WORKBENCH_HOME"] = before


@pytest.fixture(scope="module")
def server(tiny: Any, home: Path) -> Iterator[SimpleNamespace]:
    """The page on the tiny pair, served on a free port: `url` and `engine`."""
    from workbench.ui import Settings, build, launch_options

    settings = Settings(port=free_port())
    demo = build(settings, tiny)
    _, url, _ = demo.launch(prevent_thread_lock=True, **launch_options(settings))
    yield SimpleNamespace(url=url, engine=demo.engine, home=home)
    demo.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; without one the test is skipped with the line that says how to get it."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium: apt-get install -y chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install -r requirements-dev.txt"
    )
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """`open_page(url, size="wide", dark=False)` -> a page that fails the test on any script error."""
    contexts, problems = [], []

    def opener(url: str, size: str = "wide", dark: bool = False) -> Any:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#kv-chat .kv-empty", state="attached")
        page.wait_for_selector(
            "#kv-clear:disabled", state="attached"
        )  # what the server knows of this visitor has arrived
        return page

    yield opener
    for context in contexts:
        context.close()
    assert not problems, problems


def shoot(page: Any, name: str) -> None:
    """A screenshot of the whole page."""
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=True)
