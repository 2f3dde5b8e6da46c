"""vLLM's writer of hidden states, for its CPU build."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as shipped


class _Copied:
    """A CUDA event that has happened."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(shipped.ExampleHiddenStatesConnector):
    """The shipped connector, without the CUDA streams and pinned memory that it copies with."""

    def _submit_async_write(self, pending: Any) -> None:
        size = self._block_size
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
        count = len(pending.token_ids)
        states = shipped.extract_from_kv_cache(self._kv_cache, slots, count)
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        save_file(tensors, pending.filename)
        held = self._lock_fds.pop(pending.req_id, None)
        if held is not None:
            os.close(held)
        self._req_copy_events[pending.req_id] = _Copied()
