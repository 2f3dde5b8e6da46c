"""Multimodal checkpoints as targets: their text model is found, whole, and alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.plan.model_sizes import TargetSize
from draftlab.recipe.recipe import Recipe
from draftlab.target_model.auto_model import meta_model
from draftlab.target_model.locate import load_config
from draftlab.target_model.parts import load_parts
from tests.helpers.multimodal_zoo import KINDS, random_folder
from tests.helpers.zoo import assert_close, load_on_cpu

IDS = torch.tensor([[5, 9, 7, 11, 5, 31, 17, 8, 12, 44, 21, 6]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_model_gives_the_whole_model_s_tokens(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = random_folder(tmp_path, kind)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    capfd.readouterr()
    target = load_on_cpu(folder)
    assert capfd.readouterr() == ("", "")  # transformers prints no table of tensors
    if kind == "llama4":
        assert "not used: multi_modal_projector (1), vision_model (" in target.notes[0]
    assert target.num_layers == 4
    with torch.no_grad():
        assert_close(target.logits(target.states(IDS).last), model(input_ids=IDS).logits, 1e-4)
        answer = model.generate(
            IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=6,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    engine = Engine(target, batch=1, max_length=32)
    (own,) = engine.generate([Request("0", tuple(IDS[0].tolist()), 6, Sampling(), frozenset())])
    assert list(own.token_ids) == answer[0, IDS.shape[1] :].tolist()
    parts = load_parts(folder)
    assert torch.equal(parts.lm_head, target.parts.lm_head)
    assert torch.equal(parts.embeddings, target.parts.embeddings)
    others = sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in target.model.parameters()
    )
    assert others > 0, "vision weights stay in memory"
    size = TargetSize(Recipe(name="plan"), load_config(folder, trust_remote_code=False))
    assert size.parameters == sum(p.numel() for p in target.model.parameters())
    assert size.kv_bytes == sum(target.kv_bytes.values())


def test_models_without_a_causal_text_model_are_refused_by_their_config() -> None:
    for kind, found in (("t5", "found 't5'"), ("paligemma", "in both directions")):
        with pytest.raises(UserError, match=found):
            meta_model(CONFIG_MAPPING[kind]())
