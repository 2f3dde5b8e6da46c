"""The texts beside an export: how a server is started with it, and what it is."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path

from draftlab.heads.config import HeadConfig

_FAMILIES = {"eagle3": "EAGLE3", "ptd": "Parallel draft (P-EAGLE)"}


def is_hub_id(name: str) -> bool:
    """Whether a target's name is a Hub id ("org/name") rather than a folder."""
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not Path(name).expanduser().exists()
    )


def launch_text(head: HeadConfig, place: Path, verifier: str, k: int) -> str:
    """launch.md: how vLLM serves this export."""
    chosen = {"model": str(place), "method": "eagle3", "num_speculative_tokens": k}
    parallel = head.family == "ptd"
    # Only of an export served alone does vLLM read it from config.json.
    options = json.dumps(chosen | ({"parallel_drafting": True} if parallel else {}))
    explicit = f"vllm serve {shlex.quote(verifier)} --speculative-config {shlex.quote(options)}"
    alone = f"vllm serve {shlex.quote(str(place))}"
    if is_hub_id(verifier):
        text = (
            f"The target is on the Hub, and the export names it:\n\n```\n{alone}\n```\n\n"
            f"Spelled out, for another K or a local copy of the target:\n\n```\n{explicit}\n```\n"
        )
    else:
        text = (
            "The target is a local folder, which vLLM wants named (it serves an export alone only "
            f"where the target is on the Hub):\n\n```\n{explicit}\n```\n"
        )
    drafts = f"{k} tokens a step, greedy, " + ("all in one pass" if parallel else "one a pass")
    return f"# Serving this head with vLLM\n\n{text}\nDrafts: {drafts}.\n"


def readme_text(head: HeadConfig, verifier: str, layout: str) -> str:
    """README.md: the layout, its version, who wrote it, for which target."""
    try:
        version = metadata.version("draftlab")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "(not installed)"
    return (
        f"{_FAMILIES[head.family]} head for {verifier}: {layout}, written by draftlab {version}. "
        f"launch.md says how to serve it. Fingerprint of the target: {head.target.fingerprint}\n"
    )
