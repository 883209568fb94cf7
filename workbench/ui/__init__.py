"""The web page. `build(settings)` makes it, `launch_options(settings)` says how it is served."""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from workbench.ui.page import build  # noqa: E402
from workbench.ui.settings import Settings  # noqa: E402
from workbench.ui.theme import launch_options  # noqa: E402

__all__ = ["Settings", "build", "launch_options"]
