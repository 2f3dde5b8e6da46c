"""On-policy replay: rejected drafts with the target's distributions after them (methods §8).

In a replayed record the head drafts at every position that carries loss. A walk over the recorded
answer finds the positions where a server's decode step would begin, and those of them whose drafts
it would reject. One pass of the target over the conversation and all of these drafts, side by side
as a `TokenTree`, gives its distributions under the head's own tokens. The anchor's rows then read
slots behind the row's conversations in place of the recorded tokens:

    x_0 … x_{S−1} | x_{t+1} d_1 … d_{L−1} | x_{t'+1} d'_1 … d'_{L−1} | …

So a batch keeps its rows and its counts. Nothing is kept from one step to the next: a batch is a
function of the step and of the weights, which a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.kernels.distill_plan import plan_rows
from draftlab.store.batches import cut_batches
from draftlab.store.extraction import summarise_logits
from draftlab.target_model.model import Target
from draftlab.target_model.token_tree import branches
from draftlab.train.batch.loss_rows import StepRows, step_rows
from draftlab.train.batch.packing import Batch, map_tensors
from draftlab.train.distillation_module import DistillationModule

MAX_TOKENS_PER_PASS = 16384
"""Most positions of a pass of the target, padding included, unless a conversation has more."""
ROWS = 8192
"""Rows whose logits are computed together."""


@dataclass(frozen=True)
class Branch:
    """Rejected drafts at an anchor of a batch.

    Attributes:
        row, anchor: the row of the batch, and the position t of the pair (x_{t+1}, g_t) in it.
        start: position of the conversation's first token in the row.
        tokens: int64 [L − 1], the drafts d_1 … d_{L−1}; beyond the anchor's last step any token.
        accepted: drafts before the first one that the recorded answer rejects.
    """

    row: int
    anchor: int
    start: int
    tokens: np.ndarray
    accepted: int


class Replay:
    """Replaces the recorded tokens of rejected drafts in a batch by the drafts.

    Args:
        target: the target model; without it there is no replay.
        module: the head that is trained, not sharded, and its teacher.

    Raises:
        UserError: the target or the head's family has no replay.
    """

    def __init__(self, target: Target | None, module: DistillationModule) -> None:
        reason = None
        if target is None:
            reason = "the trainer was given no target model"
        elif target.recurrent:
            reason = "this target has recurrent layers, which read one continuation at a time"
        elif module.objective.drafting is None:
            reason = (
                f"the family {module.head.config.family} does not say how it drafts in training"
            )
        if target is None or reason:
            raise UserError(
                f"expected a target and a head whose drafts can be replayed; {reason}",
                where="train.replay",
                do="leave it out",
            )
        self.target, self.module = target, module

    def apply(self, batch: Batch) -> Batch:
        """Return a batch in which the rows of rejected drafts read the head's present drafts."""
        if batch.replayed is None or batch.idle:
            return batch
        reach = _reach(batch)
        drafts = self.drafts(batch, np.where(batch.replayed.cpu().numpy(), reach, 0))
        found = rejected_drafts(batch, drafts.cpu().numpy(), reach)
        return self._with_branches(batch, found) if found else batch

    @torch.no_grad()
    def drafts(self, batch: Batch, reach: np.ndarray) -> Tensor:
        """Return the head's argmax drafts, int64 [B, S, L]; −1 where no row is run.

        Args:
            reach: int64 [B, S], the steps to run at each position.
        """
        shape, device = (*batch.tokens.shape, len(batch.steps)), batch.tokens.device
        steps = step_rows(torch.from_numpy(reach), shape[-1])
        batch = replace(batch, passes=(map_tensors(steps, lambda t: t.to(device)),))
        tokens, table = batch.tokens.flatten(), torch.full(shape, -1, device=device)
        module, flat = self.module, table.flatten(0, 1)
        head, target_ids, forward = module.head, module.target.target_ids, module.head_forward
        if module.objective.drafting == "chain":
            forward = partial(module.objective.forward, drafts=table)
        with torch.autocast(device.type, module.dtype, enabled=module.dtype != torch.float32):
            for k, step in enumerate(forward(head, batch)):
                anchor = step.teacher_index - 1 - k
                before = flat[anchor, k - 1] if k else tokens[step.teacher_index]
                for rows in torch.arange(len(anchor), device=device).split(ROWS):
                    best = head.logits(step.output[rows], before[rows]).argmax(-1)
                    flat[anchor[rows], k] = target_ids[best]
        return table

    def _with_branches(self, batch: Batch, found: list[Branch]) -> Batch:
        """Return the batch with the slots of its branches behind its positions."""
        (num_rows, width), length = batch.tokens.shape, len(batch.steps)
        last, logsumexp, argmax = self._teachers(batch, found)
        number_in_row = [n for _, g in groupby(found, lambda x: x.row) for n, _ in enumerate(g)]
        row = torch.tensor([branch.row for branch in found])
        anchor = torch.tensor([branch.anchor for branch in found])
        base = width + length * torch.tensor(number_in_row)
        extra = length * (max(number_in_row) + 1)
        device = batch.tokens.device
        slots = (base[:, None] - width + torch.arange(length)).to(device)
        rows = row[:, None].expand(-1, length).to(device)
        following = (row * width + anchor + 1).to(device)

        def extended(values: Tensor, own: Tensor | None = None, padding: int = 0) -> Tensor:
            """Return [B, S + E, …]; a branch has x_{t+1}'s value, then its own [n, L − 1, …]."""
            behind = values.new_full((num_rows, extra, *values.shape[2:]), padding)
            if own is not None:
                first = values.flatten(0, 1)[following][:, None]
                behind[rows, slots] = torch.cat([first, own.to(values.dtype)], 1)
            return torch.cat([values, behind], 1)

        tokens = torch.from_numpy(np.stack([branch.tokens for branch in found])).to(device)
        depth = torch.arange(1, length, device=device)
        positions = batch.positions.flatten()[following][:, None] + depth
        accepted = torch.tensor([branch.accepted for branch in found], device=device)[:, None]
        flat, index = batch.tokens.flatten(), following[:, None] + 1 + depth
        recorded = flat[index.clamp(max=len(flat) - 1)]
        # After drafts that equal the answer so far, the answer's own token follows.
        labels = torch.where(depth <= accepted, recorded, argmax)
        moved = np.full(num_rows * width, -1)
        moved[(row * width + anchor).numpy()] = base.numpy()
        steps = _redirected(batch.steps, moved, width, extra)
        plan = plan_rows(torch.cat([rows.teacher_index for rows in steps]))
        steps, plan = (map_tensors(x, lambda t: t.to(device)) for x in (steps, plan))
        noise = batch.noise
        if noise is not None:
            noise = replace(noise, records=extended(noise.records), scale=extended(noise.scale))
        return replace(
            batch,
            tokens=extended(batch.tokens, tokens),
            documents=extended(batch.documents, padding=-1),
            positions=extended(batch.positions, positions),
            features=extended(batch.features),
            last=extended(batch.last, last),
            logsumexp=extended(batch.logsumexp, logsumexp),
            argmax=extended(batch.argmax, argmax),
            labels=extended(batch.tokens.roll(-1, dims=1), labels),
            passes=(steps,),
            plans=(plan,),
            noise=noise,
            replayed=None,
        )

    @torch.inference_mode()
    def _teachers(self, batch: Batch, found: list[Branch]) -> tuple[Tensor, Tensor, Tensor]:
        """Return last states, logsumexp and argmax after each branch's drafts, [n, L − 1, …]."""
        tokens, device = batch.tokens.cpu().numpy(), self.target.device
        length = len(batch.steps) - 1
        grouped = groupby(enumerate(found), lambda item: (item[1].row, item[1].start))
        records = [list(zip(*group, strict=True)) for _, group in grouped]
        trunks = [each[-1].anchor + 2 - each[-1].start for _, each in records]
        sizes = [n + length * len(each) for n, (_, each) in zip(trunks, records, strict=True)]
        numbers, states = [], []
        for group in cut_batches(sizes, MAX_TOKENS_PER_PASS, padded=True):
            ends = [[b.anchor + 1 - b.start for b in records[i][1]] for i in group]
            tree = branches([trunks[i] for i in group], ends, length, device)
            ids = np.zeros(tree.positions.shape, np.int64)
            own = np.zeros(tree.positions.shape, bool)
            for line, i in enumerate(group):
                each, trunk = records[i][1], trunks[i]
                start = each[0].start
                ids[line, :trunk] = tokens[each[0].row, start : start + trunk]
                ids[line, trunk : sizes[i]] = np.concatenate([b.tokens for b in each])
                own[line, trunk : sizes[i]] = True
                numbers.extend(records[i][0])
            last = self.target.states(torch.from_numpy(ids).to(device), tree=tree).last
            states.append(last[torch.from_numpy(own).to(last.device)])
        last = torch.cat(states)
        summary = (last, *summarise_logits(self.target, last))
        order = torch.from_numpy(np.argsort(numbers))
        out = (x.unflatten(0, (-1, length))[order.to(x.device)] for x in summary)
        return tuple(x.to(batch.tokens.device) for x in out)


def _reach(batch: Batch) -> np.ndarray:
    """Return the number of rows of each position of a batch of one pass, int64 [B, S]."""
    reach = np.zeros(batch.tokens.numel(), np.int64)
    for k, rows in enumerate(batch.steps):
        reach[rows.teacher_index.cpu().numpy() - 1 - k] = k + 1
    return reach.reshape(batch.tokens.shape)


def rejected_drafts(batch: Batch, drafts: np.ndarray, reach: np.ndarray) -> list[Branch]:
    """Return the drafts that a walk over the recorded answers rejects, by row and anchor.

    A step begins at the first position with rows, and behind the tokens of the step before. A draft
    is accepted if it equals the recorded token (methods §6.5 and §8). Anchors whose only rejected
    draft is the last are left out, since no row reads it.

    Args:
        drafts: int64 [B, S, L], −1 where the head has not drafted.
        reach: int64 [B, S], rows of each position.
    """
    tokens, positions = (x.cpu().numpy() for x in (batch.tokens, batch.positions))
    length, width = drafts.shape[-1], tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, length + 1)), constant_values=-2)
    recorded = np.stack([padded[:, 2 + k : 2 + k + width] for k in range(length)], -1)
    hits = (drafts == recorded) & (np.arange(length) < reach[..., None])
    accepted = hits.cumprod(-1).sum(-1)
    return list(_walk(drafts, accepted, reach, positions))


def _walk(
    drafts: np.ndarray, accepted: np.ndarray, reach: np.ndarray, positions: np.ndarray
) -> Iterator[Branch]:
    for row in range(len(drafts)):
        free = 0
        for t in (drafts[row, :, 0] >= 0).nonzero()[0].tolist():
            if t < free:
                continue
            run = int(accepted[row, t])
            free = t + run + 1
            if run < reach[row, t] - 1:
                own = drafts[row, t, :-1].clip(min=0)
                yield Branch(row, t, t - int(positions[row, t]), own, run)


def _redirected(
    steps: tuple[StepRows, ...], moved: np.ndarray, width: int, extra: int
) -> tuple[StepRows, ...]:
    """Return the rows of a batch whose rows became longer, on the CPU.

    Args:
        moved: int64 [B · S], the slot in its row that holds x_{t+1} for a moved anchor t, else −1.
        width, extra: positions of a row, and those behind them.
    """
    out = []
    for k, rows in enumerate(map_tensors(steps, lambda t: t.cpu())):
        anchor = rows.teacher_index.numpy() - 1 - k
        row, t = np.divmod(anchor, width)
        slot = np.where(moved[anchor] >= 0, moved[anchor], t + 1) + k
        origin = rows.origin
        if k == 0:
            origin = torch.from_numpy(row * (width + extra) + t)
        teacher_index = torch.from_numpy(row * (width + extra) + slot)
        out.append(replace(rows, teacher_index=teacher_index, origin=origin))
    return tuple(out)
