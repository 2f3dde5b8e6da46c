"""The check of pages accepts other rounding and refuses misread keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model import attention, probe
from draftlab.target_model.model import Target
from tests.helpers.zoo import wide, zoo_target

attend_reads = attention.attend_reads


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target with random experts, whose routers are near ties everywhere."""
    path = tmp_path_factory.mktemp("mixture")
    return zoo_target(path, "gpt_oss", dtype="bfloat16", **wide("gpt_oss"))


def test_other_rounding_is_accepted(mixture: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels round so, and routers then select other experts for some tokens."""

    def rounded_otherwise(query: Tensor, *rest: object, **scores: object) -> Tensor:
        attended = attend_reads(query, *rest, **scores)
        noise = torch.randn(attended.shape, generator=torch.Generator().manual_seed(7))
        return (attended * (1 + noise * 2**-7)).to(attended.dtype)

    monkeypatch.setattr(attention, "attend_reads", rounded_otherwise)
    with torch.inference_mode():
        rows, pages = probe._rows_and_pages(mixture)
    changes = (rows - pages).norm(dim=-1) / rows.norm(dim=-1)
    assert (changes > 0.2).sum() > changes.numel() / 2, "no router selects other experts"
    probe.check_pages(mixture)


def test_a_misread_cache_is_refused(mixture: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read from other slots."""

    def misread(query: Tensor, keys: Tensor, values: Tensor, *rest: object, **scores: object):
        return attend_reads(query, keys, values.roll(1, 0), *rest, **scores)

    monkeypatch.setattr(attention, "attend_reads", misread)
    with pytest.raises(UserError, match="pages of keys do not serve"):
        probe.check_pages(mixture)
