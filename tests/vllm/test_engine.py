"""vLLM as an engine: the real client program, with a package that counts as vLLM does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.target_model.settings import VllmSettings
from draftlab.vllm.engine import VllmEngine, generation, positions
from draftlab.vllm.process import PYTHON_VARIABLE, VllmProcess, _end_of, find_python
from draftlab.vllm.vllm_client import generation as served
from tests.helpers import fake_vllm

HERE = VllmSettings(python=sys.executable)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, as far as the client looks at one."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes the fake package what the client imports; returns the file it logs to."""

    def make(**options: bool) -> Path:
        package = fake_vllm.write(tmp_path / "site", **options)
        monkeypatch.setenv("PYTHONPATH", str(package))
        monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
        return tmp_path / "log"

    return make


def ask(*firsts: int, count: int = 8, temperature: float = 0.0) -> list[Request]:
    sampling = Sampling(temperature, top_k=5, top_p=0.9, seed=3)
    return [Request(f"p{i}", (i, 7), count, sampling, frozenset({2, 1})) for i in firsts]


def run_vllm(
    head: Path | None, target: Path, requests: list[Request], k: int, draft_probs: bool, **options
) -> list[Generation]:
    """Decodes with a vLLM that is started and ended for it."""
    options.setdefault("max_length", positions(requests, k, sys.maxsize))
    engine = VllmEngine(target, head, k=k, draft_probs=draft_probs, settings=HERE, **options)
    with engine:
        return list(engine.generate(requests))


def test_tokens_counters_steps_and_times_of_each_request(folder: Path, install) -> None:
    install()
    one, two = run_vllm(folder, folder, ask(4, 6, count=9), 4, False)
    assert (one.id, two.id) == ("p4", "p6")
    assert one.token_ids == tuple(range(4, 13))
    assert one.steps == ((4, 4), (4, 4))
    assert two.steps == ((4, 1),) * 4
    assert two.counters.accepted_at == [4, 0, 0, 0]
    assert (one.counters.truncated_tokens, two.counters.truncated_tokens) == (2, 0)
    for found in (one, two):
        found.counters.check_tokens(9, 1)
        assert found.expected == ()
        assert found.finish == "length"
        assert (found.first_token_s, found.tpot_s) == (0.5, 1.0)


def test_plain_decoding_has_steps_without_drafts(folder: Path, install) -> None:
    log = install()
    (found,) = run_vllm(None, folder, ask(4), 4, True)
    assert found.steps == ((0, 0),) * 7
    assert (found.counters.k, found.counters.undrafted_steps) == (0, 7)
    assert "speculative_config" not in json.loads(log.read_text().splitlines()[0])


@pytest.mark.parametrize("probabilities", [False, True])
def test_what_is_asked_reaches_vllm(folder: Path, install, probabilities: bool) -> None:
    log, requests = install(), ask(4, 6, temperature=0.7)
    with VllmEngine(
        folder,
        folder,
        k=3,
        draft_probs=probabilities,
        dtype=torch.bfloat16,
        batch=2,
        max_length=positions(requests, 3, 64),
        settings=HERE,
    ) as engine:
        for _ in range(2):  # one start serves many asks, and counts each by itself
            assert [g.counters.drafts for g in engine.generate(requests)] == [7, 3]
        assert list(engine.generate([])) == []
    options, first, _ = map(json.loads, log.read_text().splitlines())
    assert options["speculative_config"] == {
        "model": str(folder.resolve()),
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic" if probabilities else "greedy",
    }
    assert (options["dtype"], options["max_num_seqs"]) == ("bfloat16", 2)
    assert options["max_model_len"] == 2 + 8 + 2 * 3 + 1
    assert first == [2, first[1]]  # both in one batch
    expected = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "max_tokens": 8}
    assert expected.items() <= first[1].items()
    assert (first[1]["stop_token_ids"], first[1]["ignore_eos"]) == ([1, 2], True)


@pytest.mark.parametrize("layout", [{"mask_token_id": 7}, {"mask_token_id": None}])
def test_a_head_with_a_mask_token_drafts_in_parallel(folder: Path, install, layout: dict) -> None:
    log, head = install(), folder.parent / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(layout))
    run_vllm(head, folder, ask(4), 2, False)
    asked = json.loads(log.read_text().splitlines()[0])["speculative_config"]
    assert asked.get("parallel_drafting") == (True if layout["mask_token_id"] else None)


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["Llama4ForCausalLM"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({}, "eagle3"),
    ],
)
def test_the_method_is_told_by_the_architecture(
    folder: Path, install, layout: dict, method: str
) -> None:
    """vLLM would take it from the folder's name."""
    log, head = install(), folder.parent / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(layout))
    run_vllm(head, folder, ask(4), 2, False)
    asked = json.loads(log.read_text().splitlines()[0])["speculative_config"]
    assert asked["method"] == method


def test_the_engine_says_version_runner_device_and_what_was_corrected(
    folder: Path, install
) -> None:
    install()
    lines: list[str] = []
    monitor = Monitor()
    monitor.say = lines.append  # type: ignore[method-assign]
    with VllmEngine(folder, folder, k=2, max_length=32, settings=HERE, monitor=monitor) as engine:
        assert engine.name == "vllm 9.9 (V1, cpu)"
        assert engine.corrections == (served.CORRECTION,)
    assert engine.name in lines[0]
    assert "corrected: vllm.v1.sample.rejection_sampler.expand_batch_to_tokens" in lines[0]
    with VllmEngine(folder, max_length=32, settings=HERE) as engine:
        assert engine.corrections == ()


@pytest.mark.parametrize("asked", [{}, {"boundaries": [0, 2]}])
def test_a_llama4_target_is_computed_as_its_config_says(asked: dict, folder: Path, install) -> None:
    """Decoding, and for its states: vLLM alone would leave tempered attention out."""
    log = install()
    (folder / "config.json").write_text('{"text_config": {"model_type": "llama4_text"}}')
    setup = {"target": str(folder), "states_folder": str(folder), "max_model_len": 9} | asked
    VllmProcess(setup, HERE).close()
    options = json.loads(log.read_text().splitlines()[0])
    assert ("kv_transfer_config" in options) == bool(asked)
    assert options["override_generation_config"] == {"attn_temperature_tuning": True}


def test_states_are_asked_of_its_hidden_state_extraction(folder: Path, install) -> None:
    log, setup = install(), {"target": str(folder), "boundaries": [0, 2, 4], "max_model_len": 9}
    setup |= {"states_folder": str(folder), "max_num_seqs": 3, "engine_extra": {"own": 1}}
    process = VllmProcess(setup, HERE)
    try:
        answer = process.ask({"prompts": [[5, 6], [7]]})
    finally:
        process.close()
    assert (answer["tokens"], answer["logprobs"]) == ([5, 7], [-0.5, -0.5])
    assert load_file(answer["files"][0])["hidden_states"][1].tolist() == [[6.0] * 4] * 3
    assert "copies without CUDA streams" in process.line()
    options = json.loads(log.read_text().splitlines()[0])
    speculation = options["speculative_config"]
    assert speculation["method"] == "extract_hidden_states"
    assert speculation["draft_model_config"] == {
        "hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    }
    assert options["kv_transfer_config"] == {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "vllm_client.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    # older versions write wrong states of a prompt in pieces
    assert options["enable_chunked_prefill"] is False
    assert options["enable_prefix_caching"] is False
    assert (options["max_num_batched_tokens"], options["own"]) == (9, 1)
    with pytest.raises(UserError, match="states_folder: expected where states"):
        VllmProcess({"target": str(folder), "boundaries": [1]}, HERE)


def test_an_old_vllm_counts_prompt_by_prompt_and_knows_no_draft_probabilities(
    folder: Path, install
) -> None:
    log = install(modern=False)
    found = run_vllm(folder, folder, ask(4, 6), 4, False)
    assert [g.counters.accepted for g in found] == [8, 4]
    assert [len(g.steps) for g in found] == [2, 4]
    assert "draft_sample_method" not in log.read_text()
    with pytest.raises(UserError, match="does not know draft_sample_method"):
        run_vllm(folder, folder, ask(4), 4, True)
    with pytest.raises(UserError, match="counts no single request: take batch 1"):
        run_vllm(folder, folder, ask(4), 4, False, batch=2)


def test_counters_that_disagree_are_refused(
    folder: Path, install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("FAKE_EXTRA", "1")
    with pytest.raises(UserError, match=r"drafts: get_metrics\(\) says 3, the requests add"):
        run_vllm(folder, folder, ask(4), 4, False)


def test_bad_requests_are_named(folder: Path, install) -> None:
    install()
    long = [Request("long", (1,) * 60, 8)]
    with pytest.raises(UserError, match=r"60 tokens \+ 8 new ones exceed the 64 positions"):
        run_vllm(None, folder, long, 0, False, max_length=64)
    with pytest.raises(UserError, match="miscounts prompts of one token"):
        run_vllm(folder, folder, [Request("a", (1,), 8)], 2, False, batch=2)
    with pytest.raises(UserError, match=r"draft: expected a model folder with a config\.json"):
        run_vllm(folder / "none", folder, ask(4), 2, False)
    mixed = [*ask(4), *ask(6, temperature=1.0)]
    with pytest.raises(ValueError, match="one sampling"):
        run_vllm(None, folder, mixed, 0, False)


def test_a_vllm_that_does_not_start_is_an_error_with_its_words(
    folder: Path, install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(UserError, match="no kernel for this machine"):
        run_vllm(None, folder, ask(4), 0, False)


def test_errors_far_above_the_end_are_shown_first() -> None:
    cause = "(Worker pid=7) ERROR ValueError: no such layer"
    said = f"{cause}\n{cause}\n" + "at line 1\n" * 400 + "RuntimeError: see above"
    first, second, *_, last = _end_of(said).splitlines()
    assert (first, last) == ("ValueError: no such layer", "RuntimeError: see above")
    assert "ValueError" not in second
    assert _end_of("a\nb") == "a\nb"
    assert _end_of("") == "it said nothing"


def test_a_python_without_vllm(folder: Path, tmp_path: Path, monkeypatch) -> None:
    site = tmp_path / "empty" / "vllm.py"
    site.parent.mkdir()
    site.write_text("raise ModuleNotFoundError('No module named vllm', name='vllm')\n")
    monkeypatch.setenv("PYTHONPATH", str(site.parent))
    with pytest.raises(UserError, match="found one without") as error:
        run_vllm(None, folder, ask(4), 0, False)
    assert PYTHON_VARIABLE in str(error.value)
    assert sys.executable in str(error.value)


def test_which_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = "draftlab.vllm.process.importlib.util.find_spec"
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(find, lambda _name: None)
    with pytest.raises(UserError, match=f"found none in this Python(.|\n)*{PYTHON_VARIABLE}"):
        find_python(VllmSettings())
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv(PYTHON_VARIABLE, str(link))
    assert find_python(VllmSettings()) == link  # a link tells its environment
    assert find_python(HERE) == Path(sys.executable)
    monkeypatch.setattr(find, lambda _name: SimpleNamespace())
    assert find_python(VllmSettings()) == Path(sys.executable)
    (tmp_path / "text").write_text("")
    for wrong in ("none", "text"):
        with pytest.raises(UserError, match="found no program"):
            find_python(VllmSettings(python=str(tmp_path / wrong)))


def test_drafts_missing_near_the_limit_are_missing_at_the_end() -> None:
    counted = {"drafts": 3, "draft_tokens": 7, "accepted": 2, "accepted_at": [2, 0, 0]}
    found = generation(
        Request("a", (1,), 6), 3, [1] * 6, "length", [0.1, 0.2], {**counted, "steps": [1, 0, 1]}
    )
    assert found.steps == ((3, 1), (3, 0), (1, 1))


def test_the_correction_expands_a_row_for_each_of_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.rejection_sampler"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sampler = sys.modules["vllm.v1.sample.rejection_sampler"]
    sys.modules["vllm.v1.sample"].rejection_sampler = sampler
    with pytest.raises(served.RequestError, match="expand_batch_to_tokens"):
        served.correct_expand()
    sampler.expand_batch_to_tokens = None
    served.correct_expand()
    rows, ends = torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = sampler.expand_batch_to_tokens(rows, ends, 5)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.5, 1.5, 1.5]))
    ends = torch.tensor([1, 3, 4], dtype=torch.int32)
    found = sampler.expand_batch_to_tokens(rows, ends, 4, replace_from=0, replace_to=1)
    assert torch.equal(found, torch.tensor([0.7, 1.0, 1.0, 1.5]))
