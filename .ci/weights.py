"""Fetch and build the embedded family's weights; returns at once when both models are there.

Run by `make setup`. A note in the virtual environment remembers where they were found, so that the usual case
needs no import of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTE = Path(sys.prefix) / "weights.json"
# What the place and content of the checkpoints depend on, apart from the pinned sums in the code.
SOURCES = (ROOT / "workbench/models/embedded.py", *sorted((ROOT / "precomputed/embedded").glob("sibling*")))


def fingerprint() -> str:
    """Changes when the weights must be looked for again."""
    places = [os.environ.get(name) for name in ("KV_WORKBENCH_HOME", "XDG_CACHE_HOME", "HOME")]
    digest = hashlib.sha256(repr(places).encode())
    for path in SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def remembered() -> bool:
    """Whether the note is about these sources and its checkpoints are still there."""
    try:
        note = json.loads(NOTE.read_text())
        return note["fingerprint"] == fingerprint() and all(
            (Path(folder) / "model.safetensors").is_file() for folder in note["folders"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def main() -> int:
    """Exit status 0 when both models are there."""
    if remembered():
        return 0
    sys.path.insert(0, str(ROOT))
    from workbench.errors import WorkbenchError
    from workbench.models import embedded

    said = [""]

    def report(share: float, text: str) -> None:
        line = f"[{10 * int(10 * share):3d} %] {text}"
        if line != said[0]:
            print(line, file=sys.stderr, flush=True)
            said[0] = line

    try:
        folders = [str(embedded.ensure(which, report)) for which in ("large", "small")]
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    with contextlib.suppress(
        OSError
    ):  # only a short cut: a Python that cannot be written looks again next time
        NOTE.write_text(json.dumps({"fingerprint": fingerprint(), "folders": folders}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
