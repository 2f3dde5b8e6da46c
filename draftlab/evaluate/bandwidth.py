"""The bandwidth floor of a decode step: its weights, each read once, at the device's copy rate.

A step of few rows is bound by reading weights: the target's once, and the head's once a pass, of
which a chain has one for each draft and a parallel head one for all. The fc of EAGLE3 runs in the
first pass only, later ones are fed the head's own output. Keys and values are left out (they are
small at the lengths that are timed), so the floor is a floor.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import nn

from draftlab.heads.eagle import EagleHead
from draftlab.heads.head import DraftHead
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target

COPY_BYTES = 2**30
COPIES = 20


@lru_cache
def copy_rate(device: torch.device) -> float | None:
    """Bytes a second that a large copy on the device moves, reads and writes counted.

    The best of `COPIES`. None on a CPU, where caches make weights of small models no memory
    traffic, and where the device has no room for the copy.
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


def target_bytes(target: Target) -> int | None:
    """Bytes of target weights that a step reads.

    A table that is only looked up is not read; one that is also the output projection is. None for
    mixtures of experts, which read what their router picks.
    """
    if any(getattr(target.config, name, None) for name in ("num_experts", "num_local_experts")):
        return None
    table = target.model.get_input_embeddings().weight
    output = target.model.get_output_embeddings()
    tied = output is not None and output.weight.data_ptr() == table.data_ptr()
    layers = [*target.decoder.parameters()]
    others = [] if output is None or tied else [*output.parameters()]
    return _bytes([*layers, *others]) - (0 if tied else _bytes([table]))


def head_bytes(head: DraftHead, k: int) -> int:
    """Bytes of head weights that drafting `k` tokens reads, embeddings aside."""
    once = _bytes(p for name, p in head.named_parameters() if not name.startswith("embed_tokens"))
    if isinstance(head, PeagleHead):
        return once
    later = [] if isinstance(head, EagleHead) else head.fc.parameters()
    return k * once - (k - 1) * _bytes(later)


def floor_ms(target: Target, head: DraftHead | None, k: int) -> float | None:
    """Milliseconds a step takes at least; None where the device or the target gives none."""
    rate, weights = copy_rate(target.device), target_bytes(target)
    if rate is None or weights is None:
        return None
    return 1e3 * (weights + (head_bytes(head, k) if head and k else 0)) / rate
