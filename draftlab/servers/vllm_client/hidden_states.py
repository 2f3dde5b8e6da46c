"""Hidden states of a target, written by vLLM's hidden-state extraction."""

from __future__ import annotations

import os
from typing import Any

from .loading import engine_info, load_engine

CORRECTION = "ExampleHiddenStatesConnector copies without CUDA streams, which a CPU build lacks"


class HiddenStateWriter:
    """A vLLM engine that runs prompts once and writes their states to files.

    vLLM takes the states of the boundaries as keys and values of an additional layer, and writes
    those of a finished request to a file (servers §4). Chunked prefill is off, because older
    versions write wrong states with it.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        # The engine's own process continues to write files after it has answered.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        # The token after the longest prompt has a position, which is never computed.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        from vllm.config import KVTransferConfig
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        connector = {"kv_connector": "ExampleHiddenStatesConnector"}
        if on_cpu:
            connector = {
                "kv_connector": "CpuHiddenStatesConnector",
                "kv_connector_module_path": f"{__package__}.connector",
            }
        self.llm = load_engine(
            setup,
            enable_chunked_prefill=False,
            max_num_batched_tokens=setup["max_model_len"],
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": setup["boundaries"]}
                },
            },
            kv_transfer_config=KVTransferConfig(
                **connector,
                kv_role="kv_producer",
                kv_connector_extra_config={"shared_storage_path": setup["states_folder"]},
            ),
        )
        self.info = engine_info(self.llm, [CORRECTION] if on_cpu else [])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run prompts; return the files of their states, and the next tokens with log probability.

        A file `<path>.lock` next to a file of states is locked until the states are complete.
        """
        from vllm import SamplingParams

        results = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in request["prompts"]],
            SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, detokenize=False),
            use_tqdm=False,
        )
        tokens = [result.outputs[0].token_ids[0] for result in results]
        logprobs = [result.outputs[0].logprobs[0] for result in results]
        return {
            "files": [result.kv_transfer_params["hidden_states_path"] for result in results],
            "tokens": tokens,
            "logprobs": [p[token].logprob for p, token in zip(logprobs, tokens, strict=True)],
        }
