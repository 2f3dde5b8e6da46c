"""Branches of one conversation in a single pass have the states of rows of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.target_model.token_tree import branches
from tests.helpers.zoo import assert_close, random_texts, zoo_target

ENDS = ((4, 9, 10, 30), (0, 2))
LENGTH = 3


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_branches_equal_rows_of_their_own(kind: str, tmp_path: Path) -> None:
    target = zoo_target(tmp_path, kind)
    trunks = [text[:n] for text, n in zip(random_texts((40, 40)), (32, 5), strict=True)]
    drafts = torch.stack(random_texts((LENGTH,) * 6, seed=1)).split([4, 2])
    tree = branches([len(t) for t in trunks], ENDS, LENGTH, torch.device("cpu"))
    ids = torch.zeros(tree.positions.shape, dtype=torch.long)
    for row, trunk, own in zip(ids, trunks, drafts, strict=True):
        row[: len(trunk) + own.numel()] = torch.cat([trunk, own.flatten()])
    with torch.inference_mode():
        states = target.states(ids, (1, 2), tree=tree)
        for row, (trunk, own, anchors) in enumerate(zip(trunks, drafts, ENDS, strict=True)):
            for number, anchor in enumerate(anchors):
                alone = target.states(torch.cat([trunk[: anchor + 1], own[number]])[None], (1, 2))
                begin = len(trunk) + LENGTH * number
                slots = slice(begin, begin + LENGTH)
                assert_close(states.last[row, slots], alone.last[0, -LENGTH:])
                assert_close(states.features[row, slots], alone.features[0, -LENGTH:])
            alone = target.states(trunk[None])
            assert_close(states.last[row, : len(trunk)], alone.last[0])
    assert bool(states.last.isfinite().all())
