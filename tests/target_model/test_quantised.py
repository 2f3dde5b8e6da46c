"""Targets with quantised weights: they record and decode as transformers runs them, or say why not.

The libraries that hold such weights are not among ours; tests that need one are skipped without it.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftlab.engine.engine import Engine
from draftlab.errors import UserError
from draftlab.target_model.fused_decoder import knows
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.target_model.parts import load_parts
from tests.helpers.greedy_answers import STOPS, requests, run
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target_folder(tmp_path_factory.mktemp("plain"), layers=4, hidden=64, max_length=128)


def w4a16(folder: Path, out: Path) -> None:
    """Weights of 4 bits, 32 to a scale, packed as vLLM and transformers read them."""
    from compressed_tensors import quantization as q
    from compressed_tensors.compressors import ModelCompressor

    weights = q.QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=True)
    scheme = q.QuantizationScheme(targets=["Linear"], weights=weights)
    config = q.QuantizationConfig(
        config_groups={"all": scheme},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="frozen",
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    q.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.view(len(module.weight), -1, 32).float()
            module.weight_scale.data.copy_(groups.abs().amax(-1) / 7.5)
            module.quantization_status = q.QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)


def eight_bits(folder: Path, out: Path) -> None:
    """torchao's weights, which stay in a tensor class of their own."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config
    ).save_pretrained(out)


@pytest.mark.parametrize(
    ("library", "quantise"), [("compressed_tensors", w4a16), ("torchao", eight_bits)]
)
def test_greedy_tokens_are_transformers_own(
    library: str, quantise: Any, plain: Path, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    quantise(plain, tmp_path)
    target = load_target(TargetSettings(path=str(tmp_path), device="cpu", dtype="bfloat16"))
    assert not knows(target)  # kernels of ours would read its weights as they lie
    (note,) = target.notes
    assert f"quantised ({library.replace('_', '-')})" in note
    # Training reads its parts from the files, where they are not quantised.
    parts = load_parts(tmp_path)
    assert torch.equal(parts.embeddings, target.parts.embeddings)
    assert torch.equal(parts.lm_head, target.parts.lm_head)
    target = load_target(TargetSettings(path=str(tmp_path), device="cpu"))
    asked = requests(3, seed=1)
    for request, found in zip(
        asked, run(Engine(target, batch=3, max_length=128), asked), strict=True
    ):
        ids = torch.tensor([request.prompt_ids])
        answer = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(STOPS),
        )
        assert list(found.token_ids) == answer[0, ids.shape[1] :].tolist()


@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="the library is there")
def test_without_its_library_a_quantised_target_is_refused(plain: Path, tmp_path: Path) -> None:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "dense"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="pip install compressed-tensors"):
        load_target(TargetSettings(path=str(tmp_path), device="cpu"))


class Codes(Tensor):
    """Weights of a class of their own, as quantising libraries make them."""


def test_weights_of_another_class_are_not_for_our_kernels(plain: Path) -> None:
    target: Target = load_target(TargetSettings(path=str(plain), device="cpu"))
    assert knows(target)
    product = target.layers[1].mlp.up_proj
    product.weight = nn.Parameter(product.weight.data.as_subclass(Codes), requires_grad=False)
    assert not knows(target)
