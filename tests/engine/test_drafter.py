"""The drafters' caches against dense passes over the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.base_drafter import Drafter
from draftlab.engine.block_drafter import FusedBlock
from draftlab.engine.drafter import (
    ChainDrafter,
    HeadDrafter,
    ParallelDrafter,
    Proposal,
    new_drafter,
)
from draftlab.engine.head_pass import EagerHead, FusedHead, PrepackedHead
from draftlab.engine.sampling import Request, Sampling, sampling_metadata
from draftlab.errors import UserError
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.store.store import Record
from draftlab.target_model.model import Target
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.block import block_outputs
from tests.helpers.decoding import DFLASH, DFLASH2, DSPARK, MASK, PARALLEL, untrained_head
from tests.helpers.dense_attention import dense_pass
from tests.helpers.engines import RaggedPairs
from tests.helpers.head_toys import YARN, randomise

K = 4
TABLE = torch.tensor([[2], [3], [1]], dtype=torch.int32)  # one block a row; block 0 is nobody's
COUNTS = [[5, 9, 2], [1, 4, 3], [3, 1, 5]]  # pairs of each row in each step
PASSES = {"eager": EagerHead, "fused": FusedHead, "packed": PrepackedHead}


def large_head(target: Target, **changes: Any) -> Any:
    """Return a parallel head with large weights; with small ones attention has little effect."""
    head = untrained_head(target, K, target.vocab_size - 20, **(PARALLEL | changes))
    randomise(head, 2, weights=0.3, norms=0.3)
    return head.eval().requires_grad_(False)


def probabilities(proposal: Proposal) -> Tensor:
    assert proposal.distribution is not None
    return proposal.distribution.probabilities()


def dense_probabilities(
    head: Any, tokens: Tensor, features: Tensor, drafts: Tensor, k: int = K
) -> Tensor:
    """Return q [K, D] behind n pairs, by one causal pass over masked slots or a pass a draft."""
    hidden = head.project_features(features)
    if isinstance(head, PeagleHead):
        masks = head.project_features(head.mask_hidden.expand(k - 1, -1))
        tokens = torch.cat([tokens, torch.full((k - 1,), MASK)])
        outputs = dense_pass(head, tokens, torch.cat([hidden, masks]))[-k:]
        return head.logits(outputs).softmax(-1)
    for depth in range(k):
        output = dense_pass(head, torch.cat([tokens, drafts[:depth]]), hidden)[-1:]
        hidden = torch.cat([hidden, output])
    return head.logits(hidden[-k:]).softmax(-1)


def start(head: Any, k: int, passes: str) -> HeadDrafter:
    """Return a drafter with four blocks of 24 positions."""
    drafter = new_drafter(head, k)
    drafter.start(4, 24, cpu_prepacked=passes == "packed")
    if passes == "fused":
        drafter.runner = drafter.fused_pass(head)  # a GPU's passes, on their kernels' references
        assert isinstance(drafter.runner, FusedHead | FusedBlock)
    elif not isinstance(head, BlockHead):
        assert type(drafter.runner) is PASSES[passes]
    return drafter


def check_ragged_steps(head: Any, drafter: HeadDrafter) -> None:
    """Check three steps of ragged rows; later ones must not see the drafts of earlier ones."""
    rows = RaggedPairs([sum(n) for n in zip(*COUNTS, strict=True)])
    for counts in COUNTS:
        proposal = drafter.propose(rows.next(counts, TABLE))
        q = probabilities(proposal)
        for row, done in enumerate(rows.done):
            pairs = rows.tokens[row][:done], rows.features[row][:done]
            expected = dense_probabilities(head, *pairs, proposal.tokens[row], drafter.k)
            torch.testing.assert_close(q[row], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("passes", PASSES)
def test_a_chains_probabilities_equal_dense_passes(passes: str, head: Eagle3Head) -> None:
    check_ragged_steps(head, start(head, K, passes))


@pytest.mark.parametrize(
    ("k", "layers", "changes"),
    [
        (1, 1, {}),
        (K, 1, {"norm_before_residual": True}),
        (K, 2, {"qk_norm": True}),
        (K, 2, {"rope_parameters": YARN | {"original_max_position_embeddings": 8}}),
        (K, 4, {}),
    ],
)
@pytest.mark.parametrize("passes", PASSES)
def test_parallel_probabilities_equal_a_dense_pass(
    k: int, passes: str, layers: int, changes: dict, target: Target
) -> None:
    head = large_head(target, num_layers=layers, **changes)
    check_ragged_steps(head, start(head, k, passes))


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize(("kind", "k"), [("chain", K), ("parallel", 1), ("parallel", K)])
def test_a_prompt_in_chunks_equals_the_whole_prompt(
    kind: str, k: int, draft_probs: bool, request: pytest.FixtureRequest
) -> None:
    """`extend_cache` chunk by chunk, then `propose`, against one `propose` with everything."""
    head = request.getfixturevalue({"chain": "head", "parallel": "parallel_head"}[kind])
    drafter = new_drafter(head, k, draft_probs=draft_probs)
    assert type(drafter) is {"chain": ChainDrafter, "parallel": ParallelDrafter}[kind]
    assert drafter.drafting == kind
    assert (drafter.draft_vocab is None) == (not draft_probs)
    drafter.start(4, 24)
    expected = drafter.propose(RaggedPairs([9] * 3).next([9] * 3, TABLE))
    drafter.start(4, 24)
    pairs = RaggedPairs([9] * 3)
    for count in (4, 4):
        drafter.extend_cache(pairs.next([count] * 3, TABLE))
    actual = drafter.propose(pairs.next([1] * 3, TABLE))
    assert torch.equal(actual.tokens, expected.tokens)
    assert (actual.distribution is None) == (not draft_probs)
    if actual.distribution is not None and expected.distribution is not None:
        torch.testing.assert_close(actual.distribution.logits, expected.distribution.logits)
        torch.testing.assert_close(actual.distribution.log_sum, expected.distribution.log_sum)


@pytest.mark.parametrize("passes", ["eager", "fused"])
@pytest.mark.parametrize("kind", ["dspark", "causal", "dflash", "dflash2"])
def test_a_blocks_prompt_in_chunks_equals_the_whole_prompt(
    kind: str, passes: str, block_heads: dict[str, BlockHead]
) -> None:
    head = block_heads[kind]
    expected = start(head, 3, "eager").propose(RaggedPairs([9] * 3).next([9] * 3, TABLE))
    drafter, pairs = start(head, 3, passes), RaggedPairs([9] * 3)
    for count in (4, 4):
        drafter.extend_cache(pairs.next([count] * 3, TABLE))
    actual = drafter.propose(pairs.next([1] * 3, TABLE))
    assert torch.equal(actual.tokens, expected.tokens)
    assert actual.distribution is not None
    assert expected.distribution is not None
    torch.testing.assert_close(actual.distribution.logits, expected.distribution.logits)


@pytest.mark.parametrize(
    ("kind", "k", "missing"),  # tokens that the draft vocabulary lacks
    [
        *(("dspark", 4, missing) for missing in (0, 20)),
        *(("dflash", 4, 0), ("sliding", 4, 20), ("dflash2", 4, 0)),
        *(("causal", k, 20) for k in (1, 2, 3, 4)),
    ],
)
def test_drafts_at_every_position_are_the_training_forwards(
    kind: str, k: int, missing: int, target: Target
) -> None:
    """A conversation, verified pair by pair: each draft is the best token behind the one before.

    Its confidence is stated behind the same token. A causal block's first drafts are those of a
    shorter block.
    """
    sliding = {"sliding_window": 6, "layer_types": ("sliding_attention", "full_attention")}
    fields = {
        "dspark": DSPARK,
        "dflash": DFLASH,
        "dflash2": DFLASH2 | {"embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 3.0},
        "causal": DSPARK | {"is_causal": True},
        "sliding": DSPARK | sliding,
    }[kind]
    head = untrained_head(target, K, target.vocab_size - missing, **fields)
    randomise(head, 2, weights=0.3, norms=0.3)
    head.eval().requires_grad_(False).double()
    length, pairs = 24, RaggedPairs([24])
    # The training forward needs labels for all drafts: further tokens, which no block sees.
    tokens = torch.cat([torch.tensor([5]), pairs.tokens[0], torch.zeros(K, dtype=torch.int64)])
    features = F.pad(pairs.features[0], (0, 0, 0, K + 1))
    blank = torch.zeros(len(tokens), 1)
    r = Record("r", tokens, torch.ones_like(tokens), features, blank, blank[:, 0], tokens, 0.0)
    steps = [step.output for step in block_outputs(head, pack([[r]], len(tokens), K))]
    drafter = new_drafter(head, k, draft_probs=False, confidence=head.confidence_head is not None)
    drafter.start(2, 32)
    table, drafts = torch.tensor([[1]], dtype=torch.int32), []
    for t in range(length):
        verified = pairs.next([1], table)
        verified = replace(verified, features=verified.features.double())
        proposal = drafter.propose(verified)
        (drafted,), previous = proposal.tokens, pairs.tokens[0][t]
        for step, draft in enumerate(drafted):
            output = steps[step][t]
            logits = head.drawn_logits(head.logits(output, previous), output, previous)
            assert int(head.target_ids(logits.argmax())) == int(draft), (t, step)
            if proposal.confidence is not None:
                factors = head.markov_factors(previous)
                expected = float(head.confidence_logits(head.normed(output), factors))
                assert float(proposal.confidence[0, step]) == pytest.approx(expected, rel=1e-5)
            previous = draft
        drafts += drafted.tolist()
    assert len(set(drafts)) > 10  # or the test proves little


def test_a_block_has_no_more_drafts_than_slots(block_heads: dict[str, BlockHead]) -> None:
    with pytest.raises(UserError, match="all slots of the head's block, found 4"):
        new_drafter(block_heads["dspark"], 4)


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
    proposal = drafter.propose(rows.next(counts, table))
    expected_written = torch.zeros(7, 4, dtype=torch.bool)
    expected_written.view(-1)[[*range(4, 14), *range(16, 24)]] = True
    for pool in (*drafter.key_pools, *drafter.value_pools):
        written = pool.isfinite().all(-1).all(-1)
        assert torch.equal(written[1:], expected_written[1:])
        assert not pool[0].any()
    for row, count, real in ((0, 8, 3), (1, 6, 3)):
        pairs = rows.tokens[row], rows.features[row][:count]
        expected = dense_probabilities(head, *pairs, proposal.tokens[row])
        q = probabilities(proposal)[row, :real]
        torch.testing.assert_close(q, expected[:real], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "family", [{}, DSPARK | {"embeddings": "target"}], ids=["parallel", "block"]
)
def test_drafts_use_the_noise_of_their_position(family: dict, target: Target) -> None:
    """A token's noise does not depend on the step that drafts it, nor on its depth."""
    head = large_head(target, **(family | {"num_layers": 1}))
    with torch.no_grad():  # so that tokens are noise alone
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            if name in dict(head.named_parameters()):
                head.get_parameter(name).zero_()
    drafter, rows = start(head, K, "eager"), RaggedPairs([9] * 3)
    first = drafter.propose(rows.next([4] * 3, TABLE)).tokens
    second = drafter.propose(rows.next([2] * 3, TABLE)).tokens
    assert torch.equal(first[:, 2:], second[:, :2])
    assert len(set(first.flatten().tolist())) > K


def test_the_mask_token_has_its_trained_embedding(target: Target) -> None:
    """Before a head is saved and loaded, its table has an untrained row there."""
    head = large_head(target)
    for passes in (FusedHead(head), PrepackedHead(head)):
        assert torch.equal(passes.embeddings[MASK], head.mask_embedding)
    assert not torch.equal(head.embed_tokens.weight[MASK], head.mask_embedding)
    head.embed_tokens.weight[MASK] = head.mask_embedding
    assert FusedHead(head).embeddings.data_ptr() == head.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("draft_probs", "temperature", "at"),
    [(False, 0.0, 1.0), (False, 0.7, 1.0), (True, 0.7, 0.7), (True, 0.0, 1.0)],
)
def test_confidence_has_the_temperature_that_a_calibration_names(
    draft_probs: bool, temperature: float, at: float, head: Eagle3Head
) -> None:
    assert DecodingConfig(None, K, draft_probs).confidence_temperature(temperature) == at
    table, proposals = torch.tensor([[1]], dtype=torch.int32), []
    pairs = RaggedPairs([9]).next([9], table)
    request = Request("0", (1,), 1, Sampling(temperature))
    pairs = replace(pairs, keys=sampling_metadata([request], torch.device("cpu")))
    for probabilities in (draft_probs, True):  # the second one also gives the logits
        drafter = new_drafter(head, K, draft_probs=probabilities, confidence=True)
        drafter.start(2, 24)
        proposals.append(drafter.propose(pairs))
    stated, with_logits = proposals
    first = with_logits.distribution.logits[0, 0].double()
    largest = [float((first / t).softmax(-1).max()) for t in (at, 0.7, 1.0)]
    expected, *others = (torch.tensor(m / (1 - m)).log().item() for m in largest)
    assert float(stated.confidence[0, 0]) == pytest.approx(expected, abs=1e-3)
    assert sum(abs(one - expected) > 0.05 for one in others) == 1  # the other temperature shows


def test_a_drafter_with_the_removed_method_is_refused() -> None:
    with pytest.raises(UserError, match=r"removed: Drafter\.sampling"):
        type("Own", (Drafter,), {"sampling": lambda self, temperature: (temperature, True)})
