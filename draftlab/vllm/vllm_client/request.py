"""What the client is asked, with defaults; refused where vLLM would fail late, or mislead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

UNUSABLE, NO_VLLM = 2, 3  # exit statuses
SETUP: dict[str, Any] = {
    "target": None,
    "draft": None,
    "method": "eagle3",
    "k": 0,
    "draft_probs": False,
    "parallel_drafting": False,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "boundaries": None,
    "states_folder": None,
    "speculative_extra": {},
    "engine_extra": {},
}
ASK: dict[str, Any] = {
    "prompts": None,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "seed": 0,
    "max_new_tokens": 128,
    "stop_token_ids": [],
    "each": None,
}
EACH = ("temperature", "seed", "max_new_tokens")


class RequestError(ValueError):
    """What cannot be run; the message says what to change."""


def filled(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`; unknown keys are refused."""
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise RequestError(f"unknown keys {unknown}; known are {', '.join(defaults)}")
    return {**defaults, **given}


def check_setup(setup: dict[str, Any]) -> dict[str, Any]:
    """The setup with defaults, refused where vLLM would fail late or run something else."""
    setup = filled(setup, SETUP)
    for key in ("target", "draft"):
        folder = setup[key]
        if (key == "target" or folder) and not (Path(folder or "") / "config.json").is_file():
            raise RequestError(f"{key}: expected a model folder with a config.json, found {folder}")
    if setup["boundaries"] and not setup["states_folder"]:
        raise RequestError("states_folder: expected where states of boundaries go, found nothing")
    if setup["draft"] and setup["k"] < 1:
        raise RequestError(f"k: expected at least 1 with a draft, found {setup['k']}")
    return setup


def each_asked(ask: dict[str, Any]) -> list[dict[str, Any]]:
    """What is asked for each prompt (EACH): the ask's own, prompt i with seed + i, or `each`."""
    common = {key: ask[key] for key in EACH}
    if ask["each"] is None:
        return [{**common, "seed": ask["seed"] + i} for i in range(len(ask["prompts"]))]
    return [filled(own, common) for own in ask["each"]]


def check_ask(ask: dict[str, Any], setup: dict[str, Any]) -> dict[str, Any]:
    """An ask with defaults, refused where vLLM would cut short or count something else."""
    ask = filled(ask, ASK)
    if not ask["prompts"] or len(ask["each"] or ask["prompts"]) != len(ask["prompts"]):
        raise RequestError("expected prompts, and each (where it is given) of as many")
    for index, (prompt, own) in enumerate(zip(ask["prompts"], each_asked(ask), strict=True)):
        if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
            raise RequestError(f"prompts[{index}]: expected a non-empty list of token ids")
        if own["max_new_tokens"] < 1:
            raise RequestError(f"prompts[{index}]: expected max_new_tokens of at least 1")
        length = len(prompt) + own["max_new_tokens"]
        if length > setup["max_model_len"]:
            raise RequestError(
                f"prompts[{index}]: {len(prompt)} tokens + {own['max_new_tokens']} new ones exceed "
                f"the {setup['max_model_len']} positions of max_model_len"
            )
        # vLLM pads such a prompt, where it joins a running batch, with k zeros as its drafts.
        if len(prompt) == 1 and setup["draft"] and setup["max_num_seqs"] > 1:
            raise RequestError(
                f"prompts[{index}]: vLLM miscounts prompts of one token in a batch; take batch 1"
            )
    return ask
