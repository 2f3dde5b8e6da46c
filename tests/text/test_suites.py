"""Prompt suites: what is taken of each benchmark, and what of another shape is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.target_model.model import TargetSettings, load_tokenizer
from draftlab.text.render import prompt_ids, template_sha256
from draftlab.text.suites import RAW, load_suite, parse_source, suite_sha256

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


class Lines(Monitor):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


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


def chat(tokenizer, text: str) -> tuple[int, ...]:
    return prompt_ids(tokenizer, [{"role": "user", "content": text}])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", FIRST_TURNS)
def test_the_first_turn_of_every_row_in_the_targets_template(
    tokenizer, tmp_path: Path, name: str, suffix: str
) -> None:
    rows, expected = FIRST_TURNS[name]
    source = f"{name}:{write(tmp_path / f'data{suffix}', rows)}"
    suite = load_suite(source, tokenizer, Monitor())
    assert suite.prompts == tuple((f"{name}/{i}", chat(tokenizer, t)) for i, t in expected)
    assert (suite.name, suite.template_sha256) == (source, template_sha256(tokenizer))


def test_a_category_alone(tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "question.jsonl", SPEC_BENCH)
    monitor = Lines()
    suite = load_suite(f"spec-bench:{file}#translation", tokenizer, monitor)
    assert [i for i, _ in suite.prompts] == ["spec-bench/241", "spec-bench/242"]
    assert "2 prompts (first turns)" in monitor.lines[-1]
    assert "translation 2; vllm bench lets each have 256 tokens" in monitor.lines[-1]
    with pytest.raises(UserError, match="category qa, found translation, writing"):
        load_suite(f"spec-bench:{file}#qa", tokenizer, Monitor())


def test_a_subset_of_speed_benchs_folder_and_a_category_of_it(tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "qualitative.jsonl", SPEED_BENCH)
    write(tmp_path / "throughput_1k.jsonl", SPEED_BENCH[:1])

    def ids(part: str) -> list[str]:
        source = f"speed-bench:{tmp_path}{part}"
        return [i for i, _ in load_suite(source, tokenizer, Monitor()).prompts]

    assert ids("") == ids("#qualitative") == ["speed-bench/6e3f", "speed-bench/a0b1"]
    assert ids("#throughput_1k") == ["speed-bench/6e3f"]
    assert ids("#qualitative/rag") == ["speed-bench/a0b1"]
    with pytest.raises(UserError, match=r"subset throughput_8k.*throughput_1k\.jsonl"):
        ids("#throughput_8k")


def test_a_data_sets_folder_gives_its_configuration_and_split(tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "main" / "gsm8k"  # a name above the folder decides nothing
    write(folder / "main" / "test-00000-of-00001.parquet", GSM8K[:1])
    write(folder / "main" / "train-00000-of-00001.parquet", GSM8K[1:])
    write(folder / "socratic" / "test-00000-of-00001.parquet", GSM8K[1:])
    write(folder / "dataset_infos.json", [{"no": "row"}])
    suite = load_suite(f"gsm8k:{folder}", tokenizer, Monitor())
    assert [ids for _, ids in suite.prompts] == [chat(tokenizer, GSM8K[0]["question"])]
    one, two = (write(tmp_path / "two" / name, GSM8K) for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(UserError, match=r"one file, or files of the split main test .*a\.jsonl, b"):
        load_suite(f"gsm8k:{one.parent}", tokenizer, Monitor())
    two.unlink()
    assert len(load_suite(f"gsm8k:{one.parent}", tokenizer, Monitor()).prompts) == 2


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("mt-bench", HUMANEVAL, "expected the field turns of mt-bench, found task_id, prompt"),
        ("gsm8k", SPEC_BENCH, "expected the field question of gsm8k, found question_id, category"),
        ("speed-bench", SPEC_BENCH, "expected the field messages of speed-bench"),
        ("spec-bench", [{"turns": []}], "expected a text, turns or messages in turns"),
        ("humaneval", [{"prompt": " "}], "expected a text, turns or messages in prompt"),
        ("humaneval", ["a"], "expected a JSON object a row, found str"),
        ("humaneval", [], "expected prompts, found no rows"),
        (
            "speed-bench",
            [{"messages": [{"content": "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"}]}],
            "SPEED-Bench's placeholder",
        ),
    ],
)
def test_rows_of_another_shape_are_refused(
    tokenizer, tmp_path: Path, name: str, rows: list, said: str
) -> None:
    file = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(UserError, match=said) as error:
        load_suite(f"{name}:{file}", tokenizer, Monitor())
    assert str(file) in str(error.value)


def test_a_broken_line_is_named(tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(UserError, match="expected JSON") as error:
        load_suite(f"humaneval:{file}", tokenizer, Monitor())
    assert error.value.where == f"{file}:3"


def test_repeated_ids_stay_apart(tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [SPEC_BENCH[0], SPEC_BENCH[1], SPEC_BENCH[0]])
    suite = load_suite(f"spec-bench:{file}", tokenizer, Monitor())
    assert [i for i, _ in suite.prompts] == ["spec-bench/81", "spec-bench/241", "spec-bench/81:3"]


@pytest.mark.parametrize(
    "source", ["mtbench", "spec-bench.jsonl", "embedded:held", "nowhere.jsonl"]
)
def test_an_unknown_suite_lists_the_known(tokenizer, source: str) -> None:
    with pytest.raises(UserError, match="neither") as error:
        load_suite(source, tokenizer, Monitor())
    for name in ("embedded:heldout", *FIRST_TURNS):
        assert name in str(error.value)


def test_a_benchmark_that_is_not_on_the_hub_needs_a_path(tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a path for spec-bench(.|\n)*question\.jsonl"):
        load_suite("spec-bench#qa", tokenizer, Monitor())
    with pytest.raises(UserError, match="expected a file or folder of mt-bench, found neither"):
        load_suite(f"mt-bench:{tmp_path / 'none'}", tokenizer, Monitor())
    (tmp_path / "data.csv").write_text("prompt\n")
    with pytest.raises(UserError, match=r"expected a file in \.jsonl"):
        load_suite(f"humaneval:{tmp_path / 'data.csv'}", tokenizer, Monitor())


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("mt-bench", ("philschmid/mt-bench", None, "train")),
        ("mt-bench#writing", ("philschmid/mt-bench", None, "train")),
        ("humaneval", ("openai/openai_humaneval", None, "test")),
        ("gsm8k", ("openai/gsm8k", "main", "test")),
    ],
)
def test_without_a_path_the_hub_is_asked(
    tokenizer, monkeypatch: pytest.MonkeyPatch, source: str, where: tuple
) -> None:
    asked = []

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> list[dict]:
        asked.append((path, name, split))
        return FIRST_TURNS[source.partition("#")[0]][0]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    suite = load_suite(source, tokenizer, Monitor())
    assert asked == [where]
    assert len(suite.prompts) == (1 if "#" in source else 2)
    assert suite_sha256(source) is None


def test_a_hub_that_does_not_answer_and_a_missing_extra(
    tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_args: str, **_options: str) -> list[dict]:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"ConnectionError: no route(.|\n)*gsm8k:PATH"):
        load_suite("gsm8k", tokenizer, Monitor())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"draftlab\[suites\](.|\n)*gsm8k:PATH"):
        load_suite("gsm8k", tokenizer, Monitor())


def test_conversations_are_taken_up_to_their_first_answer(tokenizer, tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello"}
    file = write(tmp_path / "c.jsonl", [{"id": "a", "messages": [user, answer, user]}])
    assert load_suite(str(file), tokenizer, Monitor()).prompts == (("a", chat(tokenizer, "Hi")),)
    assert len(load_suite("embedded:heldout", tokenizer, Monitor()).prompts) > 30
    write(file, [{"id": "a", "messages": [system, user]}])
    with pytest.raises(UserError, match="one user turn as plain text, found system, user"):
        load_suite(str(file), tokenizer, Monitor(), raw=True)


def test_raw_is_the_tokenizers_own_encoding_of_the_text(tokenizer, tmp_path: Path) -> None:
    source = f"gsm8k:{write(tmp_path / 'data.jsonl', GSM8K)}"
    suite = load_suite(source, tokenizer, Monitor(), raw=True)
    assert [ids for _, ids in suite.prompts] == [
        tuple(tokenizer(row["question"])["input_ids"]) for row in GSM8K
    ]
    assert suite.template_sha256 == RAW
    assert suite.sha256 != load_suite(source, tokenizer, Monitor()).sha256


def test_a_default_bos_is_kept_in_raw_text(tmp_path: Path) -> None:
    def tokenizer(text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict:
        return {"input_ids": [7] * add_special_tokens + [ord(c) for c in text]}

    source = f"gsm8k:{write(tmp_path / 'data.jsonl', [{'question': 'ab'}])}"
    assert load_suite(source, tokenizer, Monitor(), raw=True).prompts == (("gsm8k/1", (7, 97, 98)),)


def test_prompts_that_are_too_long_are_counted_and_said(tokenizer, tmp_path: Path) -> None:
    rows = [{"question": "word " * count} for count in (1, 200, 2, 300)]
    source, monitor = f"gsm8k:{write(tmp_path / 'data.jsonl', rows)}", Lines()
    lengths = [len(ids) for _, ids in load_suite(source, tokenizer, monitor).prompts]
    suite = load_suite(source, tokenizer, monitor, longest=lengths[2])
    assert [i for i, _ in suite.prompts] == ["gsm8k/1", "gsm8k/3"]
    assert monitor.lines[-1] == (
        f"error: suite: left out 2 of 4 prompts have more than the {lengths[2]} tokens that leave "
        f"room for an answer: gsm8k/2 ({lengths[1]}), gsm8k/4 ({lengths[3]})"
    )
    with pytest.raises(UserError, match="expected prompts that fit, found none: 4 of 4"):
        load_suite(source, tokenizer, monitor, longest=1)


def test_the_contents_hash_follows_the_file(tmp_path: Path) -> None:
    source = f"gsm8k:{write(tmp_path / 'data.jsonl', GSM8K)}"
    before = suite_sha256(source)
    write(tmp_path / "data.jsonl", GSM8K[:1])
    assert before != suite_sha256(source)
    assert suite_sha256("embedded:heldout") != suite_sha256("embedded")


def test_a_path_may_hold_the_separator(tmp_path: Path) -> None:
    file = write(tmp_path / "a#b.jsonl", SPEC_BENCH)
    assert parse_source(f"spec-bench:{file}").path == file
    found = parse_source(f"spec-bench:{file}#writing")
    assert (found.path, found.category) == (file, "writing")
    assert parse_source("embedded:heldout") is None
