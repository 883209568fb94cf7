"""Where weights and mappers of one's own are kept. Apart from the loaders, so that a page needs no torch for it."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`KV_WORKBENCH_HOME`, else `kv-workbench` in the user's cache folder."""
    if chosen := os.environ.get("KV_WORKBENCH_HOME"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kv-workbench"
