"""The client program: reads lines, answers lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from .generation import Served
from .hidden_states import StatesServed
from .request import NO_VLLM, UNUSABLE, RequestError, check_setup

# Read when vllm is imported. The caller's own choice wins.
ENVIRONMENT = {
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


def serve(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> int:
    """Reads the setup and asks from `lines` until they end; returns the exit status."""
    try:
        setup = check_setup(json.loads(lines.readline()))
        served = StatesServed(setup) if setup["boundaries"] else Served(setup)
        answer(served.info)
        for line in lines:
            answer(served.answer(json.loads(line)))
    except RequestError as error:
        print(f"vllm_client: {error}", file=sys.stderr)
        return UNUSABLE
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):
            raise
        print(f"vllm_client: {error} in {sys.executable}", file=sys.stderr)
        return NO_VLLM
    return 0


def main() -> int:
    """Takes standard output for the answers, and sends everybody else's to standard error."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return serve(sys.stdin, lambda value: print(json.dumps(value), file=answers, flush=True))
