"""vLLM that writes a target's states, by its own hidden-state extraction."""

from __future__ import annotations

import os
from typing import Any

from .own_config import engine_options
from .request import check_ask

CORRECTION = "ExampleHiddenStatesConnector copies without CUDA streams, which the CPU build has not"


class StatesServed:
    """vLLM with its engine loaded, which runs prompts once and leaves their states in files.

    vLLM takes the states of the asked boundaries for keys and values of one more layer and writes
    those of a request that ends into a file (servers §4). A prompt is computed in one piece:
    older versions write wrong states of prompts in pieces.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        # Its engine runs on in a process of its own, and writes files after it has answered.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        # One position beyond the target's, of the token after the longest prompt: never computed.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        import vllm
        from vllm.config import KVTransferConfig
        from vllm.platforms import current_platform

        self.vllm = vllm
        on_cpu = current_platform.is_cpu()
        connector = {"kv_connector": "ExampleHiddenStatesConnector"}
        if on_cpu:
            connector = {
                "kv_connector": "CpuHiddenStatesConnector",
                "kv_connector_module_path": f"{__package__}.connector",
            }
        options = {
            "enforce_eager": on_cpu,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "skip_tokenizer_init": True,  # ids in, files out
            "generation_config": "vllm",  # the model's own sampling defaults must not leak in
            "max_num_batched_tokens": setup["max_model_len"],
            **engine_options(setup["target"]),
            **setup["engine_extra"],
        }
        self.llm = vllm.LLM(
            model=setup["target"],
            dtype=setup["dtype"],
            max_model_len=setup["max_model_len"],
            max_num_seqs=setup["max_num_seqs"],
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
            **options,
        )
        second = getattr(self.llm.llm_engine.vllm_config, "use_v2_model_runner", False)
        self.info = {
            "version": vllm.__version__,
            "runner": "V2" if second else "V1",
            "device": current_platform.device_type,
            "corrections": [CORRECTION] if on_cpu else [],
        }

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Runs prompts; where their states are, and the token after each with its log probability.

        A file `<path>.lock` beside one of states is locked until the states are whole.
        """
        ask = check_ask({**ask, "max_new_tokens": 1}, self.setup)
        results = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in ask["prompts"]],
            self.vllm.SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, detokenize=False),
            use_tqdm=False,
        )
        tokens = [result.outputs[0].token_ids[0] for result in results]
        first = [result.outputs[0].logprobs[0] for result in results]
        return {
            "files": [result.kv_transfer_params["hidden_states_path"] for result in results],
            "tokens": tokens,
            "logprobs": [found[token].logprob for found, token in zip(first, tokens, strict=True)],
        }
