"""Fixtures: a target of five tokens, heads for it, and its certificate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.evaluate.certificate.certify import Certificate, Sampled
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.sampling.types import VerifyResult
from draftlab.kernels.verify import verify
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.certificates import OFF, ON, VOCAB, RunCertify, certify
from tests.helpers.decoding import DSPARK, untrained_head
from tests.helpers.zoo import zoo_folder


@pytest.fixture(scope="package")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = zoo_folder(
        tmp_path_factory.mktemp("small"), "llama", vocab_size=VOCAB, num_hidden_layers=3, seed=2
    )
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@pytest.fixture(scope="package")
def small_16_bit(small: Target) -> Target:
    return load_target(TargetSettings(path=str(small.folder), device="cpu", dtype="bfloat16"))


@pytest.fixture(scope="package")
def poor_head(small: Target) -> Eagle3Head:
    """An untrained, too sure head without the target's token 0; a good head would hide faults.

    Chosen so that each fault shows in few samples.
    """
    head = untrained_head(small, 2, VOCAB - 1, seed=4).eval().requires_grad_(False)
    head.lm_head.weight *= 2
    return head


@pytest.fixture(scope="module", params=[VOCAB, VOCAB - 1], ids=["whole", "reduced"])
def markov_head(small: Target, request: pytest.FixtureRequest) -> BlockHead:
    """A random DSpark head of two drafts, with a strong bias; it may lack the target's token 0."""
    head = untrained_head(small, 2, request.param, **DSPARK | {"mask_token_id": VOCAB - 1})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.startswith(("fc.", "markov_head")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head.eval().requires_grad_(False)


@pytest.fixture
def run_certify(small: Target, poor_head: Eagle3Head) -> RunCertify:
    """A function that certifies an engine with another verifier and changed settings."""

    def run(
        verifier: Callable[..., VerifyResult] = verify,
        rows: Sequence[Sampled] = (ON, OFF),
        **changes: Any,
    ) -> Certificate:
        def engine(target: Target, drafter: ChainDrafter | None, **options: Any) -> Engine:
            return Engine(target, drafter, **options, verifier=verifier if drafter else verify)

        return certify(small, poor_head, rows, engine=engine, **changes)

    return run
