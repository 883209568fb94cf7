"""The fit against a library: streamed = batch = scikit-learn's Ridge, and held-out R² from sums = R² from tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score

from workbench.errors import InputError
from workbench.kv import lowrank
from workbench.kv.moments import Moments, Rows
from workbench.kv.ridge import RIDGE_LADDER, RidgeSolver, columns_of, head_r2, loaded_factor

LAYERS_SRC, WIDTH_SRC, LAYERS_TGT, WIDTH_TGT = 4, 6, 3, 8


def data(n: int, seed: int = 0, offset: float = 0.0):
    """Features and outputs with a real linear relation, noise, and means far from zero when asked for."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(
        LAYERS_SRC * WIDTH_SRC, LAYERS_TGT * WIDTH_TGT, generator=torch.Generator().manual_seed(9)
    )
    x = torch.randn(n, LAYERS_SRC * WIDTH_SRC, generator=generator)
    y = x @ mixing + torch.randn(n, mixing.shape[1], generator=generator)
    return x + offset, y - offset


def rows(x, y):
    """The same tokens, kept as they are."""
    kept = Rows(x.shape[1], y.shape[1], 10_000)
    kept.add(x, y)
    return kept


def solver(train, held):
    """Of the shapes above, with two heads a target layer."""
    return RidgeSolver(train, rows(*held), LAYERS_SRC, 2, WIDTH_TGT)


def moments(x, y, chunks=1):
    sums = Moments(x.shape[1], y.shape[1])
    for part_x, part_y in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        sums.add(part_x, part_y)
        if chunks > 1:
            sums.flush()
    sums.flush()
    return sums


@settings(max_examples=20, deadline=None)
@given(chunks=st.integers(2, 40), offset=st.sampled_from([0.0, 300.0]))
def test_streamed_equals_batch(chunks, offset):
    x, y = data(400, offset=offset)
    whole, streamed = moments(x, y), moments(x, y, chunks)
    columns = torch.arange(x.shape[1])
    assert streamed.count == whole.count == 400
    torch.testing.assert_close(streamed.cov_xx(columns), whole.cov_xx(columns), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(streamed.mean_y, whole.mean_y, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("layers", [(0,), (1, 3), (0, 1, 2, 3)])
def test_solution_is_scikit_learns_ridge(layers, offset):
    x, y = data(500, offset=offset)
    held = data(200, seed=1, offset=offset)
    ridge_solver = solver(moments(x, y, 7), held)
    columns, outputs = columns_of(layers, WIDTH_SRC), slice(WIDTH_TGT, 2 * WIDTH_TGT)
    ours = ridge_solver.solve(outputs, layers, ridge=0.05)

    centred = x[:, columns].double() - x[:, columns].double().mean(0)
    alpha = 0.05 * float((centred**2).sum(0).mean())  # ours is relative to the mean variance and divided by n
    theirs = Ridge(alpha=alpha).fit(x[:, columns].double().numpy(), y[:, outputs].double().numpy())
    torch.testing.assert_close(ours.weight, torch.tensor(theirs.coef_).T, rtol=1e-3, atol=1e-4)

    predicted = theirs.predict(held[0][:, columns].double().numpy())
    expected = r2_score(held[1][:, outputs].numpy(), predicted, multioutput="variance_weighted")
    found = ridge_solver.r2(outputs, ours)
    assert float(found.mean()) == pytest.approx(expected, abs=2e-2)  # two heads of nearly equal variance
    error = torch.tensor(predicted) - held[1][:, outputs]
    torch.testing.assert_close(found, head_r2(error, held[1][:, outputs], 2), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("layers", [(1,), (0, 2), (0, 1, 2, 3)])
def test_one_eigendecomposition_gives_every_ridge(layers):
    ridge_solver = solver(moments(*data(500, offset=3.0)), data(100, seed=1))
    outputs = slice(0, WIDTH_TGT)
    for found in ridge_solver.ladder(outputs, layers, RIDGE_LADDER):
        torch.testing.assert_close(found.weight, ridge_solver.solve(outputs, layers, found.ridge).weight)
        torch.testing.assert_close(found.bias, ridge_solver.solve(outputs, layers, found.ridge).bias)


def test_both_orders_find_the_layer_that_carries_the_signal():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(600, LAYERS_SRC * WIDTH_SRC, generator=generator)
    y = torch.randn(600, LAYERS_TGT * WIDTH_TGT, generator=generator)
    y[:, :WIDTH_TGT] += 5 * x[:, 2 * WIDTH_SRC : 3 * WIDTH_SRC].repeat(1, 2)[:, :WIDTH_TGT]
    ridge_solver = solver(moments(x[:400], y[:400]), (x[400:], y[400:]))
    outputs = slice(0, WIDTH_TGT)
    assert ridge_solver.ranked(outputs, ridge=0.01)[0] == 2
    assert ridge_solver.greedy(outputs, 0.01, 4)[0] == 2
    assert ridge_solver.choose(outputs, top_k=1, ridge=0.01) == ((2,), 0.01)


def test_greedy_passes_over_a_layer_that_says_the_same():
    """Layer 1 is nearly layer 0; alone it is second best, beside layer 0 it adds nothing and layer 3 does."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(900, LAYERS_SRC * WIDTH_SRC, generator=generator)
    x[:, WIDTH_SRC : 2 * WIDTH_SRC] = x[:, :WIDTH_SRC] + 0.1 * x[:, WIDTH_SRC : 2 * WIDTH_SRC]
    y = torch.zeros(900, LAYERS_TGT * WIDTH_TGT)
    mix = torch.randn(2, WIDTH_SRC, WIDTH_TGT, generator=generator)
    y[:, :WIDTH_TGT] = 2 * x[:, :WIDTH_SRC] @ mix[0] + x[:, 3 * WIDTH_SRC :] @ mix[1]
    ridge_solver = solver(moments(x[:600], y[:600]), (x[600:], y[600:]))
    outputs = slice(0, WIDTH_TGT)
    assert set(ridge_solver.ranked(outputs, 0.01)[:2]) == {0, 1}
    assert ridge_solver.greedy(outputs, 0.01, 2) == [0, 3]
    scores = {
        selection: float(ridge_solver.r2(outputs, ridge_solver.solve(
            outputs, *ridge_solver.choose(outputs, 2, 0.01, selection))).mean())
        for selection in ("ranked", "greedy")
    }  # fmt: skip
    assert scores["greedy"] > 0.95 > scores["ranked"]


def test_greedy_gain_is_the_fall_of_the_ridge_objective():
    """With both kinds of features; checked against solving every pair of layers."""
    x, y = data(500, seed=7)
    sums = moments(x, y)
    ridge_solver = RidgeSolver(sums, rows(*data(50, seed=8)), LAYERS_SRC // 2, 2, WIDTH_TGT, kinds=2)
    outputs, weight = slice(0, WIDTH_TGT), torch.ones(WIDTH_TGT, dtype=torch.float64)
    every = ridge_solver.columns((0, 1))
    strength = 0.05 * sums.cov_xx(every).diagonal().mean()

    def explained(layers):
        columns = ridge_solver.columns(layers)
        cov, cross = sums.cov_xx(columns), sums.cov_xy(columns, outputs)
        cov.diagonal().add_(strength)
        return float((cross * torch.linalg.solve(cov, cross)).sum())

    first = max(((0,), (1,)), key=explained)
    assert ridge_solver.greedy(outputs, 0.05, 2, weight)[0] == first[0]


def test_auto_does_not_overfit_noise():
    """With few tokens and no signal, fewer layers and more ridge win on held-out tokens."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(60, 24, generator=generator), torch.randn(60, 24, generator=generator)
    held = torch.randn(300, 24, generator=generator), torch.randn(300, 24, generator=generator)
    ridge_solver, outputs = solver(moments(x, y), held), slice(0, WIDTH_TGT)
    layers, ridge = ridge_solver.choose(outputs, None, None)
    chosen = ridge_solver.solve(outputs, layers, ridge)
    everything = ridge_solver.solve(outputs, (0, 1, 2, 3), 1e-4)
    assert ridge_solver.r2(outputs, chosen).mean() > ridge_solver.r2(outputs, everything).mean()
    assert ridge == max(RIDGE_LADDER)


def test_features_that_depend_on_each_other_are_refused_in_words():
    with pytest.raises(InputError, match="too small for these features"):
        loaded_factor(torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-6]]), 1e-30)


@pytest.mark.parametrize("rank", [3, 10])
@pytest.mark.parametrize("blocks", [False, True])
def test_reduced_rank_is_the_truncated_svd_in_the_metric(rank, blocks):
    """Against the definition: the best rank-r approximation of the whitened ridge solution, seen through D."""
    x, y = data(800, offset=2.0)
    sums, columns = moments(x, y, 3), torch.arange(x.shape[1])
    metric = torch.rand(y.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    dense = torch.diag(metric)
    if blocks:
        half = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        metric = half @ half.transpose(1, 2) + 0.1 * torch.eye(4)
        dense = torch.block_diag(*metric)
    found = lowrank.reduced_rank(sums, columns, 0.02, rank, metric)

    cov, cross = sums.cov_xx(columns), sums.cov_xy(columns, slice(None))
    cov.diagonal().add_(0.02 * cov.diagonal().mean())
    lower = torch.linalg.cholesky(cov)
    full = torch.linalg.solve(cov, cross)
    u, s, v = torch.linalg.svd(lower.T @ full @ dense)
    best = torch.linalg.solve(lower.T, u[:, :rank] * s[:rank] @ v[:rank]) @ torch.linalg.inv(dense)
    torch.testing.assert_close(found.reduce @ found.weight, best, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.bias, sums.mean_y - sums.mean_x @ best, rtol=1e-3, atol=1e-3)
    spread = (x.double() - sums.mean_x) @ found.reduce
    assert float(spread.square().mean(0).max()) <= 1.0 + 1e-6


def test_the_ridge_of_a_low_rank_map_is_chosen_on_other_tokens():
    x, y = data(40)
    y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))  # nothing to be learnt
    few = moments(x, y)
    held = rows(data(400, seed=1)[0], torch.randn(400, 24, generator=torch.Generator().manual_seed(3)))
    assert lowrank.choose_ridge(few, held, torch.arange(24), torch.ones(24), (1e-6, 1e-1, 1e3)) == 1e3


def test_weighted_tokens_count_as_copies():
    x, y = data(200)
    weight = torch.randint(1, 4, (200,), generator=torch.Generator().manual_seed(6)).float()
    weighted, copied = (
        Moments(x.shape[1], y.shape[1]),
        moments(x.repeat_interleave(weight.long(), 0), y.repeat_interleave(weight.long(), 0)),
    )
    weighted.add(x, y, weight)
    weighted.flush()
    columns = torch.arange(x.shape[1])
    assert weighted.count == 200
    torch.testing.assert_close(weighted.cov_xx(columns), copied.cov_xx(columns), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weighted.mean_y, copied.mean_y, rtol=1e-5, atol=1e-5)


def test_kept_rows_are_bounded_and_an_even_sample():
    x = torch.arange(4000.0)[:, None]
    kept = Rows(1, 1, 500)
    for part in x.split(130):
        kept.add(part, part + 1)
    first, second = kept.part(slice(None), slice(None))
    assert kept.count == len(first) == 500 and kept.seen == 4000
    torch.testing.assert_close(second, first + 1, rtol=2e-3, atol=3.0)
    assert 1700 < float(first.mean()) < 2300
    again = Rows.from_state(kept.state())
    assert torch.equal(again.part(slice(None), slice(None))[0], first) and again.seen == 4000


def test_state_round_trip_goes_on_where_it_stopped():
    x, y = data(300)
    first = moments(x[:100], y[:100])
    resumed = Moments.from_state(first.state())
    resumed.add(x[100:], y[100:])
    resumed.flush()
    columns = torch.arange(x.shape[1])
    torch.testing.assert_close(resumed.cov_xx(columns), moments(x, y).cov_xx(columns), rtol=1e-5, atol=1e-5)


def test_bad_chunks_are_refused():
    sums = Moments(3, 2)
    with pytest.raises(ValueError, match="NaN"):
        sums.add(torch.tensor([[0.0, float("nan"), 1.0]]), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="shapes"):
        sums.add(torch.zeros(4, 3), torch.zeros(5, 2))
