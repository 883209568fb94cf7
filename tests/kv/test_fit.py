"""Fitting, end to end on tiny models: it recovers what is linear, resumes, stops, and refuses what cannot work."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from tests.kv.test_mapper import filled
from workbench.errors import Cancelled, IncompatiblePairError, InputError
from workbench.kv import artefact
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.fit import Gatherer, fit
from workbench.kv.options import FitOptions, cut_sequences
from workbench.kv.state import FitState
from workbench.models.loading import wrap

TEXTS = [
    "".join(chr(97 + (i * 7 + j * j) % 26) + (" the" if i % 5 else ".\n") for i in range(700))
    for j in range(6)
]
OPTIONS = FitOptions(sequences=24, length=64, top_k=None, ridge=1e-6, anchors=2, hold_back=4)


@pytest.fixture(scope="module")
def twins():
    """One model under two names: the relation between the caches is exactly linear."""
    tokenizer = tiny_tokenizer()
    return wrap(tiny_model("llama", 1), tokenizer, "one"), wrap(tiny_model("llama", 1), tokenizer, "two")


def test_a_linear_pair_is_recovered_and_survives_saving(twins, tmp_path):
    source, target = twins
    mapper, manifest, report = fit(source, target, TEXTS, OPTIONS, direction="up")
    assert report.r2_k > 0.999 and report.r2_v > 0.999
    artefact.save(tmp_path / "m", mapper, manifest)
    loaded, _ = artefact.load(tmp_path / "m", source.identity, target.identity, "up")
    ids = source.tokenizer(TEXTS[0])["input_ids"][:40]  # tokens that the fit has seen
    native, mapped = filled(target.model, ids), new_cache(3)
    loaded.to(torch.float32).map_into(filled(source.model, ids), mapped, 0, 40, source.rotary, target.rotary)
    for layer in range(3):
        for ours, theirs in zip(layer_tensors(mapped, layer), layer_tensors(native, layer), strict=True):
            assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_different_geometry_both_directions_and_held_out_counts():
    tokenizer = tiny_tokenizer()
    small = wrap(tiny_model("qwen3", 1), tokenizer, "small")
    large = wrap(tiny_model("llama-llama3", 2), tokenizer, "large")
    for source, target, direction in ((small, large, "up"), (large, small, "down")):
        mapper, manifest, report = fit(
            source, target, TEXTS, FitOptions(24, 64, top_k=1, anchors=2), direction=direction
        )
        assert manifest.direction == direction and mapper.target == target.spec
        assert all(len(chosen) == 1 for chosen in mapper.key_layers)
        assert (report.tokens, report.heldout_tokens) == (21 * 62, 3 * 62)
        assert report.p_over_n == pytest.approx((source.spec.kv_width + 1) / (21 * 62))


def test_overfitting_warns():
    tokenizer = tiny_tokenizer()
    model = wrap(tiny_model("llama", 1), tokenizer, "x")
    _, _, report = fit(model, model, TEXTS, FitOptions(8, 64, top_k=3), direction="up")
    assert report.p_over_n > 0.2 and "p/n" in report.warning


def test_stop_and_resume_give_the_same_fit(twins, tmp_path):
    source, target = twins
    options = FitOptions(sequences=16, length=64, top_k=2)
    whole, _, _ = fit(source, target, TEXTS, options, direction="up")

    state = tmp_path / "state"
    sequences = cut_sequences(source.tokenizer, TEXTS, options)
    calls = iter(range(100))
    import workbench.kv.fit as module

    keep = module.FitState
    module.FitState = lambda path, digest: keep(path, digest, every_seconds=0.0)
    try:
        with pytest.raises(Cancelled):
            fit(
                source,
                target,
                TEXTS,
                options,
                direction="up",
                state_file=state,
                should_stop=lambda: next(calls) >= 9,
            )
        read = []
        resumed, _, _ = fit(source, target, TEXTS, options, direction="up", state_file=state, resume=True,
                            progress=lambda share, text: read.append(text))  # fmt: skip
    finally:
        module.FitState = keep
    assert read[0] == f"read 10 of {len(sequences)} sequences"
    assert not state.exists()
    assert resumed.key_layers == whole.key_layers
    for ours, theirs in zip(resumed.key_weight, whole.key_weight, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_kept_sums_fit_other_settings_without_reading_again(twins, tmp_path):
    source, target = twins
    sums = tmp_path / "sums"
    fit(source, target, TEXTS, FitOptions(16, 64, top_k=1), direction="up", state_file=sums, keep_state=True)
    said = []
    resumed, _, report = fit(source, target, TEXTS, FitOptions(16, 64, top_k=2), direction="up", state_file=sums,
                             resume=True, keep_state=True, progress=lambda share, text: said.append(text))  # fmt: skip
    whole, _, _ = fit(source, target, TEXTS, FitOptions(16, 64, top_k=2), direction="up")
    assert said[0].startswith("chose") and report.tokens == 14 * 60
    assert resumed.key_layers == whole.key_layers
    torch.testing.assert_close(resumed.key_weight[0], whole.key_weight[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("objective", ["plain", "attention"])
def test_one_reading_serves_both_directions(twins, tmp_path, objective):
    """The opposite direction's sums, gathered on the way, fit what its own reading would have fitted."""
    source, target = twins
    options = FitOptions(16, 64, top_k=2, objective=objective)
    files = tmp_path / "up", tmp_path / "down"
    up, _, _ = fit(source, target, TEXTS, options, direction="up", state_file=files[0], back_file=files[1])
    said = []
    down, _, _ = fit(target, source, TEXTS, options, direction="down", state_file=files[1], resume=True,
                     progress=lambda share, text: said.append(text))  # fmt: skip
    assert said[0].startswith("chose") and not files[0].exists()
    for found, (one, other, direction) in ((up, (source, target, "up")), (down, (target, source, "down"))):
        alone, _, _ = fit(one, other, TEXTS, options, direction=direction)
        assert found.key_layers == alone.key_layers
        torch.testing.assert_close(found.value_weight[0], alone.value_weight[0], rtol=1e-3, atol=1e-4)


def test_state_of_another_fit_is_not_used(twins, tmp_path):
    source, target = twins
    gatherer = Gatherer(source, target, OPTIONS)
    gatherer.add(random_ids(64), "fit")
    FitState(tmp_path / "s", "one").save(gatherer.parts, 1)
    assert FitState(tmp_path / "s", "other").restore(gatherer.parts) == 0
    assert FitState(tmp_path / "s", "one").restore(gatherer.parts) == 1
    (tmp_path / "s").write_bytes(b"torn")
    assert FitState(tmp_path / "s", "one").restore(gatherer.parts) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequences": 3},
        {"length": 8},
        {"top_k": 0},
        {"ridge": -1.0},
        {"hold_back": 0},
        {"anchors": -1},
        {"stride": 0},
        {"selection": "best"},
        {"objective": "x"},
        {"features": "all"},
        {"rank": -1},
        {"rank": 4, "top_k": None},
        {"mlp": 8},
        {"mlp": 8, "rank": 4, "features": "own"},
        {"polish": -1},
        {"native_layers": -1},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(InputError):
        FitOptions(**wrong)


def test_native_layers_are_fitted_like_the_others_and_saved(twins, tmp_path):
    source, target = twins
    plain, _, expected = fit(source, target, TEXTS, OPTIONS, direction="up")
    mapper, manifest, report = fit(source, target, TEXTS, replace(OPTIONS, native_layers=2), direction="up")
    assert torch.equal(mapper.key_weight[0], plain.key_weight[0]) and report.r2_k == expected.r2_k
    assert (report.parameters, mapper.native_layers) == (expected.parameters, 2)
    assert report.flops_per_token < expected.flops_per_token
    assert artefact.save(tmp_path / "m", mapper, manifest) == artefact.read_manifest(tmp_path / "m")
    assert artefact.read_manifest(tmp_path / "m").native_layers == manifest.native_layers == 2
    with pytest.raises(InputError, match="native"):
        fit(source, target, TEXTS, replace(OPTIONS, native_layers=9), direction="up")


def test_too_little_text_and_other_vocabularies_are_refused(twins):
    source, target = twins
    with pytest.raises(InputError, match="only 0 pieces"):
        fit(source, target, [TEXTS[0][:60]], FitOptions(24, 64), direction="up")
    other = wrap(tiny_model("llama", 1, vocab_size=640), tiny_tokenizer(), "other")
    with pytest.raises(IncompatiblePairError):
        fit(source, other, TEXTS, OPTIONS, direction="up")


@pytest.fixture(scope="module")
def strangers():
    """Two random models of unequal geometry."""
    tokenizer = tiny_tokenizer()
    return wrap(tiny_model("qwen3", 1), tokenizer, "small"), wrap(tiny_model("llama", 2), tokenizer, "large")


@pytest.mark.parametrize("objective", ["plain", "attention"])
@pytest.mark.parametrize("features", ["own", "both"])
def test_low_rank_of_a_linear_pair_needs_no_more_than_the_hidden_size(twins, tmp_path, features, objective):
    """All keys and values come out of one residual stream per layer: enough coordinates lose nothing."""
    source, target = twins
    options = FitOptions(
        24, 64, top_k=99, ridge=1e-4, rank=96, features=features, objective=objective, anchors=2
    )
    mapper, manifest, report = fit(source, target, TEXTS, options, direction="up")
    assert report.r2_k > 0.95 and report.r2_v > 0.95
    assert (mapper.rank, mapper.features, manifest.objective) == (96, features, objective)
    artefact.save(tmp_path / "m", mapper, manifest)
    loaded, _ = artefact.load(tmp_path / "m", source.identity, target.identity, "up")
    assert loaded.flops_per_token == report.flops_per_token == 2 * report.parameters


def test_both_features_see_more_than_own_ones(strangers):
    source, target = strangers
    found = {
        features: fit(
            source, target, TEXTS, FitOptions(24, 64, top_k=3, ridge=1e-2, features=features), direction="up"
        )
        for features in ("own", "both")
    }
    assert found["both"][2].r2_v > found["own"][2].r2_v
    assert found["both"][2].features == 2 * found["own"][2].features - 1
    assert found["both"][0].key_weight[0].shape[0] == 2 * found["own"][0].key_weight[0].shape[0]


def test_choices_are_not_made_by_the_tokens_that_are_reported(strangers, monkeypatch):
    """Garbage in the reported set changes the report, and nothing that was fitted."""
    source, target = strangers
    options = FitOptions(16, 64, top_k=None, ridge=None, selection="greedy")
    plain, _, before = fit(source, target, TEXTS, options, direction="up")
    real = Gatherer.add

    def spoil(self, ids, part):
        real(self, list(reversed(ids)) if part == "report" else ids, part)

    monkeypatch.setattr(Gatherer, "add", spoil)
    spoilt, _, after = fit(source, target, TEXTS, options, direction="up")
    assert plain.key_layers == spoilt.key_layers
    torch.testing.assert_close(plain.key_weight[1], spoilt.key_weight[1], rtol=0, atol=0)
    assert before.r2_k != after.r2_k
    assert before.chosen_tokens == before.heldout_tokens == 2 * 60 and before.tokens == 14 * 60


def test_an_mlp_and_a_polish_are_judged_and_never_lose(strangers, tmp_path):
    source, target = strangers
    options = FitOptions(
        16, 192, top_k=99, ridge=1e-2, rank=16, features="both", mlp=8, polish=3, hold_back=4
    )
    mapper, manifest, report = fit(source, target, TEXTS, options, direction="up", state_file=tmp_path / "s")
    assert report.mlp["choose_error_share"] <= 1.0 and "r2_v_without" in report.mlp
    assert 0 < report.polish_quotes_kl[-1] <= report.polish_quotes_kl[0] and len(report.polish_kl) == 3
    assert list(tmp_path.iterdir()) == []
    artefact.save(tmp_path / "m", mapper, manifest)
    loaded, read = artefact.load(tmp_path / "m", source.identity, target.identity, "up")
    assert (read.hidden, read.ranks, read.polish) == (8, (16,), 3) and loaded.hidden == 8


def test_a_polish_learns_from_all_other_pieces_and_from_more_text(strangers, monkeypatch):
    from workbench.kv import polish

    source, target = strangers
    cut, taught = [], []
    joined, lessons = polish.joined, polish.lessons
    monkeypatch.setattr(polish, "joined", lambda pieces, *a: cut.append(pieces) or joined(pieces, *a))
    monkeypatch.setattr(
        polish, "lessons", lambda s, t, pieces, *a: taught.append(pieces) or lessons(s, t, pieces, *a)
    )
    options = FitOptions(16, 192, top_k=1, polish=1, hold_back=4)
    _, manifest, _ = fit(source, target, TEXTS, options, direction="up", polish_texts=["x" * 400])
    fitted, choosing = cut
    assert not {tuple(ids) for ids in choosing} & {tuple(ids) for ids in fitted}
    more = source.tokenizer("x" * 400)["input_ids"][:192]
    assert more in fitted and more not in cut_sequences(source.tokenizer, TEXTS, options)
    judged, learnt = taught
    assert manifest.calibration["polish_pieces"] == len(learnt) < len(fitted)
    assert choosing == judged[: len(choosing)] and max(map(len, judged)) > 192 < max(map(len, learnt))
    with pytest.raises(InputError, match="too short to polish"):
        fit(source, target, TEXTS, replace(options, length=64), direction="up")


def test_the_command_line_has_the_same_defaults():
    from workbench.commands.fit import DEFAULTS

    options = FitOptions()
    assert {name: str(getattr(options, name)) for name in DEFAULTS} == {
        name: "1000000" if value == "all" else str(value) for name, value in DEFAULTS.items()
    }
