"""Running llama.cpp's own converter on an export: head.gguf beside config.json."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from draftlab.errors import UserError
from draftlab.files import atomic_path, read_json
from draftlab.progress import Monitor

SCRIPT, FILE = "convert_hf_to_gguf.py", "head.gguf"
FOLDER, PYTHON = "LLAMA_CPP", "LLAMA_CPP_PYTHON"
"""Environment variables: a folder of llama.cpp, and the interpreter its converter runs in."""
OUT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PRE_TOKENIZERS = {
    _START + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _START + r"\p{N}" + _REST: "qwen2",
}
"""How a tokenizer splits text → llama.cpp's name for it, which it knows by tokenizers' hashes."""


@dataclass(frozen=True)
class Converter:
    """llama.cpp's converter: its script, and the interpreter that has what it imports."""

    script: Path
    python: str


def find_converter() -> Converter:
    """The converter on this machine.

    Raises:
        UserError: there is none; how to get one, and what to run without it.
    """
    folder, python = os.environ.get(FOLDER), os.environ.get(PYTHON, sys.executable)
    if folder and (script := Path(folder).expanduser() / SCRIPT).is_file():
        return Converter(script, python)
    if not folder and (found := shutil.which(SCRIPT)):
        return Converter(Path(found), python)
    raise UserError(
        f"expected llama.cpp's {SCRIPT}, found none" + (f" in {FOLDER}={folder}" if folder else ""),
        where="export.gguf",
        do=f"clone llama.cpp, install its requirements and set {FOLDER} to its folder (and "
        f"{PYTHON} to another interpreter, if they are not in this one); or export without --gguf "
        "and run the commands of launch.md",
    )


def convert(
    converter: Converter, export: Path, target: Path, dtype: str, monitor: Monitor | None = None
) -> Path:
    """Makes head.gguf of an export in llama.cpp's layout.

    Args:
        export: folder written by `--to llamacpp`.
        target: the target's checkpoint, which lends tokenizer and sizes.
        dtype: of the weights, as config.json names it.

    Raises:
        UserError: the converter's last lines, when it fails.
    """
    out = export / FILE
    name = pre_tokenizer(target)
    wrapper = [str(Path(__file__).with_name("gguf_wrapper.py")), str(converter.script), name or ""]
    with atomic_path(out) as temporary:
        options = ["--target-model-dir", str(target), "--outtype", OUT_TYPES[dtype]]
        done = subprocess.run(
            [converter.python, *wrapper, str(export), *options, "--outfile", str(temporary)],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode or not temporary.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-6:]
            raise UserError(
                "llama.cpp's converter failed:\n  " + "\n  ".join(last),
                where=converter.script,
                do=f"{PYTHON} names an interpreter with what it imports (sentencepiece, …)"
                if "ModuleNotFoundError" in done.stderr
                else f"the export itself is whole: {export}",
            )
    if monitor is not None:
        monitor.say(f"export: {out}, {out.stat().st_size:,} bytes, by {converter.script}")
    return out


def pre_tokenizer(target: Path) -> str | None:
    """llama.cpp's name for how a tokenizer splits text; None: not one of ours to tell."""
    file = target / "tokenizer.json"
    if not file.is_file():
        return None
    part = read_json(file, kind="tokenizer").get("pre_tokenizer") or {}
    for step in part.get("pretokenizers", [part]):
        pattern = (step.get("pattern") or {}).get("Regex")
        if pattern in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[pattern]
    return None
