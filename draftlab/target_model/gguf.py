"""GGUF files as targets: the checkpoint that transformers reads, made once of a file.

transformers dequantises the weights. The checkpoint has what its loader leaves out: the
pre-tokenizer and the special tokens that the file's metadata name, and a config without the
quantisation, which the dequantised weights no longer have. It lies in this machine's cache, under
a hash of the file.

    CACHE/gguf/NAME-HASH/config.json, tokenizer.json …    made first: a plan needs no more
    CACHE/gguf/NAME-HASH/model.safetensors                in 16 bits
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftlab.errors import UserError
from draftlab.files import MAX_JSON, cache_folder, moved_into
from draftlab.formatting import pip_install, visible
from draftlab.target_model.auto_model import meta_model
from draftlab.target_model.fingerprint import read_pages

_MAKER = "2"
"""Changes with what is made of a file."""
_HEADER_BYTES, _PAGES = 32 << 20, 1024
"""What is hashed of a file: its start, which holds the metadata, and pages at equal distances."""
_SPECIAL = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "padding_token_id": "pad_token",
    "unknown_token_id": "unk_token",
    "mask_token_id": "mask_token",
}
"""Fields of the metadata (without tokenizer.ggml.), and attributes of a tokenizer."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens (gguf.TokenType) that a tokenizer finds before it splits a text."""
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number, by its type (gguf.GGUFValueType)."""
_STRING, _ARRAY = 8, 9
_MOST_ELEMENTS = 1 << 24
"""Elements of all arrays of the metadata; the reader makes an object of each."""
_LARGE_VOCABULARY = 1 << 16
"""Tokens of a vocabulary that takes so long to read that the user is told."""
_REPLACING = threading.Lock()
"""Held while functions of the package gguf are replaced."""
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all checkpoints of Llama 3.1 to 3.3 share; their factors differ."""
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = r"[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (rf"{_CASES}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_CASES}|{_WORD}|\p{{N}}|{_REST}",)
_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_TEKKEN = (rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}",)
_GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CASES}?|{_START}{_UPPER}+{_LOWER}*{_CASES}?|\p{{N}}{{1,3}}"
    rf"|{_SLASHES}",
)
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    **dict.fromkeys(("tekken",), _TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
}
"""The expressions that split a text before its merges, one after the other, by the name of
`tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp)."""
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "tekken")
"""Names of pre-tokenizers whose words that are tokens are not built by merges."""


def gguf_folder(file: Path) -> Path:
    """Return the folder of a GGUF file's checkpoint with config and tokenizer; raise a `UserError`
    if it is no GGUF file, one of several parts, or has a tokenizer that is not known.
    """
    _check(file)
    folder = cache_folder() / "gguf" / f"{file.stem}-{_hash(file)}"
    if not (folder / "config.json").is_file():
        tokens = _check_arrays(file)
        if tokens >= _LARGE_VOCABULARY:
            print(
                f"reading {visible(file.name)}'s vocabulary of {tokens:,} tokens takes up to a "
                "minute the first time",
                file=sys.stderr,
            )
        with moved_into(folder) as work, _read_once(folder):
            metadata = _read_metadata(file)
            _tokenizer(file, metadata).save_pretrained(work)
            _write_config(file, metadata, work)
    return folder


def add_weights(folder: Path, file: Path) -> None:
    """Write the dequantised weights of a GGUF file into its checkpoint, unless they are there."""
    if (folder / "model.safetensors").is_file():
        return
    # Newer versions of transformers keep weights quantised unless told otherwise.
    config = getattr(transformers, "GgufConfig", None)
    options = {} if config is None else {"quantization_config": config(dequantize=True)}
    # transformers' bars for a second of work would fill a log.
    with moved_into(folder) as work, _read_once(folder), redirect_stderr(io.StringIO()):
        # They are stored in float16, which rounds less than bfloat16 does.
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float16, **options
        )
        names = dict(model.named_parameters())  # a shared tensor has one name
        tensors = {name: x for name, x in model.state_dict().items() if name in names}
        save_file(tensors, work / "model.safetensors", {"format": "pt"})
    _kept_reads.cache_clear()


@lru_cache(maxsize=1)
def _kept_reads(folder: Path) -> dict[str, Callable[..., Any]]:
    """Return functions in place of those of the package gguf, which keep what they read of the file
    that a checkpoint is made of.
    """
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            # Slices of a plain array are made in a third of the time that a memmap's take.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    read = cache(Reader)
    return {
        # transformers names one file as "x.gguf" and "./x.gguf".
        "GGUFReader": lambda path: read(str(Path(path).absolute())),
        "get_tensor_name_map": cache(gguf.get_tensor_name_map),
    }


@contextmanager
def _read_once(folder: Path) -> Iterator[None]:
    """Read a checkpoint's file once for its config, tokenizer and weights: transformers asks for it
    up to six times, seconds each.
    """
    import gguf

    with _REPLACING:
        kept = _kept_reads(folder)
        functions = {name: getattr(gguf, name) for name in kept}
        try:
            for name, function in kept.items():
                setattr(gguf, name, function)
            yield
        finally:
            for name, function in functions.items():
                setattr(gguf, name, function)


def _check(file: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "a GGUF file is read with the package gguf, which is not installed",
            where=file,
            do=pip_install("gguf"),
        )
    with open(file, "rb") as opened:
        magic = opened.read(4)
    if magic != b"GGUF":
        raise UserError(
            f"expected a GGUF file, found one that begins with {magic!r}",
            where=file,
            do="fetch it again",
        )
    if re.search(r"-\d{5}-of-\d{5}$", file.stem):
        raise UserError(
            "expected a whole GGUF file, found a part of one",
            where=file,
            do="join the parts: llama-gguf-split --merge FIRST-PART WHOLE.gguf",
        )


def _check_arrays(file: Path) -> int:
    """Return the number of tokens of a file's vocabulary; raise an error if its metadata end beyond
    it, have too many elements, or a type that is not known: the reader goes on behind the end of
    the file.
    """
    size, elements, tokens = file.stat().st_size, 0, 0
    with open(file, "rb") as opened:

        def number(form: str) -> int:
            return int(struct.unpack(form, opened.read(struct.calcsize(form)))[0])

        def value(kind: int) -> bytes:
            count = number("<Q") if kind == _STRING else _BYTES[kind]
            if opened.tell() + count > min(size, MAX_JSON):
                raise ValueError(f"the metadata end beyond the file, or {MAX_JSON:,} bytes")
            return opened.read(count)

        opened.seek(4)
        version, _, fields = number("<I"), number("<Q"), number("<Q")
        if version not in (2, 3):
            raise ValueError(f"version {version} of the format is not known")
        for _ in range(fields):
            name, kind = value(_STRING), number("<I")
            if kind != _ARRAY:
                value(kind)
                continue
            kind, count = number("<I"), number("<Q")
            elements += count
            if elements > _MOST_ELEMENTS:
                raise ValueError(f"its metadata have more than {_MOST_ELEMENTS} elements")
            if name == b"tokenizer.ggml.tokens":
                tokens = count
            for _ in range(count):
                value(kind)
    return tokens


def _hash(file: Path) -> str:
    """Return 16 hexadecimal digits of a file's metadata and of a sample of its weights."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{_MAKER} {size} ".encode())
    with open(file, "rb") as opened:
        digest.update(opened.read(_HEADER_BYTES))
        digest.update(b"".join(read_pages(opened.fileno(), 0, size, _PAGES)))
    return digest.hexdigest()[:16]


def _read_metadata(file: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file that decide about the tokenizer and stop tokens."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = reader.fields
    names = ("model", "pre", "tokens", "token_type", "eot_token_id", *_SPECIAL)
    found = {name: fields.get(f"tokenizer.ggml.{name}") for name in names}
    found["chat_template"] = fields.get("tokenizer.chat_template")
    scaling = (field for name, field in fields.items() if name.endswith(".rope.scaling.type"))
    found["rope_scaling"] = next(scaling, None)
    metadata = {name: field.contents() for name, field in found.items() if field is not None}
    factors = {x.name: x.data for x in reader.tensors if x.name.startswith("rope_f")}
    return metadata | {"rope_factors": factors}


def _tokenizer(file: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return a file's tokenizer, which splits texts as llama.cpp does."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if metadata.get("model") == "gpt2":
        name = metadata.get("pre")
        if name not in PRE_TOKENIZERS:
            raise UserError(
                f"draftlab does not know the pre-tokenizer {name!r} of this file",
                where=file,
                do="use the checkpoint that the file was made of, or a newer draftlab; known are "
                + ", ".join(sorted(PRE_TOKENIZERS)),
            )
        backend = tokenizer.backend_tokenizer
        splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in PRE_TOKENIZERS[name]]
        encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, encode])
        backend.normalizer = None
        backend.model.ignore_merges = name in WHOLE_WORDS
    vocabulary = tokenizer.get_vocab()
    types = zip(metadata["tokens"], metadata.get("token_type", ()), strict=False)
    # Runs of spaces are tokens of the vocabulary in another spelling, which merges find.
    found = [(text, kind) for i, (text, kind) in enumerate(types) if vocabulary.get(text) == i]
    for kind in (_CONTROL, _USER_DEFINED):
        special = kind == _CONTROL
        added = [
            AddedToken(text, normalized=False, special=special)
            for text, own in found
            if own == kind
        ]
        tokenizer.add_tokens(added, special_tokens=special)
    # transformers adds default tokens that the vocabulary may lack, also when it loads them again.
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    size = len(metadata["tokens"])
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=metadata.get("chat_template"),
        **{
            attribute: metadata["tokens"][metadata[name]]
            for name, attribute in _SPECIAL.items()
            if name in metadata
        },
    )


def _write_config(file: Path, metadata: dict[str, Any], work: Path) -> None:
    """Write config.json and generation_config.json."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        vars(config).pop(name, None)
    _set_rope(config, metadata, file)
    model = meta_model(config)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16  # a GPU computes in it: activations may exceed float16
    stops = [metadata[name] for name in ("eos_token_id", "eot_token_id") if name in metadata]
    GenerationConfig(eos_token_id=sorted(set(stops)) or None).save_pretrained(work)
    config.save_pretrained(work)


def _set_rope(config: Any, metadata: dict[str, Any], file: Path) -> None:
    """Write the scaling of a file's RoPE, which transformers leaves out, into its config.

    llama.cpp stores that of Llama 3 as the divisors of the frequencies, in rope_freqs.weight; a
    `UserError` refuses others.
    """
    factors = metadata["rope_factors"]
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    if any(kind.get("rope_type", "default") != "default" for kind in kinds):
        return  # transformers reads it of this architecture
    if not factors and metadata.get("rope_scaling", "none") == "none":
        return
    if list(factors) == ["rope_freqs.weight"] and "rope_theta" in rope:
        divisors = torch.tensor(factors["rope_freqs.weight"], dtype=torch.float32)
        text.rope_parameters = rope | _LLAMA3_ROPE | {"factor": float(divisors.max())}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](text, torch.device("cpu"))
        exponents = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
        expected = rope["rope_theta"] ** -exponents / scaled
        if divisors.shape == expected.shape and torch.allclose(divisors, expected, rtol=1e-3):
            return
    raise UserError(
        "this file scales its RoPE, and transformers leaves the scaling out",
        where=file,
        do="use the checkpoint that the file was made of",
    )
