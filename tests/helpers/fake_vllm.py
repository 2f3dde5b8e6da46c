"""A package called vllm that counts as vLLM does, for the client program to load.

Prompt [p, …] with n = max_tokens "generates" p, p + 1, …; a step accepts p % (k + 1) of k drafts.
Asked for states it writes those of token p at every boundary as four times p.
"""

from __future__ import annotations

from pathlib import Path

_INIT = """
import json, os, sys
from types import SimpleNamespace as Some

__version__ = "9.9"
print("vLLM prints to standard output")

class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)

class LLM:
    def __init__(self, **options):
        spec = options.get("speculative_config")
        if os.environ.get("FAKE_FAILS"):
            sys.exit("no kernel for this machine")
        log = os.environ.get("FAKE_LOG")
        if log:
            with open(log, "a") as file:
                file.write(json.dumps(options) + "\\n")
        self.log = log
        self.states = options.get("kv_transfer_config")
        self.k = spec["num_speculative_tokens"] if spec and not self.states else 0
        if self.states:
            self.width = len(spec["draft_model_config"]["hf_config"]
                             ["eagle_aux_hidden_state_layer_ids"])
            self.folder = self.states["kv_connector_extra_config"]["shared_storage_path"]
            self.generate = self.write
        self.total = [0, 0, 0, [0] * self.k]
        self.llm_engine = Some(vllm_config=Some(use_v2_model_runner=False))

    def get_metrics(self):
        name = "vllm:spec_decode_num_"
        drafts, tokens, accepted, at = self.total
        return [Some(name=name + "drafts", value=drafts),
                Some(name=name + "draft_tokens", value=tokens),
                Some(name=name + "accepted_tokens", value=accepted),
                Some(name=name + "accepted_tokens_per_pos", values=list(at))] if self.k else []

    def generate(self, prompts, params, use_tqdm):
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps([len(prompts), vars(params[0])]) + "\\n")
        return [self.one(p["prompt_token_ids"], s) for p, s in zip(prompts, params)]

    def write(self, prompts, params, use_tqdm):
        import torch
        from safetensors.torch import save_file
        found = []
        for number, prompt in enumerate(p["prompt_token_ids"] for p in prompts):
            ids, file = torch.tensor(prompt), f"{self.folder}/{number}.safetensors"
            states = ids[:, None, None].expand(-1, self.width, 4).float().contiguous()
            save_file({"hidden_states": states, "token_ids": ids}, file)
            token = Some(token_ids=[prompt[0]], logprobs=[{prompt[0]: Some(logprob=-0.5)}])
            found.append(Some(outputs=[token], kv_transfer_params={"hidden_states_path": file}))
        return found

    def one(self, prompt, params):
        n, first, steps, made = params.max_tokens, prompt[0], [], 1
        while self.k and made < n:
            steps.append(first % (self.k + 1))
            made += 1 + steps[-1]
        histogram = [steps.count(a) for a in range(self.k + 1)]
        self.total[0] += len(steps) + int(os.environ.get("FAKE_EXTRA", 0))
        self.total[1] += self.k * len(steps)
        self.total[2] += sum(steps)
        for a in steps:
            for i in range(a):
                self.total[3][i] += 1
        metrics = Some(histogram=histogram, num_draft_tokens=self.k * len(steps),
                       per_step_accepted=steps)
        out = Some(token_ids=list(range(first, first + n)), finish_reason="length",
                   spec_decode_metrics=metrics if steps and PER_REQUEST else None)
        times = Some(first_token_latency=0.5, first_token_ts=10.0, last_token_ts=10.0 + n - 1)
        return Some(outputs=[out], metrics=times)

PER_REQUEST = MODERN
"""
_SAMPLER = "def expand_batch_to_tokens():\n    raise RuntimeError('not corrected')\n"


def write(folder: Path, *, modern: bool = True) -> Path:
    """Writes the package; an old one counts no single request and knows no draft probabilities."""
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
    }.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
