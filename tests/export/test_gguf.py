"""Conversion to GGUF with a stand-in for llama.cpp's script (parity-llamacpp runs the real one)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.export import gguf
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.settings import TargetSettings

SCRIPT = """
import argparse, json, sys
{home}
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("--target-model-dir", "--outtype", "--outfile"):
        parser.add_argument(name)
    options = vars(parser.parse_args())
    options["pre"] = TextModel().get_vocab_base_pre(None)
    if {fails}:
        import nothing_of_this_name
    with open(options["outfile"], "w") as file:
        json.dump(options, file)
if __name__ == "__main__":
    main()
"""
CLASS = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        {body}
"""
KNOWN, UNKNOWN = 'return "known"', 'raise NotImplementedError("BPE pre-tokenizer")'
EMBEDDED = resolve_target(TargetSettings())


def make_tree(folder: Path, body: str, *, package: bool, fails: bool = False) -> Path:
    """Write a stand-in for llama.cpp whose converter is one file, or has a package beside it."""
    folder.mkdir()
    home = CLASS.format(body=body)
    if package:
        (folder / "conversion").mkdir()
        (folder / "conversion" / "__init__.py").write_text("")
        (folder / "conversion" / "base.py").write_text(home)
        home = "from conversion.base import TextModel"
    (folder / gguf.SCRIPT).write_text(SCRIPT.format(home=home, fails=fails))
    return folder


@pytest.mark.parametrize("package", [True, False])
@pytest.mark.parametrize(("body", "pre"), [(KNOWN, "known"), (UNKNOWN, "llama-bpe")])
def test_the_converter_gets_the_name_of_an_unknown_pre_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bool, body: str, pre: str
) -> None:
    monkeypatch.setenv(gguf.FOLDER, str(make_tree(tmp_path / "llama", body, package=package)))
    export = tmp_path / "export"
    export.mkdir()
    out = gguf.convert(gguf.find_converter(), export, EMBEDDED, "float32")
    assert out == export / "head.gguf"
    options = json.loads(out.read_text())
    assert options["model"] == str(export)
    assert options["target_model_dir"] == str(EMBEDDED)
    assert (options["outtype"], options["pre"]) == ("f32", pre)
    assert [p.name for p in export.iterdir()] == ["head.gguf"]  # nothing temporary is left


def test_a_failing_converter_is_an_error_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(tmp_path / "llama", KNOWN, package=True, fails=True)
    monkeypatch.setenv(gguf.FOLDER, str(tree))
    with pytest.raises(UserError, match=r"nothing_of_this_name(?s:.*)LLAMA_CPP_PYTHON"):
        gguf.convert(gguf.find_converter(), tmp_path, EMBEDDED, "bfloat16")
    assert not list(tmp_path.glob("*.gguf"))


def test_a_missing_converter_is_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gguf.FOLDER, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"found none(?s:.*)LLAMA_CPP"):
        gguf.find_converter()
    monkeypatch.setenv(gguf.FOLDER, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=f"found none in LLAMA_CPP={tmp_path}/nowhere"):
        gguf.find_converter()
    script = tmp_path / gguf.SCRIPT
    script.write_text("#!/usr/bin/env python3\n")
    script.chmod(0o755)
    monkeypatch.delenv(gguf.FOLDER)
    monkeypatch.setenv(gguf.PYTHON, "/usr/bin/python3")
    assert gguf.find_converter() == gguf.Converter(script, "/usr/bin/python3")
