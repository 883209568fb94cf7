"""The Fit tab in a real browser: check, estimate, a low-rank fit, its report, and the pair in the chat at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui.conftest import shoot
from tests.ui.test_page import measure, open_tab, say

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("size", "dark"), [("wide", False), ("narrow", True)])
def test_check_fit_and_use(server: Any, open_page: Any, size: str, dark: bool) -> None:
    page = open_page(server.url, size=size, dark=dark)
    open_tab(page, "fit")
    page.wait_for_function("document.querySelector('#kv-fit-verdict')?.innerText.includes('can be paired')")
    page.click("#kv-fit-check")
    page.wait_for_function("document.querySelector('#kv-fit-verdict')?.innerText.includes('Estimate')")
    page.get_by_role("button", name="More").last.click()
    page.get_by_label("Source layers a target layer").fill("all")
    page.get_by_label("Rank", exact=True).fill("4")
    page.keyboard.press("Tab")
    page.wait_for_timeout(300)
    measure(page, "#kv-fit-run")
    page.wait_for_function("document.querySelector('#kv-fit-report')?.innerText.includes('held out')")
    assert "Fitted, checked and saved" in page.locator("#kv-fit-status").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    shoot(page, f"fit-{size}-{'dark' if dark else 'light'}")
    page.click("#kv-fit-use")
    page.wait_for_function("document.querySelector('#kv-fit-status')?.innerText.includes('now uses')")
    open_tab(page, "chat")
    say(page, "hello lamp")
    page.click("#kv-switch")
    page.wait_for_selector("#kv-switch.kv-to-small")
    assert "mapped" in page.locator("#kv-account").inner_text()
