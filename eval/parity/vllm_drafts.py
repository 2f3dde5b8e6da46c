"""Decode with vLLM and report its draft tokens. `parity_vllm.py` runs it in vLLM's environment.

    python eval/parity/vllm_drafts.py REQUEST ANSWER

A request has the folder that contains draftlab's client, the client's setup, prompts, and the
sampling of each. The answer has the client's answer to each prompt, with the drafted tokens of each
step in `drafts`, [steps, K].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer the request, the only one of a process: vLLM is corrected for its method."""
    request = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, request["client"])
    from vllm_client.generation import Decoder
    from vllm_client.loading import SETUP
    from vllm_client.serve import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    decoder = Decoder({**SETUP, **request["setup"]})
    worker = decoder.llm.llm_engine.model_executor.driver_worker.worker
    drafts = record(worker.model_runner)
    answers = []
    for prompt, sampling in zip(request["prompts"], request["sampling"], strict=True):
        drafts.clear()
        answer = decoder.answer({"prompts": [prompt], "sampling": [sampling]})
        answers.append(answer | {"drafts": list(drafts)})
    Path(sys.argv[2]).write_text(json.dumps({"info": decoder.info, "answers": answers}))


def record(runner: Any) -> list[list[int]]:
    """Return a list that gets the drafts of each step of a runner, V1 or V2."""
    drafts: list[list[int]] = []
    drafter = getattr(runner, "speculator", None) or runner.drafter
    propose = drafter.propose

    def recorded(*arguments: Any, **options: Any) -> Any:
        tokens = propose(*arguments, **options)
        drafts.append(tokens[0].tolist())
        return tokens

    drafter.propose = recorded
    return drafts


if __name__ == "__main__":
    main()
