"""GGUF files as targets, beside the checkpoint that each was written from."""

from __future__ import annotations

import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from draftlab.errors import UserError
from draftlab.files import CACHE
from draftlab.target_model import gguf
from draftlab.target_model.gguf import PRE_TOKENIZERS, add_weights
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import local_target, resolve_target
from draftlab.target_model.parts import load_parts
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids
from tests.helpers.gguf_file import write_gguf
from tests.helpers.toys import SPECIALS, toy_target_folder, toy_tokenizer

TEXTS = (
    "Hello 1234 world's  end\n\n  def f(x):\r\n\tпривет, 世界! 12.5%<|im_start|>user<|eot_id|>",
    "  two  spaces\n\n\n1234567 it'S I'll don’t 😀 e\u0301",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    return tmp_path / "toy.gguf"


def test_weights_tokenizer_and_stops_are_those_of_the_checkpoint(
    tmp_path: Path, file: Path
) -> None:
    folder = toy_target_folder(tmp_path / "hf", layers=2)
    model = write_gguf(folder, file)
    settings = TargetSettings(path=str(file), device="cpu")
    planned = local_target(settings)
    assert planned is not None
    assert resolve_target(settings, ("config.json",)) == planned
    assert not (planned / "model.safetensors").exists(), "a plan needs no weights"
    tokenizer, own = load_tokenizer(settings), toy_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text)
    assert tokenizer.chat_template == own.chat_template
    assert set(SPECIALS) <= set(tokenizer.all_special_tokens) | set(
        map(str, tokenizer.added_tokens_decoder.values())
    )
    target = load_target(settings)
    assert target.folder == planned
    assert stop_ids(tokenizer, planned) == stop_ids(own, folder)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    found = target.logits(target.states(ids).last)
    # Products of 8-bit integers and float16 factors are rounded to float16.
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-3 * float(expected.abs().max()))
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert load_parts(planned).embeddings.dtype == torch.float16
    assert "quantization_config" not in json.loads((planned / "config.json").read_text())


@pytest.mark.parametrize(
    ("architecture", "pre", "whole"), [("llama", "llama-bpe", True), ("qwen2", "qwen2", False)]
)
def test_added_tokens_are_those_of_the_metadata(
    tmp_path: Path,
    file: Path,
    architecture: str,
    pre: str,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Types of GGUF: 1 is normal, 4 user-defined."""
    load = AutoTokenizer.from_pretrained

    def as_older_versions(*arguments: Any, **options: Any) -> Any:
        tokenizer = load(*arguments, **options)
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", as_older_versions)
    folder = toy_target_folder(tmp_path / "hf", layers=2, vocab=292)
    more = [("<think>", 4), ("Ġqzx", 1), ("(qzx", 1)]
    write_gguf(folder, file, architecture=architecture, pre=pre, more_tokens=more)
    settings = TargetSettings(path=str(file))
    tokenizer = load_tokenizer(settings)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ids = encode("a<think>b<|eot_id|>")
    assert ids[1] == 289
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"
    # A word that is a token and that no merges build: llama.cpp finds it for Llama 3 only.
    assert (encode(" qzx") == [290]) == (encode("(qzx") == [291]) == whole
    assert len(tokenizer) == 292
    assert encode("e\u0301") != encode("\u00e9"), "llama.cpp does not normalise"
    config = json.loads((resolve_target(settings, ("config.json",)) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_a_file_is_converted_once_and_anew_when_it_changes(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_HEADER_BYTES", 4096)  # pages of the weights are hashed, too
    folder = toy_target_folder(tmp_path / "hf", layers=2)
    write_gguf(folder, file)
    settings = TargetSettings(path=str(file))
    first = resolve_target(settings)
    state = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert resolve_target(settings) == first
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == state
    content = bytearray(file.read_bytes())
    content[-5000] ^= 1  # in the last tensor
    file.write_bytes(content)
    second = resolve_target(settings)
    assert second != first
    assert (second / "model.safetensors").is_file()
    assert sorted(path.name for path in first.parent.iterdir()) == sorted(
        [first.name, second.name]
    ), "no temporary folders stay"


def test_a_file_is_read_once_for_config_tokenizer_and_weights(
    tmp_path: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """transformers names the file in two ways if its path begins with a dot."""
    write_gguf(toy_target_folder(tmp_path / "hf", layers=2), file)
    read, paths = GGUFReader.__init__, []

    def counted(reader: GGUFReader, path: str, *arguments: Any) -> None:
        paths.append(path)
        read(reader, path, *arguments)

    monkeypatch.setattr(GGUFReader, "__init__", counted)
    monkeypatch.setattr(gguf, "_LARGE_VOCABULARY", 256)
    monkeypatch.chdir(tmp_path)
    settings = TargetSettings(path="./toy.gguf")
    assert local_target(settings) == resolve_target(settings)
    assert paths == [str(file)]
    size = len(toy_tokenizer())
    told = f"reading toy.gguf's vocabulary of {size} tokens takes up to a minute the first time"
    assert capsys.readouterr().err.splitlines().count(told) == 1


def test_threads_convert_files_one_after_the_other(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion replaces functions of the package gguf for its time."""
    folder, other = toy_target_folder(tmp_path / "hf", layers=2), tmp_path / "other.gguf"
    write_gguf(folder, file)
    write_gguf(folder, other)
    read = gguf._read_metadata
    monkeypatch.setattr(gguf, "_read_metadata", lambda path: time.sleep(0.2) or read(path))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(gguf.gguf_folder, (file, other))
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
    assert first != second


def test_a_killed_conversion_leaves_nothing_that_looks_whole(
    tmp_path: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_gguf(toy_target_folder(tmp_path / "hf", layers=2), file)
    capfd.readouterr()
    settings = TargetSettings(path=str(file))
    folder = local_target(settings)
    assert folder is not None

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("draftlab.target_model.gguf.save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            add_weights(folder, file)
    assert not (folder / "model.safetensors").exists()
    assert resolve_target(settings) == folder
    assert (folder / "model.safetensors").is_file()
    assert capfd.readouterr().err == "", "transformers' progress bars"


def test_weights_of_another_shape_are_refused(tmp_path: Path, file: Path) -> None:
    write_gguf(toy_target_folder(tmp_path / "hf", layers=2), file)
    content, name = file.read_bytes(), b"blk.0.ffn_gate.weight"
    start = content.index(name) + len(name) + 4  # two sizes of 8 bytes follow their number
    sizes = content[start : start + 16]
    file.write_bytes(content[:start] + sizes[8:] + sizes[:8] + content[start + 16 :])
    with pytest.raises(UserError, match="the target does not load") as caught:
        resolve_target(TargetSettings(path=str(file)))
    assert caught.value.where == str(file)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, file: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            local_target(TargetSettings(path=str(path)))

    file.write_bytes(b"version https://git-lfs")
    refused(file, "expected a GGUF file, found one that begins with b'vers'")
    write_gguf(toy_target_folder(tmp_path / "hf", layers=2), file, pre="of-tomorrow")
    refused(file, "does not know the pre-tokenizer 'of-tomorrow'")
    write_gguf(toy_target_folder(tmp_path / "hf", layers=2), file, scaling="yarn")
    refused(file, "this file scales its RoPE")
    part = tmp_path / "toy-00001-of-00003.gguf"
    part.write_bytes(file.read_bytes())
    refused(part, "found a part of one")
    file.write_bytes(file.read_bytes()[:400])
    refused(file, "does not load(?s:.*)fetch the file again")
    assert not any((tmp_path / "cache" / "gguf").iterdir()), "no empty folder stays"
    with pytest.raises(UserError, match="found neither"):
        local_target(TargetSettings(path="folder/none.gguf"))  # no id on the Hub
    refused(tmp_path / "none.gguf", "expected a checkpoint folder with config.json or a GGUF file")


@pytest.mark.parametrize("high", [4.0, 8.0])
def test_a_scaled_rope_is_kept_or_refused(tmp_path: Path, file: Path, high: float) -> None:
    folder = toy_target_folder(tmp_path / "hf", layers=2)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": high}
    config["rope_parameters"] = rope | {"original_max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    model = write_gguf(folder, file)
    settings = TargetSettings(path=str(file), device="cpu")
    if high != 4:
        with pytest.raises(UserError, match="this file scales its RoPE"):
            local_target(settings)
        return
    found = load_target(settings).model.get_decoder().rotary_emb.inv_freq
    torch.testing.assert_close(found, model.model.rotary_emb.inv_freq)


def test_arrays_beyond_the_file_are_refused(file: Path) -> None:
    for count in (1 << 40, 200):
        key = b"general.name"
        array = struct.pack("<IIQ", 9, 0, count)
        head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
        file.write_bytes(head + array + bytes(64))
        with pytest.raises(UserError, match=r"metadata (have more than|end beyond)"):
            local_target(TargetSettings(path=str(file)))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_pre_tokenizers_keep_every_character(name: str) -> None:
    from tokenizers import Regex

    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in PRE_TOKENIZERS[name]]
    for text in TEXTS:
        pieces = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
        assert "".join(piece for piece, _ in pieces) == text
        assert max(np.diff([start for _, (start, _) in pieces])) < 12
