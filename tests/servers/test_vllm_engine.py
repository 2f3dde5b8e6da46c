"""vLLM as an engine: the real client program, with a package that counts as vLLM does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.servers.vllm_client import corrections
from draftlab.servers.vllm_engine import VllmEngine, required_positions, to_generation
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from tests.helpers.fake_vllm import read_log
from tests.helpers.monitors import RecordingMonitor


def requests(*firsts: int, count: int = 8, temperature: float = 0.0) -> list[Request]:
    """Return requests whose prompts begin with these token ids."""
    sampling = Sampling(temperature, top_k=5, top_p=0.9, seed=3)
    return [Request(f"p{i}", (i, 7), count, sampling, frozenset({2, 1})) for i in firsts]


def run_vllm(
    target: Path,
    head: Path | None,
    prompts: list[Request],
    k: int = 0,
    draft_probs: bool = False,
    **options: Any,
) -> list[Generation]:
    """Start a vLLM, decode requests and end it."""
    options.setdefault("max_length", required_positions(prompts, k, sys.maxsize))
    engine = VllmEngine(target, head, k=k, draft_probs=draft_probs, **options)
    with engine:
        return list(engine.generate(prompts))


def test_tokens_counters_steps_and_times_of_each_request(folder: Path, install_fake: Any) -> None:
    install_fake()
    one, two = run_vllm(folder, folder, requests(4, 6, count=9), 4)
    assert (one.id, two.id) == ("p4", "p6")
    assert one.token_ids == tuple(range(4, 13))
    assert one.steps == ((4, 4), (4, 4))
    assert two.steps == ((4, 1),) * 4
    assert two.counters.accepted_at == [4, 0, 0, 0]
    assert (one.counters.truncated_tokens, two.counters.truncated_tokens) == (2, 0)
    for result in (one, two):
        result.counters.check_tokens(9, 1)
        assert result.expected == ()
        assert result.finish == "length"
        assert (result.first_token_s, result.tpot_s) == (0.5, 1.0)


def test_plain_decoding_has_steps_without_drafts(folder: Path, install_fake: Any) -> None:
    log = install_fake()
    (result,) = run_vllm(folder, None, requests(4), 4, True)
    assert result.steps == ((0, 0),) * 7
    assert (result.counters.k, result.counters.undrafted_steps) == (0, 7)
    assert "speculative_config" not in read_log(log)[0]


@pytest.mark.parametrize("probabilities", [False, True])
def test_options_and_sampling_reach_vllm(
    folder: Path, install_fake: Any, probabilities: bool
) -> None:
    log, batch = install_fake(), requests(4, 6, temperature=0.7)
    with VllmEngine(
        folder,
        folder,
        k=3,
        draft_probs=probabilities,
        dtype=torch.bfloat16,
        batch=2,
        max_length=required_positions(batch, 3, 64),
    ) as engine:
        for _ in range(2):  # counters start anew with each call
            assert [result.counters.drafts for result in engine.generate(batch)] == [7, 3]
        assert list(engine.generate([])) == []
    options, (num_prompts, sampling), _ = read_log(log)
    assert options["speculative_config"] == {
        "model": str(folder.resolve()),
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic" if probabilities else "greedy",
    }
    assert (options["dtype"], options["max_num_seqs"]) == ("bfloat16", 2)
    assert options["max_model_len"] == 2 + 8 + 2 * 3 + 1
    assert num_prompts == 2
    expected = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "max_tokens": 8}
    assert expected.items() <= sampling.items()
    assert (sampling["stop_token_ids"], sampling["ignore_eos"]) == ([1, 2], True)


@pytest.mark.parametrize(
    ("config", "method", "parallel"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "eagle", None),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3", None),
        ({"architectures": ["DFlashDraftModel"], "mask_token_id": 7}, "dflash", True),
        ({"architectures": ["Qwen3DSparkModel"], "mask_token_id": 7}, "dspark", True),
        ({"speculators_model_type": "dspark", "mask_token_id": 7}, "dspark", True),
        ({"mask_token_id": 7}, "eagle3", True),
    ],
)
def test_a_heads_config_decides_the_drafting_method(
    folder: Path, install_fake: Any, config: dict, method: str, parallel: bool | None
) -> None:
    """vLLM would decide by the folder's name. Heads with a mask token draft in parallel."""
    log, head = install_fake(), folder.parent / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    run_vllm(folder, head, requests(4), 2)
    options = read_log(log)[0]["speculative_config"]
    assert (options["method"], options.get("parallel_drafting")) == (method, parallel)


def test_version_runner_device_and_corrections_are_reported(
    folder: Path, install_fake: Any
) -> None:
    install_fake()
    monitor = RecordingMonitor()
    with VllmEngine(folder, folder, k=2, max_length=32, monitor=monitor) as engine:
        assert engine.name == "vllm 9.9 (V1, cpu)"
        assert engine.corrections == (corrections.EXPANSION,)
    assert engine.name in monitor.text
    assert "corrected: vllm.v1.sample.rejection_sampler.expand_batch_to_tokens" in monitor.text
    with VllmEngine(folder, max_length=32) as engine:
        assert engine.corrections == ()


def test_an_old_vllm_counts_prompt_by_prompt_and_has_no_draft_probabilities(
    folder: Path, install_fake: Any
) -> None:
    log = install_fake(modern=False)
    results = run_vllm(folder, folder, requests(4, 6), 4)
    assert [result.counters.accepted for result in results] == [8, 4]
    assert [len(result.steps) for result in results] == [2, 4]
    assert "draft_sample_method" not in log.read_text()
    with pytest.raises(UserError, match="does not know draft_sample_method"):
        run_vllm(folder, folder, requests(4), 4, True)
    with pytest.raises(UserError, match="no counters per request: use batch 1"):
        run_vllm(folder, folder, requests(4), 4, batch=2)


def test_counters_that_disagree_are_refused(
    folder: Path, install_fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake()
    monkeypatch.setenv("FAKE_EXTRA", "1")
    with pytest.raises(UserError, match=r"drafts: get_metrics\(\) says 3, the requests add"):
        run_vllm(folder, folder, requests(4), 4)


def test_bad_requests_are_refused(folder: Path, install_fake: Any) -> None:
    install_fake()
    with pytest.raises(UserError, match=r"60 tokens \+ 8 new ones exceed the 64 positions"):
        run_vllm(folder, None, [Request("long", (1,) * 60, 8)], max_length=64)
    with pytest.raises(UserError, match="miscounts prompts of one token"):
        run_vllm(folder, folder, [Request("a", (1,), 8)], 2, batch=2)
    with pytest.raises(UserError, match=r"head's config\.json"):
        run_vllm(folder, folder / "none", requests(4), 2)


def test_a_vllm_that_does_not_start_is_an_error_with_its_output(
    folder: Path, install_fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake()
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(UserError, match="no kernel for this machine"):
        run_vllm(folder, None, requests(4))


def test_a_python_without_vllm(folder: Path, tmp_path: Path, monkeypatch) -> None:
    module = tmp_path / "empty" / "vllm.py"
    module.parent.mkdir()
    module.write_text("raise ModuleNotFoundError('No module named vllm', name='vllm')\n")
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with pytest.raises(UserError, match="found one without") as error:
        run_vllm(folder, None, requests(4))
    assert PYTHON_VARIABLE in str(error.value)
    assert sys.executable in str(error.value)


def test_drafts_missing_near_the_limit_are_missing_at_the_end() -> None:
    counts = {"drafts": 3, "draft_tokens": 7, "accepted": 2, "accepted_at": [2, 0, 0]}
    counts["steps"] = [1, 0, 1]
    result = to_generation(Request("a", (1,), 6), 3, [1] * 6, "length", [0.1, 0.2], counts)
    assert result.steps == ((3, 1), (3, 0), (1, 1))
