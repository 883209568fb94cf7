"""Texts to fit on and to measure on.

`assets/text/<kind>/*.txt` holds the project's own: a file is several documents with a line `%%` between two
of them. "calibration" is for fitting only and "heldout" for measuring only; they share no document. `chats`
are the held-out chats that the large model wrote, rendered with a model's own template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from workbench.errors import InputError
from workbench.lab.provenance import text_hash

TEXT_FOLDER = Path(__file__).resolve().parents[2] / "assets" / "text"
SEPARATOR = "%%"


@dataclass(frozen=True)
class Document:
    """One text and where it is from."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text."""
        return text_hash(self.text)


@dataclass(frozen=True)
class Passage:
    """A stretch of a document as token ids.

    Attributes:
        document: its name; intervals resample documents, not passages.
        start: index of the first token in the document.
        ids: the tokens.
    """

    document: str
    start: int
    ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """Document and first token."""
        return f"{self.document}@{self.start}"


def documents(kind: str, limit: int | None = None) -> list[Document]:
    """The project's own texts.

    Args:
        kind: a folder of `assets/text`: "calibration" or "heldout" ("train" is for healing the sibling).
        limit: at most so many, taken from the files in turn so that every source is heard.

    Raises:
        InputError: when there are none.
    """
    paths = sorted((TEXT_FOLDER / kind).glob("*.txt"))
    if not paths:
        raise InputError(f"There are no {kind} texts.", "Give files with --text.")
    return _in_turn([read_file(path) for path in paths])[:limit]


def read_files(paths: Sequence[str | Path]) -> list[Document]:
    """Documents of files that a person named, in that order.

    Raises:
        InputError: for a file that is missing, no UTF-8 text, or empty.
    """
    found = [document for path in paths for document in read_file(Path(path))]
    if not found:
        raise InputError("No text file was given.", "Name at least one.")
    return found


def read_file(path: Path) -> list[Document]:
    """The documents of one file; names are the file's stem with a running number where there are several.

    Raises:
        InputError: when the file is missing, no UTF-8 text, or empty.
    """
    try:
        if not path.is_file():
            raise InputError(f"There is no text file {path.name!r}.", "Check the name.")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path.name!r} is no UTF-8 text.", "Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "unusable name"
        raise InputError(f"Cannot read {path.name!r}: {reason}.") from None
    parts: list[str] = []
    lines: list[str] = []
    for line in [*text.splitlines(), SEPARATOR]:
        if line.strip() == SEPARATOR:
            parts.append("\n".join(lines).strip())
            lines = []
        else:
            lines.append(line)
    parts = [part for part in parts if part]
    if not parts:
        raise InputError(f"{path.name!r} holds no text.")
    names = (
        [path.stem] if len(parts) == 1 else [f"{path.stem}-{number}" for number in range(1, len(parts) + 1)]
    )
    return [Document(name, part) for name, part in zip(names, parts, strict=True)]


def chats(tokenizer: Any, limit: int | None = None, path: Path | None = None) -> list[Document]:
    """Chats as text, each rendered with the tokenizer's chat template.

    Args:
        tokenizer: of the pair.
        limit: at most so many.
        path: a file with a JSON object a line, whose "messages" have role and content; None for the held-out ones.

    Raises:
        InputError: when they are missing or something else.
    """
    path = path or TEXT_FOLDER / "chats-heldout.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    except (OSError, UnicodeDecodeError):
        raise InputError(f"There are no chats in {path.name!r}.", "Use text files.") from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            messages = json.loads(line)["messages"]
            found.append(Document(f"chat-{number}", tokenizer.apply_chat_template(messages, tokenize=False)))
        except (ValueError, KeyError, TypeError, RecursionError, TemplateError):
            raise InputError(f"Line {number} of {path.name!r} is no chat.", 'It needs "messages".') from None
    return found


def encode(tokenizer: Any, text: str | Document, limit: int | None = None) -> list[int]:
    """Token ids as the model's own tokenizer makes them, a start token included where the family has one.

    Args:
        tokenizer: of the pair.
        text: what to encode; a lone surrogate becomes a replacement character.
        limit: at most so many tokens.
    """
    raw = text.text if isinstance(text, Document) else text
    ids = tokenizer(raw.encode("utf-8", "replace").decode("utf-8"), verbose=False)["input_ids"]
    return [int(token) for token in ids[:limit]]


def passages(
    tokenizer: Any, texts: Sequence[Document], length: int, limit: int | None = None
) -> list[Passage]:
    """Passages of exactly `length` tokens that do not overlap, from every document in turn.

    Args:
        tokenizer: of the pair.
        texts: their order is kept: first the first passage of each, then the second of each, ...
        length: tokens a passage.
        limit: at most so many.

    Raises:
        InputError: when no text is long enough.
    """
    cut: list[list[Passage]] = []
    for text in texts:
        ids = encode(tokenizer, text)
        starts = range(0, len(ids) - length + 1, length)
        cut.append([Passage(text.name, start, tuple(ids[start : start + length])) for start in starts])
    found = _in_turn(cut)[:limit]
    if not found:
        raise InputError(f"No text has {length:,} tokens.", "Give longer texts or ask for fewer tokens.")
    return found


def stretch(tokenizer: Any, texts: Sequence[Document], length: int) -> list[int]:
    """Real text of exactly `length` tokens: one document after the other, again if need be.

    Raises:
        InputError: when the texts hold no token.
    """
    ids: list[int] = []
    for text in _round_and_round(texts):
        more = encode(tokenizer, text)
        if not more and not ids:
            raise InputError("The text holds no token.", "Give another one.")
        ids += more
        if len(ids) >= length:
            return ids[:length]
    raise InputError("No text was given.", "Name at least one.")


def _in_turn(lists: Sequence[list[Any]]) -> list[Any]:
    """Of several lists: all firsts, all seconds, ..."""
    longest = max(map(len, lists), default=0)
    return [entries[i] for i in range(longest) for entries in lists if i < len(entries)]


def _round_and_round(texts: Sequence[Document]) -> Iterator[Document]:
    while texts:
        yield from texts
