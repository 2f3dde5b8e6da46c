"""Cached keys in pages are trusted when rounding alone tells them from keys in rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model import attention, probe
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.helpers.zoo import wide, zoo_folder

attend_reads = attention.attend_reads


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Random experts: routers are near ties everywhere."""
    folder = zoo_folder(tmp_path_factory.mktemp("mixture"), "gpt_oss", **wide("gpt_oss"))
    return load_target(TargetSettings(path=str(folder), dtype="bfloat16", device="cpu"))


def test_another_rounding_is_no_misreading(
    mixture: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels round so, and some tokens then meet other experts."""

    def rounded_otherwise(query: Tensor, *rest: object, **scores: object) -> Tensor:
        attended = attend_reads(query, *rest, **scores)
        noise = torch.randn(attended.shape, generator=torch.Generator().manual_seed(7))
        return (attended * (1 + noise * 2**-7)).to(attended.dtype)

    monkeypatch.setattr(attention, "attend_reads", rounded_otherwise)
    with torch.inference_mode():
        rows, pages = probe._pages(mixture)
    changes = (rows - pages).norm(dim=-1) / rows.norm(dim=-1)
    assert (changes > 0.2).sum() > changes.numel() / 2, "routers fell as before: nothing is tested"
    probe.check_pages(mixture)


def test_a_misread_cache_is_refused(mixture: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values read from the slots of others."""

    def misread(query: Tensor, keys: Tensor, values: Tensor, *rest: object, **scores: object):
        return attend_reads(query, keys, values.roll(1, 0), *rest, **scores)

    monkeypatch.setattr(attention, "attend_reads", misread)
    with pytest.raises(UserError, match="pages of keys do not serve"):
        probe.check_pages(mixture)
