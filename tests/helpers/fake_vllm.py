"""A package called vllm that counts as vLLM does, for the client program to load: a CPU build.

A prompt [p, …] with n = max_tokens "generates" p, p + 1, …; a step accepts p % (k + 1) of k drafts.
The states of a token p are four times p at every boundary. The file $FAKE_LOG gets the options of
the engine and of each batch as JSON lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftlab.servers.vllm_process import PYTHON_VARIABLE

_INIT = """
import json, os, sys
from types import SimpleNamespace

__version__ = "9.9"
print("vLLM prints to standard output")

def log(value):
    if "FAKE_LOG" in os.environ:
        with open(os.environ["FAKE_LOG"], "a") as file:
            file.write(json.dumps(value) + "\\n")

class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)

class LLM:
    def __init__(self, **options):
        if os.environ.get("FAKE_FAILS"):
            sys.exit("no kernel for this machine")
        log(options)
        speculative = options.get("speculative_config")
        transfer = options.get("kv_transfer_config")
        self.k = speculative["num_speculative_tokens"] if speculative and not transfer else 0
        if transfer:
            config = speculative["draft_model_config"]["hf_config"]
            self.num_boundaries = len(config["eagle_aux_hidden_state_layer_ids"])
            self.folder = transfer["kv_connector_extra_config"]["shared_storage_path"]
            self.generate = self.write_states
        self.drafts = self.draft_tokens = self.accepted = 0
        self.accepted_at = [0] * self.k
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=False))

    def get_metrics(self):
        if not self.k:
            return []
        values = {"drafts": self.drafts, "draft_tokens": self.draft_tokens,
                  "accepted_tokens": self.accepted}
        metrics = [SimpleNamespace(name="vllm:spec_decode_num_" + name, value=value)
                   for name, value in values.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        return [*metrics, SimpleNamespace(name=name, values=list(self.accepted_at))]

    def generate(self, prompts, params, use_tqdm):
        log([len(prompts), vars(params[0])])
        return [self.decode(p["prompt_token_ids"], s) for p, s in zip(prompts, params)]

    def write_states(self, prompts, params, use_tqdm):
        import torch
        from safetensors.torch import save_file
        results = []
        for number, prompt in enumerate(p["prompt_token_ids"] for p in prompts):
            ids, file = torch.tensor(prompt), f"{self.folder}/{number}.safetensors"
            states = ids[:, None, None].expand(-1, self.num_boundaries, 4).float().contiguous()
            save_file({"hidden_states": states, "token_ids": ids}, file)
            logprobs = [{prompt[0]: SimpleNamespace(logprob=-0.5)}]
            output = SimpleNamespace(token_ids=[prompt[0]], logprobs=logprobs)
            params = {"hidden_states_path": file}
            results.append(SimpleNamespace(outputs=[output], kv_transfer_params=params))
        return results

    def decode(self, prompt, params):
        n, first, steps, num_tokens = params.max_tokens, prompt[0], [], 1
        while self.k and num_tokens < n:
            steps.append(first % (self.k + 1))
            num_tokens += 1 + steps[-1]
        self.drafts += len(steps) + int(os.environ.get("FAKE_EXTRA", 0))
        self.draft_tokens += self.k * len(steps)
        self.accepted += sum(steps)
        for accepted in steps:
            for position in range(accepted):
                self.accepted_at[position] += 1
        metrics = SimpleNamespace(
            histogram=[steps.count(accepted) for accepted in range(self.k + 1)],
            num_draft_tokens=self.k * len(steps), per_step_accepted=steps)
        output = SimpleNamespace(
            token_ids=list(range(first, first + n)), finish_reason="length")
        if PER_REQUEST:
            output.spec_decode_metrics = metrics if steps else None
        times = SimpleNamespace(
            first_token_latency=0.5, first_token_ts=10.0, last_token_ts=10.0 + n - 1)
        return SimpleNamespace(outputs=[output], metrics=times)

PER_REQUEST = MODERN
"""
_SAMPLER = "def expand_batch_to_tokens():\n    raise RuntimeError('not corrected')\n"
_BLOCK_HEAD = (
    "class DFlashQwen3Model:\n    def _normalize_context_k(self, keys):\n"
    "        raise RuntimeError('not corrected')\n"
)
_CPU_BUILD = "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9+cpu\n"


def write(folder: Path, *, modern: bool = True) -> Path:
    """Write the package; an old one has no counters per request and no draft probabilities."""
    fields = "per_request_spec_decode_metrics: str = 'none'" if modern else "other: int = 0"
    sampled = "draft_sample_method: str = 'greedy'" if modern else "other: int = 0"
    dataclass = "from dataclasses import dataclass\n\n@dataclass\nclass {}:\n    {}\n"
    for name, text in {
        "__init__": _INIT.replace("MODERN", str(modern)),
        "config": dataclass.format("SpeculativeConfig", sampled) + "\nKVTransferConfig = dict\n",
        "engine/__init__": "",
        "engine/arg_utils": dataclass.format("EngineArgs", fields),
        "platforms": "class current_platform:\n    device_type = 'cpu'\n"
        "    is_cpu = staticmethod(lambda: True)\n",
        "v1/__init__": "",
        "v1/sample/__init__": "",
        "v1/sample/rejection_sampler": _SAMPLER,
        "_custom_ops": "",
        "model_executor/__init__": "",
        "model_executor/models/__init__": "",
        "model_executor/models/qwen3_dflash": _BLOCK_HEAD,
    }.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path, text in {
        "vllm-9.9.dist-info/METADATA": _CPU_BUILD,
        "triton/__init__.py": "",
        "triton/backends/__init__.py": "backends = {}\n",
    }.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return folder


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: bool) -> Path:
    """Write the package where the client finds it, and return its log file."""
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(write(folder / "site", **options)))
    monkeypatch.setenv("FAKE_LOG", str(folder / "log"))
    return folder / "log"


def read_log(log: Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text().splitlines()]
