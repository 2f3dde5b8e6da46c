"""Bad overrides, recipes and prompts, as a user would write them: what each command answers.

Every case must be refused with what was expected and found and what to do, and never as an
internal error. A case of `ACCEPTED` ends well, and its consequence must be printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bad_inputs import Case, check_refused, name, run_case, write

pytestmark = pytest.mark.slow


def conversation(**fields: Any) -> str:
    """Return a line of a prompt file."""
    return json.dumps({"id": "a", "messages": [{"role": "user", "content": "hello"}]} | fields)


def plans(*cases: tuple[str, str]) -> list[Case]:
    """Return a case for each override of a plan, in a run that does not exist yet."""
    return [Case(f"run small.yaml --plan name=new {override}", words) for override, words in cases]


def recipes(*cases: tuple[str | bytes, str]) -> list[Case]:
    """Return a case for each text of a recipe."""
    return [Case("run r.yaml --plan", words, write("r.yaml", text)) for text, words in cases]


def prompts(*cases: tuple[str, str]) -> list[Case]:
    """Return a case for each file of prompts."""
    command = "prepare small.yaml name=other prompts.source=p.jsonl"
    return [Case(command, words, write("p.jsonl", text)) for text, words in cases]


REFUSED = [
    *plans(
        ("train.step=3", "did you mean train.steps?"),
        ("=3", "expected an override"),
        ("steps", "expected an override"),
        ("train.steps=1.5", "train.steps"),
        ("train.steps=0", "greater than or equal to 1"),
        ("train.learning_rate=nan", "train.learning_rate"),
        ("train.gamma=2", "train.gamma"),
        ("train.row_tokens=7", "train.row_tokens"),
        ("train.precision=int8", "train.precision"),
        ("run.url=s3://bucket/run", "run.url: removed: sync the run folder"),
        ("train.device=cuda:7", "0 GPUs"),
        ("target.device=cuda:9", "0 GPUs"),
        ("target=nowhere", "expected a checkpoint folder"),
        ("name=..", "expected a name"),
        ("head.family=eagle9", "eagle9"),
        ("head.family=peagle,", "peagle"),
        ("head.num_key_value_heads=3", "key-value heads"),
        ("head.num_layers=5", "at most 4 layers"),
        ("head.intermediate_size=0", "intermediate_size"),
        ("head.init=nowhere", "nowhere"),
        ("head.mask_token=5", "mask_token"),
        ("record.boundaries=[9]", "expected boundaries in 0..4"),
        ("record.boundaries=[3,1]", "expected sorted unique boundaries"),
        ("record.max_length=2", "record.max_length"),
        ("draft_vocab.size=99999999", "draft_vocab.size"),
        ("regenerate.temperatures=[-1]", "regenerate.temperatures"),
        ("regenerate.backend=openai", "server.url"),
        ("regenerate.server.url=localhost", "regenerate.server.url"),
        ("eval.k=0", "eval.k"),
        ("eval.compare=[nowhere]", "nowhere"),
        ("export.formats=[vlm]", "vllm"),
        ("export.max_shard=1GB", "export.max_shard: removed"),
        ("export.gguf=true", "llamacpp"),
        ("hardware.gpu=B9000", "hardware.gpu"),
    ),
    *recipes(
        ("", "expected a mapping of settings"),
        ("null", "expected a mapping of settings"),
        ("target: [", "expected YAML"),
        ("\x00", "expected YAML"),
        (b"\xff\xfe\x00\x01", "expected YAML"),
        ("target: toy\ntarget: toy", "twice"),
        ("train: {steps: 5, stepz: 6}", "did you mean train.steps?"),
        ("target: {path: toy, revison: x}", "did you mean target.revision?"),
        ("a: &a [*a]", ""),
        ("!!python/object/apply:os.system ['true']", "expected YAML"),
    ),
    Case("run nowhere.yaml", "expected a recipe, found no such file"),
    Case("run toy", "expected a recipe"),
    *prompts(
        ("", "an empty data set"),
        ("\n\n", "an empty line"),
        (conversation() + "\n{", "p.jsonl:2"),
        ("null", "p.jsonl:1"),
        (conversation(messages=[5]), "messages"),
        (conversation() + "\n" + conversation(messages=[{"role": "user", "content": "b"}]), "a"),
        (conversation(messages=[{"role": "user", "content": "x" * 5000}]), "no room"),
        (conversation(messages=[{"role": "assistant", "content": "x"}]), "user"),
    ),
]
ACCEPTED = [
    Case("run small.yaml --plan record.max_length=20", "20"),
    Case("run small.yaml --plan train.micro_rows=99", ""),
    *prompts(
        (conversation() + "\r\n", "1 conversation"),
        (conversation() + "\n" + conversation(id="b"), "1 "),
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=name)
def test_refused(case: Case, folder: Path) -> None:
    check_refused(case, folder)


@pytest.mark.parametrize("case", ACCEPTED, ids=name)
def test_accepted_with_its_consequence(case: Case, folder: Path) -> None:
    code, output = run_case(case, folder)
    assert code == 0, output
    assert case.words.lower() in " ".join(output.lower().split()), output
