"""Named pairs, and what can be said about a pair before any weights are loaded.

A pair has two sides, "small" and "large", and two directions: "up" hands a conversation from small to large,
"down" the other way. Each direction has an artefact of its own. Presets name checkpoints that share one
tokenizer and keep all keys and values; mappers for them are fitted by whoever uses them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import InputError, WorkbenchError
from workbench.models.place import home

SIDES = ("small", "large")
DIRECTIONS = ("up", "down")
PRECOMPUTED = Path(__file__).resolve().parents[2] / "precomputed"


def source_side(direction: str) -> str:
    """The side that a conversation comes from: "up" -> "small".

    Raises:
        InputError: no such direction.
    """
    if direction not in DIRECTIONS:
        raise InputError(f"There is no direction {direction!r}.", "Use up (small to large) or down.")
    return "small" if direction == "up" else "large"


def target_side(direction: str) -> str:
    """The side that a conversation goes to: "up" -> "large"."""
    return other_side(source_side(direction))


def other_side(side: str) -> str:
    """ "small" -> "large" and back."""
    return "large" if side == "small" else "small"


def direction_to(side: str) -> str:
    """The direction of a switch to this side."""
    return "up" if side == "large" else "down"


@dataclass(frozen=True)
class PairRef:
    """Two references that belong together; `workbench.models.loading.load` says what a reference can be."""

    name: str
    small: str
    large: str
    title: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,150}", self.name):
            raise InputError(
                f"{self.name[:60]!r} is no name for a pair.", "Use letters, digits, dots and dashes."
            )

    def ref(self, side: str) -> str:
        """The reference of one side."""
        return self.small if side == "small" else self.large

    def source(self, direction: str) -> str:
        """The reference of the model that a conversation comes from."""
        return self.ref(source_side(direction))

    def target(self, direction: str) -> str:
        """The reference of the model that a conversation goes to."""
        return self.ref(target_side(direction))


def _preset(small: str, large: str) -> PairRef:
    """A pair of hub ids; its name joins theirs, without what they share."""
    ending = re.compile(r"-Instruct(-\d{4})?(-BF16)?$")
    short, long = (ending.sub("", ref.rpartition("/")[2]).lower() for ref in (small, large))
    stem = long.rpartition("-")[0]
    name = f"{short}-{long.removeprefix(stem + '-')}" if short.startswith(stem) else f"{short}-{long}"
    title = " and ".join(ref.rpartition("/")[2] for ref in (small, large))
    return PairRef(name, small, large, title)


EMBEDDED_PAIR = PairRef(
    "embedded", "embedded:small", "embedded:large", "SmolLM2-135M-Instruct and its sibling"
)
_ALL = [
    EMBEDDED_PAIR,
    _preset("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    _preset("HuggingFaceTB/SmolLM2-360M-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    _preset("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    _preset("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"),
    _preset("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    _preset("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct"),
    _preset("Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    _preset("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct"),
    _preset("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"),
    _preset("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B"),
    _preset("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B"),
    _preset("Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"),
    _preset("Qwen/Qwen3-4B", "Qwen/Qwen3-8B"),
    _preset("Qwen/Qwen3-8B", "Qwen/Qwen3-14B"),
    _preset("Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
    _preset("Qwen/Qwen3-14B", "Qwen/Qwen3-32B"),
    _preset("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    _preset("meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    _preset("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
    _preset("mistralai/Ministral-3-3B-Instruct-2512-BF16", "mistralai/Ministral-3-8B-Instruct-2512-BF16"),
    _preset("mistralai/Ministral-3-8B-Instruct-2512-BF16", "mistralai/Ministral-3-14B-Instruct-2512-BF16"),
]
PAIRS: dict[str, PairRef] = {pair.name: pair for pair in _ALL}


def known(ref: str) -> bool:
    """Whether a reference is in the catalog; a revision of one's own choice is not."""
    return any(ref in (pair.small, pair.large) for pair in PAIRS.values())


def resolve(
    pair: str | None = None, source: str | None = None, target: str | None = None, direction: str = "up"
) -> PairRef:
    """The pair that command-line arguments mean.

    `source` is what `--direction up` reads from, so the small side; `--direction down` swaps the two roles,
    not the sides.

    Raises:
        InputError: an unknown name or direction, or only one of `source` and `target`.
    """
    source_side(direction)
    if (source is None) != (target is None):
        raise InputError("Only one of --source and --target was given.", "Give both, or a pair with --pair.")
    if source is not None and target is not None:
        if pair is not None:
            raise InputError("--pair and --source/--target exclude each other.", "Give one of them.")
        known = next((p for p in PAIRS.values() if (p.small, p.large) == (source, target)), None)
        return known or PairRef(
            f"{_slug(source)}--{_slug(target)}", source, target, f"{_last(source)} and {_last(target)}"
        )
    name = pair or EMBEDDED_PAIR.name
    if name not in PAIRS:
        raise InputError(f"There is no pair {name[:60]!r}.", "`python -m workbench pairs` lists them.")
    return PAIRS[name]


def _last(ref: str) -> str:
    """What people call a reference: without folders and endings."""
    base, plus, adapter = ref.rpartition("+")
    if plus and base:
        return f"{_last(base)}+{_last(adapter)}"
    name = ref.rstrip("/").rpartition("/")[2] or "model"
    return name[:-5] if name.lower().endswith(".gguf") else name


def _slug(ref: str) -> str:
    return re.sub(r"[^\w.-]+", "-", _last(ref)).strip("-._")[:60] or "model"


def artefact_folder(pair: PairRef, direction: str) -> Path:
    """Where the mapper of a direction is: of one's own if there is one, else the one that is shipped."""
    source_side(direction)
    own = own_artefact_folder(pair, direction)
    return own if own.exists() else PRECOMPUTED / pair.name / direction


def own_artefact_folder(pair: PairRef, direction: str) -> Path:
    """Where a mapper that is fitted here is kept."""
    return home() / "mappers" / pair.name / direction


def has_artefact(pair: PairRef, direction: str) -> bool:
    """Whether a mapper of this direction is there (not whether it is good)."""
    return (artefact_folder(pair, direction) / "manifest.json").is_file()


@dataclass(frozen=True)
class Compatibility:
    """What the two configs say.

    Attributes:
        compatible: None when a config could not be had.
        reason: why not, "" when they can be paired.
        small, large: geometries, None where one is not known.
        by_catalog: whether a config was not there and the catalog's facts stood in.
        tokenizers: whether the tokenizers were compared too; if not, that happens before the weights are loaded.
    """

    compatible: bool | None
    reason: str
    small: Any = None
    large: Any = None
    by_catalog: bool = False
    tokenizers: bool = False

    @property
    def matched(self) -> bool | None:
        """Whether a layer of both caches is as wide (equal KV heads of equal size); None when not known."""
        if self.small is None or self.large is None:
            return None
        return (self.small.kv_heads, self.small.head_dim) == (self.large.kv_heads, self.large.head_dim)


def pair_compatibility(ref: PairRef, *, fetch: bool = True) -> Compatibility:
    """Whether two models can be paired, before any weights are there; never raises for a pair that cannot.

    Args:
        ref: the pair.
        fetch: False looks at configs on this machine only, and then at what the catalog knows.
    """
    from workbench.errors import ModelUnavailableError
    from workbench.kv.spec import KVSpec, check_pair, check_tokenizers
    from workbench.models.loading import read_spec, read_tokenizer
    from workbench.models.presets import preset_config

    specs, by_catalog = [], False
    for side in SIDES:
        try:
            specs.append(read_spec(ref.ref(side), fetch=fetch)[0])
        except ModelUnavailableError as error:
            config = preset_config(ref.ref(side))
            if config is None:
                return Compatibility(None, str(error))
            specs.append(KVSpec.from_config(config))
            by_catalog = True
        except WorkbenchError as error:
            return Compatibility(False, str(error))
    small, large = specs
    tokenizers = [None if by_catalog else read_tokenizer(ref.ref(side), fetch=fetch) for side in SIDES]
    compared = None not in tokenizers
    try:
        check_pair(small, large)
        if compared:
            check_tokenizers(*tokenizers)
    except WorkbenchError as error:
        return Compatibility(False, str(error), small, large, by_catalog, compared)
    return Compatibility(True, "", small, large, by_catalog, compared)
