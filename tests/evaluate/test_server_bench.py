"""`draftlab bench` against a stand-in server: figures, faults, other traffic, restarts, causes."""

from __future__ import annotations

import io
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.evaluate import server_compare
from draftlab.evaluate.server_bench import ServerBench, ServerPoint, load_figures
from draftlab.evaluate.server_compare import compare
from draftlab.progress import Monitor
from draftlab.servers import server_load
from draftlab.servers.server_counters import CountersRestarted, parse_counters
from draftlab.servers.server_load import Answer, LoadedServer, _Fault
from draftlab.servers.settings import BenchSettings
from draftlab.target_model.fingerprint import fingerprint
from draftlab.text.suites import Suite
from tests.helpers.bench_server import ACCEPTED, BenchServer, bench_server
from tests.helpers.sample_report import report as sample_report
from tests.helpers.sample_report import row
from tests.helpers.small_run import draftlab, refused
from tests.helpers.toys import toy_target_folder

TOKENS = 11
"""Tokens of an answer: 1 and four steps of 3, 1, 4 and 2."""
SUITE = Suite("suite", "template", tuple((f"p{i}", (i + 1, 2, 3)) for i in range(8)))
AL = 1 + sum(ACCEPTED) / 4


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_load, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(server_load, "_SETTLED_S", 0.01)
    monkeypatch.setattr(server_load, "_SETTLE_S", 0.5)


def new_bench(server: BenchServer, monitor: Monitor | None = None, **settings: Any) -> ServerBench:
    chosen = BenchSettings(**{"max_new_tokens": TOKENS} | settings)
    loaded = LoadedServer(server.url, chosen, lambda line: None)
    return ServerBench(loaded, None, SUITE, chosen, monitor or Monitor())


def measured(server: BenchServer, **settings: Any) -> ServerPoint:
    bench = new_bench(server, **settings)
    faults, server.faults = server.faults, []
    bench.server.warm_up([(1, 2)])
    server.faults = faults
    bench.measure(bench.server, 1, None)
    return bench.points[0]


@pytest.mark.parametrize("own", [False, True])
def test_the_servers_counters_and_the_times(own: bool) -> None:
    with bench_server(own=own, step_s=0.005) as server:
        point = measured(server, max_prompts=6)
    found, load = point.acceptance, point.load
    assert (point.requests, point.failures, point.warnings) == (6, {}, [])
    assert found.acceptance_length == AL
    assert found.acceptance_length_ci == pytest.approx((AL, AL)), "all prompts have the same steps"
    assert (found.k, found.drafts, found.accepted_at) == (3, 24, (18, 12, 6))
    assert found.acceptance_at == [0.75, 0.5, 0.25]
    assert load.output_tokens == 6 * TOKENS
    assert 2.0 <= load.tpot_ms.p50 < 60, "four steps of 5 ms for ten tokens"
    body = server.bodies[-1]
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.0, TOKENS, True)


def test_an_answer_ends_with_its_last_token() -> None:
    with bench_server(usage_s=0.5) as server:
        assert measured(server, max_prompts=1).answers[0].total_s < 0.5


@pytest.mark.parametrize("program", ["sglang", "llamacpp"])
def test_other_programs(program: str) -> None:
    with bench_server(program=program) as server:
        point = measured(server)
    assert point.acceptance.acceptance_length == AL
    assert point.warnings == []


def test_faults_are_named_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_load, "FIRST_WAIT_S", 0.2)
    faults = [429, "cut", 500, 503, "ids", "type", "huge", "count", "more", 429]
    with bench_server() as server:
        server.faults = list(faults)
        point = measured(server)
    assert point.retries == {"HTTP 429": 2, "HTTP 500": 1, "HTTP 503": 1}
    assert point.requests == 2, "what is left of eight"
    assert set(point.failures) == {
        "the stream was cut",
        "expected a text and a list of token ids, found other types",
        "an answer of too many bytes",
        "expected completion_tokens to be a count, found '11'",
        "expected a count of at most 11 tokens, found 12",
    }
    assert point.load.output_tokens == 2 * TOKENS
    assert max(answer.first_token_s for answer in point.answers) > 0.2, "a refusal is waited for"
    assert any("6 requests failed" in text for text in point.warnings)
    assert point.acceptance.source == "vLLM's counters, failed requests included"


def test_a_slow_answer_ends_and_a_busy_server_is_given_up() -> None:
    with bench_server() as server:
        server.faults = ["slow", 429, 429]
        started = time.monotonic()
        point = measured(server, timeout_s=0.5, attempts=2, max_prompts=6)
    assert time.monotonic() - started < 4
    assert point.failures == {"no end of an answer in time": 1, "HTTP 429 (2 attempts)": 1}


def test_other_traffic_is_said() -> None:
    with bench_server(others=2) as server:
        point = measured(server)
        assert any("other traffic: the server counted 16 further" in t for t in point.warnings)
        assert "others' requests included" in point.acceptance.source
        server.own = True
        assert measured(server).acceptance.source == "the counters in the answers"


def test_counters_that_restart_are_named() -> None:
    with bench_server(restart_at=5) as server:
        point = measured(server)
    assert any("the counters restarted" in text for text in point.warnings)
    assert point.acceptance is None
    page = "vllm:generation_tokens_total 7\nprocess_start_time_seconds {}\n"
    one, two = (parse_counters(page.format(n)) for n in (1, 2))
    with pytest.raises(CountersRestarted):
        two.since(one)


def test_a_server_without_counters_or_drafts() -> None:
    with bench_server(program="") as server:
        point = measured(server)
        assert point.acceptance is None
        assert any("/metrics: HTTP 404" in text for text in point.warnings)
    with bench_server(drafts=False) as server:
        assert measured(server).acceptance is None


def test_goodput_of_a_busy_server_is_its_rate() -> None:
    """The server writes 100 tokens a second, shared by the four that run.

    With the tail, where fewer run, 4 · Σ tokens / Σ seconds would be 111 tokens a second.
    """
    lengths = [20, 80, 180, 320] * 4
    left, began, answers, now, sent = {}, {}, [], 0.0, 0
    while len(answers) < 16:
        while sent < 16 and len(left) < 4:
            left[sent], began[sent], sent = lengths[sent], now, sent + 1
        step = min(left.values())
        now += step * len(left) / 100
        left = {i: tokens - step for i, tokens in left.items()}
        for i in [i for i, tokens in left.items() if not tokens]:
            del left[i]
            answers.append(Answer(i, lengths[i], 3, began[i], 0.001, now - began[i], 9))
    load = load_figures(answers, 4)
    assert load.goodput_tok_s == pytest.approx(100, rel=0.05)
    assert load.running == pytest.approx(4)
    assert load.ttft_ms.p50_ci is not None
    assert load.ttft_ms.p90_ci is None, "all of 16 are below the 90th percentile 19 times in 100"


def test_copies_of_a_prompt_share_no_cache() -> None:
    with bench_server() as server:
        bench = new_bench(server, max_prompts=2, concurrency=(2,))
        bench.run()
    salts = [(tuple(body["prompt"]), body["cache_salt"]) for body in server.bodies]
    assert len(set(salts)) == len(salts) == 2 + 8, "two of the warm-up"


def test_poisson_arrivals_do_not_wait_for_answers() -> None:
    with bench_server(step_s=0.05) as server:
        bench = new_bench(server, rate=(100.0,))
        bench.run()
        point = bench.points[0]
    assert (point.requests, point.rate) == (8, 100.0)
    assert point.load.running > 2
    assert "others" not in str(point.warnings)


def test_an_interruption_keeps_what_was_measured() -> None:
    class Interrupts(Monitor):
        def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
            if done == 3:
                raise KeyboardInterrupt

    with bench_server() as server:
        bench = new_bench(server, Interrupts())
        with pytest.raises(KeyboardInterrupt):
            bench.run()
    (point,) = bench.points
    assert point.interrupted
    assert point.requests >= 3
    assert point.load is not None


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    options = ("--target", "embedded", "--suite", "embedded:heldout", "--max-prompts", "8")
    result = draftlab(folder, "bench", *arguments, *options, "--max-new-tokens", str(TOKENS))
    assert result.exit_code == code, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines()), result.stdout
    return result.output


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report's AL beside the server's, the causes, the speed-up, and the key."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abcdefghijklm")
    sample_report().write(tmp_path / "report.json")
    with bench_server(step_s=0.005) as server, bench_server(step_s=0.005, drafts=False) as plain:
        server.template, server.card = [1, 2], {"root": "model-AWQ"}
        output = run(tmp_path, server.url, "--plain", plain.url, "--head", ".")
        assert server.keys[-1] == "Bearer sk-abcdefghijklm", "this machine may have it"
        refusal = refused(tmp_path, "bench", "ftp://x", "--target", "embedded")
    assert "sk-abc" not in output
    assert "an address such as" in refusal
    content = json.loads((tmp_path / "bench.json").read_text())
    (point,) = content["points"]
    assert point["load"]["speedup"] > 1.3
    assert point["acceptance"]["acceptance_length"] == AL
    assert len(point["answers"]) == len(point["plain"]["answers"]) == 8
    assert "sk-abc" not in json.dumps(content)
    for text in (
        f"AL      {AL:.2f}",
        "found: template",
        "found: quantised target",
        "other prompts",
    ):
        assert text in output
    assert "check:" in output
    (tmp_path / "bench.json").write_text("{}")
    assert "a bench.json of draftlab" in refused(tmp_path, "bench", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("keep", "k", "expected"),
    [
        (0.65, 3, ["agree (the server's AL and the report's interval, not prompt by prompt)"]),
        (0.99, 3, ["differ", "if the target is right: other weights of the head"]),
        (0.65, 2, ["agree", "K = 2; server 2.25", "found: other K"]),
        (0.85, 2, ["differ", "found: other K"]),
    ],
)
def test_causes(keep: float, k: int, expected: list[str]) -> None:
    """The server has acceptance 0.75, 0.5, 0.25 at its three positions."""
    one = row(keep=keep, k=k, suite_sha256=SUITE.sha256, max_new_tokens=TOKENS)
    if keep == 0.65:  # an AL that the server's equals
        at = [48, 32, 16][:k]
        counts = {"drafts": 64, "draft_tokens": 64 * k, "accepted": sum(at), "accepted_at": at}
        al = 1 + sum(at) / 64
        fields = {"acceptance_length": al, "acceptance_length_ci": (al - 0.1, al + 0.1)}
        one = one.model_copy(update=counts | fields)
    with bench_server() as server:
        bench = new_bench(server, raw=True)
        bench.run()
        bench.report = sample_report([one])
        text = "\n".join(compare(bench))
        bench.points[0].acceptance.acceptance_at = []  # as SGLang, which states AL alone
        text_without = "\n".join(compare(bench))
        assert "likely" not in text_without
        assert ("aux layers" in text_without) == ("differ" in text)
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("tokens", "dtype", "keep", "expected", "absent"),
    [
        (8 * TOKENS, "float32", 0.99, ["the same answers (", "aux layers"], "check: the target"),
        (8 * TOKENS, "float32", 0.67, ["differ (of the same", "check: dtype first"], "likely"),
        (8 * TOKENS, "bfloat16", 0.67, ["differ (of the same", "likely: aux"], "check: the target"),
        (8 * TOKENS + 9, "float32", 0.99, ["found: other answers", "check: the target"], "aux"),
        (8 * TOKENS + 8, "float32", 0.99, ["aux layers", "check: the target"], "answers ("),
    ],
)
def test_answers_tell_the_target_from_the_head(
    tokens: int, dtype: str, keep: float, expected: list[str], absent: str
) -> None:
    """In 16 bits they depend on rounding, and a server may not count the last token of each."""
    limit = TOKENS + 2
    changes = {"suite_sha256": SUITE.sha256, "max_new_tokens": limit, "dtype": dtype}
    one = row(keep=keep, k=3, **changes)
    fields = {"prompts": 8, "output_tokens": tokens}
    if keep < 0.7:  # the server's AL, or a larger one in an interval that has it
        at = [48, 32, 16] if keep == 0.65 else [50, 33, 16]
        fields |= {"drafts": 64, "draft_tokens": 192, "accepted": sum(at), "accepted_at": at}
        fields |= {"acceptance_length": 1 + sum(at) / 64, "acceptance_length_ci": (2.4, 2.6)}
    with bench_server(longest=TOKENS) as server:
        bench = new_bench(server, raw=True, max_new_tokens=limit)
        bench.run()
        bench.report = sample_report([one.model_copy(update=fields)])
        text = "\n".join(compare(bench))
    for part in expected:
        assert part in text
    assert absent not in text


def test_the_served_target_is_compared_by_its_files(tmp_path: Path) -> None:
    target = toy_target_folder(tmp_path / "toy")
    card = {"root": str(target), "parent": None}
    report = sample_report()
    report.target["fingerprint"] = fingerprint(target)
    other = partial(server_compare._other_target, report=report, is_here=True)
    assert other(card) == ""
    assert other(card, is_here=False) is None, "that machine may have other files there"
    assert other({"root": "org/name"}) is other({}) is other({"root": 7}) is None
    assert "adapter of base" in other({"parent": "base"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    assert "quantised, other weights" in other(card)
    with bench_server(cache_dtype="fp8_e5m2", card=card) as server:
        bench = new_bench(server, raw=True)
        bench.run()
        one = row(keep=0.99, k=3, suite_sha256=SUITE.sha256, max_new_tokens=TOKENS)
        bench.report = sample_report([one])
        bench.report.target["fingerprint"] = report.target["fingerprint"]
        text = "\n".join(compare(bench))
    assert "found: a KV cache of fp8_e5m2" in text
    assert f"found: another target: {target}" in text
    assert "aux layers" not in text, "the target is found"


@pytest.mark.parametrize("finish", [None, "length"])
def test_an_answer_that_goes_on_after_its_end_is_a_fault(finish: str | None) -> None:
    ends = ({"text": "a", "finish_reason": reason} for reason in ("stop", finish))
    lines = (f"data: {json.dumps({'choices': [end]})}\n\n" for end in ends)
    with bench_server() as server:
        bench = new_bench(server)
        with pytest.raises(_Fault, match="the end of an answer, found more of it"):
            bench.server._read(io.BytesIO("".join(lines).encode()), 0, {"max_tokens": 8}, 0.0)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the server's models"):
        LoadedServer("http://127.0.0.1:1", BenchSettings(), lambda line: None)
