"""The blocks of the KV cache: which are free, and how many there are.

There are as many as a batch can use, but no more than memory holds. With fewer, the scheduler runs
fewer requests at once and preempts the ones admitted last; the tokens do not change.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from draftlab.errors import UserError
from draftlab.formatting import count_text, size_text
from draftlab.heads.head import DraftHead
from draftlab.kernels.devices import free_memory
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache

RESERVE = 0.2
"""Share of the free memory that is left for activations, logits and CUDA graphs."""
CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own memory limit (cgroup v2)."""


class BlockPool:
    """The free and the allocated ones of blocks 1 … num_blocks of a paged KV cache.

    Block 0 is never allocated: block tables are padded with it. It is never written, and it is read
    only for drafts that cannot be verified any more.

    Args:
        num_blocks: blocks to allocate; the cache has one more.
        block_size: positions in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))  # the lowest number is allocated first
        self._allocated: set[int] = set()

    def allocate(self, blocks: list[int], positions: int) -> bool:
        """Extend `blocks` in place to hold `positions`; return False, unchanged, if it cannot."""
        count = max(-(-positions // self.block_size) - len(blocks), 0)
        if count > len(self._free):
            return False
        new = [self._free.pop() for _ in range(count)]
        self._allocated.update(new)
        blocks.extend(new)
        return True

    def free(self, blocks: list[int]) -> None:
        """Free all blocks of an owner; `blocks` is empty afterwards.

        Raises:
            RuntimeError: a block is free already, and two sequences would share it.
        """
        if unknown := set(blocks) - self._allocated:
            raise RuntimeError(f"blocks {sorted(unknown)} were freed twice")
        self._allocated.difference_update(blocks)
        self._free.extend(sorted(blocks, reverse=True))
        blocks.clear()


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device; torch's unused ones count as free."""
    if device.type != "cuda":
        return _available_on_host()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _available_on_host() -> int:
    """Return the free bytes of the machine, or of a container with a lower limit."""
    available = psutil.virtual_memory().available
    try:
        limit, usage = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or the limit is "max"
        return available
    # As psutil does, count cached files as free: the kernel drops them when memory is needed.
    return min(available, max(0, limit - usage + int(stat.get("inactive_file", 0))))


def draft_kv_bytes(head: DraftHead) -> int:
    """Return the bytes of one position's keys and values in a head."""
    config, itemsize = head.config, head.fc.weight.dtype.itemsize
    return 2 * config.num_layers * config.num_key_value_heads * config.head_dim * itemsize


def new_kv_pool(
    target: Target,
    *,
    batch: int,
    max_length: int,
    draft_bytes: int = 0,
    block_size: int | None = None,
    num_blocks: int | None = None,
    monitor: Monitor | None = None,
) -> PagedCache:
    """Return an empty KV cache of the target for engines that take turns.

    Args:
        batch, max_length, block_size, num_blocks: see `Engine`; block 0 is added.
        draft_bytes: bytes of a position in the draft KV caches of all these engines.
        monitor: told if memory holds fewer blocks than the batch can use.

    Raises:
        UserError: not even one sequence of `max_length` positions fits.
    """
    block_size = block_size or (64 if target.device.type == "cuda" else max_length)
    width = -(-max_length // block_size)
    if num_blocks is None:
        wanted = batch * width
        fitting = _blocks_that_fit(target, draft_bytes, batch, block_size, width)
        num_blocks = min(wanted, fitting)
        if num_blocks < wanted and monitor is not None:
            monitor.say(
                f"KV cache: free memory holds {num_blocks * block_size:,} tokens, and "
                f"{count_text(batch, 'request')} of {max_length:,} can use "
                f"{wanted * block_size:,}: requests wait, or are evicted and computed again. The "
                "tokens stay the same; it takes longer"
            )
    if num_blocks < width:
        raise UserError(
            f"expected a pool of at least {width} blocks of {block_size} positions for a sequence "
            f"of {max_length}, found {num_blocks}",
            do="give the engine more blocks or a shorter max_length",
        )
    return target.new_paged_cache(num_blocks + 1, block_size, num_rows=batch + 1)


def _blocks_that_fit(
    target: Target, draft_bytes: int, batch: int, block_size: int, width: int
) -> int:
    """Return how many blocks the free memory of the target's devices holds, without block 0.

    It holds the recurrent states of all requests and of the dummy first.

    Raises:
        UserError: they are fewer than `width`, those of one sequence.
    """
    if target.device.type == "cuda":
        free_memory()  # pools of earlier engines
    sizes = target.kv_bytes | {target.device: target.kv_bytes[target.device] + draft_bytes}
    states = {device: (batch + 1) * target.state_bytes.get(device, 0) for device in sizes}
    fits = {
        device: int((1 - RESERVE) * available_bytes(device) - states[device])
        // (block_size * max(size, 1))
        - 1
        for device, size in sizes.items()
    }
    device = min(fits, key=fits.__getitem__)
    if fits[device] < width:
        one = (width + 1) * block_size * sizes[device]
        beside = lower_batch = ""
        if kept := states[device]:
            beside = f", beside {size_text(kept)} of recurrent states of {batch:,} requests"
            lower_batch = "lower the batch (regenerate.batch, eval.batch, eval.timing_batches), "
        raise UserError(
            f"expected memory for the keys and values of one sequence, {size_text(one)} for "
            f"{width * block_size:,} positions{beside}, found {size_text(available_bytes(device))} "
            f"free on {device}, of which {RESERVE:.0%} are reserved",
            do=f"{lower_batch}lower the lengths (regenerate.max_new_tokens, eval.max_new_tokens, "
            "the longest prompt), raise target.gpus, or end other programs on the device",
        )
    return fits[device]
