"""Reading documents, cutting passages, and refusing what is no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.conftest import texts
from workbench.errors import InputError
from workbench.lab import corpus


def test_a_line_of_percent_signs_parts_documents(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\ufeffone\nstill one %% \n%%\n\n%%\ntwo\n", encoding="utf-8")
    found = corpus.read_files([path])
    assert [(document.name, document.text) for document in found] == [
        ("book-1", "one\nstill one %%"),
        ("book-2", "two"),
    ]
    assert found[0].sha256 != found[1].sha256


@pytest.mark.parametrize("content", [b"", b"%%\n%%\n", b"\xff\xfe\x00a", None])
def test_what_is_no_text_is_refused_in_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "strange.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        corpus.read_files([path])
    assert "strange.txt" in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_a_folder_and_no_file_at_all_are_refused(tmp_path: Path) -> None:
    for paths in ([tmp_path], []):
        with pytest.raises(InputError):
            corpus.read_files(paths)


def test_the_projects_own_texts_keep_the_two_uses_apart() -> None:
    fit, measure = corpus.documents("calibration"), corpus.documents("heldout")
    assert len(fit) > 10 and len(measure) > 10
    assert not {document.sha256 for document in fit} & {document.sha256 for document in measure}
    first = corpus.documents("heldout", limit=4)
    assert len({document.name.partition("-")[0] for document in first}) > 2, "every source is heard"
    with pytest.raises(InputError):
        corpus.documents("nothing-of-this-name")


def test_chats_of_ones_own_file_are_rendered_and_anything_else_is_refused_by_its_line(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Is it raining?"}]}\n', encoding="utf-8")
    (chat,) = corpus.chats(tokenizer, path=path)
    assert "Is it raining?" in chat.text and chat.name == "chat-1"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"messages": 3}\n')
    assert len(corpus.chats(tokenizer, limit=1, path=path)) == 1
    for wrong, words in ((path, "Line 2 of 'talks.jsonl'"), (tmp_path / "none.jsonl", "'none.jsonl'")):
        with pytest.raises(InputError) as caught:
            corpus.chats(tokenizer, path=wrong)
        assert words in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_passages_take_every_document_in_turn_and_do_not_overlap(tokenizer: Any) -> None:
    documents = texts(3)
    found = corpus.passages(tokenizer, documents, 50, limit=7)
    assert [passage.document for passage in found[:4]] == ["text-0", "text-1", "text-2", "text-0"]
    assert all(len(passage.ids) == 50 for passage in found)
    whole = corpus.encode(tokenizer, documents[0])
    assert list(found[0].ids + found[3].ids) == whole[:100] and found[3].name == "text-0@50"
    with pytest.raises(InputError):
        corpus.passages(tokenizer, documents, 10**6)


def test_a_stretch_goes_round_until_it_is_long_enough(tokenizer: Any) -> None:
    documents = texts(2)
    ids = corpus.stretch(tokenizer, documents, 1500)
    once = corpus.encode(tokenizer, documents[0]) + corpus.encode(tokenizer, documents[1])
    assert len(ids) == 1500 and len(once) < 1500 and ids == (once * 3)[:1500]


def test_lone_surrogates_are_replaced(tokenizer: Any) -> None:
    assert tokenizer.decode(corpus.encode(tokenizer, "a\ud800b")) == "a?b"
    assert corpus.encode(tokenizer, "hello world", limit=1) == corpus.encode(tokenizer, "hello world")[:1]
