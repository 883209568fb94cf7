"""Messages in, token ids out: the chat template around exact ids.

What a model generated stays as the ids it generated; tokenising its text again could split it differently,
and the cache would no longer fit. So answers go through the template between two marks, and where the marks
come out with the text untouched, the ids take its place. A template that rewrites an answer (some drop old
thinking blocks) gets what it wants: the rewritten text is tokenised, and the caller sees ids that differ from
those in the cache.

What people type is text, whatever it looks like: a mark inside each control token (`<|im_end|>`) cuts it in
two before tokenising, so that no piece contains it whole. This needs no switch on the shared tokenizer,
unlike `split_special_tokens`, which is state that another visitor's thread would see.

The marks are Unicode noncharacters, which no text should contain; typed ones are replaced.

A base model has no template. It gets a plain transcript, which it continues: turns that begin with `User:` and
`Assistant:`, a blank line between them. Its answer ends at the first blank line (`loading.stop_ids` knows).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from workbench.errors import InputError

CUT, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
ANSWER = re.compile(f"{OPEN}(\\d+){CUT}([^{OPEN}{CLOSE}]*){CLOSE}")
LEFT_OVER = re.compile(f"{OPEN}\\d+{CUT}|[{OPEN}{CLOSE}{CUT}]")


class Turn(Protocol):
    """One message: who, what, and the ids if a model wrote it."""

    role: str
    text: str
    token_ids: list[int]


def clean(text: str) -> str:
    """Text that every tokenizer takes: surrogate pairs joined, lone ones and our marks replaced by U+FFFD."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub(f"[{CUT}{OPEN}{CLOSE}]", "\ufffd", text)


def render(
    tokenizer: Any, turns: Sequence[Turn], *, system: str | None = None, generation_prompt: bool
) -> list[int]:
    """The exact ids of a conversation.

    Args:
        tokenizer: its chat template and its vocabulary.
        turns: messages of the roles "user" and "assistant", cleaned (see `clean`).
        system: a system prompt, None for the template's own.
        generation_prompt: add what stands before an answer.

    Returns:
        Token ids; [] for no turns.

    Raises:
        InputError: the chat template refuses these roles.
    """
    if not turns:
        return []
    messages = [] if system is None else [{"role": "system", "content": cut_tokens(tokenizer, clean(system))}]
    answers: list[tuple[str, list[int]]] = []
    for turn in turns:
        content = cut_tokens(tokenizer, turn.text, special_only=turn.role == "assistant")
        if turn.role == "assistant":
            answers.append((content, turn.token_ids))
            content = f"{OPEN}{len(answers) - 1}{CUT}{content}{CLOSE}"
        messages.append({"role": turn.role, "content": content})
    ids: list[int] = []
    try:
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )
        else:
            text = transcript(messages, generation_prompt)
            ids += tokenizer("")["input_ids"]  # what stands at the start of every text, if anything does
    except (TemplateError, TypeError, ValueError) as error:
        what = " ".join(str(error).split())[:150].rstrip(".")
        hint = "Try without a system prompt." if system is not None else ""
        raise InputError(f"The model's chat template refuses this conversation: {what}.", hint) from error
    done = 0
    for match in ANSWER.finditer(text):
        content, exact = answers[int(match[1])]
        if match[2] == content:
            ids += encode_pieces(tokenizer, text[done : match.start()], first=not ids)
            ids += exact
            done = match.end()
    return ids + encode_pieces(tokenizer, text[done:], first=not ids)


def transcript(messages: Sequence[dict[str, str]], generation_prompt: bool) -> str:
    """A conversation as a base model would read it. A blank line ends a turn, so a person's are made shorter."""
    parts = []
    for message in messages:
        name = {"user": "User: ", "assistant": "Assistant:"}.get(message["role"], "")
        content = message["content"]
        parts.append(
            name + (content if message["role"] == "assistant" else re.sub(r"\n\s*\n", "\n", content))
        )
    return "\n\n".join([*parts, "Assistant:" if generation_prompt else ""])


def cut_tokens(tokenizer: Any, text: str, *, special_only: bool = False) -> str:
    """`text` with a mark after the first character of each control token in it, overlapping ones too.

    Args:
        tokenizer: says what its control tokens are.
        text: what someone wrote.
        special_only: leave added tokens that are not special alone; a model's own `<think>` is one for its
            template.
    """
    tokens = tokenizer.added_tokens_decoder.values()
    names = (t.content for t in tokens if (t.special or not special_only) and len(t.content.strip()) > 1)
    pattern = _starts_of(tuple(sorted(set(names), key=len, reverse=True)))
    if pattern is None:
        return text
    cuts = [match.start() + 1 for match in pattern.finditer(text)]
    return CUT.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))


@functools.lru_cache(maxsize=64)
def _starts_of(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    """Finds every position where one of the tokens starts; None when there are none."""
    return re.compile(f"(?={'|'.join(map(re.escape, tokens))})") if tokens else None


def encode_pieces(tokenizer: Any, text: str, *, first: bool) -> list[int]:
    """Ids of rendered text; marks are left out, and nothing joins across them.

    Args:
        tokenizer: the tokenizer.
        text: rendered text without whole answers.
        first: whether it stands at the very beginning; a tokenizer that puts a space there must not do it
            elsewhere.
    """
    ids: list[int] = []
    for piece in LEFT_OVER.split(text):
        if piece:
            ids += _encode(tokenizer, piece, first=first and not ids)
    return ids


def _encode(tokenizer: Any, piece: str, *, first: bool) -> list[int]:
    plain: list[int] = tokenizer.encode(piece, add_special_tokens=False)
    if first:
        return plain
    newline: list[int] = tokenizer.encode("\n", add_special_tokens=False)
    after: list[int] = tokenizer.encode("\n" + piece, add_special_tokens=False)
    return after[len(newline) :] if after[: len(newline)] == newline else plain
