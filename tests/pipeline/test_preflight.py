"""What cannot succeed is refused at the start, by the run and by its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.small_run import draftlab, new_workshop


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("verb", ["run", "run --plan"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("train.wandb=project", "train.wandb is set, and wandb is not installed"),
        ("train.tensorboard=true", "where: train.tensorboard"),
        ("train.device=cuda:99", "expected device 'cuda:99', found"),
        ("train.device=foo", "where: train.device"),
        ("target.device=foo", "where: target.device"),
        ("seed=-1", "seed: expected a number greater than or equal to 0, found -1"),
        ("seed=99999999999999999999999", "seed: expected a number less than 9223372036854775808"),
        ("eval.seed=-1", "eval.seed: expected a number"),
        ("export.max_shard=lots", "a size such as 200GB or 1.5TB, found 'lots'"),
        ("head.family=peagle head.mask_token=nonsense", "where: head.mask_token"),
        ("head.num_attention_heads=5", "5 attention heads are not a multiple of 2 key-value heads"),
        ("head.num_key_value_heads=0", "head.num_key_value_heads: expected a number greater than"),
        ("head.head_dim=7", "head_dim: expected a multiple of 2, found 7"),
        (
            "train.precision=fp8 head.intermediate_size=100",
            "sizes that are multiples of 16, found [100, ",
        ),
        ("prompts.source=no.jsonl", "where: no.jsonl"),
        ("eval.suite=no.jsonl", "where: no.jsonl"),
        ("name=latest", "runs/latest is a link to the latest run"),
        (f"name={'x' * 300}", "expected a name of at most 250 letters, found one of 300"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_succeed_is_refused(
    verb: str, settings: str, message: str, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftlab.train.trackers.find_spec", lambda name: None)
    name, *options = verb.split()
    result = draftlab(workshop, name, "small.yaml", *settings.split(), *options)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (workshop / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "run --plan"])
def test_a_device_without_products_in_fp8_is_refused(
    verb: str, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on newer devices")

    monkeypatch.setattr("draftlab.train.fast.check_fp8.linear", refuse)
    name, *options = verb.split()
    result = draftlab(workshop, name, "small.yaml", "train.precision=fp8", *options)
    assert result.exit_code == 2, result.output
    assert "expects a GPU that multiplies e4m3 numbers" in result.output
    assert "only supported on newer devices" in result.output
    assert not (workshop / "runs").exists()
    assert draftlab(workshop, name, "small.yaml", "--plan").exit_code == 0


def test_a_plan_without_its_files_is_printed_whole(workshop: Path) -> None:
    settings = ("prompts.source=no.jsonl", "prompts.max_prompts=9", "eval.suite=none.jsonl")
    result = draftlab(workshop, "run", "small.yaml", *settings, "--plan")
    assert result.exit_code == 2
    assert "answers  would run; it needs no.jsonl, which is not there yet" in result.output
    assert "eval     would run; it needs none.jsonl, which is not there yet" in result.output
    assert "  total " in result.output
    assert draftlab(workshop, "prepare", "small.yaml", settings[-1], "--plan").exit_code == 0


def test_a_plan_names_processes_without_work(workshop: Path) -> None:
    plan = ("train", "small.yaml", "--plan", "--gpus")
    assert "nothing to do, since a step has" not in draftlab(workshop, *plan, "2").output
    output = draftlab(workshop, *plan, "8").output
    assert "warning: 6 of 8 processes have nothing to do, since a step has 2 rows" in output


def test_a_plan_names_rows_that_are_too_short(workshop: Path) -> None:
    plan = ("train", "small.yaml", "--plan")
    assert "train.row_tokens is" not in draftlab(workshop, *plan).output
    output = draftlab(workshop, *plan, "train.row_tokens=16").output
    assert "train.row_tokens is 16: record.max_length=16 cuts it" in output
    limited = draftlab(workshop, *plan, "train.row_tokens=16", "record.max_length=16").output
    assert "train.row_tokens is" not in limited


def test_rows_that_are_too_short_stop_a_run_before_it_records(tmp_path: Path) -> None:
    workshop = new_workshop(tmp_path)
    result = draftlab(workshop, "train", "small.yaml", "train.row_tokens=16")
    assert result.exit_code == 2
    assert "expected records of at most train.row_tokens = 16 tokens, found one of" in result.output
    assert (workshop / "runs/small/answers.jsonl").exists()
    assert not list((workshop / "runs/small").glob("store/*"))
    # The store is for any rows, and a head of longer rows can follow.
    assert draftlab(workshop, "record", "small.yaml", "train.row_tokens=16").exit_code == 0
    assert draftlab(workshop, "train", "small.yaml").exit_code == 0


def test_a_folder_in_place_of_the_link_stops_no_run(tmp_path: Path) -> None:
    workshop = new_workshop(tmp_path)
    (workshop / "runs/latest").mkdir(parents=True)
    result = draftlab(workshop, "prepare", "small.yaml")
    assert result.exit_code == 0, result.output
    assert "runs/latest is not a link and stays" in result.output
    assert {path.name for path in (workshop / "runs").iterdir()} == {"latest", "small"}
