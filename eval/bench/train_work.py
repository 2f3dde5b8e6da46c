"""The work that `bench_train.py` times: a random but fixed head, target parts and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from random_models import RANDOM
from torch import Tensor

from draftlab.heads.config import HeadConfig, make_head_config
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.family import get_family
from draftlab.heads.folder import new_head
from draftlab.heads.layers import RMSNorm
from draftlab.store.store import Record
from draftlab.target_model.parts import TargetParts
from draftlab.train.batch.packing import Batch, OptimizerStep, Packer, map_tensors, uses_one_row
from draftlab.train.metrics import PhaseTimer
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.settings import TrainSettings

GAMMA = 0.8
TOGETHER = 4
"""Steps between two waits for the device, of draftlab and of other trainers alike."""
FAMILIES = ("eagle3", "peagle", "dspark", "dflash2")


@dataclass(frozen=True)
class Shape:
    """Sizes of the work; the defaults are Llama-3.1-8B's and those of docs/benchmarks.md.

    Attributes:
        rows, row_tokens: rows of a batch, each of one conversation.
        prompt: share of each row that is prompt; the rest is one answer.
        steps: unrolled steps of a chain, or depths of a parallel head.
        window: keys that a position sees up to its own (`head.sliding_window`); 0: all.
        cod_ratio, cod_min: peagle, anchor_share: dspark, as in `TrainSettings`.
    """

    hidden: int = 4096
    boundaries: int = 3
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    draft_vocab: int = 32000
    steps: int = 7
    rows: int = 4
    row_tokens: int = 2048
    prompt: float = 0.3
    family: str = "eagle3"
    layers: int = 1
    window: int = 0
    cod_ratio: float = 0.8
    cod_min: float = 0.2
    anchor_share: float = 0.125
    markov_rank: int = 256

    @property
    def tokens(self) -> int:
        """The number of positions in a batch."""
        return self.rows * self.row_tokens


SHAPES = {
    "8b": Shape(),
    "embedded": Shape(256, 3, 768, 8, 4, 32, 6144, 2048, 6, 16, 512),
    "tiny": Shape(64, 3, 128, 4, 2, 16, 512, 256, 4, 4, 64),
}


def in_family(shape: Shape, family: str) -> Shape:
    """Return the shape for a family.

    A parallel head has a depth more than a chain has steps. A block head has five layers, a full
    vocabulary and rows twice as long, without a prompt.
    """
    shape = replace(shape, family=family, steps=shape.steps + (family == "peagle"))
    if family not in ("dspark", "dflash2"):
        return shape
    return replace(
        shape,
        layers=5,
        draft_vocab=shape.vocab,
        rows=shape.rows // 2,
        row_tokens=2 * shape.row_tokens,
        prompt=0.0,
    )


def train_settings(shape: Shape, **changes: Any) -> TrainSettings:
    """Return the settings of a training of this shape."""
    return TrainSettings(
        ttt_steps=shape.steps,
        row_tokens=shape.row_tokens,
        batch_rows=shape.rows,
        cod_ratio=shape.cod_ratio,
        cod_min=shape.cod_min,
        anchor_share=shape.anchor_share,
        **changes,
    )


def head_config(shape: Shape) -> HeadConfig:
    """Return the config of a head, for a target with as many layers as its boundaries need."""
    layers, mask = shape.boundaries + 1, shape.vocab - 1
    of_family: dict[str, Any] = {
        "peagle": {"mask_token_id": mask, "embeddings": "own"},
        "dspark": {
            "mask_token_id": mask,
            "embeddings": "target",
            "sample_from_anchor": True,
            "markov_rank": min(shape.markov_rank, shape.hidden),
            "confidence": True,
        },
        "dflash2": {
            "mask_token_id": mask,
            "embeddings": "target",
            "sample_from_anchor": False,
        },
    }
    return make_head_config(
        family=shape.family,
        num_layers=shape.layers,
        **of_family.get(shape.family, {"embeddings": "target"}),
        boundaries=tuple(range(1, layers)),
        target_num_layers=layers,
        target_hidden_size=shape.hidden,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=shape.row_tokens,
        vocab_size=shape.vocab,
        draft_vocab_size=shape.draft_vocab,
        k_trained=shape.steps,
        sliding_window=shape.window or None,
        target=RANDOM,
    )


@dataclass(frozen=True)
class RecordsInMemory:
    """Records in memory, with the part of a store's interface that packing uses."""

    records: Sequence[Record]
    on_disk = True
    window = None

    def views(self, indices: Sequence[int]) -> list[Record]:
        return [self.records[index] for index in indices]


@dataclass(frozen=True)
class Work:
    """A head on its device, its teacher, and the records of a batch in the host's memory."""

    shape: Shape
    head: Eagle3Head
    target: DraftTeacher
    records: Sequence[Record]

    def packed(self, device: torch.device) -> Batch:
        """Return the records as a batch in the host's memory, as in training on a device."""
        objective, one_row = get_family(self.shape.family).objective(), uses_one_row(device)
        sampling, imitates = objective.sampling, objective.imitates_states
        records, settings = RecordsInMemory(self.records), train_settings(self.shape)
        step = OptimizerStep(0, [([[number] for number in range(len(self.records))], False)])
        (batch,) = Packer(records, settings, 0, sampling, imitates, one_row)[step]
        return map_tensors(batch, Tensor.pin_memory) if device.type == "cuda" else batch


def new_work(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Work:
    """Return random weights and states, equal for equal seeds and devices.

    Args:
        dtype: of products, and of the target's weights.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with device:
        head = new_head(head_config(shape))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    if shape.family != "eagle3":
        head.initialise_extra(torch.Generator().manual_seed(seed))
    head.embed_tokens.to(dtype)
    head.set_draft_vocabulary(torch.arange(shape.draft_vocab, device=device))
    lm_head = torch.empty(shape.draft_vocab, shape.hidden, device=device)
    lm_head.normal_(0, 2 * shape.hidden**-0.5, generator=generator)
    norm = RMSNorm(shape.hidden, 1e-5).requires_grad_(False)
    parts = TargetParts(head.embed_tokens.weight, norm.to(device), lm_head.to(dtype), 1.0, None)
    target = DraftTeacher.for_training(parts, head, dtype)
    records = [_record(shape, number, parts, generator) for number in range(shape.rows)]
    return Work(shape, head, target, records)


def _record(shape: Shape, number: int, parts: TargetParts, generator: torch.Generator) -> Record:
    def normal(width: int) -> Tensor:
        made = torch.randn(shape.row_tokens, width, device=generator.device, generator=generator)
        return made.to(torch.bfloat16)

    last, features = normal(shape.hidden), normal(shape.boundaries * shape.hidden)
    tokens = torch.randint(
        shape.vocab, (shape.row_tokens,), device=generator.device, generator=generator
    )
    pieces = [(z.logsumexp(-1), z.argmax(-1)) for z in map(parts.logits, last.split(1024))]
    logsumexp, argmax = (torch.cat(each).cpu() for each in zip(*pieces, strict=True))
    spans = (torch.arange(shape.row_tokens) >= round(shape.prompt * shape.row_tokens)).long()
    # As if a twentieth of the target's probability lay outside of the draft vocabulary.
    return Record(
        f"row {number}",
        tokens.cpu(),
        spans,
        features.cpu(),
        last.cpu(),
        logsumexp + 0.05,
        argmax,
        None,
    )


def step_weights(family: str, counts: Sequence[int]) -> list[float]:
    """Return the weight of each step's sum of losses; `counts` are positions of each step."""
    return get_family(family).objective().step_weights(GAMMA, counts)


def timed_steps(
    step: Callable[[PhaseTimer], object], device: torch.device, warmup: int, repeats: int
) -> tuple[float, dict[str, float]]:
    """Return the median seconds of a step, and milliseconds of its phases.

    As in training, the device is waited for once in some steps (train.log_every).

    Args:
        step: runs a step and marks its phases.
        warmup, repeats: steps before the measurements, and measurements of `TOGETHER` steps.
    """
    clock, timings = PhaseTimer(device), []
    for number in range(warmup + TOGETHER * repeats):
        if number <= warmup:
            clock.start()
        step(clock)
        measured = number - warmup + 1
        if measured > 0 and measured % TOGETHER == 0:
            timings.append({name: part / TOGETHER for name, part in clock.read().items()})
    phases = {name: 1e3 * median(each[name] for each in timings) for name in timings[0]}
    return median(sum(each.values()) for each in timings), phases
