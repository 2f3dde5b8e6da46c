"""Targets with quantised weights record and decode as transformers runs them, or are refused.

The quantisation libraries are not dependencies; tests that need one are skipped without it.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftlab.engine.engine import Engine
from draftlab.errors import UserError
from draftlab.target_model.fused_decoder import has_known_layers
from draftlab.target_model.parts import load_parts
from tests.helpers.greedy_answers import STOPS, requests, run
from tests.helpers.toys import toy_target_folder
from tests.helpers.zoo import load_on_cpu


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target_folder(tmp_path_factory.mktemp("plain"), layers=4, hidden=64, max_length=128)


def w4a16(folder: Path, out: Path) -> None:
    """Save 4-bit weights, 32 to a scale, in the format of vLLM and transformers."""
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
    """Save torchao's 8-bit weights, which have a tensor class of their own."""
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
    target = load_on_cpu(tmp_path, dtype="bfloat16")
    assert not has_known_layers(target)  # its weights are not plain tensors
    (note,) = target.notes
    assert f"quantised ({library.replace('_', '-')})" in note
    # Training reads these parts from the files, where they are not quantised.
    parts = load_parts(tmp_path)
    assert torch.equal(parts.embeddings, target.parts.embeddings)
    assert torch.equal(parts.lm_head, target.parts.lm_head)
    target = load_on_cpu(tmp_path)
    prompts = requests(3, seed=1)
    for request, generation in zip(
        prompts, run(Engine(target, batch=3, max_length=128), prompts), strict=True
    ):
        ids = torch.tensor([request.prompt_ids])
        answer = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(STOPS),
        )
        assert list(generation.token_ids) == answer[0, ids.shape[1] :].tolist()


@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="the library is there")
def test_without_its_library_a_quantised_target_is_refused(plain: Path, tmp_path: Path) -> None:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "dense"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="pip install compressed-tensors"):
        load_on_cpu(tmp_path)
