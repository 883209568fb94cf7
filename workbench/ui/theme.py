"""Colours, fonts and launch options: one place that says how the page looks and is served.

Two accents only, one per side of a pair: small is teal, large is violet. Everything else is ink on paper.
A side is never told by colour alone; it has a shape (small ●, large ◆) and its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes.utils import colors, sizes
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

from workbench.ui.guard import Guard
from workbench.ui.settings import Settings

ASSETS = Path(__file__).resolve().parents[2] / "assets"

SANS = [
    "ui-sans-serif",
    "system-ui",
    "-apple-system",
    "Segoe UI",
    "Roboto",
    "Helvetica Neue",
    "Arial",
    "sans-serif",
]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace"]

INK = colors.Color(
    name="ink",
    c50="#f7f8fa",
    c100="#eef0f3",
    c200="#e0e3e9",
    c300="#c6ccd6",
    c400="#98a1b1",
    c500="#687385",
    c600="#4a5466",
    c700="#343d4d",
    c800="#1f2733",
    c900="#161c26",
    c950="#0f141c",
)


def theme() -> gr.themes.Base:
    """A quiet theme without web fonts (the page must open offline)."""
    base = gr.themes.Base(
        primary_hue=INK,
        secondary_hue=INK,
        neutral_hue=INK,
        text_size=sizes.text_md,
        radius_size=sizes.radius_md,
        spacing_size=sizes.spacing_md,
        font=SANS,
        font_mono=MONO,
    )
    return base.set(
        body_background_fill="#fbfbfc",
        body_background_fill_dark="#10141b",
        body_text_color="#1f2733",
        body_text_color_dark="#e4e8ee",
        body_text_color_subdued="#566072",
        body_text_color_subdued_dark="#a3adbb",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#161c26",
        background_fill_secondary="#f4f5f7",
        background_fill_secondary_dark="#1b222d",
        border_color_primary="#e0e3e9",
        border_color_primary_dark="#2b3442",
        block_background_fill="#ffffff",
        block_background_fill_dark="#161c26",
        block_border_color="#e0e3e9",
        block_border_color_dark="#2b3442",
        block_shadow="none",
        block_label_text_color="#4a5466",
        block_label_text_color_dark="#b6bfcc",
        block_title_text_color="#343d4d",
        block_title_text_color_dark="#d3d9e2",
        block_title_text_weight="500",
        block_info_text_color="#566072",
        block_info_text_color_dark="#a3adbb",
        input_background_fill="#ffffff",
        input_background_fill_dark="#10141b",
        input_border_color="#c6ccd6",
        input_border_color_dark="#3a4556",
        input_border_color_focus="#4a5466",
        input_border_color_focus_dark="#98a1b1",
        input_placeholder_color="#687385",
        input_placeholder_color_dark="#8d97a7",
        button_primary_background_fill="#1f2733",
        button_primary_background_fill_hover="#343d4d",
        button_primary_text_color="#ffffff",
        button_primary_background_fill_dark="#e4e8ee",
        button_primary_background_fill_hover_dark="#ffffff",
        button_primary_text_color_dark="#10141b",
        button_secondary_background_fill="#ffffff",
        button_secondary_background_fill_dark="#1b222d",
        button_secondary_background_fill_hover="#eef0f3",
        button_secondary_background_fill_hover_dark="#2b3442",
        button_secondary_border_color="#c6ccd6",
        button_secondary_border_color_dark="#3a4556",
        button_secondary_text_color="#1f2733",
        button_secondary_text_color_dark="#e4e8ee",
        button_border_width="1px",
        slider_color="#4a5466",
        slider_color_dark="#98a1b1",
        link_text_color="#1f2733",
        link_text_color_dark="#e4e8ee",
        error_text_color="#9b1c1c",
        error_text_color_dark="#fca5a5",
    )


def html(value: Any = "", **options: Any) -> gr.HTML:
    """A `gr.HTML` without gradio's prose styles, which shift margins and draw their own tables."""
    return gr.HTML(value, apply_default_css=False, padding=False, **options)


def library(request: Request) -> FileResponse:
    """The drawing library that came with plotly, for figures that are saved or drawn in the page."""
    del request
    import plotly

    path = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return FileResponse(
        path, media_type="text/javascript", headers={"Cache-Control": "public, max-age=86400"}
    )


def launch_options(settings: Settings) -> dict[str, Any]:
    """Keyword arguments for `demo.launch`: look, address, and everything that is not needed switched off."""
    host = "0.0.0.0" if settings.on_space else settings.host  # a Space is reached from outside its container
    return {
        "server_name": host,
        "server_port": settings.port,
        "theme": theme(),
        "css_paths": [ASSETS / "workbench.css"],
        "favicon_path": ASSETS / "favicon.svg",
        "footer_links": [],
        "ssr_mode": False,
        "run_history": False,
        "enable_monitoring": False,
        "strict_cors": True,
        "allowed_paths": [],
        "max_file_size": "2mb",
        "share": False,
        "quiet": True,
        "max_threads": 40
        + 2 * settings.queue_size,  # a handler that waits for the lane holds one while it polls
        "state_session_capacity": 2 * settings.max_chats,
        "app_kwargs": {
            "middleware": [Middleware(Guard, settings=settings)],
            "routes": [Route("/kv/plotly.min.js", library)],  # the one file that is served plainly
        },
    }
