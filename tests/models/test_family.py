"""The recipe on a tiny random Llama: layer choice, loss and gradient, resuming, one-token decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.errors import InputError
from workbench.models import distil, family, packing, prune
from workbench.models.distil import Block, Distiller, DistilOptions
from workbench.models.refit import refit_down_projections
from workbench.models.selfchat import Decoder


def tiny_llama(layers: int = 5, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def some_blocks(count: int, seed: int, length: int = 24) -> list[Block]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Block(torch.randint(0, 97, (length - i % 3,), generator=generator), skip=2 * (i % 2))
        for i in range(count)
    ]


@pytest.fixture(autouse=True)
def exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """These identities hold in float32; a processor with bfloat16 units would train in bfloat16."""
    monkeypatch.setattr(distil, "choose_dtype", lambda device: (torch.float32, "for the test"))


@pytest.fixture
def material(tmp_path: Path) -> family.Material:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "large")
    return family.Material(tmp_path / "large", model, None)


def quiet(share: float, text: str) -> None:
    assert 0 <= share <= 1 and text


def test_a_layer_that_does_nothing_is_dropped_first() -> None:
    model = tiny_llama()
    for matrix in (model.model.layers[3].self_attn.o_proj, model.model.layers[3].mlp.down_proj):
        torch.nn.init.zeros_(matrix.weight)
    kept, losses = prune.choose_layers(model, distil.stack(some_blocks(4, 1)), 3, quiet)
    assert len(kept) == 3 and 3 not in kept and kept == sorted(kept)
    assert abs(losses[0]) < 1e-4 < losses[1]


def test_kl_gradient_is_what_autograd_says() -> None:
    torch.manual_seed(0)
    head, teacher = torch.randn(97, 16), torch.randn(300, 16)
    student = torch.randn(300, 16, requires_grad=True)
    target, guess = F.linear(teacher, head).log_softmax(-1), F.linear(student, head).log_softmax(-1)
    loss = F.kl_div(guess, target, log_target=True, reduction="sum") / 300
    loss.backward()
    value, gradient = distil.kl_and_gradient(teacher, student.detach(), head)
    assert value == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(gradient, student.grad, atol=1e-5, rtol=1e-4)


def distiller(material: family.Material, folder: Path, tokens: int = 2000) -> Distiller:
    options = DistilOptions(tokens=tokens, rate=3e-3, warmup_steps=2, evaluate_every=500, measure_every=1)
    student = prune.new_student(material.path, material.model, [0, 2, 4])
    return Distiller(material.model, student, some_blocks(6, 2), some_blocks(5, 3), options, folder)


def test_student_starts_as_the_kept_layers(material: family.Material) -> None:
    own = prune.new_student(material.path, material.model, [0, 2, 4]).state_dict()
    for new, old in enumerate([0, 2, 4]):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(own[name.format(new)], material.model.state_dict()[name.format(old)])


def test_steps_lower_the_loss_and_leave_embeddings_alone(material: family.Material, tmp_path: Path) -> None:
    job = distiller(material, tmp_path / "work")
    before = job.student.model.embed_tokens.weight.clone()
    losses = [job.train_step() for _ in range(40)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert torch.equal(job.student.model.embed_tokens.weight, before)


def test_resumed_run_ends_in_the_same_state(material: family.Material, tmp_path: Path) -> None:
    held = {"text": some_blocks(2, 9), "chat": some_blocks(2, 10)}
    whole, first = distiller(material, tmp_path / "whole"), distiller(material, tmp_path / "halves")
    whole.run(held, {"text": 1.0, "chat": 1.0}, quiet)
    first.run(held, {}, quiet, until=900)
    second = distiller(material, tmp_path / "halves")
    assert second.load() and 900 <= second.tokens < 2000
    second.run(held, {}, quiet)
    a, b = (load_file(tmp_path / x / "state.safetensors") for x in ("whole", "halves"))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert (tmp_path / "whole" / "distil.jsonl").read_text().count('"ce"') >= 4


def test_rate_warms_up_and_decays_in_the_last_half() -> None:
    plan = DistilOptions(tokens=1000, rate=1.0, warmup_steps=4)
    assert [plan.rate_at(s, 0) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert plan.rate_at(99, 500) == 1.0 and plan.rate_at(99, 750) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="tokens"):
        replace(plan, tokens=0)


def test_packing_measures_and_ships(material: family.Material, tmp_path: Path) -> None:
    job = distiller(material, tmp_path / "work", tokens=300)
    held = {"text": some_blocks(2, 9), "chat": some_blocks(2, 10)}
    job.run(held, {}, quiet)
    base = {n: t.to(torch.bfloat16) for n, t in material.model.state_dict().items() if n != "lm_head.weight"}
    student = prune.new_student(material.path, material.model, [0, 2, 4])
    options = packing.PackOptions(
        tmp_path / "out", tmp_path / "work" / "state.safetensors", [0, 2, 4], tolerance=0.5, group=16
    )
    result = packing.pack(options, material.model, student, base, some_blocks(4, 2), held, quiet)
    assert set(result["ce"]) == {"large", "small"} and set(result["ce"]["small"]) == {"text", "chat"}
    assert (tmp_path / "out" / "sibling.safetensors").stat().st_size == result["bytes"]
    assert result["table"][0]["form"] == "bfloat16" and result["table"][-1]["form"] == "low rank"


def test_refit_brings_the_student_closer(material: family.Material) -> None:
    ids, counts = distil.stack(some_blocks(60, 4))
    real = F.pad(counts, (0, 1), value=False)
    student = prune.new_student(material.path, material.model, [0, 2, 4])

    def loss() -> float:
        models = (material.model, student)
        states = [distil.hidden_states(m, ids)[:, :-1][counts].detach() for m in models]
        return distil.kl_and_gradient(*states, material.model.lm_head.weight.detach())[0]

    before = loss()
    ratios = refit_down_projections(material.model, student, [0, 2, 4], ids, real)
    assert len(ratios) == 3 and max(ratios) < 1.0 and loss() < 0.8 * before


def test_one_token_decoder_agrees_with_transformers() -> None:
    model = tiny_llama()
    ids = torch.randint(0, 97, (3, 12))
    decoder = Decoder(model, batch=3, length=12)
    for position in range(12):
        logits = decoder.step(ids[:, position], position)
    torch.testing.assert_close(logits, model(ids).logits[:, -1].detach(), atol=1e-4, rtol=1e-4)


def test_wrong_options_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--stage"):
        family.FamilyOptions(stage="cook")
    with pytest.raises(InputError, match=r"\.txt"):
        family.read_documents(tmp_path)
