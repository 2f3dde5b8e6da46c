"""One decode step on the device: gather the batch, verify, commit, extend the draft cache, propose.

Nothing here waits for the host: shapes depend only on the number of rows, so on CUDA the step is
captured once for each number and replayed (graphed_step.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftlab.engine.base_drafter import Drafter, VerifiedFeatures
from draftlab.engine.sampling import Request, sampling_metadata
from draftlab.kernels.devices import copy_to_device
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata, VerifyResult
from draftlab.kernels.step_layout import commit, gather_batch, store_drafts
from draftlab.kernels.step_layout.types import SlotBuffers, StepLayout
from draftlab.kernels.verify import verify
from draftlab.target_model.fused_decoder import fused_decoder
from draftlab.target_model.model import DecodePath, Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.prepacked_decoder import prepacked_decoder


class InputBatch(SlotBuffers):
    """The device state of `num_slots` running requests and of a dummy, one slot each.

    Steps read and write these static buffers only, so a captured CUDA graph can be replayed while
    requests come and go. The dummy, of length 0, pads a graph's batch.
    `kernels/step_layout/types.py` describes the buffers.

    Args:
        num_slots: number of requests.
        k: drafts a step.
        table_width: blocks of a request.
        draft_vocab: size and dtype of the draft distributions; None: all drafts are argmaxes.
        confidence: whether drafts have one.
    """

    def __init__(
        self,
        num_slots: int,
        k: int,
        table_width: int,
        device: torch.device,
        *,
        draft_vocab: tuple[int, torch.dtype] | None,
        confidence: bool = False,
    ) -> None:
        self.num_slots, self.dummy, self.device = num_slots, num_slots, device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device)

        super().__init__(
            length=zeros(),
            newest=zeros(),
            stored=zeros(),
            drafts=zeros(k),
            block_table=zeros(table_width, dtype=torch.int32),
            keys=SamplingMetadata(
                temperature=zeros(dtype=torch.float32),
                top_k=zeros(),
                top_p=torch.ones(num_slots + 1, device=device),
                seed=zeros(),
                prompt=zeros(),
            ),
        )
        if draft_vocab is not None:
            size, dtype = draft_vocab
            self.draft_logits = zeros(k, size, dtype=dtype)
            self.draft_log_sum = zeros(k, dtype=torch.float32)
        if confidence:
            self.confidence = zeros(k, dtype=torch.float32)

    def index(self, slots: Sequence[int], size: int | None = None) -> Tensor:
        """Return slot numbers int64 [B] on the device, padded to `size` with the dummy."""
        padding = [self.dummy] * ((size or len(slots)) - len(slots))
        return self.to_device([*slots, *padding], torch.int64)

    def to_device(self, values: Sequence, dtype: torch.dtype) -> Tensor:
        """Copy a short host list to the device without waiting for it."""
        return copy_to_device(torch.tensor(values, dtype=dtype), self.device)

    def set_requests(self, index: Tensor, requests: Sequence[Request]) -> None:
        """Write the sampling parameters of the requests in slots `index`."""
        metadata = sampling_metadata(requests, torch.device("cpu"))
        for name, values in vars(metadata).items():
            getattr(self.keys, name)[index] = values.to(self.device, non_blocking=True)

    def set_blocks(self, index: Tensor, blocks: Sequence[Sequence[int]]) -> None:
        """Write the rows of slots `index` in the block table, padded with block 0."""
        width = self.block_table.shape[1]
        rows = [[*each, *[0] * (width - len(each))] for each in blocks]
        self.block_table[index] = self.to_device(rows, torch.int32)


Verifier = Callable[..., VerifyResult]


class Step:
    """The decode step of an `Engine` (see there for the arguments).

    It reads and writes `input_batch`, and the target's KV cache `cache`.
    """

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        input_batch: InputBatch,
        drafter: Drafter | None,
        *,
        max_length: int,
        verifier: Verifier = verify,
        expect: bool = True,
        cpu_prepacked: bool = False,
    ) -> None:
        self.target, self.cache, self.input_batch = target, cache, input_batch
        self.drafter = drafter
        prepacked = prepacked_decoder(target) if cpu_prepacked else None
        self.decoder: DecodePath = fused_decoder(target) or prepacked or target
        self.max_length, self.verifier, self.expect = max_length, verifier, expect
        self.block = drafter is not None and drafter.verification == "block"
        self.boundaries = drafter.boundaries if drafter else ()

    @torch.inference_mode()
    def __call__(self, index: Tensor, *, limited: bool) -> Tensor:
        """Decode one step of the slots `index` [B]; return its packed results (`pack_results`).

        Args:
            index: slot numbers; results of the dummy are not read.
            limited: whether any of them samples with top-k or top-p.
        """
        # Gather the batch: each row's newest token and its drafts.
        layout = gather_batch(
            self.input_batch,
            index,
            max_length=self.max_length,
            block_size=self.cache.block_size,
        )
        table, positions = layout.block_table, layout.positions
        states = self.decoder.states(
            layout.tokens,
            self.boundaries,
            positions=positions,
            cache=self.cache.at(table, positions, layout.slots, layout.index),
        )
        # Verify the drafts by rejection sampling.
        verified = self.verifier(
            self.decoder.logits(states.last),
            layout.tokens[:, 1:],
            layout.num_drafts,
            self._draft_distribution(layout),
            layout.length,
            layout.keys,
            limited=limited,
            expect=self.expect,
            block=self.block,
        )
        # Commit the accepted drafts and the token after them.
        output = commit(self.input_batch, layout, verified)
        if self.cache.states is not None:
            self.cache.states.keep(output.counts)
        if self.drafter is None:
            return output.packed_results
        # Extend the draft model's cache by the verified features, and propose new drafts.
        pairs = VerifiedFeatures(
            output.tokens,
            states.features,
            output.positions,
            output.counts,
            table,
            layout.keys,
        )
        self.draft(index, pairs)
        return output.packed_results

    def draft(self, index: Tensor, verified: VerifiedFeatures) -> None:
        """Propose drafts for the next step of the slots `index`, and store them."""
        proposal = self.drafter.propose(verified)
        q = proposal.distribution
        distribution = (None, None) if q is None else (q.logits, q.log_sum)
        store_drafts(self.input_batch, index, proposal.tokens, *distribution, proposal.confidence)

    def _draft_distribution(self, layout: StepLayout) -> DraftDistribution | None:
        """Return what the drafts were drawn from; None: all are argmaxes."""
        logits, log_sum = self.input_batch.draft_logits, self.input_batch.draft_log_sum
        if logits is None or log_sum is None:
            return None
        drafter, temperature = self.drafter, layout.keys.temperature
        of_vocabulary = drafter.draft_ids, drafter.draft_index
        return DraftDistribution(logits, log_sum, temperature, *of_vocabulary, rows=layout.index)
