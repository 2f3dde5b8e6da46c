"""Cases of the distillation loss: all rows at once, in chunks, and their comparison."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.distill import Labels, Loss, Teacher, distill
from draftlab.kernels.distill.linear import distill_linear
from draftlab.kernels.distill.plan import plan_rows

LOSSES: tuple[Loss, ...] = ("soft_ce", "lk", "ce_l1")


def make_case(
    num_rows: int = 23,
    positions: int = 9,
    vocab: int = 29,
    size: int = 7,
    size_of_target: int = 5,
    *,
    loss: Loss = "soft_ce",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    scale: float = 1.0,
    softcap: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the arguments of `distill_linear`, with `row` instead of its plan.

    The teacher's vocabulary is half as large again as the draft vocabulary, so its probabilities
    in the draft vocabulary sum to less than 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, as_dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, as_dtype)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    last = draw(positions, size_of_target)
    weights = draw(vocab + vocab // 2 + 1, size_of_target, scale=2 * size_of_target**-0.5)
    full = Teacher(last, None, weights, last[:, 0], scale, softcap)
    logsumexp = full.to_logits(last @ weights.t()).logsumexp(-1)
    row = torch.randint(0, max(1, positions), (num_rows,), generator=generator)
    # −1: the draft vocabulary lacks the token.
    ids = torch.arange(num_rows) * 7 % (vocab + 1) - 1
    labels = Labels(ids.to(device), 0.3, 0.7)
    return {
        "hidden": draw(num_rows, size).requires_grad_(),
        "lm_head": draw(vocab, size, scale=2 * size**-0.5).requires_grad_(),
        "teacher": Teacher(last, None, weights[:vocab].clone(), logsumexp, scale, softcap),
        "row": row.to(device),
        "weight": draw(num_rows, as_dtype=wide).abs(),
        "loss": loss,
        "kl_weight": draw(num_rows, as_dtype=wide).abs().clamp(max=1) if loss == "lk" else None,
        "labels": labels if loss == "ce_l1" else None,
    }


def arguments_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `distill_linear`."""
    arguments = {name: value for name, value in case.items() if name != "row"}
    return arguments | {"plan": plan_rows(case["row"])}


def at_once(case: dict[str, Any], factor: float = 3.0) -> dict[str, Tensor]:
    """Return what `distill_linear` computes, by `distill` on all rows at once and autograd."""
    teacher, row = case["teacher"], case["row"]
    z = teacher.to_logits(teacher.last @ teacher.weight.t())
    out = distill(
        F.linear(case["hidden"], case["lm_head"]),
        z[row],
        teacher.logsumexp[row],
        loss=case["loss"],
        kl_weight=case["kl_weight"],
        labels=case["labels"],
    )
    total = (case["weight"] * out.loss).sum()
    return vars(out) | {"total": total} | gradients(case, total, factor)


def in_chunks(case: dict[str, Any], height: int = 6) -> dict[str, Tensor]:
    """Return what `distill_linear` computes with `height` rows and teachers a chunk."""
    pitch = -(-len(case["lm_head"]) // 16) * 16
    line = pitch * max(case["hidden"].itemsize, case["teacher"].weight.itemsize)
    out = distill_linear(**arguments_of(case), buffer_bytes=height * line)
    return vars(out) | gradients(case, out.total)


def gradients(case: dict[str, Any], total: Tensor, factor: float = 3.0) -> dict[str, Tensor]:
    """Return the gradients of factor · total for those of hidden and lm_head that require them."""
    leaves = {n: case[n] for n in ("hidden", "lm_head") if case[n].requires_grad}
    if not leaves:
        return {}
    values = torch.autograd.grad(factor * total, list(leaves.values()))
    return {f"d_{name}": gradient for name, gradient in zip(leaves, values, strict=True)}


def assert_close(
    values: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    """Assert that values and gradients are equal, and that only the total has a gradient."""
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            values[name].detach(),
            value.detach(),
            rtol=tolerance,
            atol=tolerance * max(1.0, float(value.detach().abs().max()) if value.numel() else 1.0),
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert not any(values[name].requires_grad for name in ("loss", "alpha", "best"))
