"""A new head's norm multiplies states by what the target's norm does, whatever it stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.heads.head import DraftHead
from draftlab.target_model.parts import TargetParts, load_parts
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train.initial_weights import untrained_head
from tests.helpers import synthetic
from tests.helpers.zoo import SHAPE, zoo_folder

SIZES = {name: SHAPE[name] for name in ("vocab_size", "hidden_size")}
STATES = 10 * torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
FAMILIES = ("eagle3", "peagle", "dspark", "dflash")


def new_head(parts: TargetParts, family: str = "eagle3") -> DraftHead:
    config = synthetic.config(family=family, draft_vocab_size=40, **SIZES)
    return untrained_head(config, parts, DraftVocabulary(torch.arange(40), 1.0), seed=0)


@pytest.mark.parametrize(
    ("kind", "family"),
    zip(
        ["llama", "gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3", "olmo2", "olmo3"],
        FAMILIES * 2,
        strict=True,
    ),
)
def test_the_norm_is_the_targets(kind: str, family: str, tmp_path: Path) -> None:
    parts = load_parts(zoo_folder(tmp_path, kind))
    torch.testing.assert_close(new_head(parts, family).norm(STATES), parts.norm(STATES))
    assert parts.norm_form is not None
    assert parts.norm_form.is_rms


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_next", "olmo"])
def test_the_norm_is_found_in_16_bit(kind: str, tmp_path: Path) -> None:
    exact = load_parts(zoo_folder(tmp_path, kind))
    parts = exact.to("cpu", torch.bfloat16)
    assert exact.norm_form is not None
    assert parts.norm_form is not None
    expected = exact.norm_form.weight.float()
    assert torch.allclose(parts.norm_form.weight.float(), expected, atol=0.01)
    assert parts.norm_form.is_rms == exact.norm_form.is_rms


@pytest.mark.parametrize(("kind", "has_bias"), [("olmo", False), ("cohere2", False), ("phi", True)])
def test_of_a_layer_norm_it_has_the_weight(kind: str, has_bias: bool, tmp_path: Path) -> None:
    parts = load_parts(zoo_folder(tmp_path, kind))
    assert parts.norm_form is not None
    assert not parts.norm_form.is_rms
    bias = parts.norm.bias if has_bias else torch.zeros(())
    without_mean = STATES - STATES.mean(-1, keepdim=True)
    expected = parts.norm(STATES) - bias
    torch.testing.assert_close(new_head(parts).norm(without_mean), expected, rtol=1e-4, atol=1e-4)
    assert bool(bias.any()) == has_bias


class Tanh(nn.Module):
    """A norm's stand-in that saturates (DyT)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((32,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class Double(Tanh):
    """A norm whose factor is neither its weight nor 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.rms_norm(x, x.shape[-1:], self.weight)


@pytest.mark.parametrize("norm", [Tanh, Double])
def test_another_norm_is_refused(norm: type[nn.Module]) -> None:
    table = torch.randn(61, 32, generator=torch.Generator().manual_seed(0))
    parts = TargetParts(table, norm().requires_grad_(False), table, 1.0, None)
    assert "target_norm.weight" not in parts.shared_tensors
    with pytest.raises(UserError, match=f"expected a final norm .*, found {norm.__name__}"):
        new_head(parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["cohere2", "granite"])
def test_the_targets_state_gives_the_targets_logits(kind: str, family: str, tmp_path: Path) -> None:
    """Also where the target multiplies them: a head's logits have no factor."""
    parts = load_parts(zoo_folder(tmp_path, kind))
    assert parts.scale != 1
    states = STATES - STATES.mean(-1, keepdim=True)  # a head's norm takes no mean off
    head = new_head(parts, family)
    product = F.linear(head.norm(states), head.lm_head.weight)
    torch.testing.assert_close(product, parts.logits(states)[:, :40], rtol=1e-3, atol=1e-3)
