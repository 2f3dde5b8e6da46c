"""Prompt suites: prompts of benchmarks, files with another layout, and parts of a suite."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import prompt_ids, template_sha256
from draftlab.text.data_sets import Source
from draftlab.text.suites import NO_TEMPLATE, Suite, even_order, load_suite, suite_sha256
from tests.helpers.messages import assistant, user
from tests.helpers.monitors import RecordingMonitor

MT_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Travel blog.", "Rewrite."],
     "reference": None},
    {"question_id": 101, "category": "reasoning", "turns": ["A race.", "And last?"],
     "reference": ["second", "last"]},
]  # fmt: skip
HUMANEVAL = [
    {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(x):\n", "canonical_solution": "    return x",
     "test": "def check(f): ...", "entry_point": f"f{n}"}
    for n in range(2)
]  # fmt: skip
GSM8K = [
    {"question": "Two apples and three?", "answer": "5\n#### 5"},
    {"question": "Half of ten?", "answer": "5\n#### 5"},
]
SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Blog.", "Again."]},
    {"question_id": 241, "category": "translation", "turns": ["Translate: Ja."], "reference": [""]},
    {"question_id": 242, "category": "translation", "turns": ["Translate: Nein."]},
]
SPEED_BENCH = [
    {"question_id": "6e3f", "category": "coding", "sub_category": "c", "source": "own",
     "messages": [{"role": "user", "content": "Sort."}, {"role": "user", "content": "Faster."}]},
    {"question_id": "a0b1", "category": "rag", "source": "own",
     "messages": [{"role": "user", "content": "Read this."}]},
]  # fmt: skip
FIRST_TURNS = {
    "mt-bench": (MT_BENCH, [("81", "Travel blog."), ("101", "A race.")]),
    "humaneval": (HUMANEVAL, [("HumanEval/0", "def f0(x):\n"), ("HumanEval/1", "def f1(x):\n")]),
    "gsm8k": (GSM8K, [("1", "Two apples and three?"), ("2", "Half of ten?")]),
    "spec-bench": (SPEC_BENCH, [("81", "Blog."), ("241", "Translate: Ja."),
                                ("242", "Translate: Nein.")]),
    "speed-bench": (SPEED_BENCH, [("6e3f", "Sort."), ("a0b1", "Read this.")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TargetSettings())


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(source: object, tokenizer: Any, monitor: Monitor | None = None, **options: Any):
    """Return a suite's prompts: (id, token ids)."""
    return load_suite(str(source), tokenizer, monitor or Monitor(), **options).prompts


def ids(source: object, tokenizer: Any, **options: Any) -> list[str]:
    return [i for i, _ in load(source, tokenizer, **options)]


def prompt(tokenizer, text: str) -> tuple[int, ...]:
    return prompt_ids(tokenizer, [user(text)])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", FIRST_TURNS)
def test_a_benchmarks_prompts_are_the_first_turns_in_the_targets_template(
    tokenizer, tmp_path: Path, name: str, suffix: str
) -> None:
    rows, expected = FIRST_TURNS[name]
    source = f"{name}:{write(tmp_path / f'data{suffix}', rows)}"
    suite = load_suite(source, tokenizer, Monitor())
    assert suite.prompts == tuple((f"{name}/{i}", prompt(tokenizer, t)) for i, t in expected)
    categories = [row["category"] for row in rows if "category" in row]
    assert [*suite.categories.values()] == categories
    assert (suite.name, suite.template_sha256) == (source, template_sha256(tokenizer))


def test_a_subset_of_speed_benchs_folder(tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "throughput_1k.jsonl", SPEED_BENCH[:1])
    assert ids(f"speed-bench:{tmp_path / 'throughput_1k.jsonl'}", tokenizer) == ["speed-bench/6e3f"]
    with pytest.raises(UserError, match=r"one file qualitative, found 0 in throughput_1k\.jsonl"):
        load(f"speed-bench:{tmp_path}", tokenizer)
    write(tmp_path / "qualitative.jsonl", SPEED_BENCH)
    assert ids(f"speed-bench:{tmp_path}", tokenizer) == ["speed-bench/6e3f", "speed-bench/a0b1"]


def test_a_folder_with_one_file_is_read(tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "main" / "test-00000-of-00001.parquet", GSM8K)
    write(tmp_path / "dataset_infos.json", [{"no": "row"}])
    assert len(load(f"gsm8k:{tmp_path}", tokenizer)) == 2
    write(tmp_path / "other.jsonl", GSM8K)
    with pytest.raises(UserError, match=r"one file, found 2 in main/test-0.*, other\.jsonl"):
        load(f"gsm8k:{tmp_path}", tokenizer)


PLACEHOLDER = user("FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE")


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("mt-bench", HUMANEVAL, "expected the field turns of mt-bench, found task_id, prompt"),
        ("gsm8k", SPEC_BENCH, "expected the field question of gsm8k, found question_id, category"),
        ("speed-bench", SPEC_BENCH, "expected the field messages of speed-bench"),
        ("spec-bench", [{"turns": []}], "messages in turns, found no user turn"),
        ("humaneval", [{"prompt": " "}], "messages in prompt, found an empty question"),
        ("humaneval", ["a"], "expected a JSON object a row, found str"),
        ("humaneval", [], "expected prompts, found no rows"),
        ("speed-bench", [{"messages": [PLACEHOLDER]}], "SPEED-Bench's placeholder"),
    ],
)
def test_rows_with_another_layout_are_refused(
    tokenizer, tmp_path: Path, name: str, rows: list, words: str
) -> None:
    file = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(UserError, match=words) as error:
        load(f"{name}:{file}", tokenizer)
    assert str(file) in str(error.value)


def test_repeated_ids_get_a_suffix(tokenizer, tmp_path: Path) -> None:
    other = SPEC_BENCH[1] | {"question_id": SPEC_BENCH[0]["question_id"]}
    file = write(tmp_path / "data.jsonl", [SPEC_BENCH[0], other])
    assert ids(f"spec-bench:{file}", tokenizer) == ["spec-bench/81", "spec-bench/81:2"]


def test_a_repeated_prompt_is_one(tokenizer, tmp_path: Path) -> None:
    """Intervals take prompts as independent, whatever they are called."""
    again, monitor = SPEC_BENCH[0] | {"question_id": 7}, RecordingMonitor()
    file = write(tmp_path / "data.jsonl", [SPEC_BENCH[0], SPEC_BENCH[1], again, SPEC_BENCH[0]])
    prompts = load(f"spec-bench:{file}", tokenizer, monitor)
    assert [i for i, _ in prompts] == ["spec-bench/81", "spec-bench/241"]
    assert "left out 2 of 4 prompts, which repeat an earlier one" in monitor.lines[-1]


@pytest.mark.parametrize(
    "source", ["mtbench", "mt-bench#writing", "spec-bench.jsonl", "embedded:held", "nowhere.jsonl"]
)
def test_the_error_of_an_unknown_suite_lists_all_suites(tokenizer, source: str) -> None:
    with pytest.raises(UserError, match="neither") as error:
        load(source, tokenizer)
    for name in ("embedded:heldout", *FIRST_TURNS):
        assert name in str(error.value)


def test_paths_that_are_missing_or_of_another_format_are_refused(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("prompt\n")
    for source, words in (
        ("spec-bench", r"expected a path for spec-bench(.|\n)*question\.jsonl"),
        (f"mt-bench:{tmp_path / 'none'}", "expected a file or folder of mt-bench, found neither"),
        (f"humaneval:{tmp_path / 'data.csv'}", r"expected a file in \.jsonl"),
    ):
        with pytest.raises(UserError, match=words):
            load(source, tokenizer)


@pytest.mark.parametrize(
    ("source", "dataset"),
    [
        ("mt-bench", Source("mt-bench", "philschmid/mt-bench", "train")),
        ("humaneval", Source("humaneval", "openai/openai_humaneval", "test")),
        ("gsm8k", Source("gsm8k", "openai/gsm8k", "test", "main")),
    ],
)
def test_a_benchmark_without_a_path_comes_from_the_hub(
    tokenizer, monkeypatch: pytest.MonkeyPatch, source: str, dataset: Source
) -> None:
    asked = []

    def rows_of(one: Source, alternative: str) -> list[dict]:
        asked.append(one)
        assert alternative == f"give a local copy: {one.name}:PATH"
        return FIRST_TURNS[one.name][0]

    monkeypatch.setattr("draftlab.text.benchmarks.rows_of", rows_of)
    assert len(load(source, tokenizer)) == 2
    assert asked == [dataset]
    assert suite_sha256(source) is None


def test_errors_of_the_hub_and_of_a_missing_package_say_what_to_do(
    tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")

    def load_builder(*_args: str, **_options: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset_builder", load_builder)
    for words in ("found: no route", "pip install 'datasets"):
        with pytest.raises(UserError, match=rf"{words}(.|\n)*gsm8k:PATH"):
            load("gsm8k", tokenizer)
        monkeypatch.setitem(sys.modules, "datasets", None)


def test_a_benchmark_of_the_hub_is_read_again_without_a_network(
    tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "gsm8k" / "test.parquet"
    file.parent.mkdir()
    datasets.Dataset.from_list(GSM8K).to_parquet(file)
    builder = datasets.load_dataset_builder(str(file.parent), cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    first = load("gsm8k", tokenizer)
    file.unlink()
    assert load("gsm8k", tokenizer) == first


def test_a_conversations_prompt_ends_before_its_first_answer(tokenizer, tmp_path: Path) -> None:
    row = {"id": "a", "messages": [user("Hi"), assistant("Hello"), user("Hi")]}
    file = write(tmp_path / "c.jsonl", [row])
    assert load(file, tokenizer) == (("a", prompt(tokenizer, "Hi")),)
    assert len(load("embedded:heldout", tokenizer)) > 30
    write(file, [{"id": "a", "messages": [{"role": "system", "content": "Be"}, user("Hi")]}])
    with pytest.raises(UserError, match="one user turn as plain text, found system, user"):
        load(file, tokenizer, raw=True)


def test_raw_is_the_tokenizers_default_encoding(tokenizer, tmp_path: Path) -> None:
    source = f"gsm8k:{write(tmp_path / 'data.jsonl', GSM8K)}"
    suite = load_suite(source, tokenizer, Monitor(), raw=True)
    expected = [tuple(tokenizer(row["question"])["input_ids"]) for row in GSM8K]
    assert [tokens for _, tokens in suite.prompts] == expected
    assert suite.template_sha256 == NO_TEMPLATE
    assert suite.sha256 != load_suite(source, tokenizer, Monitor()).sha256


def test_long_prompts_are_left_out_and_reported(tokenizer, tmp_path: Path) -> None:
    rows = [{"question": "word " * count} for count in (1, 200, 2, 300)]
    source, monitor = f"gsm8k:{write(tmp_path / 'data.jsonl', rows)}", RecordingMonitor()
    lengths = [len(tokens) for _, tokens in load(source, tokenizer)]
    prompts = load(source, tokenizer, monitor, max_prompt_tokens=lengths[2])
    assert [i for i, _ in prompts] == ["gsm8k/1", "gsm8k/3"]
    for words in (
        f"left out 2 of 4 prompts, which have more than the {lengths[2]} tokens",
        f"gsm8k/2 ({lengths[1]}), gsm8k/4 ({lengths[3]})",
    ):
        assert words in monitor.lines[-1]
    with pytest.raises(UserError, match="expected prompts that fit, found 4 of 4"):
        load(source, tokenizer, max_prompt_tokens=1)


def test_the_hash_of_a_suite_follows_its_file(tmp_path: Path) -> None:
    source = f"gsm8k:{write(tmp_path / 'data.jsonl', GSM8K)}"
    before = suite_sha256(source)
    write(tmp_path / "data.jsonl", GSM8K[:1])
    assert before != suite_sha256(source)
    assert suite_sha256("embedded:heldout") != suite_sha256("embedded")


def test_the_tools_of_a_conversation_are_in_its_prompt(tmp_path: Path, tokenizer: Any) -> None:
    """As in the prompts that the target answers; else a head is measured on other prompts."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"id": "1", "messages": [user("Rain?")], "tools": tools}))
    suite = load_suite(str(path), tokenizer, Monitor())
    assert suite.prompts == (("1", prompt_ids(tokenizer, [user("Rain?")], tools)),)
    assert "weather" in tokenizer.decode(suite.prompts[0][1])


CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "arts")


def sorted_suite() -> Suite:
    """Return eight categories of ten prompts, one category after the other, as in MT-Bench."""
    prompts = tuple((f"q{i}", (i,)) for i in range(80))
    return Suite("toy", "t", prompts, {f"q{i}": CATEGORIES[i // 10] for i in range(80)})


def counts(suite: Suite) -> Counter[str]:
    return Counter(suite.categories[id_] for id_, _ in suite.prompts)


@pytest.mark.parametrize("seed", range(5))
def test_each_category_has_its_share_of_a_sample_and_of_the_timed_prompts(seed: int) -> None:
    drawn = sorted_suite().sample(64, seed)
    assert counts(drawn) == dict.fromkeys(CATEGORIES, 8)
    assert drawn.prompts == tuple(sorted(drawn.prompts, key=lambda one: one[1]))  # still in order
    timed = drawn.evenly_ordered(seed)[:10]
    by_category = Counter(drawn.categories[id_] for id_, _ in timed)
    assert sorted(by_category.values()) == [1] * 6 + [2] * 2
    assert set(timed) <= set(drawn.prompts)


def test_unequal_categories_keep_their_proportions() -> None:
    strata = ["long"] * 60 + ["middle"] * 30 + ["short"] * 10
    for seed in range(20):
        beginning = Counter(strata[i] for i in even_order(strata, seed)[:50])
        assert abs(beginning["long"] - 30) <= 1
        assert abs(beginning["middle"] - 15) <= 1
        assert abs(beginning["short"] - 5) <= 1


def test_the_seed_decides_the_sample_and_every_prompt_is_as_likely() -> None:
    suite = sorted_suite()
    assert suite.sample(20, 1) == suite.sample(20, 1)
    assert suite.sample(20, 1) != suite.sample(20, 2)
    assert suite.sample(None, 1) == suite.sample(80, 2) == suite
    drawn = Counter(id_ for seed in range(400) for id_, _ in suite.sample(20, seed).prompts)
    assert len(drawn) == 80
    assert min(drawn.values()) > 60  # 100 expected, with a standard deviation of 9
    assert max(drawn.values()) < 140


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([{"category": "a"}, {"category": "b"}, {"category": "b"}], ["a", "b", "b"]),
        ([{"source": "a"}, {"source": "b"}, {"source": "b"}], ["a", "b", "b"]),
        ([{"source": "x", "category": c} for c in "abb"], ["a", "b", "b"]),
        ([{"source": "x"}] * 3, []),
        ([{}] * 3, []),
    ],
)
def test_a_file_of_conversations_has_the_categories_of_its_lines(
    tokenizer: Any, tmp_path: Path, fields: list[dict[str, str]], expected: list[str]
) -> None:
    lines = [
        {"id": f"p{i}", "messages": [user(f"Write f{i}.")], **one} for i, one in enumerate(fields)
    ]
    path = write(tmp_path / "suite.jsonl", lines)
    suite = load_suite(str(path), tokenizer, Monitor())
    assert [suite.categories[id_] for id_, _ in suite.prompts if suite.categories] == expected
