"""The engine emits the target's tokens, whatever the batch, the order and the drafter."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftlab.engine.drafter import ChainDrafter, new_drafter
from draftlab.engine.engine import SMALL_TARGET_BYTES, Engine, decoding_threads, one_thread
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.engines import RecordingTarget
from tests.helpers.greedy_answers import outcomes, requests, run

HOT = Sampling(temperature=1.0, top_p=0.95, seed=7)


def make_engine(
    target: Target,
    head: Eagle3Head | None,
    batch: int,
    *,
    k: int = 3,
    draft_probs: bool = True,
    max_length: int = 128,
) -> Engine:
    drafter = ChainDrafter(head, k, draft_probs=draft_probs) if head else None
    return Engine(target, drafter, batch=batch, max_length=max_length)


@pytest.fixture(scope="module")
def greedy(target: Target) -> tuple[list[Request], list[tuple[int, ...]]]:
    """Requests, and transformers' greedy answers."""
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype="float32").eval()
    # The head was trained on half of them, so that long runs of drafts are accepted, too.
    prompts = requests(5, seed=1) + requests(5, seed=100, shortest=3)
    expected = []
    for request in prompts:
        ids = torch.tensor([request.prompt_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.stop_ids),
        )
        expected.append(tuple(output[0, ids.shape[1] :].tolist()))
    return prompts, expected


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("drafted", [False, True])
def test_greedy_tokens_equal_transformers(
    batch: int, drafted: bool, target: Target, head: Eagle3Head, greedy
) -> None:
    prompts, expected = greedy
    engine = make_engine(target, head if drafted else None, batch)
    generations = run(engine, prompts)
    assert [g.token_ids for g in generations] == expected
    reversed_order = run(engine, prompts[::-1])
    assert outcomes(reversed_order[::-1]) == outcomes(generations)
    if drafted:  # or the test proves little
        counts = {accepted for g in generations for drafts, accepted in g.steps if drafts == 3}
        assert counts >= {0, 1, 3}


@pytest.mark.parametrize("draft_probs", [None, False, True])
def test_sampling_does_not_depend_on_batch_or_order(
    draft_probs: bool | None, target: Target, head: Eagle3Head
) -> None:
    prompts = requests(11, seed=2, sampling=HOT)
    draft_head = None if draft_probs is None else head
    expected = run(make_engine(target, draft_head, 1, draft_probs=bool(draft_probs)), prompts)
    engine = make_engine(target, draft_head, 5, draft_probs=bool(draft_probs))
    for order in (prompts, prompts[6:] + prompts[5::-1]):
        by_id = {g.id: g for g in run(engine, order)}
        assert outcomes([by_id[r.id] for r in prompts]) == outcomes(expected)
    assert run(engine, []) == []
    other = run(engine, [replace(r, sampling=replace(HOT, seed=8)) for r in prompts])
    assert [g.token_ids for g in other] != [g.token_ids for g in expected]


def test_greedy_and_sampled_rows_share_a_batch(target: Target, head: Eagle3Head) -> None:
    kinds = [Sampling(), HOT, Sampling(0.7, top_k=4, seed=3)]
    prompts = [replace(r, sampling=kinds[i % 3]) for i, r in enumerate(requests(12, seed=3))]
    mixed = run(make_engine(target, head, 6), prompts)
    alone = make_engine(target, head, 1)
    assert outcomes(mixed) == outcomes([run(alone, [r])[0] for r in prompts])


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_torchs_global_generator_is_neither_read_nor_written(
    sampling: Sampling, target: Target, head: Eagle3Head
) -> None:
    prompts, results = requests(4, seed=4, sampling=sampling), []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            results.append(outcomes(run(make_engine(target, head, 4), prompts)))
            assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1]


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_abandoned_requests_have_no_effect(
    sampling: Sampling, target: Target, head: Eagle3Head
) -> None:
    engine = make_engine(target, head, 3)
    prompts = requests(6, seed=5, sampling=sampling)
    expected = outcomes(run(engine, prompts))
    for _ in range(3):  # each leaves slots and blocks in use
        stream = engine.generate(requests(9, seed=6, sampling=sampling))
        next(stream)
        stream.close()
    assert outcomes(run(engine, prompts)) == expected


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_a_stop_token_ends_the_answer(
    drafted: bool, sampling: Sampling, target: Target, head: Eagle3Head
) -> None:
    engine = make_engine(target, head if drafted else None, 4)
    prompts = [replace(r, stop_ids=frozenset()) for r in requests(12, seed=7, sampling=sampling)]
    whole = run(engine, prompts)
    assert {(len(g.token_ids), g.finish) for g in whole} == {(24, "length")}
    # A token from the middle of each answer becomes its stop token.
    stopping = [
        replace(r, stop_ids=frozenset({g.token_ids[5 + i]}))
        for i, (r, g) in enumerate(zip(prompts, whole, strict=True))
    ]
    truncated = 0
    for request, long, short in zip(stopping, whole, run(engine, stopping), strict=True):
        end = next(i for i, t in enumerate(long.token_ids) if t in request.stop_ids)
        assert (short.token_ids, short.finish) == (long.token_ids[: end + 1], "stop")
        truncated += short.counters.truncated_tokens
        # Accepted drafts count before truncation.
        assert short.steps == long.steps[: len(short.steps)]
    assert (truncated > 0) == drafted


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_max_new_tokens(count: int, target: Target, head: Eagle3Head) -> None:
    prompts = requests(6, seed=8, stop_ids=frozenset())
    long = run(make_engine(target, head, 3), prompts)
    short = run(make_engine(target, head, 3), [replace(r, max_new_tokens=count) for r in prompts])
    assert [g.token_ids for g in short] == [g.token_ids[:count] for g in long]
    assert {g.finish for g in short} == {"length"}
    if count == 1:
        assert {(g.counters.drafts, g.steps, g.tpot_s) for g in short} == {(0, (), None)}
    for generation in short:
        assert 0 < generation.first_token_s <= generation.total_s


@pytest.mark.parametrize(
    ("limit", "sampling"),
    [(21, Sampling()), (24, Sampling()), (24, Sampling(0.8, seed=3))],
)
@pytest.mark.parametrize("kind", ["none", "chain", "parallel", "dspark", "dflash"])
def test_no_pass_has_a_position_beyond_the_limit(
    kind: str,
    limit: int,
    sampling: Sampling,
    target: Target,
    head: Eagle3Head,
    parallel_head: PeagleHead,
    block_heads: dict[str, BlockHead],
) -> None:
    """Steps near the limit draft fewer tokens, and masked slots beyond it have no effect."""
    heads = {"none": None, "chain": head, "parallel": parallel_head, **block_heads}
    drafter = new_drafter(heads[kind], 3) if heads[kind] else None
    prompts = requests(10, seed=9, sampling=sampling, stop_ids=frozenset(), max_new_tokens=30)
    prompts.append(replace(prompts[0], id="full", prompt_ids=tuple(range(limit - 1))))
    prompts.append(replace(prompts[0], id="one token", prompt_ids=(5,)))
    expected = run(ReferenceEngine(target, drafter, batch=3, max_length=limit), prompts)
    for sizes in ({"batch": 4, "block_size": 5}, {"batch": 1, "block_size": 16}):
        recording: Any = RecordingTarget(target)
        engine = Engine(recording, drafter, max_length=limit, **sizes)
        assert outcomes(run(engine, prompts)) == outcomes(expected), sizes
        assert recording.highest == limit - 2
    unlimited = run(make_engine(target, None, 4), prompts)
    for request, generation, longer in zip(prompts, expected, unlimited, strict=True):
        room = limit - len(request.prompt_ids)
        assert (len(generation.token_ids), generation.finish) == (room, "length")
        if sampling.temperature == 0:
            assert generation.token_ids == longer.token_ids[:room]
    if drafter:
        assert {drafts for g in expected for drafts, _ in g.steps} >= {0, 1, 2, 3}


def repeated(lengths: tuple[int, ...], times: int) -> list[Request]:
    """Return prompts of some lengths, `times` of each, with different noise."""
    base = [
        requests(
            1, seed=n, sampling=HOT, shortest=n, longest=n, stop_ids=frozenset(), max_new_tokens=12
        )[0]
        for n in lengths
    ]
    return [replace(r, id=f"{r.id} {i}") for i in range(times) for r in base]


@pytest.mark.parametrize("kind", ["none", "chain", "parallel", "dspark"])
@pytest.mark.parametrize("options", [{}, {"block_size": 4}, {"block_size": 4, "num_blocks": 40}])
def test_equal_prompts_decode_as_alone(
    kind: str,
    options: dict,
    target: Target,
    head: Eagle3Head,
    parallel_head: PeagleHead,
    block_heads: dict[str, BlockHead],
) -> None:
    """Some prompts fill their blocks exactly, and the small pool preempts some sequences."""
    draft_head = {"none": None, "chain": head, "parallel": parallel_head, **block_heads}[kind]

    def engine(batch: int, **options: int) -> Engine:
        drafter = new_drafter(draft_head, 3) if draft_head else None
        return Engine(target, drafter, batch=batch, max_length=60, **options)

    prompts = repeated((1, 16, 17, 34), 3)
    alone = engine(1)
    expected = [run(alone, [request])[0] for request in prompts]
    # Chunks have 16 tokens: one prompt's last pair is alone in its chunk.
    generations = run(engine(9, prefill_tokens=30, **options), prompts)
    assert outcomes(generations) == outcomes(expected)
    assert len({g.token_ids for g in generations}) == len(prompts)


def test_equal_prompts_are_computed_once(target: Target, head: Eagle3Head) -> None:
    prompts = [replace(request, max_new_tokens=1) for request in repeated((8, 11), 5)]
    recording = RecordingTarget(target)
    run(Engine(recording, new_drafter(head, 3), batch=10, max_length=60), prompts)
    assert recording.num_tokens == 8 + 11


def test_short_prompts_are_no_padding_of_a_long_one(target: Target, head: Eagle3Head) -> None:
    """A chunk has the prompts that are not computed yet, and then has more tokens of each."""
    prompts = [replace(request, max_new_tokens=1) for request in repeated((3, 9, 50, 5), 1)]
    recording = RecordingTarget(target)
    engine = Engine(recording, new_drafter(head, 3), batch=4, max_length=60, prefill_tokens=64)
    run(engine, prompts)
    assert recording.num_tokens == 3 + 9 + 50 + 5
    assert recording.padding == (16 - 3) + (16 - 9) + (16 - 5)  # of the first chunk alone


@pytest.mark.parametrize("length", [0, 128, 300])
def test_prompts_that_do_not_fit_are_refused(length: int, target: Target) -> None:
    good = requests(1)[0]
    bad = replace(good, id="the long one", prompt_ids=(5,) * length)
    with pytest.raises(UserError, match="expected a prompt of 1 to 127 tokens") as raised:
        list(make_engine(target, None, 2).generate([good, bad]))
    assert "the long one" in raised.value.where


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 1.5}, {"top_p": -0.2}]
)
def test_impossible_sampling_is_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="expected temperature"):
        Sampling(**settings)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_one_thread_inside_the_block_only() -> None:
    with one_thread(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("more", "threads"), [(0, 1), (1, 2)])
def test_a_small_target_decodes_with_one_thread(more: int, threads: int) -> None:
    weights = torch.empty(SMALL_TARGET_BYTES + more, dtype=torch.int8, device="meta")
    target = SimpleNamespace(
        device=torch.device("cpu"), model=SimpleNamespace(parameters=lambda: [weights])
    )
    with decoding_threads(target):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
def test_a_gpu_that_is_not_the_current_one(target: Target, head: Eagle3Head, greedy) -> None:
    """Graphs, events and copies must use its streams, or results are read too early."""
    prompts, expected = greedy
    there = load_target(TargetSettings(path=str(target.folder), dtype="float32", device="cuda:1"))
    engine = make_engine(there, deepcopy(head).to("cuda:1"), 3)
    assert torch.cuda.current_device() == 0
    assert [g.token_ids for g in run(engine, prompts)] == expected
    assert torch.cuda.current_device() == 0
