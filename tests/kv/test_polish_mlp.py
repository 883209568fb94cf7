"""Polish: its loss is the KL after a real handoff, and goes down. MLP: learns what is not linear, and resumes."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from tests.kv.test_mapper import filled, low_rank_mapper, random_mapper
from workbench.chat.handoff import hand_over
from workbench.errors import Cancelled
from workbench.kv import polish
from workbench.kv.cache import new_cache
from workbench.kv.checkpoint import Checkpoint
from workbench.kv.forward import forward
from workbench.kv.lowrank import LowRank
from workbench.kv.mlp import train_mlp
from workbench.kv.moments import Rows
from workbench.lab.likelihood import kl_divergence
from workbench.models.loading import wrap


@pytest.fixture(scope="module")
def pair():
    tokenizer = tiny_tokenizer()
    return wrap(tiny_model("llama", 1), tokenizer, "source"), wrap(
        tiny_model("qwen3", 2), tokenizer, "target"
    )


def lessons(pair, count, first=0):
    texts = [random_ids(110, seed=first + seed) for seed in range(count)]
    return [*itertools.islice(polish.lessons(*pair, texts, 2, 5), 2 * count)]


@pytest.mark.parametrize("form", ["low rank", "full"])
def test_the_loss_is_the_kl_after_a_real_handoff(pair, form):
    source, target = pair
    made = low_rank_mapper(source.model, target.model, hidden=4)
    if form == "full":
        made = random_mapper(source.model, target.model)
    mapper = replace(made, anchors=2, hold_back=5)
    ids, cut = random_ids(110), 58
    loss = polish._loss(mapper, target, polish.record(source, target, ids, 2, 0), cut)

    cache = new_cache(3)
    first, account = hand_over(ids[:cut], filled(source.model, ids[:cut]), target, cache, mapper, source)
    n = polish.following(len(ids))
    rest = forward(target.model, ids[cut : cut + n - 1], cache, keep=n - 1)
    native = forward(target.model, ids[: cut + n - 1], new_cache(3), keep=n)
    expected = kl_divergence(native, torch.cat((first, rest))).mean()
    assert (account.anchors, account.hold_back, account.mapped) == (2, 5, cut - 7)
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)  # recordings are in half precision


def test_polish_lowers_the_kl_and_leaves_the_models_alone(pair):
    source, target = pair
    mapper = replace(low_rank_mapper(source.model, target.model), anchors=2, hold_back=5)
    taught, before = lessons(pair, 3), [p.clone() for p in target.model.parameters()]
    done = polish.polish(mapper, target, lambda _: itertools.cycle(taught), taught, 12, rate=0.03)
    assert done.kl[-1] < 0.98 * done.kl[0] and done.quotes_kl[-1] < 0.98 * done.quotes_kl[0]
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))
    assert not any(done.mapper.tensor(name).requires_grad for name in mapper.shapes())
    assert torch.equal(mapper.reduce[0], low_rank_mapper(source.model, target.model).reduce[0])


def test_quotes_are_spans_of_the_text_before_them():
    ids = list(range(1000, 1200))
    for seed in range(20):
        quoted, cut = polish.quoting(ids, 3, 5, [7, 8], random.Random(seed))
        assert len(quoted) == cut + polish.following(len(ids)) and quoted[:cut] == ids[:cut]
        assert len(ids) // 2 <= cut <= len(ids) - polish.following(len(ids)) == 150
        tail = quoted[cut:]
        assert tail[:2] == [7, 8]
        words = [token for token in tail if token not in (7, 8)]
        assert all(1003 <= token < 1000 + cut for token in words)
        joins = sum(b != a + 1 for a, b in itertools.pairwise(words))
        assert len(words) / polish.LONGEST_QUOTE - 1 <= joins <= len(words) / polish.SHORTEST_QUOTE


def test_joined_pieces_are_the_same_text_in_runs_of_mixed_length():
    pieces = [[1, 2, *range(10 * i, 10 * i + 8)] for i in range(1, 40)]
    long = polish.joined(pieces, 2, random.Random(0))
    assert [token for ids in long for token in ids[2:]] == [token for ids in pieces for token in ids[2:]]
    assert all(ids[:2] == [1, 2] for ids in long)
    assert {len(ids) - 2 for ids in long[:-1]} == {8 * run for run in polish.RUNS}


def test_lessons_are_quotes_and_plain_text_in_turn_and_every_piece_has_its_turn(pair):
    taught = lessons(pair, 4)
    for (quoted, cut), (plain, before) in zip(taught[::2], taught[1::2], strict=True):
        assert quoted is plain and cut == quoted.quotes
        assert 2 + polish.SHORTEST_MAPPED + 5 <= before <= cut - polish.following(len(quoted.ids))
    starts = {piece.ids[:50] for piece, _ in taught}
    assert starts == {tuple(random_ids(110, seed=seed)[:50]) for seed in range(4)}


def test_a_polish_that_only_makes_it_worse_changes_nothing_and_stops_when_asked(pair):
    source, target = pair
    mapper = replace(low_rank_mapper(source.model, target.model), anchors=2, hold_back=5)
    taught = lessons(pair, 1)
    kept = polish.polish(mapper, target, lambda _: iter(taught), taught, 1, rate=1e4)
    assert kept.kl[1] > kept.kl[0] == kept.kl[2]
    assert torch.equal(kept.mapper.key_weight[0], mapper.key_weight[0])

    def stop():
        raise Cancelled("Stopped.")

    with pytest.raises(Cancelled):
        polish.polish(mapper, target, lambda _: iter(taught), taught, 5, check=stop)


def test_a_killed_polish_goes_on_from_its_last_look(pair, tmp_path, monkeypatch):
    """As if it had never been stopped: the same lessons, the same rates, the same momentum."""
    monkeypatch.setattr(polish, "JUDGE_EVERY", 3)
    source, target = pair
    mapper = replace(low_rank_mapper(source.model, target.model), anchors=2, hold_back=5)
    texts = [random_ids(110, seed=seed) for seed in range(3)]
    judged, file = lessons(pair, 1, first=9), tmp_path / "polish"

    def run(check=None, digest="mine"):
        learnt = partial(polish.lessons, source, target, texts, 2, 5, 0)
        kept = Checkpoint(file, digest)
        return polish.polish(mapper, target, learnt, judged, 8, rate=0.03, checkpoint=kept, check=check)

    looked = iter(range(9))

    def stop():
        if next(looked) == 5:
            raise Cancelled("Stopped.")

    whole = run()
    assert not file.exists()
    with pytest.raises(Cancelled):
        run(stop)
    steps = []
    assert file.exists()
    again = run(lambda: steps.append(1))
    assert len(steps) == 8 - 3 and not file.exists()
    assert again.kl == pytest.approx(whole.kl, rel=1e-5)
    torch.testing.assert_close(again.mapper.key_weight[1], whole.mapper.key_weight[1], rtol=1e-4, atol=1e-6)
    for digest in ("another", "mine"):  # another polish's; this one's with nothing in it
        Checkpoint(file, digest).save({"step": torch.tensor(7.0)})
        assert Checkpoint(file, "mine").load({"step": torch.zeros(2)}) == {}
    assert len(run(lambda: steps.append(1)).kl) == len(whole.kl) and len(steps) == 5 + 8


def curved(n, seed):
    """Outputs that are linear in the features, but for one square."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    y = torch.cat((x[:, :1], x[:, 1:2] ** 2 - 1), dim=1)
    kept = Rows(4, 2, 10_000)
    kept.add(x, y)
    return kept


def linear():
    weight = torch.zeros(4, 2, dtype=torch.float64)
    weight[0, 0] = 1
    return LowRank(torch.eye(4, dtype=torch.float64), weight, torch.zeros(2, dtype=torch.float64))


def train(**options):
    settings = {"hidden": 16, "epochs": 6, **options}
    return train_mlp(linear(), torch.arange(4), curved(2000, 0), curved(400, 1), torch.ones(2), **settings)


def test_an_mlp_learns_what_is_not_linear():
    trained = train(epochs=60)
    assert trained.errors[0] == 1.0 and min(trained.errors) < 0.5
    assert trained.readout.shape == (16, 2) and trained.layers[2].shape == (16, 16)


def test_a_killed_training_goes_on_from_its_last_epoch(tmp_path):
    whole, epochs = train(), iter(range(9))

    def stop():
        if next(epochs) == 3:
            raise Cancelled("Stopped.")

    file = tmp_path / "mlp"
    with pytest.raises(Cancelled):
        train(checkpoint=Checkpoint(file, "a"), check=stop)
    assert file.exists()
    said = []
    again = train(checkpoint=Checkpoint(file, "a"), progress=lambda share, text: said.append(text))
    assert said[0].startswith("MLP: epoch 4 of 6") and not file.exists()
    assert again.errors[:4] == whole.errors[:4] and again.errors[-1] < again.errors[3]
    with pytest.raises(Cancelled):
        epochs = iter(range(9))
        train(checkpoint=Checkpoint(file, "a"), check=stop)
    assert len(train(checkpoint=Checkpoint(file, "another"), epochs=1).errors) == 2
