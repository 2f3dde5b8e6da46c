"""The client's main loop: one answer for each line of input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from .generation import Decoder
from .hidden_states import HiddenStateWriter
from .loading import INVALID_REQUEST, NO_VLLM, SETUP, RequestError

# Read when vllm is imported. Variables that are already set win.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process: its counters can be read, and corrections made here reach the sampler.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def serve(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> int:
    """Answer the setup and the requests in `lines`, and return the exit status."""
    try:
        setup = {**SETUP, **json.loads(lines.readline())}
        engine = HiddenStateWriter(setup) if setup["boundaries"] else Decoder(setup)
        answer(engine.info)
        for line in lines:
            answer(engine.answer(json.loads(line)))
    except RequestError as error:
        print(f"vllm_client: {error}", file=sys.stderr)
        return INVALID_REQUEST
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):
            raise
        print(f"vllm_client: {error} in {sys.executable}", file=sys.stderr)
        return NO_VLLM
    return 0


def main() -> int:
    """Serve standard input, with standard output for answers only, and return the exit status."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return serve(sys.stdin, lambda value: print(json.dumps(value), file=answers, flush=True))
