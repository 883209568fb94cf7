"""The real page as `make demo` starts it: the embedded pair, its mappers, and the figures they come with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ui.conftest import free_port, shoot
from tests.ui.test_page import TABS, open_tab, say

pytestmark = [pytest.mark.browser, pytest.mark.weights, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


def ready() -> str:
    """Why the embedded pair cannot be used here, or ""."""
    from workbench.models.catalog import EMBEDDED_PAIR, has_artefact
    from workbench.models.embedded import home

    if not any((home() / "checkpoints").glob("*")):
        return "the embedded weights are not in the cache folder (make setup fetches them)"
    if not (ROOT / "precomputed" / "embedded" / "sibling.safetensors").is_file():
        return "the small sibling is not there"
    return (
        ""
        if all(has_artefact(EMBEDDED_PAIR, way) for way in ("up", "down"))
        else "no mappers for the embedded pair"
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """`python app.py` on a free port."""
    if why := ready():
        pytest.skip(why)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "app.py", "--port", str(port)], cwd=ROOT, env=os.environ.copy()
    )
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(address, timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, "app.py ended"
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(20)


def test_small_then_large_then_small(url: str, open_page: Any) -> None:
    page = open_page(url)
    shoot(page, "embedded-first-light")
    page.set_default_timeout(180_000)
    say(page, "What should I check before I buy a used bicycle?")
    assert "small" in page.locator(".kv-by-small header").first.inner_text()
    page.click("#kv-switch")
    page.wait_for_selector("#kv-switch.kv-to-small")
    account = page.locator("#kv-account").inner_text()
    assert "mapped context" in account and "Fallback" not in account
    say(page, "And what should I pay for it?")
    head = page.locator(".kv-by-large header").last.inner_text()
    assert "SmolLM2-135M-Instruct" in head and "mapped context" in head
    page.click("#kv-measure")
    page.wait_for_selector("#kv-account .kv-seg-prefill")
    page.click("#kv-switch")
    page.wait_for_selector("#kv-switch.kv-to-large")
    say(page, "Thank you!")
    assert page.locator(".kv-by-small").count() == 2
    assert page.locator(".kv-divider").count() == 2
    shoot(page, "embedded-chat-light")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_tab_opens_with_its_figure(url: str, open_page: Any, dark: bool) -> None:
    page = open_page(url, dark=dark)
    word = "dark" if dark else "light"
    figures = {
        "side": "#kv-side-columns .kv-text:not(:empty)",
        "heads": ".kv-grid button",
        "latency": "#kv-latency-figure .main-svg",
        "quality": "#kv-quality-figure .main-svg",
    }
    for name, figure in figures.items():
        open_tab(page, name)
        page.wait_for_selector(figure)
        page.wait_for_function(
            "id => document.querySelector(id)?.innerText.includes('Precomputed')", arg=f"#kv-{name}-origin"
        )
        page.wait_for_timeout(600)
        shoot(page, f"embedded-{name}-{word}")
    open_tab(page, "heads")
    page.locator("#kv-heads-direction").get_by_text("large → small").click()
    page.wait_for_function("document.querySelectorAll('.kv-grid button').length > 0")
    open_tab(page, "fit")
    page.wait_for_function("document.querySelector('#kv-fit-verdict')?.innerText.includes('can be paired')")
    shoot(page, f"embedded-fit-{word}")
    assert set(TABS) >= set(figures)
