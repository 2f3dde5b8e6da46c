"""Drafters that run a draft head: a pass for each draft, or one for all (methods §4)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from draftlab.engine.base_drafter import Drafter, Pools, Verification, VerifiedFeatures
from draftlab.engine.draft_sampler import DraftSampler, Proposal
from draftlab.engine.head_pass import EagerHead, FusedHead, PassLayout, PrepackedHead
from draftlab.heads.head import DraftHead
from draftlab.kernels.chain_layout import chain_layout, last_rows
from draftlab.kernels.parallel_layout import parallel_layout
from draftlab.kernels.sampling.types import draft_index
from draftlab.kernels.step_layout.types import MaskedColumns, ParallelLayout


class HeadDrafter(Drafter):
    """Proposer of up to K draft tokens for each row by a draft head.

    Args:
        head: the draft head.
        k: draft tokens a step.
        draft_probs: whether rows with temperature > 0 sample drafts from
            q = softmax(logits / temperature); otherwise every draft is the argmax.
        verification: how the drafts will be verified (see `DraftSampler`).
        confidence: whether proposals state the confidence of each draft.

    Attributes:
        drafting: "chain": one token a pass; "parallel": all tokens in one pass.
        eager_pass, fused_pass: the head's decode pass in its own modules, and in fused kernels.
    """

    drafting: Literal["chain", "parallel"]
    eager_pass: ClassVar[type[Any]] = EagerHead
    fused_pass: ClassVar[type[Any]] = FusedHead

    def __init__(
        self,
        head: DraftHead,
        k: int,
        *,
        draft_probs: bool = True,
        verification: Verification = "token",
        confidence: bool = False,
    ) -> None:
        head.check_drafts(k)
        self.head, self.k, self.draft_probs, self.verification = head, k, draft_probs, verification
        self.boundaries = head.config.boundaries
        self.draft_ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device))
        self.draft_index = draft_index(self.draft_ids, len(head.t2d))
        self.confidence = confidence
        self.fused_runner: Any = None
        self.runner = self.eager_pass(head)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the head's weights and outputs."""
        return self.head.fc.weight.dtype

    @property
    def draft_vocab(self) -> tuple[int, torch.dtype] | None:
        """Return size and dtype of the draft distributions; None: drafts are greedy."""
        return (len(self.draft_ids), self.dtype) if self.draft_probs else None

    @property
    def pools(self) -> Pools:
        """Return the keys and values of each layer, in the blocks of the target's tables."""
        return list(zip(self.key_pools, self.value_pools, strict=True))

    def start(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_length: int | None = None,
        cpu_prepacked: bool = False,
    ) -> None:
        """Allocate the draft KV cache, and choose the head's implementation."""
        config = self.head.config
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.block_size, self.max_length = block_size, max_length or num_blocks * block_size
        self.key_pools, self.value_pools = (
            tuple(
                torch.zeros(shape, dtype=self.dtype, device=self.draft_ids.device)
                for _ in range(config.num_layers)
            )
            for _ in range(2)
        )
        self.runner = self.new_runner(cpu_prepacked=cpu_prepacked)
        self.prepare_runner()

    def new_runner(self, *, cpu_prepacked: bool) -> Any:
        """Return the fastest implementation of the head's pass on its device."""
        if self.fused_pass.supports(self.head):
            if self.fused_runner is None:  # one copy of the weights serves all engines
                self.fused_runner = self.fused_pass(self.head)
            return self.fused_runner
        if cpu_prepacked and PrepackedHead.supports(self.head):
            return PrepackedHead(self.head)
        return self.eager_pass(self.head)

    def prepare_runner(self) -> None:
        """Compute what no pass changes."""

    @torch.inference_mode()
    def extend_cache(self, verified: VerifiedFeatures) -> None:
        """Write the keys and values of verified positions to the draft KV cache."""
        self._run_verified(verified, self._pass_layouts(verified, num_later=0)[0])

    def _pass_layouts(self, verified: VerifiedFeatures, *, num_later: int) -> list[PassLayout]:
        """Return the layouts of the pass over verified positions and of the `num_later` after it.

        The first pass returns the output of each row's last pair. Each later one runs a single pair
        a row, one position further on.
        """
        counts = verified.counts
        chain = chain_layout(
            verified.positions, counts, verified.block_table, self.block_size, num_later
        )
        all_angles = self.runner.angles(chain.positions)
        layouts = []
        for number in range(num_later + 1):
            slots, positions, *angles = (
                chain.select_pass(x, number) for x in (chain.slots, chain.positions, *all_angles)
            )
            selects = number == 0 and chain.width > 1
            output_positions = chain.last[:, None] if selects else positions
            layouts.append(
                PassLayout(
                    slots, tuple(angles), positions, output_positions, counts if selects else None
                )
            )
        return layouts

    def _masked_columns(
        self, verified: VerifiedFeatures, start: Tensor, num_slots: int
    ) -> ParallelLayout:
        """Return the columns of verified pairs from positions `start` [B] on, the last one being
        the first of `num_slots` slots, whose others are masked.
        """
        return parallel_layout(
            verified.tokens,
            verified.counts - 1,
            start,
            verified.block_table,
            block_size=self.block_size,
            max_length=self.max_length,
            mask_token_id=self.head.mask_token_id,
            k=num_slots,
        )

    def _run_verified(self, verified: VerifiedFeatures, layout: PassLayout) -> Tensor:
        """Return the outputs [B, A, H] of a pass over verified positions."""
        hidden = self.runner.project_features(verified.features.to(self.dtype))
        return self._forward(verified.tokens, hidden, layout, verified.block_table)

    def _forward(
        self, tokens: Tensor, hidden: Tensor, layout: PassLayout, block_table: Tensor
    ) -> Tensor:
        return self.runner.forward(tokens, hidden, layout, block_table, self.pools)


class ChainDrafter(HeadDrafter):
    """Drafter of a head that drafts one token a pass, each from its previous output.

    Before the next chain starts, accepted positions are run again with the target's features, so
    that the cache never keeps the head's own outputs as features (methods §5).
    """

    drafting: Literal["chain"] = "chain"

    @torch.inference_mode()
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        k = self.k
        layouts = self._pass_layouts(verified, num_later=k - 1)
        output = self._run_verified(verified, layouts[0])
        logits = None
        if self.draft_probs:
            logits = output.new_empty(k, len(output), len(self.draft_ids))
        last = layouts[0].output_positions[:, 0]
        sampler = DraftSampler(self, last, verified.keys, logits)
        for depth in range(k):
            if depth:
                drafted = sampler.tokens[depth - 1][:, None]
                output = self._forward(drafted, output, layouts[depth], verified.block_table)
            out = None if logits is None else logits[depth]
            sampler.draw(depth, self.runner.logits(output[:, 0], out=out))
        return sampler.proposal()


def without_padding(verified: VerifiedFeatures) -> VerifiedFeatures:
    """Drop columns of padding on a CPU, where shapes may depend on values."""
    if verified.tokens.is_cuda:
        return verified
    return verified.first_columns(int(verified.counts.max()))


class ParallelDrafter(HeadDrafter):
    """Drafter of a parallel head: the last true pair drafts the first token, masked slots the rest.

    Masked slots write their keys to the positions of future tokens. No later query reads them: the
    next pass overwrites every position that its queries see after the verified ones.

    Args: those of `HeadDrafter`; the head has a mask token and `mask_hidden`.
    """

    drafting: Literal["parallel"] = "parallel"

    @torch.inference_mode()
    def prepare_runner(self) -> None:
        self.mask_state = self.runner.project_features(self.head.mask_hidden)[0]

    @torch.inference_mode()
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        k, verified = self.k, without_padding(verified)
        counts, table = verified.counts, verified.block_table
        columns = self._masked_columns(verified, verified.positions[:, 0], k)
        cos, sin = self.runner.angles(columns.positions.flatten())
        layout = PassLayout(
            columns.slots,
            (cos.unflatten(0, columns.slots.shape), sin.unflatten(0, columns.slots.shape)),
            columns.positions,
            last_rows(columns.positions, counts, k),
            counts,
            MaskedColumns(columns.is_mask, self.mask_state),
        )
        hidden = self.runner.project_features(verified.features.to(self.dtype))
        outputs = self._forward(columns.tokens, hidden, layout, table)
        logits = outputs.new_empty(k, len(outputs), len(self.draft_ids))
        self.runner.logits(outputs.transpose(0, 1).flatten(0, 1), out=logits.flatten(0, 1))
        last = layout.output_positions[:, 0].contiguous()
        sampler = DraftSampler(self, last, verified.keys, logits)
        sampler.draw_all(logits)
        return sampler.proposal()


def new_drafter(head: DraftHead, k: int, **options: Any) -> HeadDrafter:
    """Return the drafter of a head's family; `options` are those of `HeadDrafter`."""
    return head.family.new_drafter(head, k, **options)
