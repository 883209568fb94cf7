"""The fit against a library: streamed = batch = scikit-learn's Ridge, and held-out R² from sums = R² from tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score

from workbench.kv.moments import Moments
from workbench.kv.ridge import RidgeSolver, columns_of

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
    held_x, held_y = data(200, seed=1, offset=offset)
    solver = RidgeSolver(moments(x, y, 7), moments(held_x, held_y, 3), LAYERS_SRC, LAYERS_TGT)
    columns, outputs = columns_of(layers, WIDTH_SRC), solver.outputs(1)
    ours = solver.solve(1, layers, ridge=0.05)

    centred = x[:, columns].double() - x[:, columns].double().mean(0)
    alpha = 0.05 * float((centred**2).sum(0).mean())  # ours is relative to the mean variance and divided by n
    theirs = Ridge(alpha=alpha).fit(x[:, columns].double().numpy(), y[:, outputs].double().numpy())
    torch.testing.assert_close(ours.weight, torch.tensor(theirs.coef_).T, rtol=1e-3, atol=1e-4)

    predicted = theirs.predict(held_x[:, columns].double().numpy())
    errors = torch.tensor(predicted) - held_y[:, outputs].double()
    torch.testing.assert_close(solver.squared_error(1, ours), (errors**2).mean(0), rtol=1e-2, atol=1e-3)
    expected = r2_score(held_y[:, outputs].numpy(), predicted, multioutput="variance_weighted")
    assert float(solver.r2(1, ours, heads=1)) == pytest.approx(expected, abs=1e-3)


def test_ranking_finds_the_layer_that_carries_the_signal():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(600, LAYERS_SRC * WIDTH_SRC, generator=generator)
    y = torch.randn(600, LAYERS_TGT * WIDTH_TGT, generator=generator)
    y[:, :WIDTH_TGT] += 5 * x[:, 2 * WIDTH_SRC : 3 * WIDTH_SRC].repeat(1, 2)[:, :WIDTH_TGT]
    solver = RidgeSolver(moments(x[:400], y[:400]), moments(x[400:], y[400:]), LAYERS_SRC, LAYERS_TGT)
    assert solver.rank(0, heads=2, ridge=0.01)[0] == 2
    assert solver.choose(0, 2, top_k=1, ridge=0.01).layers == (2,)


def test_auto_does_not_overfit_noise():
    """With few tokens and no signal, fewer layers and more ridge win on held-out tokens."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(60, 24, generator=generator), torch.randn(60, 24, generator=generator)
    held_x, held_y = torch.randn(300, 24, generator=generator), torch.randn(300, 24, generator=generator)
    solver = RidgeSolver(moments(x, y), moments(held_x, held_y), LAYERS_SRC, LAYERS_TGT)
    chosen = solver.choose(0, 2, None, None)
    everything = solver.solve(0, (0, 1, 2, 3), 1e-4)
    assert solver.r2(0, chosen, 2).mean() > solver.r2(0, everything, 2).mean()
    assert chosen.ridge == 0.1


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
