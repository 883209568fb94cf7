"""The Heads tab in a real browser: what predicts best, one head by click, keys and menu, marks, two mappers."""

from __future__ import annotations

import json
import shutil
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
    assert not page.locator("#kv-heads-native").is_visible()

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


def test_wholly_marked_lowest_layers_are_run_natively_and_mapped_again(server: Any, tiny: Any) -> None:
    from tests.conftest import random_ids
    from workbench.chat.handoff import hand_over
    from workbench.kv.cache import new_cache
    from workbench.kv.forward import forward
    from workbench.lab.marks import Marks, load_marks, save_marks
    from workbench.ui.head_work import mappers, marks_of, run_natively

    folder = server.home / "mappers" / "tiny" / "up-native"
    plain = artefact.save(folder, *tiny.mapper("up"))
    save_marks(folder, Marks(plain.tensors_sha256, ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))))
    label = next(name for name, path in mappers(server.engine, None, "up").items() if path == folder)
    label = run_natively(server.engine, None, "up", label, 2)
    mapper, manifest = artefact.load(folder)
    assert mapper.native_layers == 2 and load_marks(folder, manifest.tensors_sha256).heads[0] == (0, 0)
    assert "lowest 2 layers native" in label and marks_of(server.engine, None, "up", label)[0].heads[-1] == (
        2,
        0,
    )
    source, target = tiny.model("small"), tiny.model("large")
    ids, cache = random_ids(60), new_cache(source.spec.layers)
    forward(source.model, ids, cache, keep=0)
    _, account = hand_over(ids, cache, target, new_cache(5), mapper.to(target.dtype), source)
    assert account.native_layers == 2
    run_natively(server.engine, None, "up", label, 0)
    assert artefact.read_manifest(folder).tensors_sha256 == plain.tensors_sha256


def test_a_shipped_mapper_is_copied_before_it_is_changed(
    server: Any, tiny: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    from workbench.errors import InputError
    from workbench.lab.marks import Marks
    from workbench.models import catalog
    from workbench.ui import head_work

    shipped, own = tmp_path / "tiny" / "up", server.home / "mappers" / "tiny" / "up"
    artefact.save(shipped, *tiny.mapper("up"))
    monkeypatch.setattr(catalog, "PRECOMPUTED", tmp_path)
    monkeypatch.setattr(head_work, "marks_of", lambda *names: (Marks("m", ((0, 0), (0, 1))), shipped))
    assert head_work.run_natively(server.engine, None, "up", head_work.IN_USE, 1) == head_work.IN_USE
    assert (head_work.native_now(shipped), head_work.native_now(own)) == (0, 1)
    with pytest.raises(InputError, match="of your own"):
        head_work.run_natively(server.engine, None, "up", head_work.IN_USE, 1)
    shutil.rmtree(own)


@pytest.mark.parametrize(
    ("heads", "native", "text"),
    [
        ((), 0, None),
        (((1, 0), (1, 1)), 0, None),
        (((0, 0), (0, 1), (2, 0)), 0, "Run the lowest layer natively"),
        (((0, 0), (0, 1)), 1, "Map all layers again"),
        ((), 1, "Map all layers again"),
        (((0, 0), (0, 1), (1, 0), (1, 1)), 1, "Run the lowest 2 layers natively"),
    ],
)
def test_the_button_offers_what_is_marked(
    server: Any, heads: Any, native: int, text: str | None, tmp_path: Any
) -> None:
    import gradio as gr

    from workbench.lab.marks import Marks
    from workbench.ui.heads import HeadsTab

    (tmp_path / "manifest.json").write_text(json.dumps({"native_layers": native} if native else {}))
    tab = HeadsTab(server.engine)
    with gr.Blocks():
        tab.build(gr.State(None))
    shown = tab.marking.show(Marks("m", heads), tmp_path, 2)
    button = shown[tab.marking.native]
    assert button["visible"] == (text is not None) and (text is None or button["value"] == text)
    assert ("runs the lowest" in shown[tab.marks]) == bool(native)
