"""A target whose states are a known function of token and position, and stores recorded from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftlab.progress import Monitor
from draftlab.store.record import RecordSettings, record
from draftlab.store.sample_table import Sample
from draftlab.store.store import Store, StoreIdentity
from draftlab.target_model.hidden_states import HiddenStates
from draftlab.target_model.packed_rows import PackedRow

VOCAB, WIDTH, BOUNDARIES = 50, 4, (1, 3)


class TableTarget:
    """The part of a `Target` that recording uses."""

    num_layers, hidden_size, vocab_size, max_length = 6, WIDTH, VOCAB, 1000
    name, fingerprint, folder = "table", "f" * 64, Path("table")
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, padding_reason: str | None = None) -> None:
        self.padding_reason = padding_reason

    def states(
        self, ids: torch.Tensor, boundaries: tuple[int, ...], packed_row: PackedRow | None = None
    ) -> HiddenStates:
        assert (packed_row is None) == (self.padding_reason is not None)
        positions = torch.arange(ids.shape[-1]) if packed_row is None else packed_row.positions
        features = [self.state(ids, b, positions) for b in boundaries]
        return HiddenStates(torch.cat(features, -1), self.state(ids, self.num_layers, positions))

    def state(
        self, ids: torch.Tensor, boundary: int, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = torch.arange(ids.shape[-1]) if positions is None else positions
        token_terms = ids * 3 + positions.expand_as(ids) * 7 + boundary * 11
        return token_terms[..., None].float() / 16 + torch.arange(WIDTH)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        return torch.sin(last[..., :1] * torch.arange(1, VOCAB + 1))


TARGET: Any = TableTarget()
SETTINGS = RecordSettings(dtype="float32", shard_tokens=30, batch_tokens=25)
IDENTITY = StoreIdentity.of(
    TARGET, tokenizer_sha256="tok", template_sha256="tpl", boundaries=BOUNDARIES, dtype="float32"
)


def record_table(
    folder: Path, samples: list[Sample], target: Any = TARGET, **changes: Any
) -> Store:
    settings = SETTINGS.model_copy(update=changes)
    identity = replace(IDENTITY, dtype=settings.dtype)
    return record(target, samples, folder, settings, identity, monitor=Monitor())


def samples_of_lengths(lengths: list[int], prefix: str = "s") -> list[Sample]:
    """Make samples with these lengths, which are one answer from the second token on."""
    return [
        Sample(f"{prefix}{i}", tuple((i + t) % VOCAB for t in range(n)), (0,) + (1,) * (n - 1), 0.5)
        for i, n in enumerate(lengths)
    ]
