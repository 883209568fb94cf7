"""Strangers' templates: the same text as transformers gives, and none that hangs, eats memory or gets out."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from jinja2 import TemplateError

from tests.conftest import CHATML, tiny_tokenizer
from workbench.chat.conversation import Message
from workbench.chat.template import render
from workbench.errors import UnsupportedModelError
from workbench.models import isolated
from workbench.models.isolated import ChildLimitError, ask
from workbench.models.template_child import isolate

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TURNS = [
    {"role": "user", "content": "hello 🙂 <b>\n"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "again"},
]


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content|tojson }}]\n  {% endif %}\n{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if loop.first %}{% continue %}"
        "{% endif %}{% break %}{% endfor %}",
        "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}{{ missing }}",
        "{{ messages|map(attribute='role')|join(',') }}{{ messages[0]['content'].strip()|upper }}",
        "{{ {'a': [1, none], 'é': true}|tojson(indent=2) }}{{ strftime_now('%Y') }}",
    ],
)
def test_the_child_gives_the_text_of_transformers(template: str) -> None:
    theirs = with_template(template)
    ours = with_template(template)
    isolate(ours, "model")
    for prompt in (False, True):
        expected = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP, "took too long"),
        ("{{ 'x' * 10**10 }}", "memory"),
        ("{% set n = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", "memory"),
        ("{{ 'x' * (messages|length * 10**7) }}", "wrote too much"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_refused_in_time(template: str, why: str) -> None:
    started = time.monotonic()
    with pytest.raises(UnsupportedModelError, match=why):
        isolate(with_template(template), "model")
    assert time.monotonic() - started < 20  # on a busy machine; a quarter of it on an idle one
    isolate(with_template(CHATML), "model")  # the next one has a child again


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ],
)
def test_the_sandbox_lets_nothing_out(template: str) -> None:
    tokenizer = with_template(template)
    isolate(tokenizer, "model")
    with pytest.raises(TemplateError):
        tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_a_template_that_turns_hostile_later_ends_that_message_only() -> None:
    tokenizer = with_template("{% if 'now' in messages[-1].content %}" + LOOP + "{% endif %}" + CHATML)
    isolate(tokenizer, "model")
    assert render(tokenizer, [Message("user", "hello")], generation_prompt=True)
    with pytest.raises(UnsupportedModelError, match="took too long, so it was ended"):
        render(tokenizer, [Message("user", "now")], generation_prompt=True)
    assert render(tokenizer, [Message("user", "hello")], generation_prompt=True)


def test_exact_ids_survive_the_child() -> None:
    plain, guarded = tiny_tokenizer(), tiny_tokenizer()
    isolate(guarded, "model")
    odd = [plain.convert_tokens_to_ids(c) for c in "hello"]
    turns = [
        Message("user", "hi <|im_end|>"),
        Message("assistant", "hello", odd),
        Message("user", "\ufdd0 x"),
    ]
    for prompt in (False, True):
        assert render(guarded, turns, generation_prompt=prompt) == render(
            plain, turns, generation_prompt=prompt
        )


def test_the_child_has_none_of_our_environment_and_ends_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    child = isolated._Child(isolated.MEMORY_MB + 1)
    try:
        path = f"/proc/{child._process.pid}/environ"
        if os.path.exists(path):
            with open(path, "rb") as file:
                assert b"hf_secret" not in file.read()
        assert child._process.stdin is not None
        child._process.stdin.close()
        assert child._process.wait(10) == 0
    finally:
        child.kill()


def test_a_child_that_was_killed_is_replaced() -> None:
    assert ask("template", "a{{ b }}", {"b": 1}, seconds=5) == "a1"
    isolated._kept[0]._process.kill()
    isolated._kept[0]._process.wait()
    with pytest.raises(ChildLimitError):
        ask("template", "a{{ b }}", {"b": 1}, seconds=5)
    assert ask("template", "a{{ b }}", {"b": 1}, seconds=5) == "a1"
