"""Where calibration text comes from: files of one's own, the built-in texts, or FineWeb-Edu from the hub.

FineWeb-Edu is what published fits use. It is streamed through the optional package `datasets`, only as much as a fit
reads, and only where a hub can be reached; nothing falls back to another text in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.errors import Cancelled, InputError, ModelUnavailableError
from workbench.lab import corpus

FINEWEB = "fineweb-edu"
CHARACTERS_A_TOKEN = 5  # at least; more is read than is needed rather than less
DATASET, SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"


def calibration_texts(
    chosen: Sequence[Path] | None, tokens: int, should_stop: Callable[[], bool] | None = None
) -> tuple[list[str], str]:
    """Texts to fit on, and their name for the manifest.

    Args:
        chosen: files, [Path("fineweb-edu")], or nothing for the built-in texts.
        tokens: how many the fit will read.
        should_stop: asked while text is fetched.

    Raises:
        InputError: files that cannot be read, or `datasets` is not installed.
        ModelUnavailableError: the hub cannot be reached.
        Cancelled: when asked to stop.
    """
    if not chosen:
        return [document.text for document in corpus.documents("calibration")], "built-in calibration text"
    if [str(path) for path in chosen] == [FINEWEB]:
        return fineweb(tokens, should_stop), f"FineWeb-Edu {SUBSET}"
    texts = [document.text for document in corpus.read_files(list(chosen))]
    return texts, ", ".join(path.name for path in chosen)


def fineweb(tokens: int, should_stop: Callable[[], bool] | None = None) -> list[str]:
    """The first documents of FineWeb-Edu's sample, enough for so many tokens."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            "FineWeb-Edu needs the package datasets, which is not installed.",
            "Install it with `pip install datasets`, or use the built-in text or files of your own.",
        ) from None
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise ModelUnavailableError(
            "FineWeb-Edu is on the model hub, which is switched off here (HF_HUB_OFFLINE).",
            "Use the built-in text or files of your own.",
        )
    texts: list[str] = []
    size = 0
    try:
        for row in datasets.load_dataset(DATASET, name=SUBSET, split="train", streaming=True):
            if should_stop and should_stop():
                raise Cancelled("The fit was stopped.")
            texts.append(row["text"])
            size += len(row["text"])
            if size >= tokens * CHARACTERS_A_TOKEN:
                return texts
    except Cancelled:
        raise
    except Exception as error:  # every kind of network trouble
        raise ModelUnavailableError(
            f"FineWeb-Edu cannot be fetched from the hub ({type(error).__name__}).",
            "Use the built-in text or files of your own.",
        ) from error
    return texts
