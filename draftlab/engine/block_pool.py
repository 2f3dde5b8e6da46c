"""Allocation of the blocks of a paged KV cache, on the host.

Block 0 is never allocated: block tables are padded with it. It is never written, and it is read
only for drafts that cannot be verified any more.
"""

from __future__ import annotations

from draftlab.errors import UserError


class BlockPool:
    """The free and the allocated ones of blocks 1 … num_blocks.

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
            UserError: a block is free already (a bug: two owners would share it).
        """
        if unknown := set(blocks) - self._allocated:
            raise UserError(f"blocks {sorted(unknown)} were freed twice: please report this")
        self._allocated.difference_update(blocks)
        self._free.extend(sorted(blocks, reverse=True))
        blocks.clear()
