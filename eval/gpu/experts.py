"""Mixtures of experts on a GPU: our products against transformers' loop, and in a CUDA graph.

    python eval/gpu/experts.py

Needs transformers. Checks grouped (bfloat16) and bounded batched products (float32) of gpt-oss,
Qwen3-MoE and Mixtral experts, captured and replayed with fresh inputs, and prints their times
beside the time to read the weights of the experts that were hit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.target_model.experts import EXPERTS
from eval.gpu.parallel_layout import BANDWIDTH, microseconds

SHAPES = {  # experts, chosen, hidden, intermediate: those of public checkpoints
    "gpt-oss-20b": (GptOssExperts, GptOssConfig, 32, 4, 2880, 2880),
    "Qwen3-30B-A3B": (Qwen3MoeExperts, Qwen3MoeConfig, 128, 8, 2048, 768),
    "Mixtral-8x7B": (MixtralExperts, MixtralConfig, 8, 2, 4096, 14336),
}


def build(name: str, dtype: torch.dtype, shrink: int = 1) -> tuple[nn.Module, int, int, int]:
    """Random experts; also how many, how many are chosen, and the hidden size."""
    module, config_class, num, chosen, hidden, inner = SHAPES[name]
    sizes = {"hidden_size": hidden // shrink, "num_experts_per_tok": chosen}
    if module is Qwen3MoeExperts:
        sizes |= {"num_experts": num, "moe_intermediate_size": inner // shrink}
    else:
        sizes |= {"num_local_experts": num, "intermediate_size": inner // shrink}
    with torch.device("cuda"):
        experts = module(config_class(**sizes)).to(dtype).requires_grad_(False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts, num, chosen, hidden // shrink


def inputs(tokens: int, num: int, chosen: int, hidden: int, dtype: torch.dtype) -> list:
    weights, index = torch.rand(tokens, num, device="cuda").softmax(-1).topk(chosen)
    return [torch.randn(tokens, hidden, device="cuda", dtype=dtype), index, weights.to(dtype)]


@torch.inference_mode()
def check(name: str, dtype: torch.dtype) -> None:
    experts, *sizes = build(name, dtype, shrink=8 if dtype == torch.float32 else 1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for tokens in (1, 4, 36, 300):
        static = inputs(tokens, *sizes, dtype)
        experts.config._experts_implementation = EXPERTS
        experts(*static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = experts(*static)
        for _ in range(2):
            for old, new in zip(static, inputs(tokens, *sizes, dtype), strict=True):
                old.copy_(new)
            graph.replay()
            experts.config._experts_implementation = "eager"
            expected = experts(*static)
            error = (found - expected).abs().max() / expected.abs().max()
            assert error <= tolerance, (name, dtype, tokens, float(error))
            experts.config._experts_implementation = EXPERTS


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            check(name, dtype)
    print("check: replayed graphs equal the loop over experts, bfloat16 and float32")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'experts (bfloat16)':20} {'tokens':>6} {'us':>8} {'hit MB':>8} {'of 4.15 TB/s':>13}")
    for name in SHAPES:
        experts, num, chosen, hidden = build(name, torch.bfloat16)
        experts.config._experts_implementation = EXPERTS
        each = sum(p.nbytes for p in experts.parameters()) / num
        for tokens in (1, 4, 9, 72):
            arguments = inputs(tokens, num, chosen, hidden, torch.bfloat16)
            hit = len(arguments[1].unique()) * each
            time = microseconds(lambda given=arguments, run=experts: run(*given), 10)
            share = hit / BANDWIDTH / (time * 1e-6)
            print(f"{name:20} {tokens:6} {time:8.1f} {hit / 1e6:8.0f} {share:13.1%}")


if __name__ == "__main__":
    main()
