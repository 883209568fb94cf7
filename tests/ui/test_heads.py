"""The Heads tab in a real browser: what predicts best, one head by click, keys and menu, marks, two mappers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ui.conftest import shoot
from tests.ui.test_page import measure, open_tab
from workbench.kv import artefact

PANEL = "text => document.querySelector('#kv-heads-panel').innerText.includes(text)"


def pick_option(page: Any, label: str, option: str) -> None:
    """Chooses from a dropdown by its label."""
    box = page.get_by_label(label, exact=True).locator("visible=true").first
    box.click()
    page.get_by_role("option", name=option).first.click()


@pytest.mark.browser
def test_heads_tab(server: Any, tiny: Any, open_page: Any) -> None:
    mapper, manifest = tiny.mapper("up")
    folder = server.home / "mappers" / "tiny" / "up-second"
    artefact.save(folder, mapper, manifest)
    page = open_page(server.url)
    open_tab(page, "heads")
    page.locator("#kv-heads-options button").first.click()
    page.locator("#kv-heads-patch input").check()
    measure(page, "#kv-heads-run")
    page.wait_for_selector(".kv-grid button")
    meaning = page.locator("#kv-heads-meaning").inner_text()
    assert "predicts best what happens" in meaning, meaning
    for name in ("keys", "values", "positions"):
        page.wait_for_selector(f"#kv-heads-{name} .main-svg")
    assert page.locator("#kv-heads-tokens li").count() == 10

    page.locator(".kv-grid button[data-layer='2'][data-head='1']").first.click()
    page.wait_for_function(PANEL, arg="Layer 2, KV head 1")
    panel = page.locator("#kv-heads-panel").inner_text()
    assert "Made right in the mapped cache" in panel and "Keys come from source" in panel
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_function(PANEL, arg="Layer 3, KV head 1")
    pick_option(page, "Open a head", "layer 4, KV head 0")
    page.wait_for_function(PANEL, arg="Layer 4, KV head 0")
    assert page.locator(".kv-grid .kv-picked").first.get_attribute("data-layer") == "4"

    page.click("#kv-heads-mark")
    page.wait_for_selector(".kv-grid .kv-marked")
    measure(page, "#kv-heads-repair")
    page.wait_for_function("document.querySelector('#kv-heads-marks').innerText.includes('they win back')")

    pick_option(page, "Metric", "Attention output, mean cosine")
    page.wait_for_function("document.querySelectorAll('#kv-heads-grid .kv-grid button').length === 20")
    assert "Best is" in page.locator("#kv-heads-meaning").inner_text()
    page.locator("#kv-heads-predicts button").first.click()
    page.wait_for_selector("#kv-heads-repair-curve .main-svg")
    assert "random heads" in page.locator("#kv-heads-prediction").inner_text()
    shoot(page, "tiny-heads-open-light")

    pick_option(page, "Compare with", "up-second")
    measure(page, "#kv-heads-run")
    page.wait_for_selector("#kv-heads-other .kv-grid button")
    page.get_by_label("difference", exact=True).check()
    page.wait_for_selector(".kv-diverging")
    grid = page.locator("#kv-heads-grid .kv-grid button")
    assert {grid.nth(i).inner_text() for i in range(20)} <= {"0.00", ".00"}  # the same mapper twice
    page.evaluate("document.body.classList.add('dark')")
    shoot(page, "tiny-heads-difference-dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(800)
    shoot(page, "tiny-heads-open-narrow")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_marks_are_kept_beside_the_mapper(server: Any, tiny: Any) -> None:
    from workbench.lab.marks import NAME, load_marks
    from workbench.ui.head_work import keep_marks, mappers, marks_of

    folder = server.home / "mappers" / "tiny" / "up-other"
    artefact.save(folder, *tiny.mapper("up"))
    label = next(name for name, path in mappers(server.engine, None, "up").items() if path == folder)
    assert label.startswith("up-other: k 2")
    marks, found = marks_of(server.engine, None, "up", label)
    assert found == folder and not marks.heads
    key = server.engine.visits.open()
    assert not keep_marks(server.engine, key, "up", label, marks.toggled([(1, 0), (0, 1)]), folder)
    assert json.loads((folder / NAME).read_text())["heads"] == [[0, 1], [1, 0]]
    again, _ = marks_of(server.engine, None, "up", label)  # another visitor of the same private page
    assert again.heads == ((0, 1), (1, 0)) and again.toggled([(1, 0)]).heads == ((0, 1),)
    assert load_marks(folder, "another mapper").heads == ()
