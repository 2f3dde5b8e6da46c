"""The parallel drafter: one pass against the whole sequence run anew, slot by slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.drafter import ChainDrafter, Observed, Proposal, new_drafter
from draftlab.engine.eager_head import PlainHead
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.parallel_drafter import ParallelDrafter
from draftlab.engine.prepacked_head import PackedHead
from draftlab.engine.sampling import Request, Sampling, row_keys
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.kernels.parallel_layout import layout_size
from draftlab.target_model.model import Target
from tests.helpers.decoding import MASK, PARALLEL, untrained_head

K, ROWS = 4, 3
PASSES = {"plain": PlainHead, "fused": FusedHead, "packed": PackedHead}
COUNTS = [[5, 9, 2], [1, 4, 3], [3, 1, 5]]  # pairs of each row, step by step


def loud(target: Target, **changed: Any) -> PeagleHead:
    """Loud weights: quiet ones hide what is attended to."""
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
    """q [K, W] behind n pairs: the pairs and K − 1 masked slots in one causal pass, no cache."""
    tokens = torch.cat([tokens, torch.full((k - 1,), MASK)])
    features = torch.cat([features, head.mask_hidden.expand(k - 1, -1)])

    def attend(_: int, *inputs: Tensor) -> Tensor:
        query, key, value = (t.transpose(0, 1) for t in inputs)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return found.transpose(0, 1)

    outputs = head.run(tokens, head.fuse(features), torch.arange(len(tokens)), attend)
    return head.logits(outputs[-k:]).softmax(-1)


def hot_keys(rows: int = ROWS) -> Any:
    asked = [Request(str(i), (1,), 1, Sampling(temperature=1.0)) for i in range(rows)]
    return row_keys(asked, torch.device("cpu"))


class Rows:
    """Ragged rows of random pairs, shown some at a time."""

    def __init__(self, total: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(0, 281, (n,), generator=generator) for n in total]
        self.features = [torch.randn(n, 96, generator=generator) for n in total]
        self.done = [0] * len(total)

    def next(self, counts: list[int], table: Tensor) -> Observed:
        rows, width = len(counts), max(counts)
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        features = torch.zeros(rows, width, 96)
        positions = torch.full((rows, width), -1)
        for row, n in enumerate(counts):
            at = slice(self.done[row], self.done[row] + n)
            tokens[row, :n], features[row, :n] = self.tokens[row][at], self.features[row][at]
            positions[row, :n] = torch.arange(at.start, at.stop)
            self.done[row] += n
        shown = torch.tensor(counts).clamp(min=1)
        return Observed(tokens, features, positions, shown, table, hot_keys(rows))


def probabilities(found: Proposal) -> Tensor:
    assert found.distribution is not None
    return found.distribution.probabilities()


TABLE = torch.tensor([[2], [3], [1]], dtype=torch.int32)  # a block a row; block 0 is nobody's


@pytest.mark.parametrize(
    ("layers", "changed"),
    [(1, {}), (1, {"norm_before_residual": True}), (2, {"qk_norm": True}), (4, {})],
)
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("k", [1, K])
def test_a_pass_is_the_whole_sequence_run_anew(
    k: int, passes: str, layers: int, changed: dict, target: Target
) -> None:
    """Ragged rows over three steps: keys of one step's masks must not be seen by the next."""
    head = loud(target, num_layers=layers, **changed)
    drafter, rows = ParallelDrafter(head, k), Rows([sum(n) for n in zip(*COUNTS, strict=True)])
    drafter.start(4, 24, packed=passes == "packed")
    if passes == "fused":
        drafter.passes = FusedHead(head)
    assert isinstance(drafter.passes, PASSES[passes])
    for counts in COUNTS:
        q = probabilities(drafter.propose(rows.next(counts, TABLE)))
        for row, done in enumerate(rows.done):
            expected = dense(head, rows.tokens[row][:done], rows.features[row][:done], k)
            torch.testing.assert_close(q[row], expected, rtol=1e-3, atol=1e-5)


def test_masks_are_what_drafts_come_from(target: Target) -> None:
    """Or the comparison above would say little: every draft but the first depends on both."""
    head = loud(target)
    rows = Rows([5])
    before = dense(head, rows.tokens[0], rows.features[0], K)
    for change in ("mask_hidden", "mask_embedding"):
        other = loud(target)
        with torch.no_grad():
            getattr(other, change).neg_()
        gap = (dense(other, rows.tokens[0], rows.features[0], K) - before).abs().amax(-1)
        assert gap[0] == 0
        assert (gap[1:] > 0.01).all()


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("k", [1, K])
def test_a_prompt_in_chunks_is_one_observation(k: int, draft_probs: bool, target: Target) -> None:
    """`observe` chunk by chunk, then `propose`: what that says of everything at once."""
    drafter = ParallelDrafter(loud(target), k, draft_probs=draft_probs)
    drafter.start(4, 24)
    expected = drafter.propose(Rows([9] * 3).next([9] * 3, TABLE))
    drafter.start(4, 24)
    rows = Rows([9] * 3)
    for count in (4, 4):
        drafter.observe(rows.next([count] * 3, TABLE))
    found = drafter.propose(rows.next([1] * 3, TABLE))
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.distribution is None) == (not draft_probs)
    if found.distribution is not None and expected.distribution is not None:
        torch.testing.assert_close(found.distribution.logits, expected.distribution.logits)
        torch.testing.assert_close(found.distribution.log_sum, expected.distribution.log_sum)


def test_nothing_is_written_at_or_beyond_the_limit(target: Target) -> None:
    """Nor by rows of padding, nor into blocks that a row does not own."""
    limit, head = 10, loud(target)
    drafter = ParallelDrafter(head, K)
    drafter.start(7, 4, max_length=limit)
    table = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 6, 6]], dtype=torch.int32)
    counts = [8, 6, 0]  # masks would go on to 10, to 8 and nowhere
    for pool in (*drafter.key_pools, *drafter.value_pools):
        pool.fill_(torch.nan)
        pool[0] = 0  # what nobody owns is read for drafts that cannot be verified
    rows = Rows(counts)
    q = probabilities(drafter.propose(rows.next(counts, table)))
    wanted = torch.zeros(7, 4, dtype=torch.bool)
    wanted.view(-1)[[*range(4, 14), *range(16, 24)]] = True
    for pool in (*drafter.key_pools, *drafter.value_pools):
        written = pool.isfinite().all(-1).all(-1)
        assert torch.equal(written[1:], wanted[1:])
        assert not pool[0].any()
    for row, count, real in ((0, 8, 3), (1, 6, 3)):
        expected = dense(head, rows.tokens[row], rows.features[row][:count], K)
        torch.testing.assert_close(q[row, :real], expected[:real], rtol=1e-3, atol=1e-5)


def test_a_full_batch_of_tokens_has_room_for_its_masks(target: Target) -> None:
    """8192 tokens of 7 rows at K = 4: 8213 slots, the boundary at which others' buffers end."""
    head = loud(target, num_layers=1)
    drafter, seven = ParallelDrafter(head, K), [1171, 1170, 1171, 1170, 1170, 1170, 1170]
    assert layout_size(sum(seven), 7, K) == 8213
    table = torch.arange(1, 8, dtype=torch.int32)[:, None]
    drafter.start(8, 1180)
    rows = Rows(seven)
    q = probabilities(drafter.propose(rows.next(seven, table)))
    for row in (0, 6):
        expected = dense(head, rows.tokens[row], rows.features[row], K)
        torch.testing.assert_close(q[row], expected, rtol=1e-3, atol=1e-5)


def test_drafts_are_drawn_with_the_noise_of_their_position(target: Target) -> None:
    """A token's noise does not depend on the step that drafts it, nor on its depth."""
    head = loud(target, num_layers=1)
    with torch.no_grad():
        head.lm_head.weight.zero_()  # so that tokens are noise alone
    drafter, rows = ParallelDrafter(head, K), Rows([9] * 3)
    drafter.start(4, 24)
    first = drafter.propose(rows.next([4] * 3, TABLE)).tokens
    second = drafter.propose(rows.next([2] * 3, TABLE)).tokens
    assert torch.equal(first[:, 2:], second[:, :2])
    assert len(set(first.flatten().tolist())) > K


def test_the_family_of_a_head_chooses_its_drafter(target: Target, head: Eagle3Head) -> None:
    parallel = new_drafter(loud(target), K, draft_probs=False, greedy_below=0.5)
    chain = new_drafter(head, K)
    assert (type(parallel), type(chain)) == (ParallelDrafter, ChainDrafter)
    assert (parallel.kind, chain.kind) == ("parallel", "chain")
    assert parallel.draft_vocab is None
    assert parallel.greedy_below == 0.5


def test_a_table_with_another_row_for_the_mask_is_not_read(target: Target) -> None:
    """Until it is saved and loaded, a head's table has a row that was never trained."""
    head = loud(target)
    for passes in (FusedHead(head), PackedHead(head)):
        assert torch.equal(passes.embeddings[MASK], head.mask_embedding)
    assert not torch.equal(head.embed_tokens.weight[MASK], head.mask_embedding)
    head.embed_tokens.weight[MASK] = head.mask_embedding
    assert FusedHead(head).embeddings.data_ptr() == head.embed_tokens.weight.data_ptr()
