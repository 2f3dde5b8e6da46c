"""A stand-in for vLLM in tests of recording: a target in this process."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftlab.kernels.cpu_float32_products import onednn_products
from draftlab.target_model.model import Target


class StandIn:
    """A `VllmProcess` that answers at once and writes files later, locked as vLLM locks them.

    Args:
        setups: receives the setup of each start, and {"closed": True} at each end.
        faults: nan, missing: the number of a prompt whose states have NaN, or are not written;
            truncated: whether files lack the last token id; logprob_error: added to the answers.
    """

    # `Target.states` hooks the layers of the model, which several stand-ins share.
    target_lock = threading.Lock()
    python = Path("stand-in")

    def __init__(self, target: Target, setups: list[dict[str, Any]], **faults: Any) -> None:
        self.target, self.setups, self.faults = target, setups, faults
        self.num_prompts = 0
        self.writers: list[threading.Thread] = []

    def __call__(self, setup: dict[str, Any], *_: Any) -> StandIn:
        self.setups.append(setup)
        return self

    def describe(self) -> str:
        return "stand-in"

    def close(self) -> None:
        for writer in self.writers:
            writer.join()
        self.setups.append({"closed": True})

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"files": [], "tokens": [], "logprobs": []}
        boundaries = tuple(self.setups[0]["boundaries"])
        for ids in message["prompts"]:
            # A process of its own computes alike, whatever this one does meanwhile.
            with self.target_lock, onednn_products(self.target.device):
                states = self.target.states(torch.tensor([ids]), boundaries)
            features = states.features[0].view(len(ids), -1, self.target.hidden_size).clone()
            logprobs = self.target.logits(states.last[0, -1]).log_softmax(-1)
            answer["tokens"].append(int(logprobs.argmax()))
            logprob = float(logprobs.max()) + self.faults.get("logprob_error", 0.0)
            answer["logprobs"].append(logprob)
            number = self.num_prompts
            self.num_prompts += 1
            file = Path(self.setups[0]["states_folder"]) / f"{number}.safetensors"
            if self.faults.get("nan") == number:
                features[0, 1] = float("nan")
            if self.faults.get("missing") != number:
                self._write(file, features, ids[:-1] if self.faults.get("truncated") else ids)
            answer["files"].append(str(file))
        return answer

    def _write(self, file: Path, states: torch.Tensor, ids: Sequence[int]) -> None:
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write_late() -> None:
            time.sleep(0.02)
            save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, file)
            os.close(lock)

        self.writers.append(threading.Thread(target=write_late))
        self.writers[-1].start()
