"""The command of an export's launch.md, as `draftlab serve` starts it.

The folder may be a stranger's. So only the options below are taken, and none of them names a
program, code, or a file outside the folder but the target.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.server_schedule import Schedule
from draftlab.export.gguf import FILE
from draftlab.export.layout import LAUNCH
from draftlab.export.serving_tables import STS
from draftlab.servers.server_counters import PROGRAMS
from draftlab.target_model.locate import local_target, resolve_target
from draftlab.target_model.settings import TargetSettings

_COMMANDS = {
    "vllm": "vllm serve ",
    "sglang": "python -m sglang.launch_server ",
    "llamacpp": "llama-server ",
}
_SPECULATIVE = "--speculative-config"
_STEPS, _SLOTS = "--speculative-num-steps", "--speculative-num-draft-tokens"
_STS = "--speculative-dspark-confidence-sts-path"
_ADAPTIVE = "--speculative-adaptive-config"
_WINDOW = "--speculative-draft-window-size"
_K = "--spec-draft-n-max"
_TAKEN = {
    "vllm": ("--override-generation-config",),
    "sglang": ("--speculative-algorithm", _STEPS, "--speculative-eagle-topk", _SLOTS, _WINDOW),
    "llamacpp": ("--spec-type", _K, "--spec-draft-p-min"),
}
_TARGET = {"vllm": "", "sglang": "--model-path", "llamacpp": "-m"}
"""The option whose value is the target; vLLM's has none."""
_SPECULATIVE_KEYS = ("method", "num_speculative_tokens", "parallel_drafting")
_VALUE = re.compile(r"[\w.][\w.-]*|\{.*\}")


def launch_arguments(
    folder: Path,
    program: str,
    target: str | None = None,
    k: int | None = None,
    schedule: Schedule = (),
    schedule_file: Path = Path(),
) -> tuple[str, list[str]]:
    """Return the target as a program reads it, and the arguments that serve an export.

    Args:
        folder: the export, at whatever place it is now.
        program: key of `PROGRAMS`.
        target: another target than launch.md names, or for llama.cpp its GGUF file.
        k: other drafts a step.
        schedule: drafts by load, up to k or those of the export.
        schedule_file: file with those that SGLang reads (`sglang_schedule`).

    Raises:
        UserError: it is no export for the program, or `target` or `k` does not fit.
    """
    file, again = folder / LAUNCH, f"`draftlab export --to {program}` writes one"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    options = _options(text, program)
    if options is None:
        others = [PROGRAMS[one] for one in PROGRAMS if _options(text, one)]
        found = f"one for {others[0]}" if others else f"none, by {LAUNCH}"
        what = f"expected an export for {PROGRAMS[program]}, found {found}"
        raise UserError(what, where=folder, do=again)
    taken = {name: options[name] for name in _TAKEN[program] if _VALUE.fullmatch(options[name])}
    model = _model(program, target or options[_TARGET[program]], file)
    if program == "vllm":
        config = _speculative_config(options[_SPECULATIVE], file, again)
        config |= {"model": str(folder)} | ({} if k is None else {"num_speculative_tokens": k})
        config |= {"num_speculative_tokens_per_batch_size": schedule} if schedule else {}
        options = {_SPECULATIVE: json.dumps(config, ensure_ascii=False)}
        return model, [model, *_flat(options | taken)]
    if program == "sglang":
        own = {"--model-path": model, "--speculative-draft-model-path": str(folder)}
        own |= {_STS: str(folder / STS)} if options[_STS] else {}
        if (schedule or k is not None) and _STEPS not in taken:
            what = "expected no K, since SGLang drafts the whole block of this head; found one"
            raise UserError(what, where="--k, --schedule", do="leave it out")
        own |= taken | ({} if k is None else {_STEPS: str(k), _SLOTS: str(k + 1)})
        adaptive = ["--speculative-adaptive", _ADAPTIVE, str(schedule_file)] if schedule else []
        return model, [*_flat(own), *adaptive]
    if not (folder / FILE).is_file():
        do = f"export with --to llamacpp --gguf, or convert it as {LAUNCH} says"
        raise UserError(f"expected {FILE} in the export, found none", where=folder, do=do)
    own = {"-m": model, "-md": str(folder / FILE)}
    return model, [*_flat(own | taken | ({} if k is None else {_K: str(k)})), "--jinja"]


def _options(text: str, program: str) -> defaultdict[str, str] | None:
    """Return the options of a program's last command in launch.md; None: it has none."""
    start = _COMMANDS[program]
    lines = [x for x in text.replace("\\\n", " ").splitlines() if x.startswith(start)]
    try:
        words = shlex.split(lines[-1].removeprefix(start)) if lines else []
    except ValueError:
        return None
    return defaultdict(str, zip(["", *words], words, strict=False)) if words else None


def _model(program: str, target: str, file: Path) -> str:
    """Return the target as the program reads it: a Hub id, a folder or a GGUF file.

    Raises:
        UserError: it is not there.
    """
    settings = TargetSettings(path=target or "none")
    if program == "llamacpp":
        if target.endswith(".gguf") and Path(target).expanduser().is_file():
            return str(Path(target).expanduser())
        raise UserError(
            f"expected the target's GGUF file, found {target or 'none'}",
            where="--target",
            do=f"name one; {file} has the command that converts a target",
        )
    return target if local_target(settings) is None else str(resolve_target(settings))


def _speculative_config(text: str, file: Path, again: str) -> dict[str, Any]:
    """Return the known keys of vLLM's speculative config."""
    try:
        config = json.loads(text)
        return {key: config[key] for key in _SPECULATIVE_KEYS if key in config}
    except (ValueError, TypeError, RecursionError):
        what = f"expected JSON behind {_SPECULATIVE}, found {text[:80]!r}"
        raise UserError(what, where=file, do=again) from None


def _flat(options: dict[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair]
