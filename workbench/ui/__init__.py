"""The web page. `build(settings)` makes it, `launch_options(settings)` says how it is served."""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "50")  # kept for a monitoring page that is switched off
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# In bfloat16 every new length of a text leaves compiled kernels behind, 1,024 of them by default: half a gigabyte.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

from workbench.ui.page import build
from workbench.ui.settings import Settings
from workbench.ui.theme import launch_options

__all__ = ["Settings", "build", "launch_options"]
