"""Passes of a target on a GPU: packed rows, fused layers, experts, host waits.

Every test is marked `gpu`. Random models of four layers and hidden size 256 stand for each
architecture of the zoo; layers and experts are also checked at the sizes of real models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from draftlab.kernels import launching
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.attention import ATTENTION
from draftlab.target_model.check_capabilities import can_capture
from draftlab.target_model.experts import EXPERTS
from draftlab.target_model.fused_decoder import FusedDecoder
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.packed_rows import PackedRow
from draftlab.target_model.settings import TargetSettings
from tests.helpers.gpu import capture, no_host_sync, on_gpu, relative_error
from tests.helpers.zoo import ZOO, wide, zoo_folder

LENGTHS = (170, 3, 33, 1, 290)  # longer than windows, chunks and steps of temperatures
ARCHITECTURES = [*ZOO, "qwen2", "olmo2"]
pytestmark = pytest.mark.usefixtures("exact_float32")


def load(folder: Path, device: str, dtype: str, **options: Any) -> Target:
    return load_target(TargetSettings(path=str(folder), device=device, dtype=dtype, **options))


def conversations(target: Target) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, target.vocab_size, (n,), generator=generator) for n in LENGTHS]
    return [row.to(target.device) for row in rows]


def states_alone(target: Target) -> Tensor:
    """Return last states [T, H] in float32, with a pass for each conversation."""
    return torch.cat([target.states(row[None]).last[0] for row in conversations(target)]).float()


def states_packed(target: Target) -> Tensor:
    """Return last states [T, H] of one pass over all conversations in one row."""
    row = PackedRow.of(LENGTHS, target.device)
    return target.states(torch.cat(conversations(target))[None], packed_row=row).last[0]


def median_error(states: Tensor, expected: Tensor) -> float:
    """Return the relative error of the median token."""
    sizes = expected.norm(dim=-1).clamp(min=1e-6)
    return float(((states.float() - expected).norm(dim=-1) / sizes).median())


@on_gpu
@pytest.mark.parametrize("kind", list(ZOO))
def test_packed_conversations_have_the_states_they_have_alone(
    kind: str, device: str, tmp_path: Path
) -> None:
    folder = zoo_folder(tmp_path, kind, **wide(kind))
    exact, half = (load(folder, device, dtype) for dtype in ("float32", "bfloat16"))
    expected = states_alone(exact)
    difference = (states_packed(exact) - expected).abs().max() / expected.abs().max()
    assert float(difference) <= 1e-4
    alone = median_error(states_alone(half), expected)
    assert median_error(states_packed(half), expected) <= max(2 * alone, 0.02)
    row, ids = PackedRow.of(LENGTHS, half.device), torch.cat(conversations(half))[None]
    with no_host_sync():
        half.states(ids, packed_row=row)


@on_gpu
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_is_captured(kind: str, device: str, tmp_path: Path) -> None:
    assert can_capture(load(zoo_folder(tmp_path, kind, **wide(kind)), device, "bfloat16"))


@on_gpu
def test_a_loop_over_experts_is_found_to_wait(device: str, tmp_path: Path) -> None:
    target = load(zoo_folder(tmp_path, "mixtral", **wide("mixtral")), device, "bfloat16")
    target.model.set_experts_implementation("eager")
    with pytest.warns(RuntimeWarning, match="decodes without CUDA graphs"):
        assert not can_capture(target)


@torch.inference_mode()
@on_gpu
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 5), (8, 4)])
def test_fused_layers_at_the_sizes_of_llama_8b(
    rows: int, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are near those of the eager layers; overlapped launches change no bit of them."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.eval().requires_grad_(False)
    target, block = Target(model, Path("random"), "random"), 64
    table = 1 + torch.arange(3 * rows, device=device).view(rows, 3).int()
    ids = torch.randint(0, 512, (rows, 100 + tokens), device=device)
    positions = torch.arange(100 + tokens, device=device).repeat(rows, 1)
    fused, results = FusedDecoder(target), {}
    for name, run in (("fused", fused), ("eager", target)):
        cache = target.new_paged_cache(3 * rows + 1, block)

        def states(columns: slice, run: Any = run, cache: Any = cache) -> Tensor:
            at = positions[:, columns]
            cache.at(table, at, slot_mapping(table, at, block))
            return run.states(ids[:, columns], positions=at, cache=cache).last

        states(slice(0, 100))
        results[name] = states(slice(100, None))
        if name == "fused":
            monkeypatch.setattr(launching, "ENABLED", False)
            expected = states(slice(100, None))
            torch.cuda.synchronize()
            monkeypatch.setattr(launching, "ENABLED", True)
            graph, output = capture(lambda: states(slice(100, None)))
            for _ in range(20):
                output.zero_()
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(output, expected)
    assert relative_error(results["fused"], results["eager"]) < 0.03


SHAPES = {  # experts, chosen experts, hidden and intermediate sizes of public checkpoints
    "gpt-oss-20b": (GptOssExperts, GptOssConfig, 32, 4, 2880, 2880),
    "Qwen3-30B-A3B": (Qwen3MoeExperts, Qwen3MoeConfig, 128, 8, 2048, 768),
    "Mixtral-8x7B": (MixtralExperts, MixtralConfig, 8, 2, 4096, 14_336),
}


@torch.inference_mode()
@on_gpu
@pytest.mark.parametrize(
    ("dtype", "shrink", "tolerance"), [(torch.bfloat16, 1, 2e-2), (torch.float32, 8, 1e-5)]
)
@pytest.mark.parametrize("name", SHAPES)
def test_experts_at_real_sizes(
    name: str, dtype: torch.dtype, shrink: int, tolerance: float, device: str
) -> None:
    """A captured and replayed product of experts equals transformers' loop over them."""
    module, config_class, num, chosen, hidden, inner = SHAPES[name]
    sizes = {"hidden_size": hidden // shrink, "num_experts_per_tok": chosen}
    if module is Qwen3MoeExperts:
        sizes |= {"num_experts": num, "moe_intermediate_size": inner // shrink}
    else:
        sizes |= {"num_local_experts": num, "intermediate_size": inner // shrink}
    torch.manual_seed(0)
    with torch.device(device):
        experts = module(config_class(**sizes)).to(dtype).requires_grad_(False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)

    def inputs(tokens: int) -> list[Tensor]:
        weights, index = torch.rand(tokens, num, device=device).softmax(-1).topk(chosen)
        x = torch.randn(tokens, hidden // shrink, device=device, dtype=dtype)
        return [x, index, weights.to(dtype)]

    for tokens in (1, 4, 36, 300):
        static = inputs(tokens)
        experts.config._experts_implementation = EXPERTS
        graph, output = capture(lambda: experts(*static))  # noqa: B023
        for _ in range(2):
            for tensor, values in zip(static, inputs(tokens), strict=True):
                tensor.copy_(values)
            graph.replay()
            experts.config._experts_implementation = "eager"
            expected = experts(*static)
            error = (output - expected).abs().max() / expected.abs().max()
            assert float(error) <= tolerance, tokens
