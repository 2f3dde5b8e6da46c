"""A tiny target and heads trained on its greedy answers, for tests of decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.family import get_family
from draftlab.heads.folder import new_head
from draftlab.heads.head import initialise_head
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.loss import SOFT_CE, LossTerms
from draftlab.train.settings import TrainSettings
from tests.helpers.greedy_answers import BOUNDARIES, answers, greedy_records
from tests.helpers.head_toys import make_config
from tests.helpers.synthetic import family_loss
from tests.helpers.toys import toy_target_folder
from tests.helpers.zoo import load_on_cpu

MAX_LENGTH = 128


MASK = 288  # in no prompt and no answer
PARALLEL = {"family": "peagle", "embeddings": "own", "mask_token_id": MASK, "num_layers": 2}
DFLASH = {"family": "dflash", "mask_token_id": MASK, "num_layers": 2, "sample_from_anchor": False}
DSPARK = DFLASH | {
    "family": "dspark",
    "sample_from_anchor": True,
    "markov_rank": 8,
    "confidence": True,
}
DFLASH2 = DFLASH | {
    "family": "dflash2",
    "conv_group_size": 8,
    "selector_rank": 8,
    "selector_top_k": 6,
}
EAGLE = {"family": "eagle", "boundaries": (4,)}
NORMED = {"fc_norm": True, "norm_output": True}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target")
    return load_on_cpu(toy_target_folder(path, layers=4, hidden=32, max_length=MAX_LENGTH))


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def untrained_head(
    target: Target, k: int, draft_size: int, *, seed: int = 0, **changed: Any
) -> Any:
    """Return a head with initial values; its draft vocabulary lacks the lowest ids."""
    size = target.hidden_size
    if get_family(changed.get("family", "eagle3")).whole_vocabulary:
        draft_size = target.vocab_size
    config = make_config(
        **({"boundaries": BOUNDARIES, "rope_parameters": ROPE} | changed),
        target_num_layers=target.num_layers,
        target_hidden_size=size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_attention_heads=4,
        head_dim=size // 4,
        rms_norm_eps=1e-6,
        max_position_embeddings=target.max_length,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_size,
        k_trained=k,
    )
    head = new_head(config)
    initialise_head(
        head,
        embeddings=target.parts.embeddings,
        final_norm=next(target.parts.norm.parameters()),
        lm_head=target.parts.lm_head,
        target_ids=torch.arange(target.vocab_size - draft_size, target.vocab_size),
        seed=seed,
    )
    return head


@pytest.fixture(scope="session")
def head(target: Target) -> Eagle3Head:
    """A chain head whose drafts are often accepted and often rejected."""
    head = untrained_head(target, 3, target.vocab_size - 20)
    return trained_head(target, head, 40, num_answers=32)  # with fewer it tells nothing of others


@pytest.fixture(scope="session")
def block_heads(target: Target) -> dict[str, BlockHead]:
    """Block heads of three drafts, often accepted and often rejected."""
    steps = {"dspark": 90, "causal": 90, "dflash": 40, "dflash2": 75}
    kinds = {
        "dspark": DSPARK,
        "causal": DSPARK | {"is_causal": True},
        "dflash": DFLASH,
        "dflash2": DFLASH2,
    }
    return {
        name: trained_head(
            target,
            untrained_head(target, 3, target.vocab_size, **fields),
            steps[name],
            get_family(fields["family"]).objective().loss_terms(TrainSettings()),
        )
        for name, fields in kinds.items()
    }


@pytest.fixture(scope="session")
def parallel_head(target: Target) -> PeagleHead:
    """A parallel head of two layers, trained longer than `head`: its later drafts are harder."""
    head = untrained_head(target, 3, target.vocab_size - 20, **PARALLEL, qk_norm=True)
    return trained_head(target, head, 90)


def trained_head(
    target: Target, head: Any, steps: int, terms: LossTerms = SOFT_CE, num_answers: int = 20
) -> Any:
    """Train a head for some steps on the target's greedy answers, few enough to be learnt soon."""
    records = greedy_records(target, answers(target, num_answers, seed=100))
    weights = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for step in range(steps):
        sample = [records[(10 * step + i) % len(records)] for i in range(10)]
        batch = pack([sample[i : i + 2] for i in range(0, 10, 2)], 88, 3)
        loss, _ = family_loss(head, target.parts, batch, gamma=0.8, terms=terms)
        optimizer.zero_grad()
        (loss / batch.num_anchors).backward()
        optimizer.step()
    return head.eval().requires_grad_(False)
