"""The page in a real Chromium, on tiny models: tabs, keyboard, literal text, visitors, dark, narrow."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from tests.ui.conftest import shoot

pytestmark = pytest.mark.browser
TABS = {
    "chat": "Chat",
    "side": "Side by side",
    "heads": "Heads",
    "latency": "Latency",
    "quality": "Quality",
    "fit": "Fit",
}
SELECTED = "name => document.querySelector('.kv-tabs [role=tab][aria-selected=true]')?.innerText === name"


def open_tab(page: Any, name: str) -> None:
    """Clicks a tab; on a narrow screen most stand in a menu."""
    tab = page.get_by_role("tab", name=TABS[name], exact=True)
    if not (tab.count() and tab.is_visible()):
        page.locator(".overflow-menu > button").click()
        tab = page.locator(".overflow-dropdown button", has_text=TABS[name])
    tab.click()
    page.wait_for_function(SELECTED, arg=TABS[name])


def say(page: Any, text: str) -> None:
    page.fill("#kv-message textarea", text)
    page.keyboard.press("Enter")
    page.wait_for_function(
        "t => [...document.querySelectorAll('.kv-user .kv-text')].some(e => e.textContent === t)", arg=text
    )
    page.wait_for_selector("#kv-send:not([disabled])")


def measure(page: Any, button: str) -> None:
    page.click(button)
    page.wait_for_selector(f"{button}:disabled")
    page.wait_for_selector(f"{button}:not([disabled])", timeout=120_000)


def test_chat_switch_and_every_tab(server: Any, open_page: Any) -> None:
    page = open_page(server.url)
    nasty = 'hello <script>window.hacked = 1</script> <b>lamp</b> List<int> "sea"'
    say(page, nasty)
    assert page.locator(".kv-user .kv-text").first.text_content() == nasty
    assert page.evaluate("window.hacked") is None
    assert "small" in page.locator(".kv-by-small header").first.inner_text()
    page.click("#kv-switch")
    page.wait_for_selector("#kv-switch.kv-to-small")
    assert "mapped" in page.locator("#kv-account").inner_text()
    say(page, "and on")
    head = page.locator(".kv-by-large header").last.inner_text()
    assert "large" in head and "mapped context" in head
    page.click("#kv-measure")
    page.wait_for_selector("#kv-account .kv-seg-prefill")
    shoot(page, "tiny-chat-light")

    open_tab(page, "side")
    page.fill("#kv-side-text textarea", "the lamp is on the rock " * 12)
    measure(page, "#kv-side-run")
    page.wait_for_selector("#kv-side-figure .main-svg")
    assert page.locator("#kv-side-columns .kv-column").count() == 3
    assert "Measured here" in page.locator("#kv-side-origin").inner_text()

    open_tab(page, "heads")
    measure(page, "#kv-heads-run")
    page.wait_for_selector(".kv-grid button")
    assert page.locator(".kv-grid button").count() == 5 * 2
    page.click(".kv-grid button[data-layer='2'][data-head='1']")
    page.wait_for_function(
        "document.querySelector('#kv-heads-panel').innerText.includes('Layer 2, KV head 1')"
    )
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "document.querySelector('#kv-heads-panel').innerText.includes('Layer 3, KV head 1')"
    )
    shoot(page, "tiny-heads-light")

    open_tab(page, "latency")
    measure(page, "#kv-latency-run")
    page.wait_for_selector("#kv-latency-figure .main-svg")
    assert page.locator("#kv-latency-figure .main-svg").first.bounding_box()["width"] > 600
    assert "whole handoff" in page.locator("#kv-latency-lead").inner_text()

    open_tab(page, "quality")
    measure(page, "#kv-quality-run")
    page.wait_for_selector("#kv-quality-figure .main-svg")
    assert "wrong document" in page.locator("#kv-quality-arms").inner_text()

    open_tab(page, "fit")
    page.wait_for_function("document.querySelector('#kv-fit-verdict')?.innerText.includes('can be paired')")
    measure(page, "#kv-fit-run")
    page.wait_for_function("document.querySelector('#kv-fit-report')?.innerText.includes('gate')")
    assert (server.home / "mappers" / "tiny" / "up" / "manifest.json").is_file()


def test_stop_ends_an_answer(server: Any, open_page: Any) -> None:
    page = open_page(server.url)
    page.get_by_role("button", name="Sampling").click()
    page.get_by_role("spinbutton", name="Longest answer, in tokens").or_(
        page.locator("input[aria-label*='Longest answer']")
    ).first.fill("1024")
    page.keyboard.press("Tab")
    page.fill("#kv-message textarea", "hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".kv-live .kv-text:not(:empty)")
    page.click("#kv-stop")
    page.wait_for_selector("#kv-send:not([disabled])")
    assert "stopped" in page.locator(".kv-msg footer").last.inner_text()
    say(page, "go on")
    assert page.locator(".kv-msg").count() == 4


def test_an_example_and_an_edit(server: Any, open_page: Any) -> None:
    page = open_page(server.url)
    page.locator(".kv-example").first.click()
    page.wait_for_selector(".kv-by-small .kv-text:not(:empty)")
    page.wait_for_selector("#kv-send:not([disabled])")
    page.get_by_role("button", name="Edit message 1").click()
    page.wait_for_selector("text=Editing an earlier message")
    say(page, "hello lamp")
    assert page.locator(".kv-user .kv-text").all_text_contents() == ["hello lamp"]


def test_two_visitors_have_two_chats(server: Any, open_page: Any) -> None:
    one, two = open_page(server.url), open_page(server.url)
    say(one, "the secret word is lamp")
    say(two, "hello")
    assert "secret" not in two.locator("#kv-chat").inner_text()
    one.click("#kv-switch")
    one.wait_for_selector("#kv-switch.kv-to-small")
    assert two.locator("#kv-switch.kv-to-large").count() == 1


def test_bad_input_is_one_sentence(server: Any, open_page: Any) -> None:
    page = open_page(server.url)
    page.fill("#kv-message textarea", "   ")
    page.click("#kv-send")
    page.wait_for_selector("#kv-status .kv-warn")
    assert page.locator(".kv-msg").count() == 0
    open_tab(page, "side")
    page.fill("#kv-side-text textarea", "")
    measure(page, "#kv-side-run")
    page.wait_for_selector("#kv-side-status .kv-warn")
    assert "Traceback" not in page.content()


@pytest.mark.parametrize(("size", "dark"), [("wide", True), ("narrow", False), ("narrow", True)])
def test_nothing_is_cut_off(server: Any, open_page: Any, size: str, dark: bool) -> None:
    """Screenshots of every tab; the page itself never scrolls sideways."""
    page = open_page(server.url, size=size, dark=dark)
    for name in TABS:
        open_tab(page, name)
        page.wait_for_timeout(500)
        shoot(page, f"tiny-{name}-{size}-{'dark' if dark else 'light'}")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"), name


def test_a_link_opens_a_tab(server: Any, open_page: Any) -> None:
    page = open_page(f"{server.url}?tab=heads", size="narrow")
    page.wait_for_function(SELECTED, arg="Heads")
    open_tab(page, "fit")
    page.wait_for_function("location.search.includes('tab=fit')")
    open_tab(page, "chat")
    page.wait_for_function("!location.search.includes('tab=')")


def test_served_plainly(server: Any) -> None:
    """No monitoring page, no run history, no foreign addresses that a browser would load."""
    for path in ("monitoring", "gradio_api/monitoring"):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{server.url}{path}", timeout=10)
