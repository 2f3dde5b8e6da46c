"""What one forward pass records: boundary states, and a summary of the target's distributions.

`HiddenStateExtractor` makes all of it on the target's device without the host waiting for it, and
then copies it
to pinned memory on a stream of its own, so that the next pass runs while this one's states travel.
`vllm/hidden_states.py` is the other `Source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.fp8 import E4M3, quantise
from draftlab.store.manifest import Manifest, Shard, StoreIdentity
from draftlab.store.plan import SIDE_BY_SIDE
from draftlab.store.store import DTYPES, NO_TEACHER, Sample, teachers
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.target_model.packed_rows import Documents, sent

LOGITS_AT_ONCE = 64 * 2**20  # elements; the full-vocabulary logits of a whole batch never exist


@dataclass(frozen=True)
class ExtractedStates:
    """What one pass recorded, on the host.

    Attributes:
        tensors: features, last, logsumexp, argmax as a shard has them, [n, …] of n tokens of all
            samples in order; with fp8 also scales [n, …], error and square [F] (`store/fp8.py`).
        finite: bool [n, boundaries + 2]: each boundary's states, the last state, the logits.
    """

    tensors: dict[str, Tensor]
    finite: Tensor


Pending = Callable[[], ExtractedStates]
"""A pass that was asked for; called once, by any thread, it blocks until its states are there."""


class Source(Protocol):
    """Where a recording's states come from."""

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[Pending]:
        """The states of a shard's samples, batch by batch as its plan cuts them.

        Raises:
            UserError: they cannot be computed.
        """


class HiddenStateExtractor:
    """Runs the target over batches and has what they record copied to the host.

    Args:
        target: whose states are recorded.
        plan: of the recording; it says whether the records of a pass lie side by side in one row.

    Raises:
        UserError: they are to lie side by side, and the target keeps them from it.
    """

    def __init__(self, target: Target, plan: Manifest) -> None:
        self.target, self.identity = target, plan.identity
        self.padded = not plan.settings.get(SIDE_BY_SIDE, False)
        if not self.padded and (reason := target.why_padded) is not None:
            raise UserError(
                "this store was begun with conversations side by side in a pass, and here the "
                f"target {reason}",
                do="go on with the versions and on the device it was begun with, or name another "
                "store folder",
            )
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[Pending]:
        """See `Source`: a forward pass each."""
        for batch in shard.batches:
            yield self([samples[i] for i in batch])

    @torch.inference_mode()
    def __call__(self, samples: Sequence[Sample]) -> Pending:
        """One forward pass.

        Raises:
            UserError: it does not fit the device.
        """
        asked = asked_positions(samples)
        try:
            features, last = self._rows(samples) if self.padded else self._row(samples)
            asked = sent(asked, last.device)
            return self._copied(*stored(self.target, self.identity, features, last, asked))
        except torch.OutOfMemoryError as error:
            tokens = sum(len(sample.token_ids) for sample in samples)
            raise UserError(
                f"a forward pass of {len(samples)} conversations, {tokens:,} tokens in all, does "
                f"not fit: {error}",
                do="lower record.batch_tokens (or record.max_length)",
            ) from None

    def _row(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Features [n, F] and last states [n, Ht] of all samples' tokens, side by side in a row."""
        device = self.target.device
        ids = torch.tensor([token for sample in samples for token in sample.token_ids])
        documents = Documents.of([len(sample.token_ids) for sample in samples], device)
        states = self.target.states(
            sent(ids[None], device), self.identity.boundaries, documents=documents
        )
        return states.features[0], states.last[0]

    def _rows(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """The same by right-padded rows; padding is taken out again on the device."""
        lengths = torch.tensor([len(s.token_ids) for s in samples])
        ids = torch.zeros(len(samples), int(lengths.max()), dtype=torch.long)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        real = (torch.arange(ids.shape[1]) < lengths[:, None]).flatten().nonzero()[:, 0]
        states = self.target.states(sent(ids, self.target.device), self.identity.boundaries)
        real = sent(real, states.last.device)
        return states.features.flatten(0, 1)[real], states.last.flatten(0, 1)[real]

    def _copied(self, made: dict[str, Tensor], finite: Tensor) -> Pending:
        """Starts the copies to the host."""
        device = finite.device
        if device.type == "cpu":
            return lambda: ExtractedStates(made, finite)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        host = {}
        with torch.cuda.stream(stream):
            for name, values in (made | {"finite": finite}).items():
                # Pinned memory comes from torch's cache, which waits for copies under way.
                host[name] = torch.empty_like(values, device="cpu", pin_memory=True)
                host[name].copy_(values, non_blocking=True)
                values.record_stream(stream)
            ready = torch.cuda.Event()
            ready.record(stream)
        copied = ExtractedStates(host, host.pop("finite"))

        def arrived() -> ExtractedStates:
            ready.synchronize()
            return copied

        return arrived


def asked_positions(samples: Sequence[Sample]) -> Tensor:
    """Which of all samples' positions, side by side, have a distribution to learn from: int64."""
    return torch.cat([teachers(torch.tensor(s.spans)) for s in samples]).nonzero()[:, 0]


def stored(
    target: Target | TargetMetadata,
    identity: StoreIdentity,
    features: Tensor,
    last: Tensor,
    asked: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of `ExtractedStates`, made of states as the target computed them, on their
    device.

    Args:
        features, last: [n, F] and [n, Ht]. asked: int64, positions with a teacher.
    """
    boundaries, kinds = len(identity.boundaries), DTYPES[identity.dtype]
    made = {"last": last.to(kinds.last)}
    if kinds.features is E4M3:
        quantised = quantise(features, boundaries)
        made |= vars(quantised) | {"features": quantised.codes}
        del made["codes"]
    else:  # rounded first: bfloat16 makes infinities of the largest float32
        made["features"] = features = features.to(kinds.features)
    sums, tokens = summarise(target, last[asked])
    made["logsumexp"] = torch.full_like(last[:, 0], NO_TEACHER[0], dtype=torch.float32)
    made["argmax"] = torch.full_like(last[:, 0], NO_TEACHER[1], dtype=torch.int32)
    certain = torch.ones_like(last[:, 0], dtype=torch.bool)
    made["logsumexp"][asked], made["argmax"][asked] = sums, tokens.int()
    certain[asked] = sums.isfinite()
    by_boundary = features.isfinite().view(len(last), boundaries, last.shape[-1]).all(-1)
    by_last = made["last"].isfinite().all(-1)
    return made, torch.cat([by_boundary, by_last[:, None], certain[:, None]], -1)


def summarise(target: Target | TargetMetadata, last: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp float32 [n] and argmax int64 [n] of the full distributions of last states [n, Ht].

    Give it the states as the target computed them, not as they are stored, so that argmax is the
    token the target itself emits. torch.argmax gives the first of equal maxima: the lowest id.
    """
    rows = max(1, LOGITS_AT_ONCE // target.vocab_size)
    sums, tokens = [], []
    for part in last.split(rows):
        logits = target.logits(part)
        sums.append(logits.logsumexp(-1))
        tokens.append(logits.argmax(-1))
    return torch.cat(sums), torch.cat(tokens)


def not_finite(
    captured: ExtractedStates, samples: Sequence[Sample], identity: StoreIdentity
) -> dict[int, str]:
    """Where each sample (by its number) of a captured batch first has NaN or infinity."""
    if bool(captured.finite.all()):
        return {}
    found = {}
    lengths = [len(sample.token_ids) for sample in samples]
    for number, finite in enumerate(captured.finite.split(lengths)):
        bad = (~finite).T.nonzero()
        if len(bad):
            # One NaN spreads to every position in the next layer: the lowest boundary tells most.
            column, position = bad[0].tolist()
            names = [*identity.boundaries, f"{identity.num_layers} (last)"]
            place = f"boundary {names[column]}" if column < len(names) else "the logits"
            found[number] = f"{place}, position {position}"
    return found
