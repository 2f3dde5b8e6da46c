"""What takes vLLM's place in tests of recording: a target in this process."""

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

from draftlab.target_model.model import Target


class StandIn:
    """In vLLM's place: answers at once and writes files later, locked as its connector's are."""

    # `Target.states` hooks the layers of the model, which several stand-ins share.
    target_lock = threading.Lock()

    def __init__(self, target: Target, setups: list[dict[str, Any]], **faults: Any) -> None:
        self.target, self.setups, self.faults = target, setups, faults
        self.asked = 0
        self.writers: list[threading.Thread] = []

    def __call__(self, setup: dict[str, Any], *_: Any) -> StandIn:
        self.setups.append(setup)
        return self

    def line(self) -> str:
        return "stand-in"

    def close(self) -> None:
        for writer in self.writers:
            writer.join()
        self.setups.append({"closed": True})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"files": [], "tokens": [], "logprobs": []}
        for ids in question["prompts"]:
            with self.target_lock:
                states = self.target.states(
                    torch.tensor([ids]), tuple(self.setups[0]["boundaries"])
                )
            wide = states.features[0].view(len(ids), -1, self.target.hidden_size).clone()
            chances = self.target.logits(states.last[0, -1]).log_softmax(-1)
            answer["tokens"].append(int(chances.argmax()))
            answer["logprobs"].append(float(chances.max()) + self.faults.get("chance", 0.0))
            file = Path(self.setups[0]["states_folder"]) / f"{self.asked}.safetensors"
            self.asked += 1
            if self.asked - 1 == self.faults.get("nan"):
                wide[0, 1] = float("nan")
            if self.faults.get("missing") != self.asked - 1:
                self._write(file, wide, ids[:-1] if self.faults.get("cut") else ids)
            answer["files"].append(str(file))
        return answer

    def _write(self, file: Path, states: torch.Tensor, ids: Sequence[int]) -> None:
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def late() -> None:
            time.sleep(0.02)
            save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, file)
            os.close(lock)

        self.writers.append(threading.Thread(target=late))
        self.writers[-1].start()
