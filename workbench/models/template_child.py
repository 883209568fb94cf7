"""Chat templates of strangers: rendered by jinja's sandbox in a child process, every time.

`isolate(tokenizer)` replaces that one tokenizer's `apply_chat_template`, so that nobody who uses it can forget.
The sandbox alone keeps a template from reaching Python objects, but not from looping for ever or writing a
string of ten gigabytes; the child's limits do that (`isolated.py`). A template that behaves when it is tried
and not later meets the same limits later.

The environment is the one that transformers documents for templates: blocks trimmed, `tojson` without HTML
escapes, loop controls, `raise_exception`, `strftime_now`, and a `generation` block that only marks text.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workbench.errors import UnsupportedModelError
from workbench.models.isolated import ChildError, ChildLimitError, ask

SECONDS = 2.0
TEMPLATE_LIMIT = 1_000_000  # characters; the longest known ones have about 20,000


class Marked(Extension):
    """`{% generation %}…{% endgeneration %}` is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _refuse(message: Any) -> None:
    raise TemplateError(str(message))


def _json(value: Any, **options: Any) -> str:
    allowed = ("ensure_ascii", "indent", "separators", "sort_keys")
    return json.dumps(
        value, **{"ensure_ascii": False} | {name: options[name] for name in allowed if name in options}
    )


@functools.lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """A template, ready to render."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marked, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def render(template: str, variables: dict[str, Any]) -> str:
    """The text, without limits: for the child."""
    text: str = compiled(template).render(**variables)
    return text


def isolate(tokenizer: Any, name: str) -> None:
    """Renders this tokenizer's chat template in a child from now on, and tries it once.

    Args:
        tokenizer: of a model from a stranger; one without a template stays as it is.
        name: of the model, for people.

    Raises:
        UnsupportedModelError: the template cannot be rendered within the limits.
    """
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return

    def apply(
        messages: list[dict[str, Any]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        """As transformers' method, for text only.

        Raises:
            TemplateError: the template refuses this conversation.
            UnsupportedModelError: it ran into a limit.
        """
        if tokenize:
            raise TypeError("A stranger's template gives text only; tokenise that.")
        chosen = tokenizer.get_chat_template()
        if len(chosen) > TEMPLATE_LIMIT:
            raise UnsupportedModelError(
                f"The chat template of {name} is larger than {TEMPLATE_LIMIT:,} characters."
            )
        variables = {
            **{
                key: str(value)
                for key, value in tokenizer.special_tokens_map.items()
                if isinstance(value, str)
            },
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return str(ask("template", chosen, variables, seconds=SECONDS, patient=True))
        except ChildError as error:
            raise TemplateError(str(error)) from error
        except ChildLimitError as error:
            raise UnsupportedModelError(
                f"The chat template of {name} {error}, so it was ended.", "Choose another model."
            ) from error

    tokenizer.apply_chat_template = apply
    long = "word " * 2_000
    for count in (1, 3, 41):  # a first message, a second one, a long conversation
        turns = [{"role": ("user", "assistant")[i % 2], "content": long} for i in range(count)]
        try:
            apply(turns, add_generation_prompt=True)
        except TemplateError:
            return  # it refuses such turns; a chat will say so
