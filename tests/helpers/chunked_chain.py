"""A chain of a draft head, run token by token with a cache in a dictionary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead


def run_chain(head: DraftHead, answer: Any, start: int, num_steps: int = 4) -> list[Tensor]:
    """Return the outputs of a chain: verified pairs up to `start`, then its own outputs."""
    caches: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in head.layers]

    def run(token: Tensor, hidden: Tensor, position: int) -> Tensor:
        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            caches[number][position] = key, value
            chunk = head.layers[number].chunk or 1000
            visible = range(position // chunk * chunk, position + 1)
            keys, values = (
                torch.cat([caches[number][p][which] for p in visible], 0) for which in (0, 1)
            )
            groups = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

        return head.run(token[None], hidden, torch.tensor([position]), attend)

    for position in range(start + 1):
        hidden = head.project_features(answer.last[position, None].to(head.fc.weight.dtype))
        output = run(answer.tokens[position + 1], hidden, position)
    outputs = [output]
    for k in range(1, num_steps):
        if start + 1 + k < len(answer.tokens):
            outputs.append(run(answer.tokens[start + 1 + k], outputs[-1], start + k))
    return [output[0] for output in outputs]
