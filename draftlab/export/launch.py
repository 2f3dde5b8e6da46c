"""The texts beside an export: how a server is started with it, and what it is."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path

from draftlab.heads.config import HeadConfig


def is_hub_id(name: str) -> bool:
    """Whether a target's name is a Hub id ("org/name") rather than a folder."""
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not Path(name).expanduser().exists()
    )


def launch_text(place: Path, verifier: str, k: int) -> str:
    """launch.md: how vLLM serves this export."""
    options = json.dumps({"model": str(place), "method": "eagle3", "num_speculative_tokens": k})
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
    return f"# Serving this head with vLLM\n\n{text}\nDrafts: {k} tokens a step, greedy chain.\n"


def readme_text(head: HeadConfig, verifier: str, layout: str) -> str:
    """README.md: the layout, its version, who wrote it, for which target."""
    try:
        version = metadata.version("draftlab")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "(not installed)"
    return (
        f"EAGLE3 head for {verifier}: {layout}, written by draftlab {version}. launch.md says how "
        f"to serve it. Fingerprint of the target: {head.target.fingerprint}\n"
    )
