"""Heads of every family: each engine has the reference engine's tokens and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.block_drafter import FusedBlock
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.head_pass import FusedHead, PrepackedHead
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Sampling
from draftlab.engine.scheduler import Scheduler
from draftlab.kernels.cpu_prepacked_linear import why_no_prepacking
from draftlab.target_model.model import Target
from draftlab.target_model.prepacked_decoder import PrepackedDecoder
from draftlab.train.objectives.loss import SOFT_CE, LossTerms
from tests.helpers.decoding import EAGLE, NORMED, trained_head, untrained_head
from tests.helpers.evaluation import evaluate
from tests.helpers.greedy_answers import outcomes, requests, run
from tests.helpers.head_toys import LLAMA4_ATTENTION
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.walk import assert_walk_matches_engine
from tests.helpers.zoo import zoo_target

TRAINED_ON: dict[str, Any] = {"seed": 100, "shortest": 3, "max_new_tokens": 16}
NO_PREPACKING = why_no_prepacking(torch.device("cpu"), torch.float32)
CHUNK = 8  # of a Llama 4 target and its head; answers of 16 tokens cross borders
LLAMA4 = LLAMA4_ATTENTION | {"attention_chunk_size": CHUNK, "floor_scale": 16}
BLOCKS = ("dspark", "causal", "dflash", "dflash2")
GREEDY, SAMPLED = (3, 0.0, True), (3, 0.8, True)
# Number of drafts (the heads are trained for 3), temperature, draft probabilities.
# Of more than four, all but the two above have every other engine, so that each number of drafts
# and each temperature still has all.
DRAFTS: dict[str, list[tuple[int, float, bool]]] = {
    "none": [(0, 0.0, False), (0, 0.8, False)],
    "chain": [(1, 0.0, False), GREEDY, SAMPLED],
    "parallel": [
        *((1, 0.0, False), (5, 0.0, False), (5, 0.8, True), (1, 0.8, False)),
        *(GREEDY, SAMPLED, (3, 0.8, False)),
    ],
    "dspark": [
        *((1, 0.0, False), (2, 0.0, False), (2, 0.8, True), (1, 0.8, False)),
        *(GREEDY, SAMPLED, (3, 0.8, False)),
    ],
    "causal": [GREEDY, SAMPLED],
    "dflash": [(1, 0.0, False), GREEDY, SAMPLED],
    "dflash2": [(1, 0.0, False), GREEDY, SAMPLED, (2, 0.8, True)],
    "eagle of 2 layers": [GREEDY, SAMPLED],
    "normed": [GREEDY, SAMPLED],
    "llama4": [(11, 0.0, True), (11, 0.8, True)],  # drafts are longer than a chunk
}
ENGINES: list[dict[str, Any]] = [
    *({"batch": batch} for batch in (1, 4, 7)),
    {"batch": 5, "block_size": 8},
    {"batch": 5, "block_size": 8, "num_blocks": 17},  # some are preempted
    {"batch": 3, "block_size": 16, "prefill_tokens": 24},  # prompts in chunks
    {"batch": 1, "cpu_prepacked": True},
    {"batch": 5, "block_size": 8, "num_blocks": 17, "cpu_prepacked": True},
    {"batch": 5, "fused": True},  # the passes of a GPU, on their kernels' references
]


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Any]:
    """A multimodal target, of which the text model is used, and a dense Llama 4 drafter."""
    path = tmp_path_factory.mktemp("llama4")
    target = zoo_target(path, "llama4", vocab_size=289, initializer_range=0.2)
    options = {"family": "eagle_llama4", "boundaries": (target.num_layers,), "num_layers": 2}
    head = untrained_head(target, 3, target.vocab_size, llama4=LLAMA4, **options)
    return target, trained_head(target, head, 40)


@pytest.fixture(scope="module", params=DRAFTS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(kind: str, request: pytest.FixtureRequest) -> tuple[Target, Any]:
    """A target and a head (None: drafts nothing) that was trained on its greedy answers."""
    if kind == "llama4":
        return request.getfixturevalue("llama4")
    target = request.getfixturevalue("target")
    if kind == "none":
        return target, None
    if kind in ("chain", "parallel"):
        return target, request.getfixturevalue({"chain": "head"}.get(kind, "parallel_head"))
    if kind in BLOCKS:
        return target, request.getfixturevalue("block_heads")[kind]
    changes = NORMED if kind == "normed" else EAGLE | {"num_layers": 2}
    terms = SOFT_CE if kind == "normed" else LossTerms("soft_ce", 0.1, 1.0)
    head = untrained_head(target, 3, target.vocab_size - 20, **changes)
    return target, trained_head(target, head, 30, terms)


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for each preempted sequence."""
    entries: list[int] = []
    preempt = Scheduler.preempt
    monkeypatch.setattr(Scheduler, "preempt", lambda self: entries.append(1) or preempt(self))
    return entries


def test_tokens_and_steps_equal_the_reference_engine(
    kind: str, pair: tuple[Target, Any], preemptions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = pair
    for number, (k, temperature, probs) in enumerate(DRAFTS[kind]):
        # Without top_k a toy hardly ever accepts argmaxes at T > 0, or drafts among few tokens.
        top_k = 4 if temperature and (not probs or kind == "dflash2") else None
        prompts = requests(8, sampling=Sampling(temperature, top_k=top_k, seed=3), **TRAINED_ON)
        # One drafter for all engines: prepacked weights do not stay.
        drafter = new_drafter(head, k, draft_probs=probs) if head else None
        reference = run(ReferenceEngine(target, drafter, batch=4, max_length=128), prompts)
        expected = outcomes(reference)
        if k:
            counts = {n for g in reference for drafted, n in g.steps if drafted == k}
            assert counts >= {0, 1}  # or the test proves little
            assert k == 1 or max(counts) > 1
        in_turn = len(DRAFTS[kind]) > 4 and (k, temperature, probs) not in (GREEDY, SAMPLED)
        for options in ENGINES[number % 2 :: 2] if in_turn else ENGINES:
            sizes = {name: value for name, value in options.items() if name != "fused"}
            fused, packed = "fused" in options, "cpu_prepacked" in options and kind != "llama4"
            in_modules = kind in ("none", "llama4")
            if (fused and in_modules) or (packed and NO_PREPACKING):
                continue
            preemptions.clear()
            with monkeypatch.context() as patch:
                if fused:
                    for each in (FusedHead, FusedBlock):
                        patch.setattr(each, "supports", staticmethod(lambda _head: True))
                engine = Engine(target, drafter, max_length=128, **sizes)
            assert isinstance(engine.step.decoder, PrepackedDecoder if packed else Target)
            if drafter:
                eager, fast = drafter.eager_pass, drafter.fused_pass
                prepacked = packed and kind not in BLOCKS
                passes = fast if fused else PrepackedHead if prepacked else eager
                assert type(drafter.runner) is passes
            some = slice(3 if options["batch"] == 1 else None)  # each has many steps
            generations = run(engine, prompts[some])
            assert outcomes(generations) == expected[some], (k, temperature, options)
            for one, other in zip(generations, reference[some], strict=True):
                assert one.expected == pytest.approx(other.expected, rel=1e-3, abs=1e-5)
            assert bool(preemptions) == ("num_blocks" in options)
        if temperature == 0:
            plain = run(Engine(target, batch=4, max_length=128), prompts)
            assert [g.token_ids for g in reference] == [g.token_ids for g in plain]


def test_block_verification_equals_the_reference_engines(
    kind: str, pair: tuple[Target, Any], preemptions: list[int]
) -> None:
    """Some of the requests are preempted."""
    target, head = pair
    if kind not in ("chain", "parallel", "dspark", "dflash2"):
        pytest.skip("one head of each drafter is enough")
    prompts = requests(8, sampling=Sampling(0.8, seed=3), **TRAINED_ON)
    drafter = new_drafter(head, 3, verification="block")
    expected = outcomes(run(ReferenceEngine(target, drafter, batch=4, max_length=128), prompts))
    by_token = run(ReferenceEngine(target, new_drafter(head, 3), batch=4, max_length=128), prompts)
    assert outcomes(by_token) != expected
    for options in ({"batch": 1}, {"batch": 7}, {"batch": 5, "block_size": 8, "num_blocks": 17}):
        generations = run(Engine(target, drafter, max_length=128, **options), prompts)
        assert outcomes(generations) == expected
    assert preemptions


def test_the_walk_counts_what_the_engine_counts(kind: str, pair: tuple[Target, Any]) -> None:
    """tests/evaluate/test_walk.py has more of the first kind of chain."""
    if kind not in ("none", "parallel"):
        assert_walk_matches_engine(*pair, 3, 7)


@pytest.mark.skipif(NO_PREPACKING is not None, reason="no packed products")
def test_prompts_use_the_prepacked_path(
    target: Target, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' modules are slow between products."""
    drafter = new_drafter(head, 2)
    engine = Engine(target, drafter, batch=2, max_length=128, cpu_prepacked=True)
    widths: list[int] = []
    states = engine.step.decoder.states

    def record_width(token_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        widths.append(token_ids.shape[1])
        return states(token_ids, *rest, **options)

    monkeypatch.setattr(engine.step.decoder, "states", record_width)
    monkeypatch.setattr(target, "states", None)
    prompts = requests(2, seed=100)
    run(engine, prompts)
    assert max(widths) == max(len(request.prompt_ids) for request in prompts)


@pytest.mark.skipif(NO_PREPACKING is not None, reason="no packed products")
def test_an_evaluation_prepacks_by_default(target: Target, head: Any) -> None:
    reports = {}
    for packed, words in ((True, "packed for this CPU"), (False, "packing is off")):
        monitor = RecordingMonitor()
        settings = {"temperatures": 0, "timing_prompts": 0, "certify": False, "packed": packed}
        reports[packed] = evaluate(target, head, monitor=monitor, **settings)
        assert words in reports[packed].environment["products"]
        assert words in monitor.text
    for one, other in zip(reports[True].rows, reports[False].rows, strict=True):
        assert one.accepted_at == other.accepted_at
        assert one.output_tokens == other.output_tokens
    assert reports[True].rows[1].prompts_equal == 1.0
