"""Targets of other kinds than a plain text checkpoint, from prompts to exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.files import CACHE
from draftlab.heads.folder import load_config
from tests.helpers.gguf_file import write_gguf
from tests.helpers.multimodal_zoo import random_folder
from tests.helpers.small_run import new_workshop, ran
from tests.helpers.toys import toy_target_folder, toy_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return new_workshop(tmp_path / "work")


def run(folder: Path, *overrides: str) -> str:
    """Run small.yaml and return its output on one line."""
    words = ("export.formats=[vllm]", "record.boundaries=[1,2,3]", *overrides)
    result = ran(folder, "run", "small.yaml", *words)
    assert "of 3 prompts equal those of" in " ".join(result.output.split())
    return " ".join(result.output.split())


def exported(folder: Path) -> dict[str, object]:
    return json.loads((folder / "runs/small/export/vllm/config.json").read_text())


def test_a_multimodal_checkpoint(folder: Path) -> None:
    tokenizer = toy_tokenizer()
    names = ("bos", "eos", "pad")
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}
    random_folder(folder / "vl", "qwen3_vl", vocab_size=len(tokenizer), **ids)
    tokenizer.save_pretrained(folder / "vl")
    output = run(folder, "target=vl")
    assert "the text model, only; these tensors of the checkpoint are not used" in output
    config = load_config(folder / "runs/small/head")
    assert config.target.architecture == "Qwen3VLForConditionalGeneration"
    assert exported(folder)["rope_parameters"] == config.rope_parameters


def test_a_gguf_file(folder: Path) -> None:
    write_gguf(folder / "toy", folder / "toy.gguf")
    output = run(folder, f"target={folder / 'toy.gguf'}", "export.formats=[llamacpp,vllm]")
    assert "toy.gguf are dequantised, in 16 bits, in" in output
    launch = (folder / "runs/small/export/llamacpp/launch.md").read_text()
    assert f"llama-server -m {folder / 'toy.gguf'} -md head.gguf" in launch
    assert "--outfile target.gguf" not in launch
    for program in ("llamacpp", "vllm"):
        launch = (folder / "runs/small/export" / program / "launch.md").read_text()
        assert "in draftlab's cache: the checkpoint that it made of toy.gguf" in launch
    ran(folder, "push", "small", "a/b", "--to", "llamacpp", "--dry-run", "--out", "out")
    for name in ("README.md", "launch.md"):
        text = (folder / "out" / name).read_text()
        assert str(folder) not in text
        assert "--target-model-dir TARGET " in text
        assert "llama-server -m TARGET.gguf -md head.gguf" in text


def test_a_tokenizer_with_a_token_beyond_the_vocabulary(folder: Path) -> None:
    """As Gemma 3 1B has one for images: texts with it are left out, and heads never draft it."""
    rows = len(toy_tokenizer()) - 1
    toy_target_folder(folder / "short", layers=4, hidden=32, vocab=rows)
    text = {"messages": [{"role": "user", "content": "def <|mask|> the user"}], "id": "image"}
    lines = (folder / "prompts.jsonl").read_text() + json.dumps(text) + "\n"
    (folder / "more.jsonl").write_text(lines)
    output = run(folder, "target=short", "prompts.source=more.jsonl")
    assert "their text has '<|mask|>', for which the target has no embedding" in output
    assert "another model's tokenizer" not in output
