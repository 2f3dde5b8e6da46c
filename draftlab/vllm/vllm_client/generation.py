"""vLLM with its engine loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

from .counters import check_counters, request_counters, request_times, since, total_counters
from .own_config import engine_options
from .request import RequestError, check_ask, each_asked

CORRECTION = (
    "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens replaced by repeat_interleave: the "
    "CPU build's own leaves its output uninitialised at temperatures above 0"
)


def correct_expand() -> None:
    """Replaces the CPU build's batch-to-token expansion (see CORRECTION)."""
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
        raise RequestError("expected rejection_sampler.expand_batch_to_tokens in this CPU build")
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


class Served:
    """vLLM with its engine loaded, and what it is called."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import vllm
        from vllm.config import SpeculativeConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform

        self.vllm, self.setup = vllm, setup
        self.k = setup["k"] if setup["draft"] else 0
        on_cpu = current_platform.is_cpu()
        self.corrections = []
        if on_cpu and self.k:  # greedy decoding passes it by
            correct_expand()
            self.corrections.append(CORRECTION)
        options: dict[str, Any] = {}
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        self.per_request = "per_request_spec_decode_metrics" in known
        if self.k:
            options["speculative_config"] = self._speculative(SpeculativeConfig)
            if self.per_request:
                options["per_request_spec_decode_metrics"] = "detailed"
            elif setup["max_num_seqs"] > 1:
                raise RequestError(
                    f"vLLM {vllm.__version__} counts no single request: take batch 1"
                )
        # Room for every prompt in one piece, with its drafts.
        room = max(2048, (setup["max_model_len"] + self.k + 1) * setup["max_num_seqs"])
        options |= {"enable_prefix_caching": False, "max_num_batched_tokens": room}
        self.llm = vllm.LLM(
            model=setup["target"],
            dtype=setup["dtype"],
            enforce_eager=on_cpu,
            disable_log_stats=False,
            skip_tokenizer_init=True,  # ids in, ids out
            generation_config="vllm",  # the model's own sampling defaults must not leak in
            max_model_len=setup["max_model_len"],
            max_num_seqs=setup["max_num_seqs"],
            **options | engine_options(setup["target"]) | setup["engine_extra"],
        )
        second = getattr(self.llm.llm_engine.vllm_config, "use_v2_model_runner", False)
        self.info = {
            "version": vllm.__version__,
            "runner": "V2" if second else "V1",
            "device": current_platform.device_type,
            "corrections": self.corrections,
        }

    def _speculative(self, config: Any) -> dict[str, Any]:
        setup, known = self.setup, {field.name for field in dataclasses.fields(config)}
        chosen = {"model": setup["draft"], "method": setup["method"], **setup["speculative_extra"]}
        chosen["num_speculative_tokens"] = self.k
        if "draft_sample_method" in known:
            chosen["draft_sample_method"] = "probabilistic" if setup["draft_probs"] else "greedy"
        elif setup["draft_probs"]:
            raise RequestError(
                f"vLLM {self.vllm.__version__} does not know draft_sample_method, so it cannot "
                "verify with draft probabilities; take a newer one, or turn them off"
            )
        return chosen | ({"parallel_drafting": True} if setup["parallel_drafting"] else {})

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Decodes one ask: in batches, or one prompt after the other."""
        ask = check_ask(ask, self.setup)
        sampling = [
            self.vllm.SamplingParams(
                temperature=own["temperature"],
                top_k=ask["top_k"] or 0,
                top_p=ask["top_p"] or 1.0,
                max_tokens=own["max_new_tokens"],
                seed=own["seed"] if own["temperature"] > 0 else None,
                stop_token_ids=sorted(ask["stop_token_ids"]),
                ignore_eos=True,  # stop_token_ids says it all
                detokenize=False,
            )
            for own in each_asked(ask)
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in ask["prompts"]]
        size = 1 if self.setup["max_num_seqs"] == 1 else len(prompts)
        start = reading = total_counters(self.llm, self.k)
        results, per_prompt = [], []
        for at in range(0, len(prompts), size):
            done = self.llm.generate(
                prompts[at : at + size], sampling[at : at + size], use_tqdm=False
            )
            results += done
            last, reading = reading, total_counters(self.llm, self.k)
            if self.k and not self.per_request:
                per_prompt.append({**since(last, reading), "steps": None})
            else:
                per_prompt += [request_counters(result.outputs[0], self.k) for result in done]
        check_counters(since(start, reading), per_prompt)
        return {
            "outputs": [list(result.outputs[0].token_ids) for result in results],
            "finish_reasons": [result.outputs[0].finish_reason for result in results],
            "times": [request_times(result) for result in results],
            "per_prompt": per_prompt,
        }
