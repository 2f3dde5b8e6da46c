"""The KV cache is bounded by free memory, and a small one gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftlab.engine import kv_pool
from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.kv_pool import draft_kv_bytes, new_kv_pool
from draftlab.errors import UserError
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.model import Target
from tests.helpers.greedy_answers import outcomes, requests, run
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.zoo import zoo_target

SIZE = {"batch": 6, "max_length": 128, "block_size": 8}
WIDTH = 128 // 8


def limit_memory(monkeypatch: pytest.MonkeyPatch, available: float) -> None:
    monkeypatch.setattr(kv_pool, "available_bytes", lambda device: int(available))


def block_bytes(target: Target, head: Eagle3Head) -> int:
    """Return the bytes of a block in the pools of an engine that drafts."""
    engine = Engine(target, ChainDrafter(head, 3), **SIZE)
    run(engine, requests(1))
    pools = [*engine.cache.pools]
    pools += [pool for pair in engine.step.drafter.pools for pool in pair]
    return sum(pool[0].nbytes for pool in pools)


def test_a_small_pool_gives_the_same_tokens(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = block_bytes(target, head)
    assert size == SIZE["block_size"] * (sum(target.kv_bytes.values()) + draft_kv_bytes(head))
    prompts = requests(8, seed=40)
    silent = RecordingMonitor()
    full = Engine(target, ChainDrafter(head, 3), **SIZE, monitor=silent)
    assert not silent.text
    assert full.num_blocks == SIZE["batch"] * WIDTH
    # memory for 18 blocks beside the reserve, block 0 among them
    limit_memory(monkeypatch, 18.5 * size / (1 - kv_pool.RESERVE))
    monitor = RecordingMonitor()
    small = Engine(target, ChainDrafter(head, 3), **SIZE, monitor=monitor)
    assert monitor.text == (
        "KV cache: free memory holds 136 tokens, and 6 requests of 128 can use 768: requests wait, "
        "or are evicted and computed again. The tokens stay the same; it takes longer"
    )
    assert small.num_blocks == 17
    assert outcomes(run(small, prompts)) == outcomes(run(full, prompts))


def test_one_sequence_that_does_not_fit_is_a_user_error(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, WIDTH * block_bytes(target, head))
    with pytest.raises(UserError, match=r"one sequence, .* for 128 positions, found") as error:
        Engine(target, ChainDrafter(head, 3), **SIZE)
    assert "regenerate.max_new_tokens" in error.value.do


@pytest.mark.parametrize(
    ("limit", "usage", "available"),
    [("1000", "700", 350), ("500", "700", 0), ("max", "700", 2000), ("9999", "7", 2000)],
)
def test_free_memory_on_a_cpu_is_within_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: str, available: int
) -> None:
    monkeypatch.setattr(kv_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=2000))
    monkeypatch.setattr(kv_pool, "CGROUP", tmp_path)
    assert kv_pool.available_bytes(torch.device("cpu")) == 2000  # no container
    files = {"max": limit, "current": usage, "stat": "anon 600\ninactive_file 50"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    assert kv_pool.available_bytes(torch.device("cpu")) == available


def test_engines_that_take_turns_share_a_pool(target: Target, head: Eagle3Head) -> None:
    prompts = requests(6, seed=41)
    pool = new_kv_pool(target, **SIZE)
    options: dict[str, Any] = {"max_length": SIZE["max_length"], "cache": pool}
    engines = [
        Engine(target, drafter, batch=batch, **options)
        for batch, drafter in ((6, None), (2, ChainDrafter(head, 3)), (6, ChainDrafter(head, 5)))
    ]
    for _ in range(2):
        plain, *drafted = ([g.token_ids for g in run(engine, prompts)] for engine in engines)
        assert drafted == [plain, plain]


def test_memory_that_runs_out_while_decoding_is_a_user_error(
    target: Target, head: Eagle3Head
) -> None:
    def verifier(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nDetails")

    engine = Engine(target, ChainDrafter(head, 3), **SIZE, verifier=verifier)
    with pytest.raises(
        UserError, match=r"decoding ran out of GPU memory: .* allocate 2 GiB\."
    ) as error:
        run(engine, requests(2))
    assert "eval.batch" in error.value.do


def test_recurrent_states_take_memory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are pooled for all requests; where they leave no room, the message says so."""
    target = zoo_target(tmp_path, "qwen3_next")
    states = 7 * sum(target.state_bytes.values())  # of six requests and the dummy
    blocks = 18.5 * SIZE["block_size"] * sum(target.kv_bytes.values())
    limit_memory(monkeypatch, (states + blocks) / (1 - kv_pool.RESERVE))
    assert new_kv_pool(target, **SIZE).num_blocks == 18
    limit_memory(monkeypatch, states)
    with pytest.raises(UserError, match="recurrent states of 6 requests") as caught:
        new_kv_pool(target, **SIZE)
    assert str(caught.value.do).startswith("lower the batch (regenerate.batch")
