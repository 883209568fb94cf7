"""A cache through bytes to another process: the same bits, layer by layer, and nothing that is not a cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from tests.conftest import random_ids, tiny_model
from workbench.errors import InputError
from workbench.kv.cache import layer_tensors, length, new_cache, truncate
from workbench.kv.delivery import MAGIC, Layout, put_layer, ready, segment, take_layer
from workbench.kv.forward import forward
from workbench.lab.delivery import Receiver, ways


def test_a_delivered_cache_carries_on_with_the_same_logits(tmp_path: Path) -> None:
    model, ids = tiny_model("qwen3"), random_ids(40)
    cache, arrived = new_cache(3, capacity=300), new_cache(3)
    forward(model, ids[:30], cache, keep=0)
    layout = Layout.of(cache)
    with segment(tmp_path / "cache", layout) as out:
        assert ready(out) == 0
        with segment(tmp_path / "cache") as into:  # as another process would open it
            assert Layout.read(into) == layout
            for layer in range(3):
                with pytest.raises(InputError, match="not arrived"):
                    take_layer(into, layout, arrived, layer)
                put_layer(out, layout, cache, layer)
                assert ready(into) == layer + 1
                take_layer(into, layout, arrived, layer)
    assert length(arrived) == 30
    assert layout.payload_bytes == sum(t.numel() * 4 for n in range(3) for t in layer_tensors(cache, n))
    assert torch.equal(forward(model, ids[30:], arrived), forward(model, ids[30:], cache))


def test_another_process_receives_the_bytes() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    cache = new_cache(3)
    forward(model, random_ids(20), cache, keep=0)
    digests = set()
    with Receiver() as receiver:
        for tokens in (20, 7):
            truncate(cache, tokens)
            raw = b"".join(
                t.contiguous().view(torch.int16).numpy().tobytes()
                for layer in range(3)
                for t in layer_tensors(cache, layer)
            )
            for way in ways():
                got = receiver.deliver(cache, way)
                assert got.sha256 == hashlib.sha256(raw).hexdigest() and got.bytes == len(raw)
                assert 0 < got.first_ms <= got.all_ms
                digests.add(got.sha256)
    assert len(digests) == 2


def test_what_is_no_cache_is_refused() -> None:
    layout = Layout("float32", 3, ((2, 4), (2, 4)))
    good = bytearray(layout.total_bytes)
    header = layout.header()
    good[:24] = MAGIC + len(header).to_bytes(8, "little") + bytes(8)
    good[24 : 24 + len(header)] = header
    assert Layout.read(good) == layout
    huge = bytearray(good)
    huge[8:16] = (1 << 60).to_bytes(8, "little")
    bad = [
        b"", b"KVCACHE1", b"x" * 500, bytes(good[:-64]), bytes(huge),
        bytes(good).replace(b'"tokens":3', b'"tokens":0'), bytes(good).replace(b'"tokens":3', b'"tokens":9'),
        bytes(good).replace(b"float32", b"float99"), bytes(good).replace(b'"dtype"', b'"dtypo"'),
    ]  # fmt: skip
    for data in bad:
        with pytest.raises(InputError, match="no KV cache"):
            Layout.read(data)
