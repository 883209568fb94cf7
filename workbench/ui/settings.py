"""What the page was started with. One frozen object, passed down; no module-level state."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PUBLIC_JOB_SECONDS = 120.0
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "OAUTH_CLIENT_SECRET")


@dataclass(frozen=True)
class Settings:
    """Start options of the page.

    Attributes:
        pair: Name of a pair in the catalog.
        source, target: Two model references that replace the named pair (hub id, folder or GGUF file).
        direction: Which of the two is the small one: `"up"` means that `source` is.
        host, port: Where the server listens.
        public: Served to strangers: no free model references, small calibration runs only, no token in reach.
        device_map, dtype, max_memory: Handed to the loader as they are.
        by_side: What of these differs for `"small"` or `"large"`.
        queue_size: Events that may wait; the next one gets "busy" at once.
        max_chats: Chats kept on the server; the oldest idle one is dropped when one more is needed.
        max_cache_mb: Keys and values of all chats together; the longest unused ones are freed above it.
        max_prompt_chars: Longer text is refused before it is tokenised.
        max_public_fit_tokens: Calibration tokens of one fit on a public page.
        max_job_seconds: Longest time that one job may hold the models; None for 120 on a public page, else endless.
        policy: Bars that a pair must reach to be mapped (`workbench.approval.Policy`), None for no bars.
        debug: Log more.
        run: Made anew at every start, so that a page from before a restart is recognised.
    """

    pair: str = "embedded"
    source: str | None = None
    target: str | None = None
    direction: str = "up"
    host: str = "127.0.0.1"
    port: int = 7860
    public: bool = False
    device_map: str = "auto"
    dtype: str = "auto"
    max_memory: str | None = None
    by_side: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    queue_size: int = 16
    max_chats: int = 200
    max_cache_mb: int = 2_048
    max_prompt_chars: int = 100_000
    max_public_fit_tokens: int = 2_000
    max_job_seconds: float | None = None
    policy: Any = None
    debug: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)

    def __post_init__(self) -> None:
        if (self.source is None) != (self.target is None):
            raise ValueError("Give both --source and --target, or neither.")
        tokens = [name for name in TOKENS if os.environ.get(name)]
        if self.public and tokens:
            raise ValueError(
                f"A public page must not hold a token: unset {', '.join(tokens)} and start again."
            )

    @property
    def on_space(self) -> bool:
        """True on a Hugging Face Space, which sets `SPACE_ID`."""
        return bool(os.environ.get("SPACE_ID"))

    @property
    def job_seconds(self) -> float | None:
        """How long one job may hold the models, None for no limit."""
        return PUBLIC_JOB_SECONDS if self.max_job_seconds is None and self.public else self.max_job_seconds

    @property
    def api_visibility(self) -> str:
        """Handlers are no public interface; on a public server they cannot be called by scripts at all."""
        return "private" if self.public or self.on_space else "undocumented"
