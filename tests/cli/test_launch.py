"""`--gpus N` starts its processes, ends them together, and tells which one failed and where."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftlab.cli import launch as launching
from draftlab.cli.launch import launch
from tests.helpers.small_run import Heard, contents, draftlab, new_workshop

PYTHON = (sys.executable, "-c")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 1.0)
    monkeypatch.setattr(launching, "POLL_S", 0.02)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run(code: str, count: int = 2) -> tuple[int, Heard]:
    heard = Heard()
    return launch(
        [f"import os, sys, time\nrank = os.environ['RANK']\n{code}"], count, heard, program=PYTHON
    ), heard


def test_processes_know_each_other_and_leave_no_logs(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code, heard = run(
        f"open(os.path.join({str(tmp_path)!r}, rank), 'w')"
        f".write(' '.join(os.environ[name] for name in {names}))",
        count=3,
    )
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert (code, heard.lines) == (0, [])
    assert [one[:4] for one in said] == [[str(rank), "3", str(rank), "3"] for rank in range(3)]
    assert len({tuple(one[4:]) for one in said}) == 1
    assert not list(tmp_path.glob("draftlab-ranks-*"))


def test_a_crash_ends_all_and_is_told_with_its_log(tmp_path: Path) -> None:
    started = time.monotonic()
    code, heard = run("if rank == '1': print('so it went wrong'); sys.exit(3)\ntime.sleep(60)")
    assert code == 3
    assert time.monotonic() - started < 30
    (line,) = heard.lines
    found = re.fullmatch(
        r"rank 1 failed: exit code 3; its log: (\S+); it ends: so it went wrong", line
    )
    assert found
    assert Path(found[1]).read_text() == "so it went wrong\n"


def test_a_killed_process_is_named_by_its_signal() -> None:
    code, heard = run("if rank == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert code == 128 + 9
    assert heard.lines == ["rank 1 failed: killed by SIGKILL, without a word"]


def test_the_first_one_speaks_for_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, heard = run("if rank == '0': print('error: mine'); sys.exit(2)\ntime.sleep(60)")
    assert (code, heard.lines) == (2, [])
    assert not list(tmp_path.glob("draftlab-ranks-*"))
    assert "error: mine" in capfd.readouterr().out


def test_ending_the_launcher_ends_its_processes(tmp_path: Path) -> None:
    child = f"import os, time; open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w')"
    child += ".write(str(os.getpid())); time.sleep(60)"
    program = (
        "from draftlab.progress import Monitor; from draftlab.cli.launch import launch; "
        f"launch([{child!r}], 2, Monitor(), program={PYTHON!r})"
    )
    launcher = subprocess.Popen([*PYTHON, program], env=os.environ | {"TMPDIR": str(tmp_path)})
    until = time.monotonic() + 30
    while time.monotonic() < until and not all((tmp_path / r).exists() for r in "01"):
        time.sleep(0.05)
    time.sleep(0.2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=30) == 128 + signal.SIGTERM
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)
    assert not list(tmp_path.glob("draftlab-ranks-*"))


def test_two_processes_carry_out_a_recipe_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workshop = new_workshop(tmp_path / "w")
    settings = ("record.dtype=float32", "record.batch_tokens=1", "train.device=cpu")
    one = draftlab(workshop, "train", "small.yaml", "name=one", *settings, "train.micro_rows=1")
    assert one.exit_code == 0, one.output
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as this process has it
    # Online, so that each process has a target.
    settings = (*settings, "record.online=true")
    two = draftlab(workshop, "train", "small.yaml", "name=two", *settings, "--gpus", "2")
    said = capfd.readouterr().err
    assert two.exit_code == 0, said
    assert said.count("training on 2 × cpu, DistributedDataParallel") == 1
    assert [p.name for p in (workshop / "runs/two/store").iterdir()] == ["manifest.json"]
    expected, found = (
        load_file(workshop / f"runs/{name}/head/model.safetensors") for name in ("one", "two")
    )
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    before = contents(workshop / "runs/two")
    again = draftlab(workshop, "train", "small.yaml", "name=two", *settings)
    assert again.exit_code == 0, again.output  # one process finds all of it made
    assert {n for n, b in contents(workshop / "runs/two").items() if before.get(n) != b} == set()


@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_verb_is_run_in_every_process_as_it_was_asked(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop, asked = new_workshop(tmp_path), []
    monkeypatch.setattr(launching, "launch", lambda *given: asked.append(given[:2]) or 7)
    options = ["--json"] if verb == "run" else []
    words = ["small.yaml", "train.device=cpu", "name=two", "--gpus", "3", "--force", *options]
    assert draftlab(workshop, verb, *words).exit_code == 7
    settings = ["train.device=cpu", "name=two"]
    assert asked == [([verb, "small.yaml", *settings, "--force", *options], 3)]
    assert not (workshop / "runs").exists()


def test_more_gpus_than_there_are_start_nothing(tmp_path: Path) -> None:
    workshop = new_workshop(tmp_path)
    asked = str(torch.cuda.device_count() + 1 if torch.cuda.is_available() else 2)
    refused = draftlab(workshop, "train", "small.yaml", "--gpus", asked)
    assert refused.exit_code == 2
    assert f"expected {asked} GPUs, found" in refused.output
    assert not (workshop / "runs").exists()
