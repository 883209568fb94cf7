"""Memory of closed tabs goes back to the system.

The C library keeps what was freed for the next allocation, in a pool for each thread. A server with many threads and
texts of ever new lengths gathers half a gigabyte of it in half an hour.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

BETWEEN_SECONDS = 30.0
_last = 0.0
_lock = threading.Lock()


def give_back() -> bool:
    """Hand freed memory back, at most once in `BETWEEN_SECONDS`; says whether that was done (only with glibc)."""
    global _last
    with _lock:
        if not sys.platform.startswith("linux") or time.monotonic() - _last < BETWEEN_SECONDS:
            return False
        _last = time.monotonic()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
