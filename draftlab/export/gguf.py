"""Conversion of an export to head.gguf with llama.cpp's own converter."""

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
from draftlab.target_model.gguf import PRE_TOKENIZERS as PATTERNS

SCRIPT, FILE = "convert_hf_to_gguf.py", "head.gguf"
FOLDER, PYTHON = "LLAMA_CPP", "LLAMA_CPP_PYTHON"
"""Environment variables: llama.cpp's folder, and the Python interpreter of its converter."""
OUT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

PRE_TOKENIZERS = {PATTERNS[name][0]: name for name in ("llama-bpe", "qwen2")}
"""The pattern by which a tokenizer splits text → llama.cpp's name for it."""


@dataclass(frozen=True)
class Converter:
    """llama.cpp's converter: its script, and the interpreter with the packages it imports."""

    script: Path
    python: str


def find_converter() -> Converter:
    """Return the converter of this machine.

    Raises:
        UserError: there is none.
    """
    folder, python = os.environ.get(FOLDER), os.environ.get(PYTHON, sys.executable)
    if folder and (script := Path(folder).expanduser() / SCRIPT).is_file():
        return Converter(script, python)
    if not folder and (script_path := shutil.which(SCRIPT)):
        return Converter(Path(script_path), python)
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
    """Convert an export in llama.cpp's layout, and return the path of head.gguf.

    Args:
        export: folder written by `--to llamacpp`.
        target: the target's checkpoint, whose tokenizer and sizes the converter reads.
        dtype: of the weights, as in config.json.

    Raises:
        UserError: the converter failed.
    """
    out = export / FILE
    wrapper = [str(Path(__file__).with_name("gguf_wrapper.py")), str(converter.script)]
    wrapper.append(pre_tokenizer_name(target) or "")
    with atomic_path(out) as temporary:
        options = ["--target-model-dir", str(target), "--outtype", OUT_TYPES[dtype]]
        result = subprocess.run(
            [converter.python, *wrapper, str(export), *options, "--outfile", str(temporary)],
            stdin=subprocess.DEVNULL,  # nobody sees a question, such as whether code may run
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if result.returncode or not temporary.is_file():
            lines = (result.stderr or result.stdout).strip().splitlines()[-6:]
            raise UserError(
                "llama.cpp's converter failed:\n  " + "\n  ".join(lines),
                where=converter.script,
                do=f"set {PYTHON} to an interpreter with its requirements (sentencepiece, …)"
                if "ModuleNotFoundError" in result.stderr
                else f"the export itself is complete: {export}",
            )
    if monitor is not None:
        monitor.say(f"export: {out}, {out.stat().st_size:,} bytes, by {converter.script}")
    return out


def pre_tokenizer_name(target: Path) -> str | None:
    """Return llama.cpp's name for how a tokenizer splits text; None: the pattern is unknown."""
    file = target / "tokenizer.json"
    if not file.is_file():
        return None
    pre_tokenizer = read_json(file, kind="tokenizer").get("pre_tokenizer") or {}
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        pattern = (step.get("pattern") or {}).get("Regex")
        if pattern in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[pattern]
    return None
