"""`--gpus N` starts processes, ends them together and reports which one failed."""

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

from draftlab.cli import launch as launching
from draftlab.cli.launch import launch
from draftlab.signals import ENDING_SIGNALS
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import draftlab, new_workshop, ran

PYTHON = (sys.executable, "-c")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 1.0)
    monkeypatch.setattr(launching, "POLL_S", 0.02)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run(code: str, count: int = 2) -> tuple[int, list[str]]:
    """Run Python code in several processes; return the exit code and the printed lines."""
    monitor = RecordingMonitor()
    program = f"import os, sys, time\nrank = os.environ['RANK']\n{code}"
    return launch([program], count, monitor, program=PYTHON), monitor.lines


def test_processes_get_ranks_and_an_address_and_leave_no_logs(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code, lines = run(
        f"open(os.path.join({str(tmp_path)!r}, rank), 'w')"
        f".write(' '.join(os.environ[name] for name in {names}))",
        count=3,
    )
    environments = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert (code, lines) == (0, [])
    assert [values[:4] for values in environments] == [
        [str(rank), "3", str(rank), "3"] for rank in range(3)
    ]
    assert len({tuple(values[4:]) for values in environments}) == 1
    assert not list(tmp_path.glob("draftlab-ranks-*"))


def test_a_failure_ends_all_processes_and_its_log_is_reported(tmp_path: Path) -> None:
    started = time.monotonic()
    code, lines = run("if rank == '1': print('so it went wrong'); sys.exit(3)\ntime.sleep(60)")
    assert code == 3
    assert time.monotonic() - started < 30
    (line,) = lines
    match = re.fullmatch(
        r"rank 1 failed: exit code 3; its log: (\S+); the last line: so it went wrong", line
    )
    assert match
    assert Path(match[1]).read_text() == "so it went wrong\n"


def test_a_killed_process_is_reported_with_its_signal() -> None:
    code, lines = run("if rank == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert code == 128 + 9
    assert lines == ["rank 1 failed: killed by SIGKILL, without a message"]


def test_rank_0_prints_its_own_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = run("if rank == '0': print('error: mine'); sys.exit(2)\ntime.sleep(60)")
    assert (code, lines) == (2, [])
    assert not list(tmp_path.glob("draftlab-ranks-*"))
    assert "error: mine" in capfd.readouterr().out


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_signal_to_the_launcher_ends_its_processes(
    number: signal.Signals, tmp_path: Path
) -> None:
    """They have time to write a checkpoint."""
    launcher = start_launcher(number, tmp_path)
    launcher.send_signal(number)
    assert launcher.wait(timeout=30) == 128 + number
    for rank in "01":
        assert (tmp_path / f"{rank}-ended").read_text() == str(int(number))
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)
    assert not list(tmp_path.glob("draftlab-ranks-*"))


def test_processes_end_after_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """As a checkpoint needs it: by SIGTERM."""
    launcher = start_launcher(signal.SIGTERM, tmp_path)
    launcher.kill()
    launcher.wait(timeout=30)
    ended = [tmp_path / f"{rank}-ended" for rank in "01"]
    wait_for(ended)
    assert [path.read_text() for path in ended] == [str(int(signal.SIGTERM))] * 2


def wait_for(files: list[Path]) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and not all(file.exists() for file in files):
        time.sleep(0.05)
    time.sleep(0.2)


def start_launcher(number: int, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start a launcher of two processes, each of which notes a signal a second after it came."""
    child = f"""
import os, signal, time
from draftlab.signals import end_with_parent
end_with_parent()
path = os.path.join({str(tmp_path)!r}, os.environ["RANK"])
def end(number, frame):
    time.sleep(1)
    open(path + "-ended", "w").write(str(number))
    raise SystemExit
signal.signal({int(number)}, end)
open(path, "w").write(str(os.getpid()))
time.sleep(60)
"""
    program = (
        "from draftlab.progress import Monitor; from draftlab.cli import launch; "
        f"launch.GRACE_S = 0.1; launch.launch([{child!r}], 2, Monitor(), program={PYTHON!r})"
    )
    launcher = subprocess.Popen([*PYTHON, program], env=os.environ | {"TMPDIR": str(tmp_path)})
    wait_for([tmp_path / rank for rank in "01"])
    return launcher


@pytest.mark.parametrize("verb", ["train", "run"])
def test_every_process_gets_the_arguments_of_the_verb(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop, calls = new_workshop(tmp_path), []
    monkeypatch.setattr(launching, "launch", lambda *args, **_: calls.append(args[:2]) or 7)
    options = ["--json"] if verb == "run" else []
    words = ["small.yaml", "train.device=cpu", "name=two", "--gpus", "3", "--force", *options]
    assert draftlab(workshop, verb, *words).exit_code == 7
    settings = ["train.device=cpu", "name=two"]
    assert calls == [([verb, "small.yaml", *settings, "--force", *options], 3)]
    assert not (workshop / "runs").exists()


def test_more_gpus_than_the_machine_has_are_refused(workshop: Path) -> None:
    gpus = str(torch.cuda.device_count() + 1 if torch.cuda.is_available() else 2)
    refused = ran(workshop, "train", "small.yaml", "--gpus", gpus, code=2)
    assert f"expected {gpus} GPUs, found" in refused.output
    assert not (workshop / "runs").exists()
