"""Typed errors. Each message is one sentence that names what is wrong; `hint` says what to do.

Only the screens and the command line turn them into text for people.
"""


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
