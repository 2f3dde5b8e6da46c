"""Test by experiment whether a loaded model with recurrent layers can decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.check_capabilities import (
    WITHOUT_ENGINE,
    close_tolerance,
    ids_and_positions,
    raise_fault,
)
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.recurrent import unknown_recurrence

if TYPE_CHECKING:
    from draftlab.target_model.model import Target


def check_states(target: Target) -> None:
    """Raise a `UserError` if a model with recurrent layers cannot decode with rows of states."""
    if layer := unknown_recurrence(target.decoder):
        raise UserError(
            f"expected a convolution or a recurrence that draftlab can run for a few tokens, found "
            f"none in layer {layer}: its state cannot follow the accepted drafts",
            where=target.folder,
            do=WITHOUT_ENGINE,
        )
    close = close_tolerance(target)  # other tokens beside a row change the rounding of its experts
    raise_fault(target, "keeps a state of tokens that were rejected", _after_other_drafts, *close)
    raise_fault(target, "treats a row differently beside other rows", _beside_other_rows, *close)
    raise_fault(target, "computes other states token by token than at once", _in_steps, *close)


class _StateRows:
    """Rows of one target with pages and recurrent states, to run tokens in."""

    def __init__(self, target: Target, num_rows: int) -> None:
        self.target, width = target, 4
        self.cache = PagedCache(target.num_layers, num_rows * width + 1, 16, num_rows)
        blocks = torch.arange(1, num_rows * width + 1, dtype=torch.int32, device=target.device)
        self.table, self.ends = blocks.view(num_rows, width), [0] * num_rows
        self.rows = torch.arange(num_rows, device=target.device)

    def run(self, texts: list[list[int]], keep: list[int] | None = None) -> Tensor:
        """Run the rows' next tokens; return last states [B, M, Ht], those of padding undefined.

        Args:
            keep: tokens of each row that a verify step accepts; None: the texts are prompts.
        """
        width, device = max(len(text) for text in texts), self.target.device
        ids = torch.tensor([t + [0] * (width - len(t)) for t in texts], device=device)
        columns = torch.arange(width, device=device)
        ends = torch.tensor(self.ends, device=device)[:, None]
        lengths = [len(text) for text in texts]
        is_real = columns < torch.tensor(lengths, device=device)[:, None]
        positions = (ends + columns).where(is_real, -1)
        slots = slot_mapping(self.table, positions, 16)
        self.cache.at(self.table, positions, slots, self.rows, None if keep else lengths)
        ids = ids % self.target.vocab_size
        last = self.target.states(ids, positions=positions, cache=self.cache).last
        if keep:
            self.cache.states.keep(torch.tensor(keep, device=device))
        self.ends = [end + n for end, n in zip(self.ends, keep or lengths, strict=True)]
        return last


def _after_other_drafts(target: Target) -> tuple[Tensor, Tensor]:
    """Run the same continuation after steps in which different drafts were rejected."""
    states = []
    for drafts in ([9, 10], [30, 40]):
        rows = _StateRows(target, 1)
        rows.run([[5, 6, 7]])
        rows.run([[8, *drafts]], keep=[1])
        states.append(rows.run([[11, 12]], keep=[2]))
    return states[0], states[1]


def _beside_other_rows(target: Target) -> tuple[Tensor, Tensor]:
    """Run a row alone, and beside a longer and a shorter one that keep other numbers of tokens."""
    alone, beside = _StateRows(target, 1), _StateRows(target, 3)
    prompt, step = [5, 6, 7, 8, 9], [20, 21, 22]
    others = [list(range(30, 41)), [50]]
    alone.run([prompt])
    beside.run([others[0], prompt, others[1]])
    alone.run([step], keep=[2])
    beside.run([[60, 61, 62], step, [63, 64, 65]], keep=[3, 2, 1])
    last = alone.run([step], keep=[1])
    return last[0], beside.run([[70, 71], step, [72]], keep=[1, 1, 1])[1]


def _in_steps(target: Target) -> tuple[Tensor, Tensor]:
    """Run a text at once and without a cache, and as a prompt and verify steps."""
    text = list(range(5, 36))
    at_once = target.states(ids_and_positions(target, text, 0)[0]).last
    rows = _StateRows(target, 1)
    states = [rows.run([text[:18]])]
    for start in range(18, len(text), 3):
        tokens = text[start : start + 3]
        states.append(rows.run([tokens], keep=[len(tokens)]))
    return at_once, torch.cat(states, 1)
