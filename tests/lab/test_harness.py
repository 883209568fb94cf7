"""The model class through the real lm-evaluation-harness, on a task definition of our own (no hub)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs pip install -r requirements-eval.txt")

from tests.lab.conftest import make_host
from workbench.commands import common, harness
from workbench.errors import InputError
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.lab.harness import MappedCacheLM

CHOICE = """task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 1}
"""
WRITE = """task: local_write
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
metadata: {version: 1}
"""
ROLL = """task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
metadata: {version: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {
            "question": f"the river {i} is on the way to the",
            "choices": ["king", "song", "world"],
            "answer": i % 3,
        }
        for i in range(3)
    ]
    data = folder / "items.jsonl"
    data.write_text("\n".join(json.dumps(line) for line in lines))
    for name, text in (("choice", CHOICE), ("write", WRITE), ("text", ROLL)):
        (folder / f"{name}.yaml").write_text(text % data)
    return folder


def test_every_arm_through_the_real_harness(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(identity=True)
    monkeypatch.setattr(common, "host_from_args", lambda args: (host, "up"))
    parser = argparse.ArgumentParser()
    harness.add_arguments(parser)
    names = "local_choice,local_write,local_text"
    arms = "native,mapped,source,no_context,zero,wrong_document"
    options = ["--tasks", names, "--include-path", str(folder), "--arms", arms]
    found = harness.run(parser.parse_args(options), lambda share, what: None)
    assert set(found["tasks"]) == set(names.split(","))
    for task, each in found["tasks"].items():
        assert set(each) == set(arms.split(","))
        same = {arm: each[arm].get("accuracy", each[arm].get("perplexity")) for arm in each}
        assert (
            same["mapped"]
            == pytest.approx(same["native"], rel=1e-3)
            == pytest.approx(same["source"], rel=1e-3)
        ), task
    text = found["tasks"]["local_text"]
    assert text["native"]["perplexity"] > 1
    assert "local_choice" in harness.show(found) and found["harness"]
    with pytest.raises(InputError, match="no task"):
        harness.run(parser.parse_args(["--tasks", "nonsense"]), lambda share, what: None)
    with pytest.raises(InputError, match="always needed"):
        harness.run(parser.parse_args(["--arms", "mapped"]), lambda share, what: None)


def test_likelihoods_are_those_of_a_plain_pass() -> None:
    host = make_host()
    model = MappedCacheLM(host, "up", "native")
    context, ends = [3, 4, 5, 6, 7, 8], [[9, 10], [11]]
    found = model._loglikelihood_tokens([(("", ""), context, end) for end in ends])
    for end, (value, _) in zip(ends, found, strict=True):
        large = host.model("large")
        logits = forward(large.model, [*context, *end], new_cache(large.spec.layers), keep=len(end) + 1)
        expected = logits[:-1].log_softmax(-1)[range(len(end)), end].sum()
        assert value == pytest.approx(float(expected), abs=1e-4)
    source = MappedCacheLM(host, "up", "source")
    assert source._loglikelihood_tokens([(("", ""), context, [9])])[0][0] != found[0][0]
    with pytest.raises(InputError, match="no arm"):
        MappedCacheLM(host, "up", "magic")._loglikelihood_tokens([(("", ""), context, [9])])
