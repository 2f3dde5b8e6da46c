"""Read an export's files for servers with the servers' own code; print what they read as JSON.

    ENV/bin/python eval/parity/serving_readers.py EXPORT

Of SGLang and vLLM only the modules that read these files are loaded, each from its file, since the
packages themselves import GPU libraries. setup_serving.sh makes ENV.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

SITE = Path(sysconfig.get_paths()["purelib"])
DSPARK = "sglang/srt/speculative/dspark_components"
LARGEST_BATCH = 256


def load(path: str) -> ModuleType:
    """Return a module of an installed package, without importing the package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, SITE / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def config_fields() -> set[str]:
    """Return the names of the fields of vLLM's SpeculativeConfig."""
    tree = ast.parse((SITE / "vllm/config/speculative.py").read_text())
    (found,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"
    )
    return {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def speculative_config(launch: str) -> dict[str, Any] | None:
    """Return the speculative config of launch.md; None: it serves with another program."""
    if not (match := re.search(r"^vllm serve .*--speculative-config.*$", launch, re.MULTILINE)):
        return None
    words = shlex.split(match[0])
    return json.loads(words[words.index("--speculative-config") + 1])


def sglang_steps(path: Path) -> list[int]:
    """Return SGLang's drafts for the batch sizes from 1 on, by its class for adaptive drafting."""
    source = (SITE / "sglang/srt/speculative/adaptive_spec_params.py").read_text()
    code = [
        node
        for node in ast.parse(source).body
        # Its imports of SGLang load GPU libraries, and serve the checks of other options.
        if not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang"))
    ]
    module = {"log_info_on_rank0": lambda *_: None, "__name__": "adaptive_spec_params"}
    exec(compile(ast.Module(code, []), "adaptive_spec_params", "exec"), module)
    params = module["AdaptiveSpeculativeParams"](7, str(path))
    return [params.get_steps_for_batch(size) for size in range(1, LARGEST_BATCH + 1)]


def read(export: Path) -> dict[str, Any]:
    """Return what the servers read of an export."""
    result: dict[str, Any] = {}
    if (path := export / "sts.json").exists():
        sys.modules.setdefault("torch", ModuleType("torch"))  # only its recorder of data needs it
        calibration = load(f"{DSPARK}/dspark_sts.py").load_sts_calibration_from_path(str(path))
        result["sts"] = {
            name: getattr(calibration, name)
            for name in ("temperatures", "dataset", "num_samples", "ece_before", "ece_after")
        }
    if (path := export / "adaptive.json").exists():
        result["steps"] = sglang_steps(path)
    config = speculative_config((export / "launch.md").read_text())
    if config is not None:
        result["unknown_fields"] = sorted(config.keys() - config_fields())
        if schedule := config.get("num_speculative_tokens_per_batch_size"):
            dynamic = load("vllm/v1/spec_decode/dynamic/utils.py")
            result["drafts"] = dynamic.build_dynamic_sd_schedule_lookup(
                schedule, LARGEST_BATCH, config["num_speculative_tokens"]
            )[1:]
    return result


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]))))
