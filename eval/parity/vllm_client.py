"""Runs the real vLLM (its CPU build) on token-id prompts and reports tokens and counters.

This program runs inside the environment that ``setup_vllm.sh`` makes, so it must not import
draftlab, and draftlab must not import it::

    .envs/vllm/bin/python eval/parity/vllm_client.py request.json answer.json

Everything is float32 and eager, without prefix caching, and by default one request at a time, so
that at temperature 0 tokens *and* counters can be compared exactly with another float32 decoder.

Request (a JSON object; unknown keys are refused)::

    target               folder of the target model (required)
    prompts              list of lists of token ids (required)
    draft                folder of the draft head, speculators or native format; null: no drafting
    method               "eagle3" (default), "eagle", or another of vLLM's; vLLM would otherwise
                         guess it from the folder's name
    k                    drafted tokens per step (default 4)
    temperature          default 0.0
    seed                 default 0; with temperature > 0 prompt i is sampled with seed + i
    max_new_tokens       default 128
    ignore_eos           default false: the target's eos ids (its generation_config.json, else its
                         config.json) end a generation, as do stop_token_ids
    stop_token_ids       more ids that end a generation (default []); these end it in any case
    max_model_len        default 1024
    max_num_seqs         default 1: one request at a time; more: requests share batches
    parallel_drafting    default false; true for P-EAGLE heads
    draft_sample_method  "greedy" (default) or "probabilistic"
    speculative_extra    more keys of vLLM's speculative_config (default {})

Answer (a JSON object)::

    engine, engine_version, torch_version, transformers_version
    runner               "V1" or "V2", the model runner that ran
    outputs              generated ids, one list a prompt; an id that ended it is kept
    finish_reasons       "stop" or "length", one a prompt
    counters             {drafts, draft_tokens, accepted, accepted_at: [K]}, over all prompts
    per_prompt           the same counters, one object a prompt, and "steps": accepted tokens of
                         every verification step in order (the place to look when parity fails)
    stop_token_ids       the ids that could end a generation, sorted
    corrections          what was replaced in vLLM before it ran, one sentence each
    aux_layers           boundaries that the target captured (null where not found)
    draft_config         the head's configuration as vLLM resolved it (null without a draft)
    seconds              generation, all prompts
    seconds_per_prompt   (null unless max_num_seqs is 1)
    seconds_import, seconds_start

Counters are vLLM's: a step that verifies n > 0 drafted tokens adds 1 to ``drafts``, n to
``draft_tokens``, the a <= n accepted ones to ``accepted`` and 1 to ``accepted_at[i]`` for i < a.
Tokens that are verified in a generation's last step and then cut off (length, stop) still count.
``counters`` come from ``LLM.get_metrics()``, ``per_prompt`` from vLLM's per-request metrics; both
must agree, or this program fails. One artefact remains with max_num_seqs > 1: a prompt of a single
token that joins a running batch is padded with k dummy drafts, which vLLM counts as one more step
with nothing accepted. Give such runs prompts of two tokens or more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Read when vllm is imported. setdefault: the caller's own choice wins.
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process: the counters live in it, and corrections made here reach the sampler.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_DEFAULTS: dict[str, Any] = {
    "draft": None,
    "method": "eagle3",
    "k": 4,
    "temperature": 0.0,
    "seed": 0,
    "max_new_tokens": 128,
    "ignore_eos": False,
    "stop_token_ids": [],
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "parallel_drafting": False,
    "draft_sample_method": "greedy",
    "speculative_extra": {},
}
_REQUIRED = ("target", "prompts")

# What a reader wants to see of the head's configuration when parity fails.
_DRAFT_KEYS = (
    "architectures",
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "target_hidden_size",
    "num_hidden_layers",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "num_aux_hidden_states",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "mask_token_id",
    "pard_token",
    "ptd_token_id",
)

_EXPAND_CORRECTION = (
    "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens replaced by repeat_interleave: the "
    "CPU build's kernel writes float temperatures into a temporary int64 copy and leaves its "
    "output uninitialised (temperature > 0 only)"
)


class RequestError(ValueError):
    """The request cannot be run; the message says what to change."""


def read_request(path: Path) -> dict[str, Any]:
    """Reads and checks a request, defaults filled in."""
    request = json.loads(path.read_text())
    if not isinstance(request, dict):
        raise RequestError(f"{path}: expected a JSON object, found {type(request).__name__}")
    unknown = sorted(set(request) - set(_DEFAULTS) - set(_REQUIRED))
    if unknown:
        known = ", ".join([*_REQUIRED, *_DEFAULTS])
        raise RequestError(f"{path}: unknown keys {unknown}; known keys are {known}")
    missing = [key for key in _REQUIRED if not request.get(key)]
    if missing:
        raise RequestError(f"{path}: {missing} missing or empty; a request needs {_REQUIRED}")
    request = {**_DEFAULTS, **request}

    for key in ("target", "draft"):
        folder = request[key]
        if folder is not None and not (Path(folder) / "config.json").is_file():
            raise RequestError(f"{key}: expected a model folder with a config.json at {folder}")
    for index, prompt in enumerate(request["prompts"]):
        if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
            raise RequestError(f"prompts[{index}]: expected a non-empty list of token ids")
        length = len(prompt) + request["max_new_tokens"]
        if length > request["max_model_len"]:
            # vLLM would cut the generation short without a word.
            raise RequestError(
                f"prompts[{index}]: {len(prompt)} tokens + max_new_tokens "
                f"{request['max_new_tokens']} = {length} exceed max_model_len "
                f"{request['max_model_len']}; raise it or shorten the prompt"
            )
    if request["max_new_tokens"] < 1 or request["max_num_seqs"] < 1:
        raise RequestError("max_new_tokens and max_num_seqs must be at least 1")
    if request["draft"] is not None and request["k"] < 1:
        raise RequestError(f"k: expected at least 1 with a draft, found {request['k']}")
    return request


def target_eos_ids(target: Path) -> list[int]:
    """The target's end-of-sequence ids: generation_config.json first, then config.json."""
    for name in ("generation_config.json", "config.json"):
        path = target / name
        if not path.is_file():
            continue
        ids = json.loads(path.read_text()).get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


def correct_expand() -> str:
    """Replaces the CPU build's batch-to-token expansion; returns the sentence to record."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
        expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
        if replace_from != replace_to:
            expanded = expanded.masked_fill(expanded == replace_from, replace_to)
        return expanded

    if not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        raise RuntimeError(
            "expected vllm.v1.sample.rejection_sampler.expand_batch_to_tokens, found none; this "
            "vLLM differs from the one that setup_vllm.sh installs"
        )
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return _EXPAND_CORRECTION


def read_counters(llm: Any, k: int) -> dict[str, Any]:
    """Speculative-decoding counters of ``LLM.get_metrics()`` since the engine started."""
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    counters: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": 0}
    accepted_at = [0] * k
    for metric in llm.get_metrics():
        if metric.name in names:
            counters[names[metric.name]] += int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for position, value in enumerate(metric.values):
                accepted_at[position] += int(value)
    counters["accepted_at"] = accepted_at
    return counters


def request_counters(completion: Any, k: int) -> dict[str, Any]:
    """One request's counters, from vLLM's histogram of accepted tokens per step."""
    metrics = completion.spec_decode_metrics
    if metrics is None:  # no draft, or a generation that ended with the prefill's token
        return {
            "drafts": 0,
            "draft_tokens": 0,
            "accepted": 0,
            "accepted_at": [0] * k,
            "steps": [],
        }
    histogram = list(metrics.histogram)
    return {
        "drafts": sum(histogram),
        "draft_tokens": int(metrics.num_draft_tokens),
        "accepted": sum(count * steps for count, steps in enumerate(histogram)),
        "accepted_at": [sum(histogram[position + 1 :]) for position in range(k)],
        "steps": list(metrics.per_step_accepted),
    }


def check_counters(counters: dict[str, Any], per_prompt: list[dict[str, Any]]) -> None:
    """Fails when vLLM's two sets of counters disagree: then neither can be trusted."""
    for key, total in counters.items():
        parts = [prompt[key] for prompt in per_prompt]
        found = (
            [sum(column) for column in zip(*parts, strict=True)]
            if key == "accepted_at"
            else (sum(parts))
        )
        if found != total:
            raise RuntimeError(
                f"counter {key}: get_metrics() says {total}, the requests add up to {found}; the "
                "two should be equal in a fresh engine"
            )


def captured_layers(llm: Any) -> list[int] | None:
    """Boundaries that the loaded target captures for the head, where they can be found."""
    try:
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker
        worker = getattr(worker, "worker", worker)
        model = worker.model_runner.model
    except AttributeError:  # another layout of vLLM's internals: this is only a debugging aid
        return None
    layers = getattr(getattr(model, "model", model), "aux_hidden_state_layers", None)
    return None if layers is None else [int(layer) for layer in layers]


def resolved_draft_config(llm: Any) -> dict[str, Any] | None:
    """The head's configuration after vLLM's own translation."""
    speculative = llm.llm_engine.vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return None
    values = {key: getattr(draft.hf_config, key, None) for key in _DRAFT_KEYS}
    return json.loads(json.dumps(values, default=str))


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a checked request and returns the answer."""
    start = time.perf_counter()
    import torch
    import transformers
    import vllm

    seconds_import = time.perf_counter() - start
    corrections: list[str] = []
    if request["temperature"] > 0 and request["draft"] is not None:
        corrections.append(correct_expand())
        print(f"correction: {corrections[-1]}", file=sys.stderr)

    k = request["k"] if request["draft"] is not None else 0
    options: dict[str, Any] = {}
    if request["draft"] is not None:
        options["per_request_spec_decode_metrics"] = "detailed"
        options["speculative_config"] = {
            "model": request["draft"],
            "method": request["method"],
            "num_speculative_tokens": k,
            "draft_sample_method": request["draft_sample_method"],
            **({"parallel_drafting": True} if request["parallel_drafting"] else {}),
            **request["speculative_extra"],
        }
    start = time.perf_counter()
    llm = vllm.LLM(
        model=request["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        # Prompts are ids and outputs are compared as ids: no tokenizer is needed.
        skip_tokenizer_init=True,
        # The model's own sampling defaults (temperature, top_p) must not leak in.
        generation_config="vllm",
        max_model_len=request["max_model_len"],
        max_num_seqs=request["max_num_seqs"],
        # Room for every prompt in one piece, with its drafts.
        max_num_batched_tokens=max(
            2048, (request["max_model_len"] + k + 1) * request["max_num_seqs"]
        ),
        seed=request["seed"],
        **options,
    )
    seconds_start = time.perf_counter() - start

    stop_ids = set(request["stop_token_ids"])
    if not request["ignore_eos"]:
        stop_ids.update(target_eos_ids(Path(request["target"])))
    sampling = [
        vllm.SamplingParams(
            temperature=request["temperature"],
            max_tokens=request["max_new_tokens"],
            seed=request["seed"] + index if request["temperature"] > 0 else None,
            stop_token_ids=sorted(stop_ids),
            # eos is among stop_token_ids when it shall stop: vLLM knows no eos without a tokenizer.
            ignore_eos=True,
            detokenize=False,
        )
        for index in range(len(request["prompts"]))
    ]
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in request["prompts"]]

    one_by_one = request["max_num_seqs"] == 1
    seconds_per_prompt: list[float] = []
    results: list[Any] = []
    start = time.perf_counter()
    if one_by_one:
        for prompt, params in zip(prompts, sampling, strict=True):
            prompt_start = time.perf_counter()
            results += llm.generate([prompt], [params], use_tqdm=False)
            seconds_per_prompt.append(round(time.perf_counter() - prompt_start, 4))
    else:
        results = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start

    completions = [result.outputs[0] for result in results]
    counters = read_counters(llm, k)
    per_prompt = [request_counters(completion, k) for completion in completions]
    check_counters(counters, per_prompt)
    return {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "runner": "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1",
        "outputs": [list(completion.token_ids) for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "counters": counters,
        "per_prompt": per_prompt,
        "stop_token_ids": sorted(stop_ids),
        "corrections": corrections,
        "aux_layers": captured_layers(llm),
        "draft_config": resolved_draft_config(llm),
        "seconds": round(seconds, 4),
        "seconds_per_prompt": seconds_per_prompt if one_by_one else None,
        "seconds_import": round(seconds_import, 3),
        "seconds_start": round(seconds_start, 3),
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line: request and answer paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("request", type=Path, help="JSON file with the request")
    parser.add_argument("answer", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        request = read_request(options.request)
    except (RequestError, OSError, json.JSONDecodeError) as error:
        print(f"vllm_client: {error}", file=sys.stderr)
        return 2
    try:
        answer = run(request)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "vllm"):
            raise
        print(
            f"vllm_client: {error}; run this with the interpreter of the environment that "
            "eval/parity/setup_vllm.sh makes",
            file=sys.stderr,
        )
        return 3
    options.answer.parent.mkdir(parents=True, exist_ok=True)
    options.answer.write_text(json.dumps(answer, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
