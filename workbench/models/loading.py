"""A reference in, a model that can be used out: weights, tokenizer, exact revision, devices and dtype.

    "embedded:large" | "embedded:small" | folder | file.gguf | owner/name[@revision]   ->   LoadedModel

Foreign files are looked at before anything is loaded (`sources.py`). `devices.py` decides dtype and place.
Weights come in through accelerate, so a model may lie on several devices; `layer_devices` says where each layer's
keys and values belong.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    dynamic_module_utils,
)
from transformers.utils import logging as transformers_logging

from workbench.errors import (
    InputError,
    ModelUnavailableError,
    UnsupportedModelError,
    WorkbenchError,
    out_of_memory,
)
from workbench.kv import sdpa
from workbench.kv.artefact import ModelIdentity
from workbench.kv.rope import Rotary
from workbench.kv.spec import KVSpec, tokenizer_hash
from workbench.models import adapter
from workbench.models.catalog import known
from workbench.models.devices import (
    first_device,
    layer_devices,
    offload_folder,
    parse_device_map,
    parse_max_memory,
    resolve_dtype,
)
from workbench.models.sources import Source, check_config, locate
from workbench.models.template_child import isolate

Progress = Callable[[float, str], None]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Else transformers asks at the terminal whether code that came with a model may be run.
dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
PLAINLY = {  # a word of a library's error -> what it means
    "ignore_mismatched_sizes": "its weights do not have the shapes that its config says",
    "custom code": "it brings code of its own, which is never run",
    "requires you to execute": "it brings code of its own, which is never run",
}
TURN_PROBE = "zqxprobe"  # an answer that no template contains, to see what the template writes after it


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run, with everything that says what it is.

    Attributes:
        ref: what it was asked for by.
        name: for people, e.g. "SmolLM2-135M-Instruct (30 layers)".
        identity: name, revision, geometry and tokenizer hash, as artefacts store them.
        spec: geometry of its KV cache.
        tokenizer: its tokenizer.
        model: the causal language model, in eval mode, without gradients.
        stop_ids: ids that end an answer.
        rotary: strip and rotate through its own rotary embedding.
        layer_devices: per layer, where its keys and values belong.
        dtype: of the weights.
        dtype_reason: why that one.
    """

    ref: str
    name: str
    identity: ModelIdentity
    spec: KVSpec
    tokenizer: Any
    model: Any
    stop_ids: frozenset[int]
    rotary: Rotary
    layer_devices: tuple[torch.device, ...]
    dtype: torch.dtype
    dtype_reason: str

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        weight = self.model.get_input_embeddings().weight
        return self.layer_devices[0] if weight.device.type == "meta" else weight.device


def load(
    ref: str,
    *,
    device_map: str | dict[str, Any] = "auto",
    dtype: str = "auto",
    max_memory: str | dict[Any, Any] | None = None,
    progress: Progress | None = None,
    check: Callable[[KVSpec, Any], None] | None = None,
) -> LoadedModel:
    """Load a model by reference.

    Args:
        ref: "embedded:large", "embedded:small", a folder, a GGUF file, or a hub id with an optional
            "@revision"; "BASE+ADAPTER" for a PEFT adapter over one of these.
        device_map: "auto", "cpu", "cuda:0", …, a JSON file, or a dict of module name to device.
        dtype: "auto", "float32", "bfloat16" or "float16".
        max_memory: like "cpu=4GiB,0=10GiB".
        progress: called with a share from 0 to 1 and what is being done.
        check: called with the geometry and the tokenizer before the weights are read; raises to refuse.

    Raises:
        InputError: an option that cannot be read.
        UnsupportedModelError: a model whose cache cannot be mapped, or that needs code of its own.
        ModelUnavailableError: weights that are missing, misspelt, gated or out of reach; the sentence says
            which.
    """
    report = progress or (lambda share, what: None)
    placement = parse_device_map(device_map)
    memory = parse_max_memory(max_memory)
    wanted, reason = resolve_dtype(dtype, first_device(placement))
    report(0.0, f"Looking for {Path(ref).name}")
    source = locate(ref, progress)
    report(0.3, f"Loading {source.name}")
    with quiet():
        try:
            config, renamed = text_part(_config_of(source))
            spec = KVSpec.from_config(config)  # refuses what cannot be mapped before the weights are read
            tokenizer = AutoTokenizer.from_pretrained(source.path, **source.arguments)
            if not known(ref):
                isolate(tokenizer, source.name)
            if check is not None:
                check(spec, tokenizer)
            model, found = AutoModelForCausalLM.from_pretrained(
                source.path,
                config=config,
                dtype=wanted,
                device_map=placement,
                max_memory=memory,
                attn_implementation="sdpa",
                use_safetensors=True,
                offload_folder=offload_folder(placement, memory),
                output_loading_info=True,
                **renamed,
                **source.arguments,
            )
            check_loaded(model, found["missing_keys"], source.name)
            if source.adapter:
                model = adapter.merged(model, Path(source.adapter))
        except WorkbenchError:
            raise
        except Exception as error:
            if (asked := out_of_memory(error)) is None:
                raise unreadable(source, error) from error
            raise ModelUnavailableError(
                f"{source.name} does not fit into memory{asked}.",
                "Choose a smaller model, or spread it with --device-map.",
            ) from error
    report(0.95, f"{source.name} is loaded")
    loaded = wrap(model, tokenizer, source.name, source.revision, ref=ref, dtype_reason=reason)
    report(1.0, f"{source.name} is ready")
    return loaded


def wrap(
    model: Any,
    tokenizer: Any,
    name: str,
    revision: str = "memory",
    ref: str = "",
    dtype_reason: str = "as it was given",
) -> LoadedModel:
    """A `LoadedModel` from objects in memory.

    Raises:
        UnsupportedModelError: a model whose cache cannot be mapped, or whose weights are not on a device.
    """
    model.eval().requires_grad_(False)
    sdpa.use(model)
    spec = KVSpec.from_config(model.config)
    devices = layer_devices(model, spec.layers)
    identity = ModelIdentity(name, revision, spec, tokenizer_hash(tokenizer))
    return LoadedModel(
        ref=ref or name,
        name=name,
        identity=identity,
        spec=spec,
        tokenizer=tokenizer,
        model=model,
        stop_ids=stop_ids(model, tokenizer),
        rotary=Rotary(model),
        layer_devices=devices,
        dtype=model.get_input_embeddings().weight.dtype,
        dtype_reason=dtype_reason,
    )


def read_spec(ref: str, *, fetch: bool = True) -> tuple[KVSpec, str]:
    """Geometry and display name of a model from its config alone; arguments and errors as for `read_config`."""
    config, name = read_config(ref, fetch=fetch)
    return KVSpec.from_config(config), name


def read_config(ref: str, *, fetch: bool = True) -> tuple[Any, str]:
    """A model's config and display name, without its weights.

    Args:
        ref: as for `load`.
        fetch: False looks on this machine only.

    Raises:
        as `load`.
    """
    source = locate(ref, config_only=True, fetch=fetch)
    with quiet():
        try:
            config = text_part(_config_of(source))[0]
        except WorkbenchError:
            raise
        except Exception as error:
            raise unreadable(source, error) from error
    return config, source.name


def _config_of(source: Source) -> Any:
    """The config of a model's files, looked at as it stands before transformers makes anything of it."""
    if "gguf_file" not in source.arguments:  # whose head was checked
        check_config(PreTrainedConfig.get_config_dict(source.path, **source.arguments)[0], source.name)
    return AutoConfig.from_pretrained(source.path, **source.arguments)


def check_loaded(model: Any, missing: Collection[str], name: str) -> None:
    """Refuse weights that are not whole: transformers would fill what is missing with random numbers.

    Args:
        model: as it was loaded.
        missing: names of the tensors that its files do not have.
        name: of the model, for people.

    Raises:
        InputError: naming a tensor that is missing, or one with values that are not finite, and how many.
    """
    again = "Fetch its files again."
    if missing:
        raise InputError(f"{name} lacks {len(missing)} of its tensors, {min(missing)} among them.", again)
    for key, tensor in model.named_parameters():
        if tensor.device.type == "meta" or tensor.dtype not in FLOATS or not tensor.numel():
            continue
        if not all(torch.isfinite(end) for end in tensor.aminmax()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(f"The tensor {key} of {name} has {bad:,} values that are not finite.", again)


def read_tokenizer(ref: str, *, fetch: bool = True) -> Any:
    """A model's tokenizer without its weights; None where its files are not there, or are slow to read (GGUF)."""
    try:
        source = locate(ref, config_only=True, fetch=fetch)
        folder = Path(source.path)
        if "gguf_file" in source.arguments or (folder.is_dir() and not any(folder.glob("tokenizer*"))):
            return None
        with quiet():
            return AutoTokenizer.from_pretrained(source.path, **source.arguments)
    except Exception:  # it will be read again, with its errors shown, when the model is loaded
        return None


def text_part(config: Any) -> tuple[Any, dict[str, Any]]:
    """The language model's config in one that also sees pictures, where it is a plain decoder that can be used alone.

    Ministral 3 comes so. Its weights lie under `language_model`; the vision part is not read.

    Returns:
        The config, and the arguments that make `from_pretrained` find the weights under their other names.

    Raises:
        UnsupportedModelError: its weights are stored in FP8.
    """
    if getattr(config, "model_type", None) != "mistral3":
        return config, {}
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            "The weights of this Ministral 3 are stored in FP8, which only the whole model reads.",
            "Choose the repository of the same name that ends in -BF16.",
        )
    text = config.text_config
    text.tie_word_embeddings = config.tie_word_embeddings  # the whole model's word counts
    names = {
        r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
        r"^language_model\.lm_head": "lm_head",
    }
    return text, {"key_mapping": names}


def unreadable(source: Source, error: Exception) -> WorkbenchError:
    """One sentence for whatever transformers said about files that are there but cannot be used."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for word, plain in PLAINLY.items():
        if word in first:
            first = plain
    first = first.replace(str(Path(source.path).resolve()), source.name).replace(
        str(source.path), source.name
    )
    return ModelUnavailableError(f"{source.name} cannot be loaded: {first[:300].rstrip('.')}.")


# --- stop ids ---


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: the generation config's, the tokenizer's, and what the template puts after one.

    Instruct models often end a turn with a token that neither config names; without it an answer would run on
    into a turn of the user's. A base model without a template ends its turn of a transcript with a blank line.
    """
    found: set[int] = set()
    for value in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(
            i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int)
        )
    end_of_turn = template_stop_id(tokenizer)
    if end_of_turn is not None:
        found.add(end_of_turn)
    if not getattr(tokenizer, "chat_template", None):
        found.update(
            tokenizer.encode("\n\n", add_special_tokens=False)[-1:]
        )  # one token, or the last newline
    return frozenset(i for i in found if 0 <= i < model.config.vocab_size)


def template_stop_id(tokenizer: Any) -> int | None:
    """The first special token that the chat template writes after an answer, None when there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN_PROBE}]
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template may refuse any conversation; the chat will say so
        return None
    after = rendered.rpartition(TURN_PROBE)[2]
    special = set(tokenizer.all_special_ids) | {
        i for i, t in tokenizer.added_tokens_decoder.items() if t.special
    }
    return next((i for i in tokenizer.encode(after, add_special_tokens=False) if i in special), None)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and progress bars of other libraries: what people need to know, we say ourselves."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            transformers_logging.enable_progress_bar()
