"""Who owns which block of the key-value pool: the host's books, no tensors.

Block 0 is nobody's: tables are filled with it where a row owns nothing yet, it is never written,
and what it holds is only read for drafts that cannot be verified any more.
"""

from __future__ import annotations

from draftlab.errors import UserError


class BlockPool:
    """Hands out block numbers 1 … num_blocks.

    Args:
        num_blocks: blocks to own; the tensors need one more.
        block_size: positions in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks, 0, -1))  # the lowest number is handed out first
        self._owned: set[int] = set()

    def missing(self, owned: list[int], positions: int) -> int:
        """How many blocks an owner of `owned` lacks for `positions` positions."""
        return max(-(-positions // self.block_size) - len(owned), 0)

    def grow(self, owned: list[int], positions: int) -> bool:
        """Extends `owned` in place to hold `positions`; False, with nothing taken, if it cannot."""
        count = self.missing(owned, positions)
        if count > len(self._free):
            return False
        taken = [self._free.pop() for _ in range(count)]
        self._owned.update(taken)
        owned.extend(taken)
        return True

    def release(self, owned: list[int]) -> None:
        """Takes all blocks of an owner back; `owned` is empty afterwards.

        Raises:
            UserError: when a block was free already (a bug: two owners would share it).
        """
        if unknown := set(owned) - self._owned:
            raise UserError(f"blocks {sorted(unknown)} were given back twice: please report this")
        self._owned.difference_update(owned)
        self._free.extend(sorted(owned, reverse=True))
        owned.clear()
