"""The client's setup with its defaults, and checks of requests that vLLM would answer wrongly."""

from __future__ import annotations

from typing import Any

INVALID_REQUEST, NO_VLLM = 2, 3  # exit statuses
SETUP: dict[str, Any] = {
    "target": None,  # folder of the target model (required)
    "draft": None,  # folder of the head, speculators or native format; None: no drafting
    "method": "eagle3",  # or another method of vLLM, which would otherwise guess
    "k": 0,  # drafted tokens per step
    "draft_probs": False,  # whether drafts are sampled and verified with the head's probabilities
    "parallel_drafting": False,  # True for P-EAGLE heads
    "dtype": "float32",
    "max_model_len": 1024,  # maximum number of positions of a request
    "max_num_seqs": 1,  # batch size; 1: one request after the other
    # Layers in ascending order (num_layers: the state before the final norm), whose inputs are
    # written instead of decoding, and the folder of those states, a safetensors file per prompt.
    "boundaries": None,
    "states_folder": None,
    # More options of vLLM's speculative_config and LLM().
    "speculative_extra": {},
    "engine_extra": {},
}


class RequestError(ValueError):
    """A setup or request that cannot be run; the message says what to change."""


def check_request(request: dict[str, Any], setup: dict[str, Any]) -> None:
    """Raise RequestError if vLLM would truncate an answer, or return wrong counters."""
    pairs = zip(request["prompts"], request["sampling"], strict=True)
    for index, (prompt, options) in enumerate(pairs):
        if len(prompt) + options["max_new_tokens"] > setup["max_model_len"]:
            raise RequestError(
                f"prompts[{index}]: {len(prompt)} tokens + {options['max_new_tokens']} new ones "
                f"exceed the {setup['max_model_len']} positions of max_model_len"
            )
        # vLLM pads such a prompt, where it joins a running batch, with k zeros as its drafts.
        if len(prompt) == 1 and setup["draft"] and setup["max_num_seqs"] > 1:
            raise RequestError(
                f"prompts[{index}]: vLLM miscounts prompts of one token in a batch; use batch 1"
            )
