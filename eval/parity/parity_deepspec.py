"""Compare DSpark's training loss and its gradients with DeepSpec's, the authors' trainer.

    PYTHONPATH=. .venv/bin/python eval/parity/parity_deepspec.py --deepspec FOLDER

FOLDER is a checkout of github.com/deepseek-ai/DeepSpec; its `compute_dspark_loss` reads logits of
whole blocks, which are made here from the head's outputs. It computes in float32. Gradients are
compared for every trained weight of a small random head over packed conversations. The exit status
is 1 if a value differs by more than 1e-5 of the largest.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.heads.block import BlockHead
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.objectives.block import block_outputs
from draftlab.train.objectives.loss import LossTerms
from tests.helpers.fast_forward import random_norms_head
from tests.helpers.synthetic import VOCAB, family_loss, parts, record, spans_of, teacher_logits

K, DECAY, BOUND = 7, 4.0, 1e-5
TERMS = LossTerms("ce_l1", cross_entropy=0.1, l1=0.9, confidence=1.0)
TURNS = ([(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)], [(1, 2), (3, 17)])


def random_head() -> BlockHead:
    """Return a head over the whole vocabulary, as DeepSpec's are."""
    model = random_norms_head(family="dspark", k_trained=K, num_layers=2, draft_vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("markov_head", "confidence_head")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def deepspec_loss(model: BlockHead, batch: Batch) -> Tensor:
    """Return DeepSpec's loss of the same blocks; slots without loss have logits of zeros."""
    from deepspec.modeling.dspark.common import DSparkForwardOutput
    from deepspec.modeling.dspark.loss import compute_dspark_loss

    tokens, last = batch.tokens.flatten(), batch.last.flatten(0, 1)
    place = torch.full((tokens.numel(),), -1)
    anchors = batch.steps[0].teacher_index - 1
    place[anchors] = torch.arange(len(anchors))
    shape = (1, len(anchors), K)
    logits, teachers = torch.zeros(*shape, VOCAB), torch.zeros(*shape, VOCAB)
    confidence, labels = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    evaluated = torch.zeros(shape, dtype=torch.bool)
    for k, step in enumerate(block_outputs(model, batch)):
        rows, at = step.teacher_index, (0, place[step.teacher_index - 1 - k], k)
        previous = tokens[rows]
        factors = model.markov_factors(previous)
        logits[at] = model.logits(step.output, previous)
        confidence[at] = model.confidence_logits(model.normed(step.output), factors)
        teachers[at], labels[at] = teacher_logits(parts(), last[rows]), tokens[rows + 1]
        evaluated[at] = True
    outputs = DSparkForwardOutput(
        draft_logits=logits,
        target_ids=labels,
        eval_mask=evaluated,
        block_keep_mask=torch.ones(shape[:2], dtype=torch.bool),
        confidence_pred=confidence,
        aligned_target_logits=teachers,
    )
    return compute_dspark_loss(
        outputs=outputs, loss_decay_gamma=DECAY, ce_loss_alpha=0.1, l1_loss_alpha=0.9,
        confidence_head_alpha=1.0,
    )  # fmt: skip


def gradients(model: BlockHead, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every trained weight."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--deepspec", type=Path, required=True, help="a checkout of DeepSpec")
    sys.path.insert(0, str(parser.parse_args().deepspec))
    with tempfile.TemporaryDirectory() as folder:  # its loss asks for the number of processes
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        target, model = parts(), random_head()
        records = [record(spans_of(turns), target, seed) for seed, turns in enumerate(TURNS)]
        batch = pack([records[:3], records[3:]], 64, K)
        ours, _ = family_loss(model, target, batch, gamma=math.exp(-1 / DECAY), terms=TERMS)
        ours = ours / batch.num_anchors
        mine = gradients(model, ours)
        theirs = deepspec_loss(model, batch)
        other = gradients(model, theirs)
        torch.distributed.destroy_process_group()
    largest = max(float(g.abs().max()) for g in other.values())
    ours, theirs = float(ours.detach()), float(theirs.detach())
    loss = abs(ours - theirs) / theirs
    worst = max(float((mine[n] - other[n]).abs().max()) / largest for n in other)
    print(f"loss {ours:.6f} and {theirs:.6f}, {loss:.1e} apart; gradients of "
          f"{len(other)} weights at most {worst:.1e} of the largest apart")  # fmt: skip
    return int(not max(loss, worst) <= BOUND)


if __name__ == "__main__":
    sys.exit(main())
