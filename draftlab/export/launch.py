"""launch.md and README.md of an export, and its command as `draftlab serve` starts it.

An export's folder may be a stranger's. So only the options below are read back, and none of them
names a program, code, or a file outside the folder but the target.
"""

from __future__ import annotations

import filecmp
import json
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.errors import UserError
from draftlab.export.gguf import FILE, OUT_TYPES
from draftlab.export.serving_tables import STS
from draftlab.export.weight_files import DELTA, ONLY_SHARD, WEIGHTS
from draftlab.files import cache_folder
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.folder import CONFIG
from draftlab.servers.server_counters import PROGRAMS
from draftlab.servers.vllm_client.loading import generation_override
from draftlab.target_model.locate import is_hub_id, local_target, resolve_target
from draftlab.target_model.settings import TargetSettings
from draftlab.version import package_version

if TYPE_CHECKING:
    from draftlab.evaluate.server_schedule import Schedule
    from draftlab.export.layout import Export

# Options of vLLM, SGLang and llama.cpp, which are written and read back.
SPECULATIVE, OVERRIDE = "--speculative-config", "--override-generation-config"
MODEL, ALGORITHM, DRAFT = (
    "--model-path", "--speculative-algorithm", "--speculative-draft-model-path",
)  # fmt: skip
STEPS, TOP_K, SLOTS = (
    "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
)  # fmt: skip
WINDOW, STS_PATH = (
    "--speculative-draft-window-size", "--speculative-dspark-confidence-sts-path",
)  # fmt: skip
SPEC_TYPE, MOST_DRAFTS, LEAST = "--spec-type", "--spec-draft-n-max", "--spec-draft-p-min"
_K_OPTIONS = re.compile(
    rf'(?:"num_speculative_tokens": |{STEPS} |{MOST_DRAFTS} )([1-9]\d{{0,8}})\b'
)
LAUNCH = "launch.md"
_COMMANDS = {
    "vllm": "vllm serve ",
    "sglang": "python -m sglang.launch_server ",
    "llamacpp": "llama-server ",
}
_TAKEN = {
    "vllm": (OVERRIDE,),
    "sglang": (ALGORITHM, STEPS, TOP_K, SLOTS, WINDOW),
    "llamacpp": (SPEC_TYPE, MOST_DRAFTS, LEAST),
}
_TARGET = {"vllm": "", "sglang": MODEL, "llamacpp": "-m"}
"""The option whose value is the target; vLLM's has none."""
_SPECULATIVE_KEYS = ("method", "num_speculative_tokens", "parallel_drafting")
_VALUE = re.compile(r"[\w.][\w.-]*|\{.*\}")


def code_block(*lines: str) -> str:
    """Return command lines as a Markdown code block."""
    return "```\n" + "\n".join(lines) + "\n```\n"


def stated_k(text: str) -> int | None:
    """Return the K of the launch command in a launch.md; None: it names none.

    It is read back from the options that the functions below write for vLLM, SGLang and llama.cpp.
    """
    match = _K_OPTIONS.search(text)
    return int(match[1]) if match else None


def vllm_text(export: Export, path: Path, *, alone: bool = False) -> str:
    """Return launch.md for vLLM.

    Args:
        alone: whether vLLM can read target, method and K from config.json, of a target on the Hub.
    """
    family = export.family
    config = {"model": str(path), "method": family.vllm_method, "num_speculative_tokens": export.k}
    config |= family.vllm_options
    parallel = family.drafting == "parallel"
    options = json.dumps(config, ensure_ascii=False)
    override, more = generation_override(export.target), ""
    if override:
        value = shlex.quote(json.dumps(override, ensure_ascii=False))
        more = f" {OVERRIDE} {value}"
    start = f"{_COMMANDS['vllm']}{shlex.quote(export.target_name)}"
    explicit = code_block(f"{start} {SPECULATIVE} {shlex.quote(options)}{more}")
    if alone and is_hub_id(export.target_name):
        text = (
            "The target is on the Hub, and the export names it:\n\n"
            + code_block(f"{_COMMANDS['vllm']}{shlex.quote(str(path))}{more}")
            + f"\nSpelled out, for another K or a local copy of the target:\n\n{explicit}"
        )
    elif is_hub_id(export.target_name):
        text = explicit
    else:
        text = (
            "The target is a local folder, which vLLM wants named (it serves an export alone only "
            f"where the target is on the Hub):\n\n{explicit}"
        )
    drafts = f"{export.k} tokens a step, greedy, "
    drafts += "all in one pass" if parallel else "one a pass"
    if override:
        drafts += (
            ".\nWhether Llama 4's attention is tempered vLLM does not ask the target's config, by "
            "which this head was trained: hence the last option"
        )
    return f"# Serving this head with vLLM\n\n{text}\nDrafts: {drafts}.\n{vllm_load_text(export)}"


def vllm_delta_text(export: Export, path: Path) -> str:
    """Return launch.md for vLLM of changed tensors, which it reads in a whole folder."""
    hub, whole = is_hub_id(export.target_name), shlex.quote(f"{path}-whole")
    target = '"$PWD"/target' if hub else shlex.quote(export.target_name)
    fetch = [f"hf download {shlex.quote(export.target_name)} --local-dir target"] if hub else []
    config = {"method": export.family.vllm_method, "num_speculative_tokens": export.k}
    trust = " --trust-remote-code" * ("auto_map" in export.target)
    assert export.checkpoint is not None  # such exports have one
    in_one_file = WEIGHTS in export.checkpoint.files.values()
    rename = [f"mv {whole}/{WEIGHTS} {whole}/{ONLY_SHARD}"] if in_one_file else []
    commands = code_block(
        *fetch,
        f"mkdir -p {whole}",
        f"ln -sf {target}/* {whole}",
        *rename,
        f"cp --remove-destination {shlex.quote(str(path))}/*.json "
        f"{shlex.quote(str(path))}/*.safetensors {whole}",
        f"{_COMMANDS['vllm']}{whole} {SPECULATIVE} {shlex.quote(json.dumps(config))}{trust}",
    )
    return (
        "# Serving this layer with vLLM\n\nThis folder has the changed tensors, and an index of "
        "the whole checkpoint, in which all others are in their old files. vLLM wants one folder, "
        f"here of links:\n\n{commands}\nDrafts: {export.k} tokens a step, greedy, one a pass.\n"
    )


def vllm_load_text(export: Export) -> str:
    """Return what vLLM can do under load by the confidence of drafts (servers §13)."""
    if export.serving is None or not export.serving.temperatures:
        return ""
    return (
        '\n## Under load\n\n`"enable_adaptive_verification": true` in the speculative config lets '
        "vLLM verify the drafts with the largest confidence, as many as pay. "
        f"{_baked_text(export)}\n"
    )


def _baked_text(export: Export) -> str:
    """Return how good the confidence of a server is that reads no temperatures."""
    serving = export.serving
    if serving is None:
        return ""
    positions, baked = serving.calibration.positions, serving.baked_temperature
    before = max(p.error_before for p in positions)
    if baked is None:
        return (
            f"It reads no temperatures, and the head's own confidence errs by up to {before:.3f}; "
            "`--bake-temperature` writes a calibrated one."
        )
    after = max(p.error_common_temperature or 0.0 for p in positions)
    return (
        f"The confidence head is divided by the temperature {baked:.3g}: its error is at most "
        f"{after:.3f}, and was {before:.3f}."
    )


def sglang_text(export: Export, path: Path, *, algorithm: str = "EAGLE3") -> str:
    """Return launch.md for SGLang, which drafts a chain (servers §6)."""
    window = getattr(export.head, "sliding_window", None)
    command = _sglang_command(
        export,
        path,
        algorithm,
        f"{STEPS} {export.k} {TOP_K} 1",
        f"{SLOTS} {export.k + 1}",
        # SGLang counts the keys before a position's own.
        *([f"{WINDOW} {window - 1}"] if window else []),
    )
    return (
        f"# Serving this head with SGLang\n\n{command}\nDrafts: {export.k} tokens a step, one a "
        "pass. SGLang counts the token it drafts from, hence one more in the last option.\n"
        f"{_sglang_load_text(export)}"
    )


def _sglang_command(export: Export, path: Path, algorithm: str, *options: str) -> str:
    """Return the command that starts SGLang, with further options, one a line."""
    first = f"{_COMMANDS['sglang']}{MODEL} {shlex.quote(export.target_name)}"
    head = f"{DRAFT} {shlex.quote(str(path))}"
    lines = [first, f"  {ALGORITHM} {algorithm}", *(f"  {o}" for o in (head, *options))]
    return code_block(" \\\n".join(lines))


def _sglang_load_text(export: Export) -> str:
    """Return that SGLang reads nothing of a calibration whose head states no confidence."""
    if export.serving is None or export.serving.temperatures is not None:
        return ""
    return (
        "\n## Under load\n\nSGLang reads the calibration of DSpark heads only. The command is the "
        "same with and without this one, which is in calibration.json.\n"
    )


def block_sglang_text(export: Export, path: Path) -> str:
    """Return launch.md for SGLang of a block head, whose whole block it drafts (servers §12)."""
    serving = export.serving
    temperatures = serving is not None and serving.temperatures is not None
    sts = [f"{STS_PATH} {shlex.quote(str(path / STS))}"]
    algorithm = export.family.vllm_method.upper()
    slots = f"{SLOTS} {export.head.k_trained + 1}"
    command = _sglang_command(export, path, algorithm, slots, *sts * temperatures)
    load = _sglang_load_text(export)
    if temperatures:
        load = (
            "\n## Under load\n\nsts.json calibrates the confidence. SGLang verifies fewer drafts "
            "only with a table of step rates, `--speculative-dspark-sps-table-path`, which its "
            "profiler measures (`sglang.benchmark.dspark_sps_profiler`).\n"
        )
    return (
        f"# Serving this head with SGLang\n\n{command}\nDrafts: {export.head.k_trained} tokens a "
        "step, all in one pass. SGLang counts the token it drafts from, hence one more in "
        f"{SLOTS}.\n{load}"
    )


def llamacpp_text(export: Export, path: Path) -> str:
    """Return launch.md for llama.cpp's converter and server (servers §5, §10)."""
    hub = is_hub_id(export.target_name)
    target = "target" if hub else shlex.quote(export.target_name)
    fetch = [f"hf download {shlex.quote(export.target_name)} --local-dir target"] if hub else []
    head, convert = shlex.quote(str(path)), "python convert_hf_to_gguf.py"
    outtype = OUT_TYPES[export.dtype_name]
    model, made = "target.gguf", [f"{convert} {target} --outtype {outtype} --outfile target.gguf"]
    if export.target_name.endswith(".gguf"):
        folder = local_target(TargetSettings(path=export.target_name))
        model, target, made = target, shlex.quote(str(folder)), []
    family = export.family
    method = family.vllm_method
    passes = "all in one pass" if family.drafting == "parallel" else "one a pass"
    commands = code_block(
        *fetch,
        *made,
        f"{convert} {head} --target-model-dir {target} --outtype {outtype} \\",
        "  --outfile head.gguf",
        f"{_COMMANDS['llamacpp']}-m {model} -md head.gguf {SPEC_TYPE} draft-{method} \\",
        f"  {MOST_DRAFTS} {export.k} {LEAST} {_cutoff(export)} --jinja",
    )
    return (
        "# Serving this head with llama.cpp\n\nIn a folder of llama.cpp (the converter reads "
        f"tokenizer and sizes from the target):\n\n{commands}\n"
        f"Drafts: at most {export.k} tokens a step, {passes}. The converter refuses tokenizers "
        "that it does not know by their hash; `draftlab export --to llamacpp --gguf` tells it of "
        f"those that split text as Llama 3's or Qwen 2's do.\n{_cutoff_text(export)}"
    )


def _cutoff(export: Export) -> str:
    return f"{export.serving.cutoff:.2g}" if export.serving else "0"


def _cutoff_text(export: Export) -> str:
    """Return what llama.cpp's threshold saves and loses; empty without a calibration."""
    serving = export.serving
    if serving is None or not serving.cutoff:
        return ""
    one = serving.calibration
    saving = one.cutoff_saving
    own = f" {_baked_text(export)}" if serving.baked_temperature else ""
    return (
        f"\nA draft ends before the first token with a confidence below {_cutoff(export)}. On "
        f"other prompts that left out {100 * saving.not_verified:.1f} % of the drafts and "
        f"{100 * saving.lost:.1f} % of the accepted ones, at T = {one.temperature:g}.{own}\n"
    )


def cached_target_text(target: str, source: str) -> str:
    """Return of what (`source`) draftlab made the target's folder, if it is one of its cache."""
    if not Path(target).is_relative_to(cache_folder().resolve()):
        return ""
    return (
        f"\nThe target's folder is in draftlab's cache: the checkpoint that it made of {source}. "
        "Copy it elsewhere before you clear the cache.\n"
    )


def template_text(head: HeadConfig) -> str:
    """Return what requests send to the chat template, if the head was trained with arguments."""
    modes = head.provenance.get("template_arguments") or [{}]
    if modes == [{}]:
        return ""
    bodies = (json.dumps({"chat_template_kwargs": mode}, ensure_ascii=False) for mode in modes)
    text = "The head was trained with these template arguments, of which a request sends one:"
    return f"\n## Chat template\n\n{text}\n\n{code_block(*bodies)}"


def readme_text(head: HeadConfig, target_name: str, layout: str) -> str:
    """Return README.md: the layout, its version, and the target."""
    title = get_family(head.family).title
    return (
        f"{title[0].upper()}{title[1:]} head for {target_name}: {layout}, written by draftlab "
        f"{package_version()}. launch.md says how to serve it. Fingerprint of the target: "
        f"{head.target.fingerprint}\n"
    )


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
    head = f" --head {folder} --target TARGET" if (folder / CONFIG).is_file() else ""
    file, again = folder / LAUNCH, f"`draftlab export{head} --to {program}` writes one"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    options = _options(text, program)
    if options is None:
        others = [PROGRAMS[one] for one in PROGRAMS if _options(text, one)]
        found = f"one for {others[0]}" if others else f"none, by {LAUNCH}"
        what = f"expected an export for {PROGRAMS[program]}, found {found}"
        raise UserError(what, where=folder, do=again)
    taken = {name: options[name] for name in _TAKEN[program] if _VALUE.fullmatch(options[name])}
    target, is_delta = target or options[_TARGET[program]], (folder / DELTA).is_file()
    if is_delta and not _is_joined(folder, Path(target).expanduser()):
        what = f"expected a folder that joins this layer with its target, found {target or 'none'}"
        raise UserError(what, where="--target", do=f"run the commands of {file} before the last")
    model = _model(program, target, file)
    if program == "vllm":
        config = _speculative_config(options[SPECULATIVE], file, again)
        config |= {} if is_delta else {"model": str(folder)}
        config |= {} if k is None else {"num_speculative_tokens": k}
        config |= {"num_speculative_tokens_per_batch_size": schedule} if schedule else {}
        options = {SPECULATIVE: json.dumps(config, ensure_ascii=False)}
        return model, [model, *_flat(options | taken)]
    if program == "sglang":
        own = {MODEL: model, DRAFT: str(folder)}
        own |= {STS_PATH: str(folder / STS)} if options[STS_PATH] else {}
        if (schedule or k is not None) and STEPS not in taken:
            what = "expected no K, since SGLang drafts the whole block of this head; found one"
            raise UserError(what, where="--k, --schedule", do="leave it out")
        own |= taken | ({} if k is None else {STEPS: str(k), SLOTS: str(k + 1)})
        adaptive = "--speculative-adaptive", "--speculative-adaptive-config", str(schedule_file)
        return model, [*_flat(own), *(adaptive if schedule else ())]
    if not (folder / FILE).is_file():
        do = f"export with --to llamacpp --gguf, or convert it as {LAUNCH} says"
        raise UserError(f"expected {FILE} in the export, found none", where=folder, do=do)
    own = {"-m": model, "-md": str(folder / FILE)}
    return model, [*_flat(own | taken | ({} if k is None else {MOST_DRAFTS: str(k)})), "--jinja"]


def _options(text: str, program: str) -> defaultdict[str, str] | None:
    """Return the options of a program's last command in launch.md; None: it has none."""
    start = _COMMANDS[program]
    lines = [x for x in text.replace("\\\n", " ").splitlines() if x.startswith(start)]
    try:
        words = shlex.split(lines[-1].removeprefix(start)) if lines else []
    except ValueError:
        return None
    return defaultdict(str, zip(["", *words], words, strict=False)) if words else None


def _is_joined(export: Path, target: Path) -> bool:
    """Return whether a target has the changed tensors of an export, and not those of another."""
    joined = target / DELTA
    return joined.is_file() and filecmp.cmp(export / DELTA, joined, shallow=False)


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
        what = f"expected JSON behind {SPECULATIVE}, found {text[:80]!r}"
        raise UserError(what, where=file, do=again) from None


def _flat(options: dict[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair]
