"""The pictures of the documents, taken from the running page: `make screenshots`.

Starts the page on a free port as `make demo` does, without loading a model, and writes docs/images/*.png. What they
show is what was saved under precomputed/, so they are true as long as this was run last. Needs Chromium.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
OUT = ROOT / "docs" / "images"
WIDE, STAGE = {"width": 1280, "height": 860}, {"width": 1280, "height": 720}


def main() -> int:
    """Takes all pictures."""
    from playwright.sync_api import sync_playwright

    from workbench.ui import Settings, build, launch_options

    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    chromium = next((path for path in found if path), None)
    if chromium is None:
        print("Chromium is needed: apt-get install -y chromium", file=sys.stderr)
        return 1
    os.environ["KV_WORKBENCH_HOME"] = tempfile.mkdtemp()  # what is shipped, not what somebody fitted here
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        settings = Settings(port=int(probe.getsockname()[1]))
    demo = build(settings)
    _, url, _ = demo.launch(prevent_thread_lock=True, **launch_options(settings))
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        with sync_playwright() as running:
            browser = running.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
            )
            take(browser, url)
            browser.close()
    finally:
        demo.close()
    return 0


def take(browser: Any, url: str) -> None:
    """One picture a view."""
    for name, query, size, ready in (
        ("first", "", WIDE, ".kv-card"),
        ("heads", "?tab=heads", WIDE, ".kv-grid button"),
        ("coder-heads", "?pair=qwen2.5-coder-0.5b-1.5b&tab=heads", WIDE, ".kv-grid button"),
        (
            "coder-latency",
            "?pair=qwen2.5-coder-0.5b-1.5b&tab=latency",
            WIDE,
            "#kv-latency-figure .plot-container",
        ),
        ("present", "?view=present&step=6", STAGE, ".kv-slide:not([hidden])"),
    ):
        context = browser.new_context(viewport=size, color_scheme="light")
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{url}{query}")
        page.wait_for_selector("#kv-clear:disabled", state="attached")
        page.wait_for_selector(ready)
        page.wait_for_timeout(600)
        page.screenshot(path=str(OUT / f"{name}.png"))
        print(f"docs/images/{name}.png: {(OUT / f'{name}.png').stat().st_size:,} bytes", flush=True)
        context.close()


if __name__ == "__main__":
    sys.exit(main())
