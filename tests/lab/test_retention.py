"""The evaluation's arms against plain passes, its intervals, and its JSON."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.lab.conftest import texts
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.forward import forward
from workbench.lab import retention
from workbench.lab.arms import zero_cache
from workbench.lab.corpus import Passage, passages
from workbench.lab.intervals import Bootstrap
from workbench.lab.likelihood import cross_entropy, kl_divergence, same_argmax
from workbench.lab.results import Evaluation, finish
from workbench.models.pair import PairHost

N, M = 40, 12


def test_native_source_and_no_context_are_plain_passes(host: PairHost) -> None:
    result = finish(retention.stream(host, "up", texts(3), limit=3, context=N, following=M))
    large, small = host.model("large"), host.model("small")
    for i, passage in enumerate(passages(large.tokenizer, texts(3), N + M, 3)):
        ids = torch.tensor([passage.ids])
        for arm, model, start in (("native", large, 0), ("source", small, 0), ("no_context", large, N - 1)):
            logits = model.model(ids[:, start:]).logits[0, N - 1 - start : -1]
            expected = torch.nn.functional.cross_entropy(logits, ids[0, N:]).item()
            assert result.fixed[arm].per_passage["ce"][i] == pytest.approx(expected, abs=1e-4), arm
    assert result.fixed["native"].kl.value == 0.0 and result.fixed["native"].top1.value == 1.0
    assert set(result.arms()) == {
        "native", "mapped", "source", "no_context", "zero", "wrong_document", "held_back_only"
    }  # fmt: skip


def test_an_exact_mapper_recovers_the_whole_gap(same: PairHost) -> None:
    grid = [(2, 4), (0, 1)]
    result = finish(retention.stream(same, "up", texts(3), limit=3, context=N, following=M, settings=grid))
    for index in range(2):
        arms = result.arms(index)
        assert arms["mapped"].kl.value < 1e-6
        assert arms["wrong_document"].kl.value > 1e-3 and arms["zero"].kl.value > 1e-3
        assert result.settings[index].gap_recovered.value == pytest.approx(1.0, abs=1e-3)
    assert "held_back_only" in result.arms(0) and "held_back_only" not in result.arms(1)


def test_the_wrong_document_arm_reads_the_other_document(same: PairHost) -> None:
    model = same.model("large")
    one, two = passages(model.tokenizer, texts(2), N + M, 2)
    arms = retention._Arms(model, model, same.mapper("up")[0], N, None)
    logits = arms.handed_over(one, arms.source_cache(one), two, arms.source_cache(two), 2, 5)
    expected = forward(model.model, [*two.ids[: N - 5], *one.ids[N - 5 : -1]], new_cache(3), keep=M)
    assert torch.allclose(logits["wrong_document"], expected, atol=1e-3)
    tail = forward(model.model, one.ids[N - 5 : -1], new_cache(3), keep=M)
    assert torch.allclose(logits["held_back_only"], tail, atol=1e-3)


def test_the_zero_cache_is_zero_behind_native_anchors(host: PairHost) -> None:
    large = host.model("large")
    ids = passages(large.tokenizer, texts(1), N + M, 1)[0].ids
    cache = zero_cache(large, ids, 3, 30)
    native = new_cache(3)
    forward(large.model, ids[:3], native, keep=0)
    for layer in range(3):
        for tensor, true in zip(layer_tensors(cache, layer), layer_tensors(native, layer), strict=True):
            assert (
                tensor.shape[2] == 30 and not tensor[:, :, 3:].any() and torch.equal(tensor[:, :, :3], true)
            )


def test_no_anchors_one_following_token_and_json(host: PairHost) -> None:
    result = finish(
        retention.stream(
            host, "down", texts(2), limit=4, context=20, following=1, settings=[(0, 1), (4, 8), (0, 0)]
        )
    )
    assert [(setting.anchors, setting.hold_back) for setting in result.settings] == [(0, 1), (4, 8)]
    data = result.to_json()
    assert data["native"]["ce"] > 0 and data["tasks"] == {} and "no task" in data["note"]
    assert data["kl"] == data["mapped"]["kl"] and len(data["passages"]) == 4
    assert Evaluation.from_json(data).to_json() == data


def test_intervals_resample_documents_and_are_paired() -> None:
    boot = Bootstrap(["a", "a", "a", "b", "c"], seed=1)
    figure = boot.mean([1.0, 2.0, 3.0, 10.0, 4.0])
    assert figure.value == 4.0 and figure.low < 4.0 < figure.high
    assert (figure.low, figure.high) == (boot.mean([1.0, 2.0, 3.0, 10.0, 4.0]).low, figure.high)
    assert figure.high == pytest.approx(10.0), "three times the long document b is among the draws"
    without, native = np.array([5.0, 4.0, 6.0, 3.0, 7.0]), np.array([2.0, 2.0, 1.0, 1.0, 2.0])
    half = boot.gap(list(without), list((without + native) / 2), list(native))
    assert (half.value, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))


def test_distances() -> None:
    p = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    q = torch.tensor([[3.0, 2.0, 1.0, 99.0], [0.0, 0.0, 0.0, 99.0]])  # a padded vocabulary
    log_p, log_q = p.log_softmax(-1), q[:, :3].log_softmax(-1)
    assert torch.allclose(kl_divergence(p, q).float(), (log_p.exp() * (log_p - log_q)).sum(-1), atol=1e-6)
    assert kl_divergence(p, p).tolist() == [0.0, 0.0]
    assert same_argmax(p, q).tolist() == [False, True]
    assert cross_entropy(p, [2, 0]).tolist() == pytest.approx([0.4076, 1.0986], abs=1e-4)
    certain = torch.tensor([[0.0, -1e5]])
    assert torch.isfinite(kl_divergence(certain, torch.zeros(1, 2))).all()


def test_stopping_and_wrong_input(host: PairHost) -> None:
    with pytest.raises(Cancelled):
        list(
            retention.stream(host, "up", texts(2), limit=2, context=N, following=M, should_stop=lambda: True)
        )
    wrong = (
        {"context": 10**6},
        {"settings": [(20, 30)]},
        {"settings": [(-1, 3)]},
        {"following": 0},
        {"limit": 1},
        {"texts": texts(1), "context": 200, "following": 60},
    )
    for options in wrong:
        arguments = {"texts": texts(2), "context": N, "following": M, "limit": 5} | options
        with pytest.raises(InputError):
            list(retention.stream(host, "up", **arguments))  # type: ignore[arg-type]


def test_neighbours_are_other_documents(host: PairHost) -> None:
    cut = passages(host.model("large").tokenizer, texts(3), N + M, 6)
    assert all(a.document != b.document for a, b in pairwise(cut))
    assert isinstance(cut[0], Passage)
