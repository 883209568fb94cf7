"""GGUF files, each turned once into an ordinary checkpoint in the user's cache folder.

Dequantising a file of some gigabytes takes minutes and several times its size in memory, so it is done once and kept,
as the embedded model's is. The checkpoint's folder is named by the SHA-256 of the GGUF file, which stays the identity
of the weights: what was fitted on one machine fits on another that has the same file.

Quantised and bfloat16 files become bfloat16, files with float16 or float32 matrices keep that precision.
"""

from __future__ import annotations

from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import Any

from workbench.models.place import home

Progress = Callable[[float, str], None]
RECIPE_VERSION = 1


def folder(gguf: Path, sha256: str) -> Path:
    """Where the checkpoint of a GGUF file is or will be."""
    return home() / "converted" / f"{gguf.stem[:60]}-{sha256[:16]}-r{RECIPE_VERSION}"


def any_of(gguf: Path) -> bool:
    """Whether some file of this name was converted before, so that it pays to hash this one."""
    return any((home() / "converted").glob(f"{escape(gguf.stem[:60])}-*-r{RECIPE_VERSION}"))


def is_present(gguf: Path, sha256: str) -> bool:
    """Whether the checkpoint is built."""
    return (folder(gguf, sha256) / "config.json").is_file()


def ensure(gguf: Path, sha256: str, progress: Progress | None = None) -> Path:
    """The checkpoint folder of a checked GGUF file, built now if it is not there.

    Args:
        gguf: a file that `gguf_check.check_gguf` has passed.
        sha256: of its bytes, hex.
        progress: called with a share from 0 to 1 and what is going on.

    Raises:
        ModelUnavailableError: the cache folder cannot be written.
    """
    out = folder(gguf, sha256)
    if is_present(gguf, sha256):
        return out
    from workbench.models.embedded import building, publish

    if progress is not None:
        progress(0.05, f"Turning {gguf.name} into a checkpoint, once")
    with building(f"converted-{sha256[:16]}") as temporary:
        if not is_present(gguf, sha256):  # another process may have built it meanwhile
            convert(gguf, temporary / "checkpoint")
            publish(temporary / "checkpoint", out)
    return out


def convert(gguf: Path, out: Path) -> None:
    """Writes an ordinary checkpoint: weights, config, tokenizer with its chat template, stop ids.

    A model that came out of a GGUF refuses to be saved, so its weights go into a fresh one of the same config.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from workbench.models.embedded import no_bars
    from workbench.models.loading import check_loaded

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    dtype = stored_dtype(gguf)
    with no_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        loaded, found = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=dtype, output_loading_info=True, **where
        )
        check_loaded(loaded, found["missing_keys"], gguf.stem)
        raw = loaded.config.to_dict()
        raw.pop("quantization_config", None)
        raw.update(_name_or_path=gguf.stem, dtype=str(dtype).removeprefix("torch."))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(type(loaded.config)(**raw), dtype=dtype)
        model.load_state_dict(loaded.state_dict(), assign=True)  # takes the tensors over, no second copy
        model.tie_weights()
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def stored_dtype(gguf: Path) -> Any:
    """The dtype that keeps what the file holds: of its matrices, vectors are float32 in every file."""
    import torch
    from gguf import GGUFReader

    kinds = {tensor.tensor_type.name for tensor in GGUFReader(gguf).tensors if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F16", "F32"} else torch.bfloat16
