"""The client's setup and requests: defaults, and checks of what vLLM would fail on late."""

from __future__ import annotations

from pathlib import Path
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
REQUEST: dict[str, Any] = {"prompts": None, "sampling": None}
SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "seed": 0,
    "max_new_tokens": 128,
    "stop_token_ids": [],
}


class RequestError(ValueError):
    """A setup or request that cannot be run; the message says what to change."""


def with_defaults(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return `values` over `defaults`. Raise RequestError if there are unknown keys."""
    unknown = sorted(set(values) - set(defaults))
    if unknown:
        raise RequestError(f"unknown keys {unknown}; known are {', '.join(defaults)}")
    return {**defaults, **values}


def check_setup(setup: dict[str, Any]) -> dict[str, Any]:
    """Return the setup with defaults. Raise RequestError if it cannot be loaded."""
    setup = with_defaults(setup, SETUP)
    for key in ("target", "draft"):
        folder = setup[key]
        if (key == "target" or folder) and not (Path(folder or "") / "config.json").is_file():
            raise RequestError(f"{key}: expected a model folder with a config.json, found {folder}")
    if setup["boundaries"] and not setup["states_folder"]:
        raise RequestError("states_folder: expected a folder for the states, found nothing")
    if setup["draft"] and setup["k"] < 1:
        raise RequestError(f"k: expected at least 1 with a draft, found {setup['k']}")
    return setup


def check_request(request: dict[str, Any], setup: dict[str, Any]) -> dict[str, Any]:
    """Return a request with defaults, with `sampling` for each prompt.

    Raises:
        RequestError: vLLM would truncate a prompt or an answer, or return wrong counters.
    """
    request = with_defaults(request, REQUEST)
    prompts, sampling = request["prompts"] or [], request["sampling"]
    sampling = [{}] * len(prompts) if sampling is None else sampling
    if not prompts or len(sampling) != len(prompts):
        raise RequestError("expected prompts, and sampling (where it is given) for each of them")
    sampling = [with_defaults(options, SAMPLING) for options in sampling]
    for index, (prompt, options) in enumerate(zip(prompts, sampling, strict=True)):
        if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
            raise RequestError(f"prompts[{index}]: expected a non-empty list of token ids")
        if options["max_new_tokens"] < 1:
            raise RequestError(f"prompts[{index}]: expected max_new_tokens of at least 1")
        length = len(prompt) + options["max_new_tokens"]
        if length > setup["max_model_len"]:
            raise RequestError(
                f"prompts[{index}]: {len(prompt)} tokens + {options['max_new_tokens']} new ones "
                f"exceed the {setup['max_model_len']} positions of max_model_len"
            )
        # vLLM pads such a prompt, where it joins a running batch, with k zeros as its drafts.
        if len(prompt) == 1 and setup["draft"] and setup["max_num_seqs"] > 1:
            raise RequestError(
                f"prompts[{index}]: vLLM miscounts prompts of one token in a batch; use batch 1"
            )
    return {"prompts": prompts, "sampling": sampling}
