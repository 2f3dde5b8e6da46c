"""The bytes that a step reads, compared with the sizes of the named tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.evaluate import bandwidth
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.model import Target
from tests.helpers.zoo import zoo_target


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


def test_the_floor_is_bytes_over_the_copy_rate(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "copy_rate", lambda device: 1e6)
    weights = bandwidth.target_bytes(target)
    assert bandwidth.floor_ms(target, None, 0, 8) == pytest.approx(weights / 1e3)
    assert bandwidth.floor_ms(target, head, 3, 8) == pytest.approx(
        (weights + bandwidth.head_bytes(head, 3)) / 1e3
    )


def test_there_is_no_floor_on_a_cpu_or_with_experts(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bandwidth.copy_rate(torch.device("cpu")) is None
    assert bandwidth.floor_ms(target, None, 0, 8) is None
    monkeypatch.setattr(bandwidth, "copy_rate", lambda device: 1e6)
    mixture = zoo_target(tmp_path, "gpt_oss")
    assert bandwidth.floor_ms(mixture, None, 0, 8) is None  # a router picks the weights


def test_recurrent_states_are_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "copy_rate", lambda device: 1e6)
    target = zoo_target(tmp_path, "lfm2")
    convolutions, channels, width = 2, 32, 3
    states = 4 * convolutions * channels * (width - 1)
    expected = (bandwidth.target_bytes(target) + 2 * 8 * states) / 1e3
    assert bandwidth.floor_ms(target, None, 0, 8) == pytest.approx(expected)
