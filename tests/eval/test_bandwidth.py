"""The bytes that a step reads, compared with the sizes of the named tensors."""

from __future__ import annotations

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target
from tests.helpers.drivers import load

bandwidth = load("bench/bandwidth")


def test_a_target_reads_all_but_the_embedding_table(target: Target) -> None:
    weights = {name: p for name, p in target.model.named_parameters() if "embed_tokens" not in name}
    tied = "lm_head.weight" not in weights
    expected = sum(4 * p.numel() for p in weights.values())
    expected += 4 * target.parts.lm_head.numel() * tied  # a tied table is the output projection
    assert bandwidth.target_bytes(target) == expected


def test_a_head_reads_its_fc_once_and_the_rest_at_every_draft(head: Eagle3Head) -> None:
    weights = {name: p for name, p in head.named_parameters() if "embed_tokens" not in name}
    rest = sum(4 * p.numel() for name, p in weights.items() if name != "fc.weight")
    for k in (1, 4):
        assert bandwidth.head_bytes(head, k) == k * rest + 4 * head.fc.weight.numel()


def test_a_step_reads_a_parallel_head_once_for_any_k(parallel_head: PeagleHead) -> None:
    weights = [p for n, p in parallel_head.named_parameters() if not n.startswith("embed_tokens")]
    for k in (1, 8):
        assert bandwidth.head_bytes(parallel_head, k) == 4 * sum(p.numel() for p in weights)
