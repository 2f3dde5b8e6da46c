"""The parts of a decode step's bandwidth floor: the bytes of its weights, and the rate of a copy.

A step of few rows is bound by reading weights: the target's once, and the head's once per pass. A
chain head has one pass per draft, a parallel head one pass for all. The fc of EAGLE3 runs in the
first pass only; later passes get the head's own output.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import nn

from draftlab.heads.head import DraftHead
from draftlab.target_model.model import Target

COPY_BYTES = 2**30
COPIES = 20


@lru_cache
def copy_rate(device: torch.device) -> float | None:
    """Return the bytes per second of a large copy on the device, reads plus writes.

    The rate is the best of `COPIES`. It is None on a CPU, whose caches can hold the weights of
    small models, and if the device has no memory for the copy.
    """
    if device.type != "cuda":
        return None
    size = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    if size < COPY_BYTES // 16:
        return None
    source = torch.empty(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    times = []
    stream = torch.cuda.current_stream(device)
    for _ in range(COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        copy.copy_(source)
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * size / min(times)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def target_bytes(target: Target) -> int:
    """Return the bytes of target weights that a step reads.

    The embedding table counts only if it is also the output projection.
    """
    embeddings = target.model.get_input_embeddings().weight
    output = target.model.get_output_embeddings()
    tied = output is not None and output.weight.data_ptr() == embeddings.data_ptr()
    layers = [*target.decoder.parameters()]
    others = [] if output is None or tied else [*output.parameters()]
    return _bytes([*layers, *others]) - (0 if tied else _bytes([embeddings]))


def head_bytes(head: DraftHead, k: int) -> int:
    """Return the bytes of head weights, without embeddings, that drafting `k` tokens reads."""
    tables = {id(module.weight) for module in head.modules() if isinstance(module, nn.Embedding)}
    once = _bytes(p for p in head.parameters() if id(p) not in tables)
    if head.family.drafting == "parallel":
        markov = getattr(head, "markov_head", None)  # a DSpark head's bias, made for each draft
        return once + (k - 1) * _bytes([markov.markov_w2.weight] if markov else [])
    later = [] if head.fc_in_every_pass else head.fc.parameters()
    return k * once - (k - 1) * _bytes(later)
