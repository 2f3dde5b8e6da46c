"""The parallel drafter's cache against a dense pass over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.drafter import ChainDrafter, Proposal, new_drafter
from draftlab.engine.eager_head import EagerHead
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.parallel_drafter import ParallelDrafter
from draftlab.engine.prepacked_head import PrepackedHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target
from tests.helpers.decoding import MASK, PARALLEL, untrained_head
from tests.helpers.engines import RaggedPairs

K, ROWS = 4, 3
PASSES = {"plain": EagerHead, "fused": FusedHead, "packed": PrepackedHead}
COUNTS = [[5, 9, 2], [1, 4, 3], [3, 1, 5]]  # pairs of each row in each step


def large_head(target: Target, **changed: Any) -> PeagleHead:
    """Return a head with large weights; with small ones attention has little effect."""
    head = untrained_head(target, K, target.vocab_size - 20, **(PARALLEL | changed))
    assert isinstance(head, PeagleHead)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed" not in name:
                parameter.copy_(0.3 * noise)
    return head.eval().requires_grad_(False)


def dense(head: PeagleHead, tokens: Tensor, features: Tensor, k: int) -> Tensor:
    """Return q [K, W] from one causal pass over n pairs and K − 1 masked slots."""
    tokens = torch.cat([tokens, torch.full((k - 1,), MASK)])
    features = torch.cat([features, head.mask_hidden.expand(k - 1, -1)])

    def attend(_: int, *inputs: Tensor) -> Tensor:
        query, key, value = (t.transpose(0, 1) for t in inputs)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return attended.transpose(0, 1)

    outputs = head.run(tokens, head.project_features(features), torch.arange(len(tokens)), attend)
    return head.logits(outputs[-k:]).softmax(-1)


def probabilities(proposal: Proposal) -> Tensor:
    assert proposal.distribution is not None
    return proposal.distribution.probabilities()


TABLE = torch.tensor([[2], [3], [1]], dtype=torch.int32)  # one block a row


@pytest.mark.parametrize(
    ("layers", "changed"),
    [(1, {}), (1, {"norm_before_residual": True}), (2, {"qk_norm": True}), (4, {})],
)
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("k", [1, K])
def test_draft_probabilities_equal_a_dense_pass(
    k: int, passes: str, layers: int, changed: dict, target: Target
) -> None:
    """Ragged rows over three steps; later steps must not see the masked slots of earlier ones."""
    head = large_head(target, num_layers=layers, **changed)
    drafter = ParallelDrafter(head, k)
    rows = RaggedPairs([sum(n) for n in zip(*COUNTS, strict=True)])
    drafter.start(4, 24, cpu_prepacked=passes == "packed")
    if passes == "fused":
        drafter.runner = FusedHead(head)
    assert isinstance(drafter.runner, PASSES[passes])
    for counts in COUNTS:
        q = probabilities(drafter.propose(rows.next(counts, TABLE)))
        for row, done in enumerate(rows.done):
            expected = dense(head, rows.tokens[row][:done], rows.features[row][:done], k)
            torch.testing.assert_close(q[row], expected, rtol=1e-3, atol=1e-5)


def test_later_drafts_depend_on_the_masks(target: Target) -> None:
    """Without this the comparison above would prove little."""
    head = large_head(target)
    rows = RaggedPairs([5])
    before = dense(head, rows.tokens[0], rows.features[0], K)
    for change in ("mask_hidden", "mask_embedding"):
        other = large_head(target)
        with torch.no_grad():
            getattr(other, change).neg_()
        gap = (dense(other, rows.tokens[0], rows.features[0], K) - before).abs().amax(-1)
        assert gap[0] == 0
        assert (gap[1:] > 0.01).all()


def test_nothing_is_written_at_or_beyond_the_limit(target: Target) -> None:
    """Padding rows write nothing, and nothing is written to other rows' blocks."""
    limit, head = 10, large_head(target)
    drafter = ParallelDrafter(head, K)
    drafter.start(7, 4, max_length=limit)
    table = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 6, 6]], dtype=torch.int32)
    counts = [8, 6, 0]  # masked slots would extend to 10, to 8 and nowhere
    for pool in (*drafter.key_pools, *drafter.value_pools):
        pool.fill_(torch.nan)
        pool[0] = 0  # it is read for drafts that cannot be verified
    rows = RaggedPairs(counts)
    q = probabilities(drafter.propose(rows.next(counts, table)))
    expected_written = torch.zeros(7, 4, dtype=torch.bool)
    expected_written.view(-1)[[*range(4, 14), *range(16, 24)]] = True
    for pool in (*drafter.key_pools, *drafter.value_pools):
        written = pool.isfinite().all(-1).all(-1)
        assert torch.equal(written[1:], expected_written[1:])
        assert not pool[0].any()
    for row, count, real in ((0, 8, 3), (1, 6, 3)):
        expected = dense(head, rows.tokens[row], rows.features[row][:count], K)
        torch.testing.assert_close(q[row, :real], expected[:real], rtol=1e-3, atol=1e-5)


def test_a_full_batch_has_room_for_its_masks(target: Target) -> None:
    """8192 tokens of 7 rows at K = 4 need 8213 slots, the limit of other servers' buffers."""
    head = large_head(target, num_layers=1)
    drafter, seven = ParallelDrafter(head, K), [1171, 1170, 1171, 1170, 1170, 1170, 1170]
    assert sum(seven) + 7 * (K - 1) == 8213
    table = torch.arange(1, 8, dtype=torch.int32)[:, None]
    drafter.start(8, 1180)
    rows = RaggedPairs(seven)
    q = probabilities(drafter.propose(rows.next(seven, table)))
    for row in (0, 6):
        expected = dense(head, rows.tokens[row], rows.features[row], K)
        torch.testing.assert_close(q[row], expected, rtol=1e-3, atol=1e-5)


def test_drafts_use_the_noise_of_their_position(target: Target) -> None:
    """A token's noise does not depend on the step that drafts it, nor on its depth."""
    head = large_head(target, num_layers=1)
    with torch.no_grad():
        head.lm_head.weight.zero_()  # so that tokens are noise alone
    drafter, rows = ParallelDrafter(head, K), RaggedPairs([9] * 3)
    drafter.start(4, 24)
    first = drafter.propose(rows.next([4] * 3, TABLE)).tokens
    second = drafter.propose(rows.next([2] * 3, TABLE)).tokens
    assert torch.equal(first[:, 2:], second[:, :2])
    assert len(set(first.flatten().tolist())) > K


def test_the_family_of_a_head_chooses_its_drafter(target: Target, head: Eagle3Head) -> None:
    parallel = new_drafter(large_head(target), K, draft_probs=False, greedy_below=0.5)
    chain = new_drafter(head, K)
    assert (type(parallel), type(chain)) == (ParallelDrafter, ChainDrafter)
    assert (parallel.drafting, chain.drafting) == ("parallel", "chain")
    assert parallel.draft_vocab is None
    assert parallel.greedy_below == 0.5


def test_the_mask_token_has_its_trained_embedding(target: Target) -> None:
    """Before a head is saved and loaded, its table has an untrained row there."""
    head = large_head(target)
    for passes in (FusedHead(head), PrepackedHead(head)):
        assert torch.equal(passes.embeddings[MASK], head.mask_embedding)
    assert not torch.equal(head.embed_tokens.weight[MASK], head.mask_embedding)
    head.embed_tokens.weight[MASK] = head.mask_embedding
    assert FusedHead(head).embeddings.data_ptr() == head.embed_tokens.weight.data_ptr()
