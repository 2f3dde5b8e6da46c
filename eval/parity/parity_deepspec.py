"""Compare DSpark's training with DeepSpec's, the authors' trainer, in float64.

    PYTHONPATH=. .venv/bin/python eval/parity/parity_deepspec.py --deepspec FOLDER

FOLDER is a checkout of github.com/deepseek-ai/DeepSpec. Its `Qwen3DSparkModel` runs on random heads
of several shapes, conversation by conversation and with its own anchors, labels and masks, and its
`compute_dspark_loss` reads all blocks at once. draftlab packs the same conversations into two rows.
The logits of every slot, the loss and the gradient of every trained weight are compared. The exit
status is 1 if a difference exceeds 1e-12 of the largest value, or if a mistake of
`block_mistakes.py` makes none.

DeepSpec computes norms, the confidence and the loss in float32; they are replaced by float64. It
adds 1e-6 to denominators, which is undone. Its mask cannot tell adjacent answers apart, so there
are none here.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from block_mistakes import mistakes
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.heads.block import BlockHead
from draftlab.store.store import Record
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.objectives.block import block_outputs
from draftlab.train.settings import TrainSettings
from tests.helpers.synthetic import VOCAB, family_loss, parts, random_norms_head, record, spans_of

DECAY, BOUND = 4.0, 1e-12
TURNS = ([(3, 6)], [(2, 4), (2, 3)], [(4, 9)], [(1, 2), (3, 17)])
SHAPES = ((1, 3), (2, 7), (5, 8))
"""Layers and slots of a block."""


def random_head(num_layers: int, block_size: int) -> BlockHead:
    """Return a head over the whole vocabulary, as DeepSpec's are."""
    model = random_norms_head(
        family="dspark", k_trained=block_size, num_layers=num_layers, draft_vocab_size=VOCAB
    )
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("markov_head", "confidence_head")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


class InFloat64:
    """The module torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def wide_deepspec() -> Iterator[None]:
    """Make DeepSpec compute in float64, and its mask a dense one."""
    import deepspec.modeling.dspark.common as common
    import deepspec.modeling.dspark.loss as loss
    import transformers.models.qwen3.modeling_qwen3 as qwen3

    def norm(self: Any, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    def angles(self: Any, *inputs: Tensor) -> Any:  # float32 on both sides
        torch.Tensor.float = narrow
        try:
            return rotary(self, *inputs)
        finally:
            torch.Tensor.float = torch.Tensor.double

    def dense(mask: Any, B: int, H: Any, Q_LEN: int, KV_LEN: int, device: Any) -> Tensor:
        return create_mask(mask, B, 1, Q_LEN, KV_LEN, device=device)

    narrow, rotary = torch.Tensor.float, qwen3.Qwen3RotaryEmbedding.forward
    changed = (
        (torch.Tensor, "float", torch.Tensor.double),
        (loss, "torch", InFloat64()),
        (common, "create_block_mask", dense),
        (qwen3.Qwen3RMSNorm, "forward", norm),
        (qwen3.Qwen3RotaryEmbedding, "forward", angles),
    )
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    for owner, name, value in changed:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def deepspec_model(head: BlockHead) -> Any:
    """Return DeepSpec's model with the weights of a head."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import Qwen3Config

    c = head.config
    config = Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(c.rope_parameters),
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    fields = {
        "target_layer_ids": [b - 1 for b in c.boundaries], "mask_token_id": c.mask_token_id,
        "block_size": c.block_size, "num_anchors": 1, "enable_confidence_head": True,
        "confidence_head_with_markov": True, "markov_rank": c.markov_rank,
        "markov_head_type": "vanilla",
    }  # fmt: skip
    for name, value in fields.items():
        setattr(config, name, value)
    model = Qwen3DSparkModel(config).double()
    model.load_state_dict({n: t for n, t in head.state_dict().items() if n not in ("d2t", "t2d")})
    model.set_embedding_head_trainable(False)
    return model.train()


def run_deepspec(head: BlockHead, records: list[Record]) -> SimpleNamespace:
    """Return DeepSpec's logits [n, V] and confidence [n] of the slots with loss, loss, gradients.

    Slots are in the order of records, anchors and slots.
    """
    from deepspec.modeling.dspark.common import DSparkForwardOutput, build_anchor_candidate_mask
    from deepspec.modeling.dspark.loss import compute_dspark_loss

    model, norm, outputs = deepspec_model(head), parts().norm, []
    for r in records:
        mask = (r.spans > 0)[None].long()
        valid = build_anchor_candidate_mask(seq_len=len(r.tokens), loss_mask=mask)
        model.num_anchors = int(valid.sum())  # so that it takes all
        # DeepSpec stores the last states behind the target's final norm.
        last = norm(r.last.double())[None]
        outputs.append(model(r.tokens[None], r.features.double()[None], mask, last))
    joined = {
        name: torch.cat([getattr(output, name) for output in outputs], 1)
        for name in vars(outputs[0])
    }
    loss = compute_dspark_loss(
        outputs=DSparkForwardOutput(**joined), loss_decay_gamma=DECAY, ce_loss_alpha=0.1,
        l1_loss_alpha=0.9, confidence_head_alpha=1.0,
    )  # fmt: skip
    evaluated = joined["eval_mask"]
    weight = float((evaluated * (-torch.arange(model.block_size) / DECAY).exp()).sum())
    loss = loss * (1 + 1e-6 / weight)
    loss.backward()
    return SimpleNamespace(
        logits=joined["draft_logits"][evaluated].detach(),
        confidence=joined["confidence_pred"][evaluated].detach(),
        loss=loss.detach(),
        gradients={n: p.grad for n, p in model.named_parameters() if p.requires_grad},
    )


def run_draftlab(head: BlockHead, batch: Batch) -> SimpleNamespace:
    """Return the same of draftlab's objective."""
    tokens, slots = batch.tokens.flatten(), []
    for k, step in enumerate(block_outputs(head, batch)):
        previous = tokens[step.teacher_index]
        confidence = head.confidence_logits(head.normed(step.output), head.markov_factors(previous))
        slots += zip((step.teacher_index - 1 - k).tolist(), [k] * len(previous),
                     head.logits(step.output, previous), confidence, strict=True)  # fmt: skip
    slots.sort(key=lambda slot: slot[:2])
    terms = head.family.objective().loss_terms(TrainSettings())
    loss, _ = family_loss(head, parts(), batch, gamma=math.exp(-1 / DECAY), terms=terms)
    loss = loss / batch.num_anchors
    head.zero_grad()
    loss.backward()
    return SimpleNamespace(
        logits=torch.stack([slot[2] for slot in slots]).detach(),
        confidence=torch.stack([slot[3] for slot in slots]).detach(),
        loss=loss.detach(),
        gradients={n: p.grad for n, p in head.named_parameters() if p.requires_grad},
    )


def differences(mine: SimpleNamespace, theirs: SimpleNamespace) -> dict[str, float]:
    """Return the largest difference of each quantity, as a share of its largest value."""
    largest = max(float(g.abs().max()) for g in theirs.gradients.values())
    found = {
        "gradients": max(
            float((mine.gradients[n] - g).abs().max()) / largest
            for n, g in theirs.gradients.items()
        )
    }
    for name in ("logits", "confidence", "loss"):
        one, two = getattr(mine, name), getattr(theirs, name)
        same = one.shape == two.shape
        found[name] = float((one - two).abs().max() / two.abs().max()) if same else math.inf
    return found


def compare(num_layers: int, block_size: int) -> bool:
    """Compare a shape and print the result; return whether all is as it must be."""
    head, target = random_head(num_layers, block_size), parts()
    records = [record(spans_of(turns), target, seed) for seed, turns in enumerate(TURNS)]
    batch = pack([records[:2], records[2:]], 64, block_size)
    with wide_deepspec():
        theirs = run_deepspec(head, records)
    worst = differences(run_draftlab(head, batch), theirs)
    equal = max(worst.values()) <= BOUND
    figures = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    print(f"{num_layers} layers, blocks of {block_size}: {len(theirs.logits)} slots, loss "
          f"{float(theirs.loss):.6f}, {len(theirs.gradients)} gradients; largest difference / "
          f"largest value: {figures}; {'EQUAL' if equal else 'DIFFERENT'}")  # fmt: skip
    for name, wrong_head, wrong_batch, context in mistakes(head, batch):
        with context:
            found = max(differences(run_draftlab(wrong_head, wrong_batch), theirs).values())
        equal &= found > 1e-6
        print(f"  {name}: {found:.1e}{'' if found > 1e-6 else ', NOT NOTICED'}")
    return equal


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--deepspec", type=Path, required=True, help="a checkout of DeepSpec")
    sys.path.insert(0, str(parser.parse_args().deepspec))
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:  # its loss asks for the number of processes
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        equal = [compare(*shape) for shape in SHAPES]
        torch.distributed.destroy_process_group()
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main())
