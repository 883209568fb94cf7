"""A page for strangers in a real browser: chat and switch work; paths, free model names and uploads are refused visibly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui.test_page import open_tab, say
from tests.ui.test_public import public as public

pytestmark = pytest.mark.browser
ASK = """async ([path, method]) => (await fetch(path, {method, body: method == "POST" ? "{}" : undefined})).status"""


def test_chat_and_switch(public: Any, open_page: Any) -> None:
    page = open_page(public.url)
    say(page, "hello <b>lamp</b> <|im_end|>")
    assert page.locator(".kv-user .kv-text").first.text_content() == "hello <b>lamp</b> <|im_end|>"
    page.click("#kv-switch")
    page.wait_for_selector("#kv-switch.kv-to-small")
    assert "mapped" in page.locator("#kv-account").inner_text()
    say(page, "and on")
    assert "mapped context" in page.locator(".kv-by-large header").last.inner_text()
    page.fill("#kv-message textarea", "x" * 4_001)
    page.click("#kv-send")
    page.wait_for_selector("#kv-status .kv-warn")
    assert "at most 4,000 are accepted" in page.locator("#kv-status").inner_text()
    assert page.locator(".kv-msg").count() == 4
    say(page, "the next one works")


def test_paths_model_names_uploads_and_large_fits(public: Any, open_page: Any) -> None:
    page = open_page(f"{public.url}/?pair=/etc/passwd&tab=fit")
    open_tab(page, "fit")
    page.wait_for_function("document.querySelector('#kv-fit-verdict')?.innerText.includes('can be paired')")
    assert not page.locator("#kv-fit-small").is_visible() and not page.locator("#kv-fit-large").is_visible()
    pair = page.locator("#kv-fit-pair input")
    chosen = pair.input_value()
    for name in ("/etc/passwd", "owner/name", "../../model.gguf"):
        pair.fill(name)
        pair.press("Enter")
        pair.blur()
        page.wait_for_function(
            "value => document.querySelector('#kv-fit-pair input').value === value", arg=chosen
        )
    page.get_by_role("button", name="More").last.click()
    page.wait_for_selector("text=Ridge strength")
    assert page.locator("input[type=file]").count() == 0
    page.locator("#kv-fit-sequences input[type=number]").fill("256")
    page.keyboard.press("Tab")
    page.click("#kv-fit-run")
    page.wait_for_selector("#kv-fit-status .kv-warn")
    assert "may read 2,000 tokens" in page.locator("#kv-fit-status").inner_text()
    for path, method in (("/gradio_api/file=/etc/passwd", "GET"), ("/gradio_api/upload", "POST")):
        assert page.evaluate(ASK, [path, method]) == 404
    assert "passwd" not in page.content() and "Traceback" not in page.content()
    open_tab(page, "chat")
    say(page, "hello")
