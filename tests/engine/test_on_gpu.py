"""The paged engine on a GPU equals the reference engine, for every architecture of the zoo.

Every test is marked `gpu`. Tokens and steps are compared in float32, where ties are rare; bfloat16
is compared with itself, with CUDA graphs and without.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.engine.drafter import HeadDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.heads.folder import load_head, new_head
from draftlab.progress import Monitor
from draftlab.run.resolve import reference_head
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.text.suites import load_suite
from tests.helpers.bigrams import NEW_TOKENS, BigramDrafter, greedy
from tests.helpers.gpu import kernels_compiled_ahead, on_gpu
from tests.helpers.greedy_answers import outcomes, run
from tests.helpers.head_toys import make_config, randomise
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.zoo import ZOO, random_texts, wide, zoo_folder

K, MAX_LENGTH = 4, 160
pytestmark = pytest.mark.usefixtures("exact_float32")


def random_head(target: Target, **changes: Any) -> Any:
    """Return a head with random weights over half of the vocabulary, of the target's dtype."""
    size, vocabulary = target.hidden_size, target.vocab_size
    config = make_config(
        **{"boundaries": (1, 2, 4), "draft_vocab_size": vocabulary // 2} | changes,
        target_num_layers=target.num_layers,
        target_hidden_size=size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        vocab_size=vocabulary,
    )
    head = new_head(config)
    randomise(head, 1, weights=0.06, norms=0.3)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def drafter_of(head: Any, temperature: float) -> HeadDrafter | None:
    """Return a drafter with draft probabilities where rows sample; None without a head."""
    return new_drafter(head, K, draft_probs=temperature > 0) if head is not None else None


@lru_cache(maxsize=1)
def embedded(device: str) -> tuple[Target, dict[str, Any], list[tuple[str, tuple[int, ...]]]]:
    """Return the embedded target in float32, its heads by kind, and 48 prompts."""
    settings = TargetSettings(path="embedded", dtype="float32", device=device)
    target = load_target(settings)
    chain = load_head(
        reference_head(),
        target_tensors=target.parts.shared_tensors,
        dtype=target.dtype,
        device=target.device,
    )
    parallel = random_head(target, family="peagle", embeddings="own", mask_token_id=3, num_layers=2)
    block = random_head(
        target, family="dspark", draft_vocab_size=target.vocab_size, mask_token_id=3, num_layers=2,
        sample_from_anchor=True, markov_rank=16, confidence=True,
    )  # fmt: skip
    prompts = load_suite("embedded:heldout", load_tokenizer(settings), Monitor()).prompts[:48]
    return target, {"chain": chain, "parallel": parallel, "block": block}, prompts


@lru_cache
def expected_outcomes(device: str, kind: str, sampling: Sampling) -> list[Any]:
    """Return the reference engine's outcomes for the embedded target."""
    target, heads, prompts = embedded(device)
    drafter = drafter_of(heads[kind], sampling.temperature)
    engine = ReferenceEngine(target, drafter, batch=8, max_length=400)
    return outcomes(run(engine, [Request(i, ids, 64, sampling) for i, ids in prompts]))


@on_gpu
@pytest.mark.parametrize(
    "options",
    [
        {"batch": 1},
        {"batch": 8},
        {"batch": 8, "graphs": False},
        {"batch": 32},  # the first prompts are several captured prefills
        {"batch": 48},
        {"batch": 8, "num_blocks": 45},  # so few that requests are evicted
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(1.0, top_k=8)], ids=str)
@pytest.mark.parametrize("kind", ["chain", "parallel", "block"])
def test_the_embedded_target(
    kind: str, sampling: Sampling, options: dict[str, Any], device: str
) -> None:
    target, heads, prompts = embedded(device)
    requests = [Request(i, ids, 64, sampling) for i, ids in prompts]
    drafter = drafter_of(heads[kind], sampling.temperature)
    engine = Engine(target, drafter, max_length=400, **options)
    for _ in range(2):  # the second time with graphs that the first one captured
        assert outcomes(run(engine, requests)) == expected_outcomes(device, kind, sampling)


@on_gpu
@pytest.mark.parametrize("batch", [8, 48])  # 48 prompts at once are prefilled in passes
@pytest.mark.parametrize("kind", ["chain", "parallel", "block"])
def test_kernels_are_compiled_before_they_run(kind: str, batch: int, device: str) -> None:
    target, heads, prompts = embedded(device)
    requests = [Request(i, ids, 64, Sampling()) for i, ids in prompts[: max(batch, 16)]]
    engine = Engine(target, new_drafter(heads[kind], K), batch=batch, max_length=400)
    target.asked_kernels.clear()
    with kernels_compiled_ahead() as ahead:
        run(engine, requests)
    # Of several passes the first one's kernels are compiled ahead.
    assert sum(ahead) >= max(20, (0.9 if batch == 8 else 0.5) * len(ahead))


def load(folder: Path, device: str, dtype: str, **options: Any) -> Target:
    return load_target(TargetSettings(path=str(folder), device=device, dtype=dtype, **options))


def zoo_requests(target: Target, temperature: float) -> list[Request]:
    """Return prompts of several lengths; windows, chunks and temperature steps end in them."""
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            f"p{i}",
            tuple(torch.randint(3, target.vocab_size, (n,), generator=generator).tolist()),
            20,
            Sampling(temperature),
        )
        for i, n in enumerate((41, 3, 17, 30, 8, 25))
    ]


ARCHITECTURES = [*ZOO, "qwen2", "olmo2"]


@on_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture(kind: str, temperature: float, device: str, tmp_path: Path) -> None:
    target = load(zoo_folder(tmp_path, kind, **wide(kind)), device, "float32")
    requests = zoo_requests(target, temperature)
    for head in (None, random_head(target)):
        reference = ReferenceEngine(
            target, drafter_of(head, temperature), batch=8, max_length=MAX_LENGTH
        )
        expected = outcomes(run(reference, requests))
        for batch in (1, 8):
            drafter = drafter_of(head, temperature)
            engine = Engine(target, drafter, batch=batch, max_length=MAX_LENGTH)
            assert outcomes(run(engine, requests)) == expected, batch


@on_gpu
@pytest.mark.parametrize("kind", HYBRID)
def test_recurrent_layers(kind: str, device: str, tmp_path: Path) -> None:
    """Tokens are transformers': plain and drafted, alone, in batches, from graphs and evicted."""
    folder = zoo_folder(tmp_path, kind)
    prompts = [tuple(text.tolist()) for text in random_texts((23, 1, 11, 30))]
    answers = [greedy(folder, prompt, device) for prompt in prompts]
    target = load(folder, device, "float32")
    requests = [Request(str(i), prompts[i % 4], NEW_TOKENS) for i in range(10)]
    expected = [answers[i % 4] for i in range(10)]
    for k, options in (
        (0, {"batch": 1}),
        (0, {"batch": 8}),
        (1, {"batch": 8}),
        (3, {"batch": 1}),
        (8, {"batch": 8}),
        (4, {"batch": 8, "graphs": False}),
        (4, {"batch": 8, "num_blocks": 16}),  # so few that requests are evicted
    ):
        drafter = BigramDrafter(answers, k, device) if k else None
        engine = Engine(target, drafter, max_length=72, block_size=16, **options)
        assert (engine.graphs is None) == ("graphs" in options)
        for _ in range(2):  # the second time with graphs that the first one captured
            generations = run(engine, requests)
            assert [list(g.token_ids) for g in generations] == expected, (k, options)


@on_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", [*ARCHITECTURES, *HYBRID])
def test_graphs_change_no_bit(kind: str, temperature: float, device: str, tmp_path: Path) -> None:
    """In bfloat16, also of the keys, values and draft logits that are left on the device."""
    sizes = {} if kind in HYBRID else wide(kind)
    target = load(zoo_folder(tmp_path, kind, **sizes), device, "bfloat16")
    head = random_head(target)
    engines = [
        Engine(
            target, drafter_of(head, temperature), batch=1, max_length=MAX_LENGTH, graphs=captured
        )
        for captured in (True, False)
    ]
    for request in zoo_requests(target, temperature):
        one, other = (outcomes(run(engine, [request])) for engine in engines)
        assert one == other
        for tensor, expected in zip(*(device_state(e) for e in engines), strict=True):
            assert torch.equal(tensor, expected)


def device_state(engine: Engine) -> list[Tensor]:
    """Return keys, values and slots without block 0 and the dummy, which a warm-up writes."""
    pools = [pool[1:] for pool in engine.cache.pools]
    slots = engine.input_batch
    buffers = [slots.length, slots.newest]
    if slots.draft_logits is not None:
        buffers.append(slots.draft_logits)
    if engine.cache.states is not None:
        buffers += engine.cache.states.pools
    return pools + [buffer[:-1] for buffer in buffers]


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["llama4", "gpt_oss", "llama", "gemma2"])
def test_a_pipeline_parallel_target(kind: str, device: str, tmp_path: Path) -> None:
    """Two GPUs give the states of one bit by bit, and the same tokens and steps."""
    folder = zoo_folder(tmp_path, kind, **wide(kind))
    one, two = (load(folder, f"{device}:0", "float32", gpus=gpus) for gpus in (1, 2))
    assert two.pipeline_parallel
    assert not one.pipeline_parallel
    ids = torch.arange(3, 3 + 2 * 100, device=one.device).view(2, 100) % 1000
    states = [target.states(ids, (1, 2, 4)) for target in (one, two)]
    assert torch.equal(states[0].features, states[1].features)
    assert torch.equal(states[0].last, states[1].last)
    for temperature in (0.0, 0.8):
        results = []
        for target in (one, two):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a pipeline-parallel target has no graphs
                drafter = drafter_of(random_head(target), temperature)
                engine = Engine(target, drafter, batch=4, max_length=MAX_LENGTH)
            results.append(outcomes(run(engine, zoo_requests(target, temperature))))
        assert results[0] == results[1]
