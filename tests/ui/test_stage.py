"""The stage in a real Chromium: first screen, replay, presentation, links, files that are saved, axe-core."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_plots import bench, comparison, evaluation, maps
from tests.ui.conftest import SCREENSHOTS, SIZES, free_port, shoot
from tests.ui.recorded import LITERAL, recording
from workbench.lab.provenance import PRECOMPUTED_FOLDER, save_result

pytestmark = pytest.mark.browser
TABS = ("Side by side", "Heads", "Latency", "Quality", "Fit", "Chat")


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The page as it is started without weights: every result was saved, nothing can be loaded."""
    from workbench.ui import Settings, build, launch_options

    home = tmp_path_factory.mktemp("stage")
    place = home / "mappers" / "embedded" / "up"
    for kind, result in (("heads", maps()), ("latency", bench()), ("quality", evaluation()), ("compare", comparison()),
                         ("recording", recording())):  # fmt: skip
        save_result(result, place / f"{kind}.json")
    shutil.copy(PRECOMPUTED_FOLDER / "embedded" / "up" / "manifest.json", place)
    before = os.environ.get("KV_WORKBENCH_HOME")
    os.environ["KV_WORKBENCH_HOME"] = str(home)
    settings = Settings(port=free_port())
    demo = build(settings)
    _, url, _ = demo.launch(prevent_thread_lock=True, **launch_options(settings))
    yield SimpleNamespace(url=url, engine=demo.engine)
    demo.close()
    os.environ.pop("KV_WORKBENCH_HOME")
    if before is not None:
        os.environ["KV_WORKBENCH_HOME"] = before


def serious(page: Any) -> list[str]:
    """Serious and critical violations that axe-core finds on the page as it is."""
    axe = pytest.importorskip("axe_playwright_python", reason="pip install -r requirements-dev.txt")
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html'][:140]} {(node.get('failureSummary') or '')[:200]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def saved(page: Any, row: str, format: str) -> tuple[str, bytes]:
    """Clicks a button of an export row; the name and content of the file that the browser saves."""
    with page.expect_download() as waiting:
        page.click(f"{row} [data-format={format}]")
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def test_first_screen_replay_and_files(
    page_server: Any, open_page: Any, browser: Any, tmp_path: Path
) -> None:
    page = open_page(page_server.url)
    page.wait_for_selector(".kv-welcome .kv-picture svg")
    assert page.locator(".kv-card").count() >= 2
    shoot(page, "stage-first-wide-light")
    assert serious(page) == []

    page.click("[data-replay]")
    page.wait_for_function("document.querySelectorAll('#kv-replay .kv-msg').length === 4")
    page.wait_for_function(
        "document.querySelector('#kv-replay [data-play=toggle]').textContent === 'Play again'"
    )
    assert page.locator("#kv-replay .kv-by-large .kv-text").text_content() == LITERAL
    assert "Recorded" in page.locator(".kv-replay-label").inner_text()
    assert "mapped" in page.locator(".kv-replay-account").inner_text()
    shoot(page, "stage-replay-wide-light")
    assert serious(page) == []
    page.click("#kv-replay [data-play=close]")
    assert not page.locator(".kv-replay").is_visible()

    page.click("#kv-export-chat [data-format=md]")
    page.wait_for_function(
        "document.querySelector('#kv-export-chat').innerText.includes('no conversation yet')"
    )
    page.get_by_role("tab", name="Latency", exact=True).click()
    page.wait_for_selector("#kv-latency-figure .main-svg")
    row = "#kv-export-latency"
    name, svg = saved(page, row, "svg")
    assert name == "pair-up-latency.svg" and svg.lstrip().startswith(b"<svg")
    assert saved(page, row, "png")[1].startswith(b"\x89PNG")
    assert saved(page, row, "csv")[1].splitlines()[0].startswith(b"tokens,")
    assert len(json.loads(saved(page, row, "json")[1])["cells"]) == 2
    name, report = saved(page, row, "report")
    assert name == "embedded-up-report.html" and len(report) > 3_000_000
    opens_offline(browser, report, tmp_path / name)


def test_a_phone_has_the_chat_at_hand(page_server: Any, open_page: Any) -> None:
    page = open_page(page_server.url, size="narrow")
    below = "name => document.querySelector(name).getBoundingClientRect().bottom"
    assert page.evaluate(below, "#kv-send") < SIZES["narrow"][1]
    gallery, more = page.locator(".kv-gallery-box"), page.locator(".kv-more-button")
    assert not gallery.is_visible()
    more.click()
    gallery.wait_for(state="visible")
    assert page.locator(".kv-picture svg").is_visible()
    assert more.get_attribute("aria-expanded") == "true" and serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    shoot(page, "stage-first-narrow-light")
    more.click()
    gallery.wait_for(state="hidden")
    page.set_viewport_size(dict(zip(("width", "height"), SIZES["wide"], strict=True)))
    gallery.wait_for(state="visible")
    assert not more.is_visible()


def opens_offline(browser: Any, text: bytes, file: Path) -> None:
    """The file draws its figures without a network and asks for nothing."""
    file.write_bytes(text)
    context = browser.new_context(offline=True)
    try:
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector(".main-svg")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("[...document.querySelectorAll('.main-svg')].every((e) => e.clientWidth <= 680)")
        assert page.locator("details:not([open]):not([data-long])").count() == 0
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details[open]").count() == 0
        assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    finally:
        context.close()


def test_a_link_brings_a_head_back_and_a_phone_shows_everything(page_server: Any, open_page: Any) -> None:
    page = open_page(f"{page_server.url}?tab=heads&direction=up&metric=r2_v&layer=2&head=1")
    page.wait_for_selector(".kv-grid .kv-picked")
    picked = page.locator(".kv-grid .kv-picked")
    assert (picked.get_attribute("data-layer"), picked.get_attribute("data-head")) == ("2", "1")
    assert "R² of values" in page.locator("#kv-heads-meaning").inner_text()
    page.click(".kv-grid button[data-layer='3'][data-head='0']")
    page.wait_for_function("location.search.includes('layer=3') && location.search.includes('head=0')")
    for tab in TABS:
        page.set_viewport_size(dict(zip(("width", "height"), SIZES["wide"], strict=True)))
        page.get_by_role("tab", name=tab, exact=True).click()
        page.wait_for_timeout(500)
        page.set_viewport_size(dict(zip(("width", "height"), SIZES["narrow"], strict=True)))
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", tab in ("Heads", "Chat"))
        page.wait_for_timeout(300)
        shoot(page, f"stage-{tab.lower().replace(' ', '-')}-narrow")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"), tab
        assert serious(page) == [], tab


def test_the_presentation(page_server: Any, open_page: Any) -> None:
    """Six steps by keyboard at both sizes of a projector, light and dark; the recording plays and says what it is."""
    page = open_page(f"{page_server.url}?view=present")
    page.wait_for_selector(".kv-slide:not([hidden])")
    for height, look in ((720, "light"), (1080, "dark")):
        page.set_viewport_size({"width": height * 16 // 9, "height": height})
        page.keyboard.press("Home")
        for step in range(1, 7):
            page.wait_for_function(
                "n => document.querySelector('.kv-stage-step').innerText === `${n} of 6`", arg=step
            )
            page.screenshot(path=str(SCREENSHOTS / f"present-{step}-{height}-{look}.png"))
            assert page.evaluate(
                "(s => s.scrollHeight <= s.clientHeight + 1)(document.querySelector('.kv-stage-slides'))"
            ), f"step {step} does not fit a height of {height}"
            if step == 3 and look == "light":
                page.keyboard.press("r")
                page.wait_for_selector(".kv-slide:not([hidden]) .kv-by-large .kv-text:not(:empty)")
                assert "Recorded" in page.locator(".kv-live-label").inner_text()
                assert page.locator(".kv-slide .kv-by-large .kv-text").text_content() == LITERAL
            if step % 2 == (look == "light"):
                assert serious(page) == [], step
            page.keyboard.press("ArrowRight")
        page.keyboard.press("d")
    assert "step=6" in page.url
    page.keyboard.press("Escape")
    page.wait_for_function("!location.search.includes('view=')")


def test_a_live_switch_on_the_stage(server: Any, open_page: Any) -> None:
    """On the tiny pair, whose models are in memory."""
    page = open_page(f"{server.url}?view=present&step=3")
    page.wait_for_selector(".kv-slide:not([hidden]) .kv-live-bar")
    page.keyboard.press("l")
    page.wait_for_function("document.querySelector('.kv-live-label').innerText.includes('computed just now')")
    assert page.locator(".kv-slide .kv-msg").count() == 4
    assert "mapped context" in page.locator(".kv-slide .kv-by-large header").first.inner_text()
