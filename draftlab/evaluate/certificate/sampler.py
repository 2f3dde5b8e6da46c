"""The engine's sampler and verifier on the logits of a tree, without the engine around them.

In 16 bits a target's logits depend on the shape of the batch, so an engine's tokens have no exact
distribution to be compared with. Sampler and verifier do: that of the logits which they are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.engine.sampling import Request, sampling_metadata
from draftlab.evaluate.certificate.exact_tree import AnswerTree
from draftlab.kernels.noise import BLOCK_STRIDE
from draftlab.kernels.sampling import argmax_draft, sample_draft, sample_token
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata
from draftlab.kernels.verify import verify


class TableSampler:
    """Decoding of a tree's answers from tables of its nodes' logits.

    Args:
        tree: the tree; its context is the prompt of every request.
    """

    def __init__(self, tree: AnswerTree) -> None:
        settings = self.settings = tree.settings
        self.tree, self.device = tree, tree.first_logits.device
        # Node n of level m has row offset[m] + n; the last row is of nodes outside of the tree.
        outside = torch.zeros_like(tree.first_logits)[None]
        self.logits = torch.cat([*tree.logits, outside])
        self.outside = len(self.logits) - 1
        children = torch.cat([torch.from_numpy(t).to(self.device) for t in tree.tokens])
        self.tokens = torch.cat([children, children.new_full((1, settings.width), -1)])
        first_child = torch.arange(self.outside, device=self.device) * settings.width + 1
        next_nodes = first_child[:, None] + torch.arange(settings.width, device=self.device)
        self.children = torch.cat(
            [next_nodes, next_nodes.new_full((1, settings.width), self.outside)]
        ).clamp(max=self.outside)
        # Draft d of a node: zeros where no step of K drafts can reach it.
        empty = torch.zeros_like(tree.draft_logits[0][0][:1])
        self.draft_logits = torch.stack(
            [
                torch.cat(
                    [
                        level[depth] if depth < len(level) else empty.expand(len(nodes), -1)
                        for level, nodes in zip(tree.draft_logits, tree.tokens, strict=True)
                    ]
                    + [empty]
                )
                for depth in range(settings.k)
            ]
        )

    @torch.inference_mode()
    def answers(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Return the first token and the L tested tokens of each request."""
        settings, rows = self.settings, sampling_metadata(requests, self.device)
        lengths = torch.full_like(rows.prompt, len(self.tree.context))
        first = sample_token(self.tree.first_logits.expand(len(requests), -1), lengths, rows)
        answers = [[token] for token in first.tolist()]
        active = torch.arange(len(requests), device=self.device)
        nodes, lengths = torch.zeros_like(active), lengths + 1
        while len(active):
            path, tokens, accepted = self._step(nodes, lengths, rows[active])
            # A rejected draft's tokens follow the accepted prefix only.
            last = accepted[:, None]
            nodes = self._child(path.gather(1, last)[:, 0], tokens.gather(1, last)[:, 0])
            lengths = lengths + accepted + 1
            for row, emitted, count in zip(
                active.tolist(), tokens.tolist(), accepted.tolist(), strict=True
            ):
                answers[row] += emitted[: count + 1]
            unfinished = lengths - len(self.tree.context) <= settings.levels
            active, nodes, lengths = active[unfinished], nodes[unfinished], lengths[unfinished]
        return [tuple(answer[: settings.levels + 1]) for answer in answers]

    def _child(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Return the nodes after the tokens [B]; `outside` where the tree does not follow them."""
        matches = self.tokens[nodes] == tokens[:, None]
        child = self.children[nodes].gather(1, matches.int().argmax(1, keepdim=True))[:, 0]
        return child.where(matches.any(1), self.outside)

    def _step(
        self, nodes: Tensor, lengths: Tensor, rows: SamplingMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft and verify.

        Args:
            nodes: int64 [B], the nodes that the steps begin at.
            lengths: int64 [B], positions of draft 0.

        Returns:
            The nodes along the drafts [B, K + 1]; the drafts with the emitted token in the place
            of the first rejected one [B, K + 1]; the number of accepted drafts [B].
        """
        temperature = torch.full_like(rows.temperature, self.settings.draft_temperature)
        sampled, ids = temperature > 0, self.tree.draft_ids
        block = self.settings.verification == "block"
        last = (lengths - 2) * (BLOCK_STRIDE if block else 1)  # as `DraftSampler`
        path, drafts, logits, log_sums = [nodes], [], [], []
        for depth in range(self.settings.k):
            logits.append(self.draft_logits[depth][path[-1]])
            if self.settings.draft_temperature > 0:
                draft, log_sum = sample_draft(
                    logits[-1], last, rows, temperature, sampled, ids=ids, offset=2 + depth
                )
                log_sums.append(log_sum)
            else:
                draft = argmax_draft(logits[-1], ids=ids)
            drafts.append(draft)
            path.append(self._child(path[-1], draft))
        nodes, tokens = torch.stack(path, 1), torch.stack(drafts, 1)
        q = None
        if log_sums:
            q = DraftDistribution(
                torch.stack(logits, 1), torch.stack(log_sums, 1), temperature, sampled, ids
            )
        count = torch.full_like(lengths, self.settings.k)
        result = verify(
            self.logits[nodes], tokens, count, q, lengths, rows, expect=False, block=block
        )
        tokens = torch.cat([tokens, tokens[:, :1]], 1)
        tokens = tokens.scatter(1, result.accepted[:, None], result.emitted[:, None])
        return nodes, tokens, result.accepted
