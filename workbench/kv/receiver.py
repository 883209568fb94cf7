"""The other process of a delivery, for measuring: takes a cache's layers out of a mapped file as they arrive.

Needs the standard library only, so that it starts at once. It reads lines: `open PATH`, then `layer OFFSET BYTES` for
every layer that is complete, then `close`; it answers `close` with one line of JSON: when the first and the last
layer were copied (nanoseconds of the monotonic clock, which all processes of a machine share) and the SHA-256 of all.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
import time


def main() -> None:
    """Serve until standard input ends."""
    print("ready", flush=True)
    parts: list[bytes] = []
    times: list[int] = []
    buffer: mmap.mmap | None = None
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "open":
            parts, times = [], []
            with open(rest, "rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        elif word == "layer" and buffer is not None:
            offset, size = map(int, rest.split())
            parts.append(buffer[offset : offset + size])
            times.append(time.monotonic_ns())
        elif word == "close" and buffer is not None:
            buffer.close()
            digest = hashlib.sha256(b"".join(parts)).hexdigest()
            told = {"first": times[0], "last": times[-1], "sha256": digest, "bytes": sum(map(len, parts))}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
