"""Typed errors. Each message is one sentence that names what is wrong; `hint` says what to do.

Only the screens and the command line turn them into text for people.
"""

import re

_OUT_OF_MEMORY = re.compile(
    r"MemoryError|out ?of ?memory|can't allocate memory|Cannot allocate memory|Unable to allocate",
    re.IGNORECASE,
)
_ASKED_FOR = re.compile(r"(?:allocate|Tried to allocate) (\d[\d.,]* ?(?:bytes|[KMGT]i?B))")


class WorkbenchError(Exception):
    """Base of all errors that are meant for people. `exit_status` is what the command line returns."""

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InputError(WorkbenchError):
    """What the person asked for cannot be done as it stands (empty message, unknown file, too long)."""

    exit_status = 2


class UnsupportedModelError(InputError):
    """A model whose KV cache cannot be mapped (sliding window, recurrent, `dynamic` rotary, ...)."""


class IncompatiblePairError(InputError):
    """Two models that cannot be paired, for example because their token ids differ."""


class ArtefactError(InputError):
    """A mapper artefact that is damaged, or that belongs to something else. Names the field."""


class ModelUnavailableError(WorkbenchError):
    """Weights that cannot be had: missing, misspelt, gated or offline."""


class Cancelled(WorkbenchError):
    """The person stopped the job."""


class BusyError(InputError):
    """Too many people wait for the model already."""


def out_of_memory(error: BaseException) -> str | None:
    """How much memory an error says that it asked for, as words in brackets or ""; None when it is of another kind.

    On the processor torch raises a plain `RuntimeError`, so its words have to tell.
    """
    text = f"{type(error).__name__} {error}"
    if isinstance(error, WorkbenchError) or not _OUT_OF_MEMORY.search(text):
        return None
    asked = _ASKED_FOR.search(text)
    return f" ({asked[1]} were asked for)" if asked else ""
