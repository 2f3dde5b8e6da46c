"""Targets with quantised weights record and decode as transformers runs them, or are refused.

The quantisation libraries are not dependencies; tests that need one are skipped without it.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftlab.engine.engine import Engine
from draftlab.errors import UserError
from draftlab.target_model.fused_decoder import has_known_layers
from draftlab.target_model.parts import load_parts
from draftlab.target_model.quantisation import StoredWeights, dequantise, quantise
from tests.helpers.greedy_answers import STOPS, requests, run
from tests.helpers.small_run import draftlab, new_workshop, refused
from tests.helpers.toys import toy_target_folder
from tests.helpers.zoo import load_on_cpu, zoo_folder

_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
OF_CODE = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits, two in a byte."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


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
    quantisation = {"quant_method": "compressed-tensors", "format": "dense"}
    edit_config(tmp_path, quantization_config=quantisation)
    with pytest.raises(UserError, match="pip install compressed-tensors"):
        load_on_cpu(tmp_path)


def eight_bit_blocks(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Save a checkpoint as DeepSeek-V3's are, float8 with a factor for each block of 128 × 128.

    Returns:
        The weights that it stands for.
    """
    shutil.copytree(folder, out)
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = weight.bfloat16()
        if weight.ndim == 2 and ".layers." in name:
            rows, columns = (-(-size // 128) for size in weight.shape)
            scale = torch.empty(rows, columns)
            blocks = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
            meant[name] = torch.empty_like(weight)
            for i in range(rows):
                for j in range(columns):
                    block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                    scale[i, j] = weight[block].abs().max() / 448
                    blocks[block] = (weight[block] / scale[i, j]).to(blocks.dtype)
                    meant[name][block] = blocks[block].float() * scale[i, j]
            stored[name], stored[f"{name}_scale_inv"] = blocks, scale
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    quantisation |= {"weight_block_size": [128, 128]}
    edit_config(out, dtype="bfloat16", quantization_config=quantisation)
    return meant


@pytest.mark.parametrize(
    ("dtype", "hidden"), [("float32", 256), ("bfloat16", 256), ("float32", 192)]
)
def test_blocks_of_8_bits_are_dequantised(dtype: str, hidden: int, tmp_path: Path) -> None:
    """Also blocks of which the last ones are smaller."""
    folder = toy_target_folder(tmp_path / "plain", layers=2, hidden=hidden)
    meant = eight_bit_blocks(folder, tmp_path / "fp8")
    target = load_on_cpu(tmp_path / "fp8", dtype=dtype)
    assert {str(p.dtype) for p in target.model.parameters()} == {f"torch.{dtype}"}
    (note,) = target.notes
    assert "its weights (fp8) were dequantised" in note
    own = dict(target.model.named_parameters())
    for name, weight in meant.items():
        torch.testing.assert_close(own[name].float(), weight.float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "shape"),
    [((16, 16), (3, 17)), ((1, 264), (33, 1)), ((33, 264), (1,)), ((33, 264), ())],
)
def test_dequantised_weights_become_their_bits_again(
    size: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Every code, with random factors and with powers of two."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(33, 1)
    codes[codes % 128 == 127] = 0  # NaN
    codes = torch.nn.functional.pad(codes, (0, 8)).view(torch.float8_e4m3fn)  # [33, 264]
    for scale in (torch.rand(shape) + 1e-3, torch.full(shape, 2.0**-12), torch.rand(shape) / 1e5):
        for stored in (scale, scale.bfloat16()):
            weights = dequantise(codes, stored, block=size).to(dtype)
            again, factors = quantise(weights, stored, size)
            assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
            assert factors.dtype == stored.dtype
            assert torch.equal(factors, stored)
    # Values that do not fit double the factors of their blocks alone.
    weights[0, 0] = 3 * 448 * stored.float().max()
    again, factors = quantise(weights, stored, size)
    assert float(factors.flatten()[0] / stored.flatten()[0]).is_integer()
    assert torch.equal(factors.flatten()[1:], stored.flatten()[1:])
    found = dequantise(again, factors, block=size)
    torch.testing.assert_close(found, weights.float(), rtol=1 / 16, atol=float(factors.max()) / 512)


@pytest.mark.parametrize(
    ("shape", "scale", "size"),
    [
        ((3, 33, 264), torch.tensor(1e-3), None),
        ((33, 264), torch.full((1, 1), 1e-3), (10**18, 10**18)),
        ((33, 264), torch.full((3, 17), 1e-42), (16, 16)),
        ((33, 264), torch.full((3, 17), 2.0**-127).to(torch.float8_e8m0fnu), (16, 16)),
    ],
)
def test_factors_of_every_shape_and_size_grow(
    shape: tuple[int, ...], scale: torch.Tensor, size: tuple[int, int] | None
) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, factors = quantise(weights, scale, size)
    assert (factors.shape, factors.dtype) == (scale.shape, scale.dtype)
    found = dequantise(codes, factors, block=size)
    torch.testing.assert_close(found, weights, rtol=1 / 16, atol=float(factors.float().max()) / 512)


def test_a_multimodal_config_may_hold_the_block_of_its_text_model(tmp_path: Path) -> None:
    fields = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": fields}))
    codes, scale = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.rand(2, 2)
    save_file({"a": codes, "a_scale_inv": scale}, tmp_path / "model.safetensors")
    expected = scale.repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert torch.equal(StoredWeights(tmp_path).read("a"), expected)


@pytest.mark.parametrize("shape", ["channel", "tensor"])
@pytest.mark.parametrize(("kind", "dtype"), [("float", torch.float8_e4m3fn), ("int", torch.int8)])
def test_rows_of_8_bits_are_dequantised_without_a_library(
    kind: str, dtype: torch.dtype, shape: str, plain: Path, tmp_path: Path
) -> None:
    """As compressed-tensors writes them, whose activations are not quantised here."""
    out, stored, meant = tmp_path / "out", {}, {}
    shutil.copytree(plain, out)
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if weight.ndim == 2 and ".layers." in name:
            stored[name] = torch.randint(-100, 100, weight.shape).to(dtype)
            scale = torch.rand(len(weight) if shape == "channel" else 1, 1) / 2000
            stored[f"{name}_scale"] = scale if shape == "channel" else scale[0]
            meant[name] = stored[name].float() * scale
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    layout = f"{kind}-quantized"
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": kind, "strategy": shape}}
    whole = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"0": group}}
    edit_config(out, quantization_config=whole)
    target = load_on_cpu(out)
    assert f"its weights (compressed-tensors {layout}) were dequantised" in target.notes[0]
    for name, weight in target.model.named_parameters():
        torch.testing.assert_close(weight, meant[name])


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="the library is there")
def test_a_plan_names_the_library_that_quantised_weights_need(tmp_path: Path) -> None:
    folder = new_workshop(tmp_path)
    for method, words in (("awq", "gptqmodel"), ("modelopt", "Unknown quantization type")):
        edit_config(folder / "toy", quantization_config={"quant_method": method, "bits": 4})
        plan = " ".join(draftlab(folder, "run", "small.yaml", "--plan").output.split())
        said = " ".join(refused(folder, "run", "small.yaml").split())
        for text in (plan, said):
            assert f"the target's weights are quantised ({method})" in text
            assert words in text
    assert "regenerate.backend=vllm record.backend=vllm" in said
    quantisation = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    edit_config(folder / "toy", quantization_config=quantisation)
    said = " ".join(draftlab(folder, "run", "small.yaml", "--plan").output.split())
    assert "a row's states depend on the rows beside it" in said
    edit_config(folder / "toy", quantization_config=None)
    quantised = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}}
    (folder / "toy/hf_quant_config.json").write_text(json.dumps(quantised))
    plan = " ".join(draftlab(folder, "run", "small.yaml", "--plan").output.split())
    assert "the target's weights are quantised (modelopt W4A8_AWQ)" in plan


def test_blocks_of_4_bits_are_dequantised_on_a_cpu(tmp_path: Path) -> None:
    """gpt-oss's experts: MXFP4, 32 values to a power of two, two in a byte."""
    zoo_folder(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=64)
    stored, meant = {}, {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith("_proj"):
            stored[name] = weight.bfloat16()
            continue
        experts, columns, rows = weight.shape
        codes = torch.randint(0, 16, (experts, rows, columns // 32, 32))
        exponents = torch.randint(122, 126, codes.shape[:3], dtype=torch.uint8)
        stored[f"{name}_blocks"] = packed(codes)
        stored[f"{name}_scales"] = exponents
        blocks = OF_CODE[codes].float() * 2.0 ** (exponents.int()[..., None] - 127)
        meant[name] = blocks.reshape(experts, rows, columns).transpose(1, 2)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    target = load_on_cpu(tmp_path)
    assert "were dequantised" in target.notes[0]
    own = dict(target.model.named_parameters())
    assert len(meant) == 8
    for name, weight in meant.items():
        assert torch.equal(own[name], weight)


def four_bits(folder: Path, out: Path, method: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Save the layers' matrices in NVFP4 as Model Optimizer or compressed-tensors do.

    Returns:
        The weights that they stand for, in float64.
    """
    shutil.copytree(folder, out)
    is_modelopt = method == "modelopt"
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = weight.bfloat16()
        if weight.ndim < 2 or ".layers." not in name or ".gate." in name:
            continue
        del stored[name]
        rows, columns = weight.shape
        codes = torch.randint(0, 16, (rows, columns))
        scale = torch.randint(1, 100, (rows, columns // 16)).to(torch.float8_e4m3fn)
        factor = torch.rand(()) / 2000
        module = name.removesuffix(".weight")
        stored[name if is_modelopt else f"{name}_packed"] = packed(codes)
        stored[f"{module}.weight_scale"] = scale
        blocks = OF_CODE[codes].unflatten(-1, (-1, 16)) * scale.double()[..., None]
        meant[name] = blocks.flatten(-2) * factor.double()
        if is_modelopt:
            stored[f"{module}.weight_scale_2"], stored[f"{module}.input_scale"] = factor, 2 * factor
        else:
            stored[f"{module}.weight_global_scale"] = 1 / factor[None]
            stored[f"{module}.input_global_scale"] = factor[None]
    save_file({**stored, **changes}, out / "model.safetensors", {"format": "pt"})
    edit_config(out, dtype="bfloat16")
    quantisation = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    if is_modelopt:
        (out / "hf_quant_config.json").write_text(json.dumps({"quantization": quantisation}))
    else:
        weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
        group = {"targets": ["Linear"], "weights": weights, "format": "nvfp4-pack-quantized"}
        whole = {"quant_method": method, "format": "nvfp4-pack-quantized"}
        edit_config(out, quantization_config=whole | {"config_groups": {"0": group}})
    return meant


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_nvfp4_is_dequantised_without_a_library(method: str, kind: str, tmp_path: Path) -> None:
    zoo_folder(tmp_path / "plain", kind, moe_intermediate_size=32)
    meant = four_bits(tmp_path / "plain", tmp_path / "packed", method)
    target = load_on_cpu(tmp_path / "packed")
    (note,) = target.notes
    assert "were dequantised" in note
    own = dict(target.model.named_parameters())
    for name, weight in own.items():
        expected = meant.get(name)
        if expected is None:  # of all experts
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            experts = name.rpartition(".")[0]
            expected = torch.stack(
                [
                    torch.cat([meant[f"{experts}.{i}.{part}.weight"] for part in parts])
                    for i in range(len(weight))
                ]
            )
        torch.testing.assert_close(weight.double(), expected.double(), rtol=1e-6, atol=0)


def test_nvfp4_of_another_layout_is_refused_by_the_plan(tmp_path: Path) -> None:
    folder = new_workshop(tmp_path / "run")
    experts = {"model.experts.gate_up_proj": torch.zeros(2, 64, 32, dtype=torch.uint8)}
    rotated = {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(64)}
    for i, changes in enumerate(({}, experts, rotated)):
        four_bits(folder / "toy", tmp_path / f"{i}", "modelopt", **changes)
        plan = draftlab(folder, "run", "small.yaml", "--plan", f"target={tmp_path / str(i)}")
        said = " ".join(plan.output.split())
        assert "quantised (modelopt NVFP4), dequantised in memory" in said
        assert plan.exit_code == (2 if changes else 0)
        for name in changes:
            assert f"found {name}" in said
            assert "regenerate.backend=vllm record.backend=vllm" in said


def test_factors_without_their_weights_are_refused(tmp_path: Path) -> None:
    """transformers writes experts in float8 one by one, and their factors together."""
    folder = toy_target_folder(tmp_path / "plain", layers=2, hidden=256)
    eight_bit_blocks(folder, tmp_path / "fp8")
    file = tmp_path / "fp8/model.safetensors"
    factors = {"model.layers.0.mlp.experts.down_proj_scale_inv": torch.ones(4, 2, 1)}
    save_file({**load_file(file), **factors}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"experts\.down_proj_scale_inv without .*experts\.down"):
        load_on_cpu(tmp_path / "fp8")
