"""Interventions against plain forward passes over caches that were exchanged by hand, and planted faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from tests.lab.conftest import texts
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import copy, layer_tensors, new_cache
from workbench.kv.capture import capture_attention
from workbench.kv.forward import forward
from workbench.lab import branches, head_sums, heads, patch
from workbench.lab.attribution import estimated_gains, path_gains
from workbench.lab.branches import Branches, cells
from workbench.lab.corpus import passages
from workbench.lab.likelihood import kl_divergence
from workbench.lab.patch import PatchOptions
from workbench.lab.results import Step, finish
from workbench.lab.results.correlation import spearman
from workbench.lab.results.heads import SAME_TEXT
from workbench.lab.results.patch import HeadPatches
from workbench.models.loading import LoadedModel, wrap
from workbench.models.pair import PairHost

OPTIONS = PatchOptions(limit=2, context=30, following=5)


def exchanged(base: Any, other: Any, wanted: frozenset) -> Any:
    """A copy of a cache with single heads' keys or values taken from another one."""
    result = copy(base)
    for layer, head, kind in wanted:
        place = "kv".index(kind)
        layer_tensors(result, layer)[place][:, head] = layer_tensors(other, layer)[place][:, head]
    return result


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "stablelm", "phi"])
def test_variants_equal_plain_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched, and begun at the lowest exchanged layer: the same numbers as one plain run for each variant."""
    monkeypatch.setattr(branches, "ROWS", 3)
    target = wrap(tiny_model(kind, seed=5), tiny_tokenizer(), "target")
    layers, n_heads = target.spec.layers, target.spec.kv_heads
    ids = random_ids(30, seed=1)
    true, wrong = new_cache(layers), new_cache(layers)
    forward(target.model, ids[:24], true, keep=0)
    forward(target.model, random_ids(24, seed=2), wrong, keep=0)
    made = Branches(target, wrong, true, ids[24:], keep=4)
    before = target.model.base_model.layers
    variants = [
        cells([layer], [head], kind)
        for layer in range(layers)
        for head in range(n_heads)
        for kind in ("k", "kv")
    ]
    variants += [
        cells(range(layers), range(n_heads), "kv"),
        cells([0], [0], "v"),
        cells([1], [0], "kv"),
        frozenset(),
    ]
    native = forward(target.model, ids[24:], copy(true), keep=4)
    for base, first, second in (("mapped", wrong, true), ("true", true, wrong)):
        plain = [
            float(
                kl_divergence(
                    native, forward(target.model, ids[24:], exchanged(first, second, v), keep=4)
                ).mean()
            )
            for v in variants
        ]
        assert made.kl(base, variants) == pytest.approx(plain, rel=2e-3, abs=2e-6)
    assert made.base_kl > 0.01  # the wrong cache does harm, so there was something to tell apart
    assert made.kl("mapped", variants)[-4] == pytest.approx(0.0, abs=2e-6)  # all restored: native
    assert target.model.base_model.layers is before


def test_own_cache_patches_to_nothing(same: PairHost) -> None:
    """An exact map: no head wins or breaks anything, and nothing is left to recover."""
    result = finish(patch.stream(same, "up", texts(2), OPTIONS))
    assert result.base_kl == pytest.approx(0.0, abs=1e-6)
    for arrays in (result.gain, result.damage, result.layer_gain, result.layer_damage):
        for values in arrays.values():
            assert values == pytest.approx(0.0, abs=1e-6)


def test_the_stream_agrees_with_plain_runs(host: PairHost) -> None:
    options = replace(OPTIONS, hold_back=4)
    maps = finish(heads.stream(host, "up", texts(2), limit=2, length=40))
    items = list(patch.stream(host, "up", texts(2), options, maps))
    result: HeadPatches = items[-1]
    fractions = [item.fraction for item in items[:-1] if isinstance(item, Step)]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)
    source, target, mapper = host.model("small"), host.model("large"), host.mapper("up")[0]
    base, gain, damage, bottom, estimates = [], [], [], [], []
    for passage in passages(target.tokenizer, texts(2), 35, 2):
        made = patch.branch(source, target, mapper, passage, options)
        native = forward(target.model, passage.ids[:-1], new_cache(3), keep=5)

        def kl(cache: Any, passage: Any = passage, native: Any = native) -> float:
            return float(
                kl_divergence(native, forward(target.model, passage.ids[26:-1], cache, keep=5)).mean()
            )

        estimates.append(path_gains(made).sum(-1))
        base.append(kl(copy(made.mapped)))
        gain.append(base[-1] - kl(exchanged(made.mapped, made.true, cells([1], [1], "v"))))
        damage.append(kl(exchanged(made.true, made.mapped, cells([2], [0, 1], "kv"))))
        bottom.append(kl(exchanged(made.mapped, made.true, cells([0, 1], [0, 1], "kv"))))
    assert result.base_kl == pytest.approx(np.mean(base), rel=1e-3)
    assert result.estimate == pytest.approx(torch.stack(estimates).mean(0).numpy(), rel=1e-3, abs=1e-7)
    result_maps = maps.with_patches(result)
    assert result.gain["v"][1, 1] == pytest.approx(np.mean(gain), rel=1e-2, abs=1e-5)
    assert result.layer_damage["kv"][2] == pytest.approx(np.mean(damage), rel=1e-3)
    assert result.native_bottom[2] == pytest.approx(np.mean(bottom), rel=1e-3)
    prediction = result.prediction
    assert prediction is not None and prediction.best_metric in {*maps.metrics, SAME_TEXT}
    assert set(prediction.repair) == {*maps.metrics, SAME_TEXT, "random", "causal"}
    assert SAME_TEXT in result_maps.metrics and SAME_TEXT not in maps.metrics
    worst = np.unravel_index(result.gain["kv"].argmax(), (3, 2))
    top = prediction.repair["causal"]["1"]  # one head: exactly its own patch
    assert top == pytest.approx(result.gain["kv"][worst] / result.base_kl, rel=1e-3)
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert {"rank_correlation", "repair", "best_metric"} <= set(data)
    assert HeadPatches.from_json(data).to_json() == result.to_json()
    del data["estimate"]  # as in results of before
    older = HeadPatches.from_json(data)
    assert np.isnan(older.estimate).all() and SAME_TEXT not in maps.with_patches(older).metrics


def test_stopped_and_resumed(host: PairHost, tmp_path: Path) -> None:
    """Stopped after the first text; the second run does only the rest and finds the same."""
    whole = finish(patch.stream(host, "up", texts(2), OPTIONS))
    path, steps = tmp_path / "state.json", 0

    def stop_late() -> bool:
        return steps >= 4

    with pytest.raises(Cancelled):
        for _ in patch.stream(host, "up", texts(2), OPTIONS, state_file=path, should_stop=stop_late):
            steps += 1
    assert len(json.loads(path.read_text())["done"]) == 1
    items = list(patch.stream(host, "up", texts(2), OPTIONS, state_file=path, resume=True))
    assert items[0].text.startswith("patching text 2 of 2, layer 1 ") and not path.exists()
    assert np.allclose(items[-1].gain["kv"], whole.gain["kv"], atol=1e-6)
    path.write_text('{"digest": "another", "done": [1], "seconds": 1}')
    items = list(patch.stream(host, "up", texts(2), OPTIONS, state_file=path, resume=True))
    assert items[0].text.startswith("patching text 1 of 2")


def test_wrong_options(host: PairHost) -> None:
    for wrong in ({"limit": 0}, {"hold_back": 0}, {"context": 8, "anchors": 8}, {"following": 0}):
        with pytest.raises(InputError):
            PatchOptions(**wrong)
    with pytest.raises(InputError):
        next(patch.stream(host, "up", texts(1), PatchOptions(context=10**6)))


def test_rank_correlation() -> None:
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 90])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1.0)
    assert spearman(np.array([1.0, 1, 2, 3]), np.array([5.0, 6, 7, 7])) == pytest.approx(4 / 4.5)  # ties
    assert np.isnan(spearman(np.ones(3), np.arange(3.0)))


def planted(direction: str) -> tuple[LoadedModel, Any, Any, list[int]]:
    """A model whose layer-1 head 1 no query reads in dimensions 3 and 3 + d/2, and its cache with noise in that head.

    Args:
        direction: "read": the noise lies along the queries' strongest direction; "unread": where none looks.
    """
    model = tiny_model("llama", seed=7)
    target = wrap(model, tiny_tokenizer(), "target")
    spec = target.spec
    dim, group = spec.head_dim, spec.query_heads // spec.kv_heads
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for head in range(group, 2 * group):  # the rotation turns these two dimensions into each other
            attention.q_proj.weight[[head * dim + 3, head * dim + 3 + dim // 2]] = 0.0
    ids = random_ids(60, seed=3)
    true = new_cache(spec.layers)
    queries: list[torch.Tensor] = []

    def visit(layer: int, q: torch.Tensor, *_: torch.Tensor) -> None:
        if layer == 1:
            queries.append(q[0, group : 2 * group].reshape(-1, dim).clone())

    with capture_attention(model, visit):
        forward(model, ids[:50], true, keep=0)
    if direction == "read":
        along = torch.linalg.eigh(queries[0].T @ queries[0])[1][:, -1]
    else:
        along = torch.zeros(dim)
        along[3] = 1.0
    faulty = copy(true)
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0))
    layer_tensors(faulty, 1)[0][0, 1] += 3 * noise[:, None] * along
    return target, true, faulty, ids


@pytest.mark.parametrize("direction", ["read", "unread"])
def test_a_planted_fault_is_found_by_the_right_metric(direction: str) -> None:
    """R² sees noise of the same size either way; what reads it, and patching, tell the two apart."""
    target, true, faulty, ids = planted(direction)
    sums = head_sums.HeadSums(target, 50)
    text = sums.begin(50, 0, faulty)
    with (
        head_sums.layer_inputs(target.model) as stream,
        capture_attention(target.model, sums.watcher(text, target.rotary, stream)),
    ):
        forward(target.model, ids[:50], new_cache(target.spec.layers), keep=0)
    sums.tokens = 50
    found = {name: values.numpy() for name, values in sums.metrics().items()}
    gains = np.zeros((3, 2))
    made = Branches(target, faulty, true, ids[50:-1], keep=9)
    for layer in range(3):
        for head in range(2):
            gains[layer, head] = made.base_kl - made.kl("mapped", [cells([layer], [head], "kv")])[0]
    here, others = (1, 1), np.delete(np.arange(6), 3)
    assert found["r2_k"][here] < 0.8 and found["r2_k"].ravel()[others] == pytest.approx(1.0, abs=1e-5)
    group = slice(2, 4)
    if direction == "read":
        assert found["k_error_in_q"][here] > 1.5
        assert found["attention_kl"][1, group].min() > 0.01 and found["cosine"][1, group].max() < 0.999
        assert found["output_error"].argmax() == found["output_error_abs"].argmax() == gains.argmax() == 3
        assert made.base_kl > 1e-3 and gains[here] == pytest.approx(made.base_kl, rel=1e-2)
    else:
        assert found["k_error_in_q"][here] < 1e-6
        assert found["attention_kl"] == pytest.approx(0.0, abs=1e-6)
        assert found["output_error"] == pytest.approx(0.0, abs=1e-8)
        assert made.base_kl == pytest.approx(0.0, abs=1e-5) and np.abs(gains).max() < 1e-5


def test_estimated_gains_are_the_slope(host: PairHost) -> None:
    """Against a finite difference along each head's way to the true cache, and along the way of all."""
    source, target, mapper = host.model("small"), host.model("large"), host.mapper("up")[0]
    passage = passages(target.tokenizer, texts(1), 35, 1)[0]
    made = patch.branch(source, target, mapper, passage, OPTIONS)
    estimate = estimated_gains(made)

    def kl_at(step: float, layer: int, head: int, place: int) -> float:
        cache = copy(made.mapped)
        here, true = layer_tensors(cache, layer)[place], layer_tensors(made.true, layer)[place]
        here[0, head] += step * (true[0, head] - here[0, head])
        return float(made.kl_of(cache))

    for layer, head, place in ((0, 0, 0), (1, 1, 1), (2, 0, 1), (2, 1, 0)):
        slope = (kl_at(-0.02, layer, head, place) - kl_at(0.02, layer, head, place)) / 0.04
        assert float(estimate[layer, head, place]) == pytest.approx(slope, rel=0.05, abs=1e-4)
    path = sum(float(estimated_gains(made, (i + 0.5) / 16).sum()) for i in range(16)) / 16
    assert path == pytest.approx(made.base_kl, rel=0.03)  # along the whole way the slopes add up to the KL
