"""Load a target with a drafter in vLLM twice in one process and decode the same prompts.

parity_twice.py runs this program in vLLM's environment: vllm_twice.py REQUEST ANSWER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, where a load's changes remain
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def decode(request: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of each prompt and vLLM's own counters."""
    import vllm

    draft = {key: request[key] for key in ("model", "method", "num_speculative_tokens")}
    llm = vllm.LLM(
        model=request["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        speculative_config=draft,
        **request["engine_options"],
    )
    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop_token_ids"],
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    done = [llm.generate(prompt, sampling, use_tqdm=False)[0] for prompt in prompts]
    metrics = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in llm.get_metrics()}
    result = {
        "tokens": [list(result.outputs[0].token_ids) for result in done],
        "drafts": metrics["drafts"].value,
        "accepted": metrics["accepted_tokens"].value,
        "accepted_at": list(metrics["accepted_tokens_per_pos"].values),
        "version": vllm.__version__,
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def main() -> None:
    """Answer one request."""
    os.environ.update(ENVIRONMENT)
    request, answer = (Path(argument) for argument in sys.argv[1:3])
    fields = json.loads(request.read_text())
    answer.write_text(json.dumps([decode(fields) for _ in range(2)]))


if __name__ == "__main__":
    main()
