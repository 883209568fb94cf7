"""References to models: what is loaded, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from workbench.errors import InputError, ModelUnavailableError, UnsupportedModelError, WorkbenchError
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.forward import forward
from workbench.models import devices, loading, sources
from workbench.models.devices import choose_dtype, parse_device_map, parse_max_memory
from workbench.models.loading import load, stop_ids, wrap


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


# --- what is loaded ---


def test_a_folder_becomes_the_model_that_was_saved(checkpoint: Path) -> None:
    steps: list[tuple[float, str]] = []
    loaded = load(
        str(checkpoint), device_map="cpu", dtype="float32", progress=lambda *step: steps.append(step)
    )
    assert (loaded.name, loaded.dtype, loaded.dtype_reason) == ("tiny-llama", torch.float32, "asked for")
    assert loaded.layer_devices == (torch.device("cpu"),) * 3 and loaded.device == torch.device("cpu")
    assert loaded.identity.revision.startswith("sha256:") and loaded.identity.spec == loaded.spec
    ids = random_ids(20)
    expected = forward(tiny_model("llama"), ids, new_cache(3))
    assert torch.allclose(forward(loaded.model, ids, new_cache(3)), expected, atol=1e-5)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    shares = [share for share, _ in steps]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert not any(str(checkpoint.parent) in what for _, what in steps[1:])


def test_the_revision_changes_with_one_bit(broken: Path) -> None:
    first = sources.locate(str(broken)).revision
    assert sources.locate(str(broken)).revision == first
    weights = broken / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    assert sources.locate(str(broken)).revision != first


def test_auto_map_on_a_known_type_is_ignored(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil"}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "evil.py").write_text("raise SystemExit('executed')")
    assert type(load(str(broken), dtype="float32").model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("limit", ["cpu=120KB", "cpu=1KB"])
def test_so_little_memory_that_layers_go_to_disk_works_or_says_why_not(checkpoint: Path, limit: str) -> None:
    ids = random_ids(12)
    cache = new_cache(3)
    try:
        loaded = load(str(checkpoint), dtype="float32", max_memory=limit)
        logits = forward(loaded.model, ids, cache)
    except WorkbenchError as error:
        assert str(error).count("\n") == 0
        return
    assert torch.allclose(logits, forward(tiny_model("llama"), ids, new_cache(3)), atol=1e-5)
    for layer, device in enumerate(loaded.layer_devices):
        assert layer_tensors(cache, layer)[0].device == device


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_code_beside_a_tokenizer_is_never_run_and_nobody_is_asked(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone, transformers asks at the terminal, and runs it after a yes."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    rewrite(
        broken / "tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
    )
    (broken / "evil.py").write_text(f"open({str(broken / 'executed')!r}, 'w')\nclass EvilTokenizer: pass\n")
    refused(broken, ModelUnavailableError, "code of its own, which is never run")
    assert asked == [] and not (broken / "executed").exists()


def test_a_device_map_from_a_file(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"": "cpu"}))
    assert load(str(checkpoint), device_map=str(path), dtype="float32").device == torch.device("cpu")


# --- stop ids ---


def test_stop_ids_come_from_all_three_places() -> None:
    tokenizer = tiny_tokenizer(extra_special=("<|eot|>",))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} <|eot|>\n{% endfor %}"
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [5, 6, 9999]
    eot = tokenizer.convert_tokens_to_ids("<|eot|>")
    assert stop_ids(model, tokenizer) == {5, 6, tokenizer.eos_token_id, eot}
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert stop_ids(model, tokenizer) == {5, 6, tokenizer.eos_token_id}
    tokenizer.chat_template = None  # a base model: a blank line ends its turn of a transcript
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    assert stop_ids(model, tokenizer) == {5, 6, tokenizer.eos_token_id, newline}


# --- dtype and devices ---


def test_auto_dtype_looks_at_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_bfloat16_flag", lambda: "")
    dtype, reason = choose_dtype(torch.device("cpu"))
    assert dtype == torch.float32 and "no native bfloat16" in reason
    monkeypatch.setattr(devices, "cpu_bfloat16_flag", lambda: "amx_bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    dtype, reason = choose_dtype(torch.device("cpu"))
    assert dtype == torch.bfloat16 and "amx_bf16" in reason


@pytest.mark.parametrize("bad", ["gpu", "cuda:99", "nowhere.json", "meta"])
def test_devices_that_do_not_exist_are_refused(bad: str) -> None:
    with pytest.raises(InputError):
        parse_device_map(bad)


@pytest.mark.parametrize("content", ["[]", "{}", "not json", '{"a": null}', '{"a": "cuda:77"}'])
def test_device_map_files_are_checked(tmp_path: Path, content: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(InputError):
        parse_device_map(str(path))


def test_memory_limits() -> None:
    assert parse_max_memory("cpu=4GiB, 0=10GiB,1=1.5 GB") == {"cpu": "4GiB", 0: "10GiB", 1: "1.5GB"}
    assert parse_max_memory(None) is None
    for bad in ("4GiB", "cpu=4", "cpu:4GiB", "cpu=lots", "cpu=4GiB;0=1GiB"):
        with pytest.raises(InputError, match="memory limit"):
            parse_max_memory(bad)


def test_an_unknown_dtype_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="float8"):
        load(str(checkpoint), dtype="float8")


# --- what is refused ---


def refused(ref: Any, error: type[WorkbenchError], *words: str) -> None:
    started = time.monotonic()
    with pytest.raises(error) as caught:
        load(str(ref), dtype="float32", device_map="cpu")
    message = str(caught.value)
    assert time.monotonic() - started < 10
    assert "\n" not in message and all(word in message for word in words), message
    if isinstance(ref, Path):
        assert str(ref.parent) not in message  # no absolute paths for the page


def test_missing_misspelt_gated_and_offline_are_four_sentences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    refused(tmp_path / "nothing", ModelUnavailableError, "no folder, GGUF file or model", "'nothing'")
    refused("just-a-word", ModelUnavailableError, "owner/name")
    refused("", ModelUnavailableError)
    refused("embedded:medium", InputError, "embedded:small")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def answering(error: type[Exception] | None) -> None:
        def ask(*args: Any, **options: Any) -> Any:
            if error is None:
                raise httpx.ConnectError("no network")
            raise error.__new__(error)

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)

    answering(RepositoryNotFoundError)
    refused("nobody/misspelt", ModelUnavailableError, "no model called nobody/misspelt")
    answering(GatedRepoError)
    refused("somebody/gated", ModelUnavailableError, "gated", "terms")
    answering(RevisionNotFoundError)
    refused("somebody/model@v9", ModelUnavailableError, "no revision 'v9'")
    answering(None)
    refused("somebody/model", ModelUnavailableError, "cannot be reached")


def test_pickled_weights_are_never_read(broken: Path) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    refused(broken, InputError, "pickled")
    (broken / "pytorch_model.bin").unlink()
    refused(broken, InputError, "no weights")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "", 7, ".hidden"]
)
def test_a_shard_index_that_points_elsewhere_is_refused(broken: Path, name: Any) -> None:
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    refused(broken, InputError, "shard index")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "cut off"), (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
     (b"PK\x03\x04" * 9, "no safetensors"),
     (b"\x80\x04\x95" * 9, "no safetensors"), (b"<html>" * 9, "no safetensors"),
     ((2**63).to_bytes(8, "little") + b"{}", "cut off")],
)  # fmt: skip
def test_files_that_are_something_else_are_refused(broken: Path, content: bytes, words: str) -> None:
    (broken / "model.safetensors").write_bytes(content)
    refused(broken, InputError, words)


@pytest.mark.parametrize("share", [0.0001, 0.5, 0.9, 0.99999])
def test_cut_weights_are_refused(broken: Path, share: float) -> None:
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: int(len(data) * share)])
    refused(broken, InputError, "cut off")


def test_weights_that_are_not_whole_are_refused_by_the_tensor(broken: Path) -> None:
    """Left alone, transformers fills what is missing with random numbers."""
    path, name = broken / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(path)
    key = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
    refused(broken, InputError, "lacks 1 of its tensors", name)
    key[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    save_file({**tensors, name: key}, path, metadata={"format": "pt"})
    refused(broken, InputError, name, "3 values that are not finite")
    save_file({**tensors, name: key[:3, :3].clone()}, path, metadata={"format": "pt"})
    refused(broken, ModelUnavailableError, "do not have the shapes that its config says")
    for metadata, error, words in (
        ({"format": "pt"}, InputError, "tensors"),
        ({"format": 7}, ModelUnavailableError, ""),
    ):
        header = json.dumps({"__metadata__": metadata}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        refused(broken, error, words)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json"]
)
def test_files_too_large_to_be_what_they_are_called_are_not_read(broken: Path, name: str) -> None:
    with (broken / name).open("wb") as file:
        file.truncate(10 * 2**30)
    refused(broken, InputError, name, "larger than")


def test_a_pipe_in_place_of_weights_does_not_hang(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    os.mkfifo(broken / "model.safetensors")
    refused(broken, InputError, "no plain file")


def test_configs_that_cannot_be_used(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    write = lambda data: (broken / "config.json").write_text(json.dumps(data))  # noqa: E731
    write(config | {"model_type": "evilnet", "auto_map": {"AutoConfig": "evil.Config"}})
    refused(broken, UnsupportedModelError, "code of its own")
    write(config | {"model_type": "evilnet"})
    refused(broken, UnsupportedModelError, "'evilnet'")
    write(config | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}})
    refused(broken, UnsupportedModelError, "dynamic")
    write(config | {"num_hidden_layers": 10**10})
    refused(broken, UnsupportedModelError, "10,000,000,000 layers")
    write(config | {"model_type": "mistral3", "text_config": {"num_hidden_layers": 10**10}})
    refused(broken, UnsupportedModelError, "10,000,000,000 layers")
    write(config | {"model_type": "mistral", "sliding_window": 8})
    refused(broken, UnsupportedModelError, "sliding")
    write([])
    refused(broken, InputError, "config.json")
    (broken / "config.json").unlink()
    refused(broken, InputError, "config.json")


def gguf(
    keys: bytes = b"", count: int = 0, tensors: bytes = b"", tensor_count: int = 1, version: int = 3
) -> bytes:
    """The head of a GGUF file."""
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, count) + keys + tensors


def gguf_text(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


ARRAY_OF_TEXTS = gguf_text(b"a") + struct.pack("<IIQ", 9, 8, 2**60)
TENSOR = gguf_text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML" * 20,
        b"GGUF",
        b"<html>",
        gguf(version=1, tensors=TENSOR),
        gguf(tensor_count=2**60),
        gguf(tensor_count=0),
        gguf(count=2**60),
        gguf(ARRAY_OF_TEXTS, 1, TENSOR),
        gguf(gguf_text(b"a") + struct.pack("<IIQ", 9, 4, 2**61), 1, TENSOR),
        gguf(gguf_text(b"a", 2**62), 1, TENSOR),
        gguf(gguf_text(b"a") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 50, 1, TENSOR),
        gguf(gguf_text(b"a") + struct.pack("<I", 77), 1, TENSOR),
        gguf(tensors=gguf_text(b"t") + struct.pack("<I", 2**31)),
        gguf(tensors=gguf_text(b"t") + struct.pack("<IQIQ", 1, 2**50, 0, 0)),
        gguf(tensors=gguf_text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 2**50)),
    ],
)
def test_hostile_gguf_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(path, InputError, "model.gguf", "cannot be read")


def test_a_gguf_head_that_holds_what_it_declares_passes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    texts = gguf_text(b"a") + struct.pack("<IIQ", 9, 8, 2) + gguf_text(b"x") + gguf_text(b"")
    path.write_bytes(gguf(texts, 1, TENSOR) + b"\x00" * 64)
    sources.check_gguf(path)


def test_stop_ids_that_are_no_numbers_are_passed_over(broken: Path) -> None:
    rewrite(broken / "generation_config.json", eos_token_id=["x", None, {}, 5])
    assert 5 in load(str(broken), dtype="float32", device_map="cpu").stop_ids


def test_wrap_refuses_what_cannot_be_mapped() -> None:
    with pytest.raises(UnsupportedModelError, match="sliding"):
        wrap(tiny_model("mistral", sliding_window=8), tiny_tokenizer(), "mistral")


def test_a_revision_becomes_a_commit_once_and_is_used_for_everything(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    import huggingface_hub

    commit, asked, used = "0123456789abcdef" * 2 + "01234567", [], []

    def metadata(url: str, **_: Any) -> Any:
        asked.append(url)
        return SimpleNamespace(commit_hash=commit)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    raw = json.loads((checkpoint / "config.json").read_text())

    def config_dict(path: str, *, revision: str, **_: Any) -> Any:
        used.append((path, revision))
        return raw, {}

    monkeypatch.setattr(loading, "PreTrainedConfig", SimpleNamespace(get_config_dict=config_dict))
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        real = getattr(loading, name)

        def read(path: str, *_: Any, real: Any = real, revision: str, **options: Any) -> Any:
            used.append((path, revision))
            return real.from_pretrained(checkpoint, **options | {"local_files_only": True})

        monkeypatch.setattr(loading, name, SimpleNamespace(from_pretrained=read))
    loaded = load("owner/model@v1", dtype="float32", device_map="cpu")
    assert loaded.identity.revision == commit
    assert len(asked) == 1 and "v1" in asked[0]
    assert used == [("owner/model", commit)] * 4
    raw.update(model_type="evilnet", auto_map={"AutoConfig": "evil.Config"})
    refused("owner/model", UnsupportedModelError, "code of its own")
    assert len(used) == 5  # nothing else was read
