"""The loss of a chain's replayed drafts, one sequence at a time, from methods §2 and §8 alone."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.store.store import Record
from draftlab.target_model.model import Target
from draftlab.train.batch.loss_rows import loss_reach
from tests.helpers.plain_chain import PlainChain


def plain_loss(
    head: DraftHead, target: Target, record: Record, words: list[int], num_steps: int, gamma: float
) -> tuple[float, int]:
    """The loss of one replayed record by methods §8 alone, and its replayed anchors.

    Every draft has a pass of its own, of the head and of the target.

    Args:
        words: target ids of the draft vocabulary.
        num_steps, gamma: of the training.
    """
    plain = PlainChain(head.state_dict(), head.config)
    hidden = [plain.project_features(x) for x in record.features]
    caches = [plain.empty]
    for t in range(len(record.tokens) - 1):
        caches.append(plain.step(int(record.tokens[t + 1]), hidden[t], t, caches[t])[2])
    reach = loss_reach(record.spans).tolist()
    total, free, num_replayed = 0.0, 0, 0

    def loss(logits: Tensor, read: list[int]) -> float:
        z = target.logits(target.states(torch.tensor([read])).last)[0, -1]
        return -float((z - z.logsumexp(-1)).exp()[words] @ logits.log_softmax(-1))

    for t, steps in enumerate(reach):
        tokens, drafts = record.tokens.tolist(), []
        state = hidden[t], caches[t]
        losses: list[float] = []
        for k in range(min(steps, num_steps)):  # the head's own drafts
            read = tokens[: t + 2] + drafts
            output, logits, cache = plain.step(read[-1], state[0], t + k, state[1])
            state = output, cache
            losses.append(gamma**k * loss(logits, read))
            drafts.append(words[int(logits.argmax())])
        if not drafts:
            continue
        following = tokens[t + 2 : t + 2 + len(drafts)]
        agree = [a == b for a, b in zip(drafts, following, strict=True)]
        accepted = [*agree, False].index(False)
        if t >= free:  # a decode step begins here
            free = t + accepted + 1
            num_replayed += accepted < len(drafts) - 1
            total += sum(losses)
            continue
        state = hidden[t], caches[t]
        for k in range(min(steps, num_steps)):  # an ordinary anchor reads the recorded tokens
            read = tokens[: t + 2 + k]
            output, logits, cache = plain.step(read[-1], state[0], t + k, state[1])
            state = output, cache
            total += gamma**k * loss(logits, read)
    return total, num_replayed
