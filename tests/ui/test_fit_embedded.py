"""A fit of the embedded pair from the page. In a module of its own: beside the tiny server the home is that server's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ui.conftest import free_port
from tests.ui.test_page import open_tab

pytestmark = pytest.mark.browser


@pytest.mark.weights
@pytest.mark.slow
def test_the_embedded_pair_is_fitted_from_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_page: Any
) -> None:
    """On as little text as the page offers; the mapper goes to a home of its own that shares the weights."""
    from workbench.models.place import home
    from workbench.ui import Settings, build, launch_options

    if not any((home() / "checkpoints").glob("*")):
        pytest.skip("the embedded weights are not in the cache folder (make setup fetches them)")
    mine = tmp_path / "home"
    mine.mkdir()
    (mine / "checkpoints").symlink_to(home() / "checkpoints")
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(mine))
    settings = Settings(port=free_port())
    demo = build(settings)
    _, url, _ = demo.launch(prevent_thread_lock=True, **launch_options(settings))
    try:
        page = open_page(url)
        open_tab(page, "fit")
        for slider, value in (("sequences", "8"), ("length", "64")):
            page.fill(f"#kv-fit-{slider} input[type=number]", value)
            page.keyboard.press("Tab")
        page.wait_for_timeout(300)
        page.click("#kv-fit-run")
        page.wait_for_function(
            "document.querySelector('#kv-fit-report')?.innerText.includes('held out')", timeout=240_000
        )
        assert (mine / "mappers" / "embedded" / "up" / "manifest.json").is_file()
    finally:
        demo.close()
