"""vLLM's connector that writes hidden states, for its CPU build."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm_own


class _CompletedEvent:
    """A stand-in for a CUDA event that has completed."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(vllm_own.ExampleHiddenStatesConnector):
    """vLLM's own connector, without the CUDA streams and pinned memory of its copies."""

    def _submit_async_write(self, pending: Any) -> None:
        size = self._block_size
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
        states = vllm_own.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        save_file(tensors, pending.filename)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = _CompletedEvent()
