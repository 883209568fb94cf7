"""Mutants of files: what a bad disk, a bad download or a bad person makes of them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

INTERESTING = (0, 1, -1, 127, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(INTERESTING),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["../x", "/etc/passwd", "\x00", "key.0.weight", "F64", "I64", "<b>", "a" * 5000]),
    st.lists(st.integers(-2, 2**40), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@st.composite
def bytes_of(draw: Any, original: bytes) -> bytes:
    """The bytes after one to three changes."""
    blob = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(blob) - 1)))
        kind = draw(st.sampled_from(("flip", "cut", "insert", "zero", "repeat", "length", "set", "swap")))
        if kind == "flip" and blob:
            blob[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del blob[at:]
        elif kind == "insert":
            blob[at:at] = draw(st.binary(min_size=1, max_size=40))
        elif kind == "zero":
            end = min(len(blob), at + draw(st.integers(1, 64)))
            blob[at:end] = bytes(end - at)
        elif kind == "repeat":
            blob[at:at] = blob[at : at + draw(st.integers(1, 200))]
        elif kind == "length":  # what a safetensors file begins with
            blob[:8] = (draw(st.sampled_from(INTERESTING)) % 2**64).to_bytes(8, "little")
        elif kind == "set" and blob:
            blob[at] = draw(st.integers(0, 255))
        elif kind == "swap" and len(blob) > 80:
            other = draw(st.integers(0, len(blob) - 40))
            at = min(at, len(blob) - 40)
            blob[at : at + 40], blob[other : other + 40] = blob[other : other + 40], blob[at : at + 40]
    return bytes(blob)


@st.composite
def json_of(draw: Any, original: Any) -> Any:
    """The same JSON with one to three values changed, dropped, added or moved, anywhere inside."""
    data = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        place, parent, key = data, None, None
        while isinstance(place, (dict, list)) and place and (parent is None or draw(st.integers(0, 3))):
            parent = place
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            place = place[key]
        if parent is None:
            break
        kind = draw(st.sampled_from(("odd", "drop", "add", "nudge", "twin")))
        if kind == "drop":
            del parent[key]
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(st.text(max_size=12))] = draw(ODD)
        elif kind == "twin":
            siblings = list(parent.values()) if isinstance(parent, dict) else parent
            parent[key] = draw(st.sampled_from(siblings))
        elif kind == "nudge" and isinstance(place, (int, float)) and not isinstance(place, bool):
            parent[key] = place + draw(st.sampled_from((-1, 1, 1000)))
        elif kind == "nudge" and isinstance(place, str) and place:
            at = draw(st.integers(0, len(place) - 1))
            parent[key] = place[:at] + draw(st.characters(codec="utf-8")) + place[at + 1 :]
        else:
            parent[key] = draw(ODD)
    return data
