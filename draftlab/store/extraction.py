"""The states of a forward pass: boundary states, and a summary of the target's distributions.

`HiddenStateExtractor` computes them on the target's device without synchronising the host. It
copies them to pinned memory on a side stream, so that the next pass overlaps with the copy.
`servers/vllm_hidden_states.py` has the other `StateSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.kernels.cpu_float32_products import onednn_products
from draftlab.kernels.devices import copy_to_device
from draftlab.store.fp8 import E4M3, quantise
from draftlab.store.manifest import STATES, Manifest, Shard, StoreIdentity
from draftlab.store.recording_plan import SIDE_BY_SIDE, batches_of
from draftlab.store.sample_table import NO_TEACHER, Sample, teacher_mask
from draftlab.target_model.images import image_ids
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.target_model.packed_rows import PackedRow

MAX_LOGITS = 64 * 2**20  # elements at once, so that no batch's full-vocabulary logits exist


@dataclass(frozen=True)
class ExtractedStates:
    """The states of a forward pass, on the host.

    Attributes:
        tensors: features, last, logsumexp and argmax in a shard's dtypes, [n, …] for the n tokens
            of all samples in order; with fp8 also scales [n, b], and error and square [F]
            (`quantise`).
        finite: bool [n, boundaries + 2]: each boundary's states, the last state, the logits.
    """

    tensors: dict[str, Tensor]
    finite: Tensor


StatesFuture = Callable[[], ExtractedStates]
"""A submitted pass. Any thread calls it once; the call blocks until the states are on the host."""


class StateSource(Protocol):
    """What computes the states of a recording."""

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[StatesFuture]:
        """Yield the states of a shard's samples, in the batches of its plan; raise a `UserError`
        if they cannot be computed.
        """


class HiddenStateExtractor:
    """Runs forward passes of the target and copies their states to the host.

    If the plan's passes hold records side by side in one row, and the target does not support that,
    it raises a `UserError`.
    """

    def __init__(self, target: Target, plan: Manifest) -> None:
        self.target, self.plan, self.identity = target, plan, plan.identity
        self.padded = not plan.settings.get(SIDE_BY_SIDE, False)
        if not self.padded and (reason := target.padding_reason) is not None:
            raise UserError(
                "the recording of this store was begun with conversations side by side in a "
                f"forward pass, and here the target {reason}",
                do="continue with the library versions and the device that it was begun with, or "
                "name another store folder",
            )
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[StatesFuture]:
        """Yield each batch's states (see `StateSource`) after submitting its forward pass."""
        for batch in batches_of(self.plan, shard):
            yield self.submit([samples[i] for i in batch])

    @torch.inference_mode()
    def submit(self, samples: Sequence[Sample]) -> StatesFuture:
        """Submit one forward pass; raise a `UserError` if it runs out of device memory."""
        positions = teacher_positions(samples)
        try:
            forward = self._forward_padded if self.padded else self._forward_packed
            with onednn_products(self.target.device):
                features, last = forward(samples)
                positions = copy_to_device(positions, last.device)
                states, finite = states_to_store(
                    self.target, self.identity, features, last, positions
                )
            return self._copy_to_host(states, finite)
        except torch.OutOfMemoryError as error:
            tokens = sum(len(sample.token_ids) for sample in samples)
            raise UserError(
                f"a forward pass of {len(samples)} conversations, {tokens:,} tokens in all, does "
                f"not fit: {error}",
                do="lower record.batch_tokens (or record.max_length)",
            ) from None

    def _forward_packed(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return features [n, F] and last states [n, Ht] from all samples in one packed row."""
        device = self.target.device
        ids = torch.from_numpy(np.concatenate([self._ids(sample) for sample in samples])).long()
        packed_row = PackedRow.of([len(sample.token_ids) for sample in samples], device)
        states = self.target.states(
            copy_to_device(ids[None], device), self.identity.boundaries, packed_row=packed_row
        )
        return states.features[0], states.last[0]

    def _forward_padded(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return the same from right-padded rows. Padding is removed on the device."""
        lengths = torch.tensor([len(sample.token_ids) for sample in samples])
        ids = torch.zeros(len(samples), int(lengths.max()), dtype=torch.long)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.token_ids)] = torch.tensor(self._ids(sample))
        unpadded = (torch.arange(ids.shape[1]) < lengths[:, None]).flatten().nonzero()[:, 0]
        states = self.target.states(
            copy_to_device(ids, self.target.device), self.identity.boundaries
        )
        unpadded = copy_to_device(unpadded, states.last.device)
        return states.features.flatten(0, 1)[unpadded], states.last.flatten(0, 1)[unpadded]

    def _ids(self, sample: Sample) -> Sequence[int] | np.ndarray:
        """Return the ids of a sample, which may be cut, by which the target reads its images."""
        return image_ids(self.target, sample.token_ids, sample.images, prompt=False)

    def _copy_to_host(self, states: dict[str, Tensor], finite: Tensor) -> StatesFuture:
        """Start the copies to the host."""
        device = finite.device
        if device.type == "cpu":
            return lambda: ExtractedStates(states, finite)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        host = {}
        with torch.cuda.stream(stream):
            for name, values in (states | {"finite": finite}).items():
                # torch's cache of pinned memory waits for copies in flight before it reuses any.
                host[name] = torch.empty_like(values, device="cpu", pin_memory=True)
                host[name].copy_(values, non_blocking=True)
                values.record_stream(stream)
            copied = torch.cuda.Event()
            copied.record(stream)
        extracted = ExtractedStates(host, host.pop("finite"))

        def wait() -> ExtractedStates:
            copied.synchronize()
            return extracted

        return wait


def teacher_positions(samples: Sequence[Sample]) -> Tensor:
    """Return the positions in `teacher_mask` of all samples side by side: int64."""
    return torch.cat([teacher_mask(torch.tensor(s.spans)) for s in samples]).nonzero()[:, 0]


def states_to_store(
    target: Target | TargetMetadata,
    identity: StoreIdentity,
    features: Tensor,
    last: Tensor,
    positions: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """Convert states to the tensors of `ExtractedStates`, on their device.

    Args:
        features, last: [n, F] and [n, Ht], as the target computed them.
        positions: int64, the positions with a teacher.

    Returns:
        `ExtractedStates.tensors` and `ExtractedStates.finite`.
    """
    boundaries, (feature_dtype, last_dtype) = len(identity.boundaries), STATES[identity.dtype]
    tensors = {"last": last.to(last_dtype)}
    if feature_dtype is E4M3:
        tensors |= quantise(features, boundaries)
    else:  # rounded before the check: the largest float32 are infinite in bfloat16
        tensors["features"] = features = features.to(feature_dtype)
    logsumexp, argmax = summarise_logits(target, last[positions])
    tensors["logsumexp"] = torch.full_like(last[:, 0], NO_TEACHER[0], dtype=torch.float32)
    tensors["argmax"] = torch.full_like(last[:, 0], NO_TEACHER[1], dtype=torch.int32)
    finite_logits = torch.ones_like(last[:, 0], dtype=torch.bool)
    tensors["logsumexp"][positions], tensors["argmax"][positions] = logsumexp, argmax.int()
    finite_logits[positions] = logsumexp.isfinite()
    finite_features = features.isfinite().view(len(last), boundaries, last.shape[-1]).all(-1)
    finite_last = tensors["last"].isfinite().all(-1)
    finite = torch.cat([finite_features, finite_last[:, None], finite_logits[:, None]], -1)
    return tensors, finite


def summarise_logits(target: Target | TargetMetadata, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return logsumexp float32 [n] and argmax int64 [n] of the logits of last states [n, Ht].

    The states must be as the target computed them, not rounded to the store's dtype, so that argmax
    is the token that the target generates. torch.argmax returns the lowest id of equal logits.
    """
    rows = max(1, MAX_LOGITS // target.vocab_size)
    sums, tokens = [], []
    for chunk in last.split(rows):
        logits = target.logits(chunk)
        sums.append(logits.logsumexp(-1))
        tokens.append(logits.argmax(-1))
    return torch.cat(sums), torch.cat(tokens)


def check_finite(
    states: ExtractedStates, samples: Sequence[Sample], identity: StoreIdentity
) -> None:
    """Raise a `UserError` about the first sample of a batch with NaN or infinity."""
    if bool(states.finite.all()):
        return
    names = [f"boundary {boundary}" for boundary in identity.boundaries]
    names += [f"boundary {identity.num_layers} (last)", "the logits"]
    lengths = [len(sample.token_ids) for sample in samples]
    for sample, finite in zip(samples, states.finite.split(lengths), strict=True):
        bad = (~finite).T.nonzero()
        if len(bad):
            # The next layer spreads a NaN to all positions, so the lowest boundary says most.
            column, position = bad[0].tolist()
            raise UserError(
                f"expected finite states, found NaN or infinity at {names[column]}, "
                f"position {position}",
                where=f"sample {sample.id!r}",
                do="load the target in float32 or bfloat16 (target.dtype; float16 overflows "
                "easily), or leave this conversation out of the prompts",
            )
