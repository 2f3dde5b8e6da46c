"""vLLM as an engine: the real client program, with a package that counts as vLLM does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.target_model.settings import VllmSettings
from draftlab.vllm.engine import VllmEngine, required_positions, to_generation
from draftlab.vllm.process import PYTHON_VARIABLE, VllmProcess, find_python, log_tail
from draftlab.vllm.vllm_client import corrections
from draftlab.vllm.vllm_client.counters import request_counters
from draftlab.vllm.vllm_client.request import RequestError
from tests.helpers.fake_vllm import read_log
from tests.helpers.monitors import RecordingMonitor

HERE = VllmSettings(python=sys.executable)


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
    engine = VllmEngine(target, head, k=k, draft_probs=draft_probs, settings=HERE, **options)
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
        settings=HERE,
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
        ({"architectures": ["Llama4ForCausalLM"]}, "eagle", None),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3", None),
        (
            {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
            "eagle3",
            None,
        ),
        ({"architectures": ["DFlashDraftModel"], "mask_token_id": 7}, "dflash", True),
        ({"architectures": ["Qwen3DSparkModel"], "mask_token_id": 7}, "dspark", True),
        ({"speculators_model_type": "dspark", "mask_token_id": 7}, "dspark", True),
        ({"mask_token_id": None}, "eagle3", None),
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
    with VllmEngine(folder, folder, k=2, max_length=32, settings=HERE, monitor=monitor) as engine:
        assert engine.name == "vllm 9.9 (V1, cpu)"
        assert engine.corrections == (corrections.EXPANSION,)
    assert engine.name in monitor.text
    assert "corrected: vllm.v1.sample.rejection_sampler.expand_batch_to_tokens" in monitor.text
    with VllmEngine(folder, max_length=32, settings=HERE) as engine:
        assert engine.corrections == ()


@pytest.mark.parametrize(
    ("config", "states", "tuning"),
    [
        ({"model_type": "llama"}, {}, None),
        ({"model_type": "llama4_text"}, {}, True),
        (
            {"text_config": {"model_type": "llama4_text", "attn_temperature_tuning": False}},
            {"boundaries": [0, 2]},
            False,
        ),
    ],
)
def test_a_llama4_target_has_its_own_attention_temperature(
    config: dict, states: dict, tuning: bool | None, folder: Path, install_fake: Any
) -> None:
    """In decoding and for hidden states. vLLM by itself ignores the setting in config.json."""
    log = install_fake()
    (folder / "config.json").write_text(json.dumps(config))
    setup = {"target": str(folder), "states_folder": str(folder), "max_model_len": 9} | states
    VllmProcess(setup, HERE).close()
    (options,) = read_log(log)
    assert ("kv_transfer_config" in options) == bool(states)
    expected = None if tuning is None else {"attn_temperature_tuning": tuning}
    assert options.get("override_generation_config") == expected


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
    with pytest.raises(UserError, match=r"draft: expected a model folder with a config\.json"):
        run_vllm(folder, folder / "none", requests(4), 2)
    with pytest.raises(ValueError, match="one sampling"):
        run_vllm(folder, None, [*requests(4), *requests(6, temperature=1.0)])


def test_a_vllm_that_does_not_start_is_an_error_with_its_output(
    folder: Path, install_fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake()
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(UserError, match="no kernel for this machine"):
        run_vllm(folder, None, requests(4))


def test_errors_far_above_the_end_of_a_log_come_first() -> None:
    cause = "(Worker pid=7) ERROR ValueError: no such layer"
    log = f"{cause}\n{cause}\n" + "at line 1\n" * 400 + "RuntimeError: see above"
    first, second, *_, last = log_tail(log).splitlines()
    assert (first, last) == ("ValueError: no such layer", "RuntimeError: see above")
    assert "ValueError" not in second
    assert log_tail("a\nb") == "a\nb"
    assert log_tail("") == "it printed nothing"


def test_a_python_without_vllm(folder: Path, tmp_path: Path, monkeypatch) -> None:
    module = tmp_path / "empty" / "vllm.py"
    module.parent.mkdir()
    module.write_text("raise ModuleNotFoundError('No module named vllm', name='vllm')\n")
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    with pytest.raises(UserError, match="found one without") as error:
        run_vllm(folder, None, requests(4))
    assert PYTHON_VARIABLE in str(error.value)
    assert sys.executable in str(error.value)


def test_find_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = "draftlab.vllm.process.importlib.util.find_spec"
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(find_spec, lambda _name: None)
    with pytest.raises(UserError, match=f"found none in this Python(.|\n)*{PYTHON_VARIABLE}"):
        find_python(VllmSettings())
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv(PYTHON_VARIABLE, str(link))
    assert find_python(VllmSettings()) == link  # Python finds its environment by the link
    assert find_python(HERE) == Path(sys.executable)
    monkeypatch.setattr(find_spec, lambda _name: SimpleNamespace())
    assert find_python(VllmSettings()) == Path(sys.executable)
    (tmp_path / "text").write_text("")
    for wrong in ("none", "text"):
        with pytest.raises(UserError, match="found no program"):
            find_python(VllmSettings(python=str(tmp_path / wrong)))


def test_drafts_missing_near_the_limit_are_missing_at_the_end() -> None:
    counts = {"drafts": 3, "draft_tokens": 7, "accepted": 2, "accepted_at": [2, 0, 0]}
    counts["steps"] = [1, 0, 1]
    result = to_generation(Request("a", (1,), 6), 3, [1] * 6, "length", [0.1, 0.2], counts)
    assert result.steps == ((3, 1), (3, 0), (1, 1))


@pytest.fixture
def loaded_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ModuleType]]:
    """Return a function that puts empty modules in place of imported ones, and returns them."""

    def load(*names: str) -> list[ModuleType]:
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                full = ".".join(parts[:end])
                if not isinstance(sys.modules.get(full), _Empty):
                    monkeypatch.setitem(sys.modules, full, _Empty(full))
                if end > 1:
                    setattr(
                        sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[full]
                    )
        return [sys.modules[name] for name in names]

    return load


class _Empty(ModuleType):
    """A module without content."""


def test_the_correction_expands_a_row_for_each_of_its_tokens(
    loaded_modules: Callable[..., list[ModuleType]],
) -> None:
    (sampler,) = loaded_modules("vllm.v1.sample.rejection_sampler")
    with pytest.raises(RequestError, match="expand_batch_to_tokens"):
        corrections.correct_expansion()
    sampler.expand_batch_to_tokens = None
    corrections.correct_expansion()
    rows, ends = torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = sampler.expand_batch_to_tokens(rows, ends, 5)
    assert torch.equal(expanded, torch.tensor([0.7, 0.7, 1.5, 1.5, 1.5]))
    ends = torch.tensor([1, 3, 4], dtype=torch.int32)
    expanded = sampler.expand_batch_to_tokens(rows, ends, 4, replace_from=0, replace_to=1)
    assert torch.equal(expanded, torch.tensor([0.7, 1.0, 1.0, 1.5]))


def test_the_context_keys_of_each_layer_are_normed_with_its_own_weights(
    loaded_modules: Callable[..., list[ModuleType]],
) -> None:
    """rms_norm here applies the first weights to all rows, as that of vLLM's CPU build does."""

    def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        out.copy_(F.rms_norm(x, x.shape[-1:], weight.reshape(-1)[: x.shape[-1]], eps))

    ops, models = loaded_modules("vllm._custom_ops", "vllm.model_executor.models.qwen3_dflash")
    ops.rms_norm, models.DFlashQwen3Model = rms_norm, SimpleNamespace()
    with pytest.raises(RequestError, match="_normalize_context_k"):
        corrections.correct_context_norms()
    models.DFlashQwen3Model._normalize_context_k = None
    corrections.correct_context_norms()
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 5, 2, 8, generator=generator)
    weights = torch.randn(3, 8, generator=generator)
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-5)
    normed = models.DFlashQwen3Model._normalize_context_k(model, keys)
    for layer, weight in enumerate(weights):
        torch.testing.assert_close(normed[layer], F.rms_norm(keys[layer], (8,), weight, 1e-5))


@pytest.mark.parametrize(
    ("method", "runner", "expected"),
    [
        ("eagle3", None, ["EXPANSION"]),
        ("eagle3", "1", ["INTERPRETER"]),
        ("dflash", None, ["EXPANSION", "CONTEXT_NORMS"]),
        ("dspark", None, ["INTERPRETER", "CONTEXT_NORMS"]),
    ],
)
def test_method_and_runner_decide_the_corrections(
    method: str,
    runner: str | None,
    expected: list[str],
    folder: Path,
    install_fake: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_fake()
    if runner:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    setup = {"target": str(folder), "draft": str(folder), "k": 2, "method": method}
    with closing(VllmProcess(setup, HERE)) as process:
        assert process.info["corrections"] == [getattr(corrections, name) for name in expected]


def test_triton_is_interpreted_and_has_a_backend_for_cpus(
    loaded_modules: Callable[..., list[ModuleType]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (triton,) = loaded_modules("triton.backends")
    triton.backends = {}
    corrections.interpret_triton()
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert not triton.backends["cpu"].driver.is_active()
    del triton.backends
    with pytest.raises(RequestError, match="Triton"):
        corrections.interpret_triton()


def test_outputs_of_plain_decoding_may_have_no_field_for_drafts() -> None:
    """Those of vLLM 0.20.2 have none."""
    counters = request_counters(SimpleNamespace(token_ids=[1, 2], finish_reason="stop"), 0)
    assert counters == {
        "drafts": 0, "draft_tokens": 0, "accepted": 0, "accepted_at": [], "steps": []
    }  # fmt: skip
