"""launch.md and README.md of an export."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from draftlab.export.gguf import OUT_TYPES
from draftlab.export.layout import Export
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.version import package_version
from draftlab.vllm.vllm_client.loading import generation_override

_K_OPTIONS = re.compile(
    r'(?:"num_speculative_tokens": |--speculative-num-steps |--spec-draft-n-max )([1-9]\d{0,8})\b'
)


def is_hub_id(name: str) -> bool:
    """Return whether a target's name is a Hub id ("org/name") and not a folder."""
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not Path(name).expanduser().exists()
    )


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
        alone: whether vLLM can read target, method and K from config.json.
    """
    family = get_family(export.head.family)
    config = {"model": str(path), "method": family.vllm_method, "num_speculative_tokens": export.k}
    config |= family.vllm_options
    parallel = family.drafting == "parallel"
    options = json.dumps(config, ensure_ascii=False)
    override, more = generation_override(export.target), ""
    if override:
        value = shlex.quote(json.dumps(override, ensure_ascii=False))
        more = f" --override-generation-config {value}"
    explicit = code_block(
        f"vllm serve {shlex.quote(export.target_name)} --speculative-config "
        f"{shlex.quote(options)}{more}"
    )
    if alone:
        text = (
            "The target is on the Hub, and the export names it:\n\n"
            + code_block(f"vllm serve {shlex.quote(str(path))}{more}")
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
    return f"# Serving this head with vLLM\n\n{text}\nDrafts: {drafts}.\n"


def sglang_text(export: Export, path: Path, *, algorithm: str = "EAGLE3") -> str:
    """Return launch.md for SGLang, which drafts a chain (servers §6)."""
    command = code_block(
        f"python -m sglang.launch_server --model-path {shlex.quote(export.target_name)} \\",
        f"  --speculative-algorithm {algorithm} \\",
        f"  --speculative-draft-model-path {shlex.quote(str(path))} \\",
        f"  --speculative-num-steps {export.k} --speculative-eagle-topk 1 \\",
        f"  --speculative-num-draft-tokens {export.k + 1}",
    )
    return (
        f"# Serving this head with SGLang\n\n{command}\nDrafts: {export.k} tokens a step, one a "
        "pass. SGLang counts the token it drafts from, hence one more in the last option.\n"
    )


def block_sglang_text(export: Export, path: Path) -> str:
    """Return launch.md for SGLang of a block head, whose whole block it drafts (servers §12)."""
    command = code_block(
        f"python -m sglang.launch_server --model-path {shlex.quote(export.target_name)} \\",
        f"  --speculative-algorithm {get_family(export.head.family).vllm_method.upper()} \\",
        f"  --speculative-draft-model-path {shlex.quote(str(path))} \\",
        f"  --speculative-num-draft-tokens {export.head.k_trained + 1}",
    )
    return (
        f"# Serving this head with SGLang\n\n{command}\nDrafts: {export.head.k_trained} tokens a "
        "step, all in one pass. SGLang counts the token it drafts from, hence one more in the last "
        "option.\n"
    )


def llamacpp_text(export: Export, path: Path) -> str:
    """Return launch.md for llama.cpp's converter and server (servers §5, §10)."""
    hub = is_hub_id(export.target_name)
    target = "target" if hub else shlex.quote(export.target_name)
    fetch = [f"hf download {shlex.quote(export.target_name)} --local-dir target"] if hub else []
    head, convert = shlex.quote(str(path)), "python convert_hf_to_gguf.py"
    outtype = OUT_TYPES[export.dtype_name]
    family = get_family(export.head.family)
    method = family.vllm_method
    passes = "all in one pass" if family.drafting == "parallel" else "one a pass"
    commands = code_block(
        *fetch,
        f"{convert} {target} --outtype {outtype} --outfile target.gguf",
        f"{convert} {head} --target-model-dir {target} --outtype {outtype} \\",
        "  --outfile head.gguf",
        f"llama-server -m target.gguf -md head.gguf --spec-type draft-{method} \\",
        f"  --spec-draft-n-max {export.k} --spec-draft-p-min 0 --jinja",
    )
    return (
        "# Serving this head with llama.cpp\n\nIn a folder of llama.cpp (the converter reads "
        f"tokenizer and sizes from the target):\n\n{commands}\n"
        f"Drafts: at most {export.k} tokens a step, {passes}. The converter refuses tokenizers "
        "that it does not know by their hash; `draftlab export --to llamacpp --gguf` tells it of "
        "those that split text as Llama 3's or Qwen 2's do.\n"
    )


def readme_text(head: HeadConfig, target_name: str, layout: str) -> str:
    """Return README.md: the layout, its version, and the target."""
    title = get_family(head.family).title
    return (
        f"{title[0].upper()}{title[1:]} head for {target_name}: {layout}, written by draftlab "
        f"{package_version()}. launch.md says how to serve it. Fingerprint of the target: "
        f"{head.target.fingerprint}\n"
    )
