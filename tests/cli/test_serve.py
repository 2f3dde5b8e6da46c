"""`draftlab serve` with a stand-in program: its command, its end, what it refuses, and a bench."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftlab.export.launch import launch_arguments
from draftlab.servers import server_process
from draftlab.servers.server_process import ServerProcess
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from tests.helpers.bench_server import write_program
from tests.helpers.export_toys import HIDDEN, LAYERS, export, save_random_head
from tests.helpers.small_run import draftlab, ran, refused
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with exports of a random head."""
    folder = tmp_path_factory.mktemp("exports")
    target = toy_target_folder(folder / "toy", layers=LAYERS, hidden=HIDDEN)
    head = save_random_head(folder / "head", target)
    for program in ("vllm", "sglang", "llamacpp"):
        export(head, target, folder / "out" / program, program, target_name="toy", k=4)
    (folder / "out/llamacpp/head.gguf").touch()
    (folder / "target.gguf").touch()
    return folder / "out"


def test_sglang_gets_the_window_without_the_position_itself(tmp_path: Path) -> None:
    target = toy_target_folder(tmp_path / "toy", layers=LAYERS, hidden=HIDDEN)
    head = save_random_head(tmp_path / "head", target, sliding_window=12)
    out = export(head, target, tmp_path / "out", "sglang", target_name="toy", k=4)
    _, words = launch_arguments(out, "sglang")
    assert words[words.index("--speculative-draft-window-size") + 1] == "11"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def have_ended(*pids: int) -> bool:
    """Return whether all processes end soon, as a killed one does on a busy machine, too."""
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@contextmanager
def served(folder: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `draftlab serve` in a process that has answered."""
    process = subprocess.Popen(
        [sys.executable, "-m", "draftlab", "serve", *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_ends(exports: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Both processes of the server end with the command, and a bench runs meanwhile."""
    python, port = str(write_program(tmp_path / "python")), free_port()
    arguments = (str(exports / "vllm"), "--with", "vllm", "--port", str(port), "--target")
    with served(tmp_path, *arguments, "embedded", DRAFTLAB_VLLM_PYTHON=python) as process:
        assert process.stdout
        assert process.stderr
        curl, bench = process.stdout.readline(), process.stdout.readline()
        command, log = process.stderr.readline(), process.stderr.readline()
        words = shlex.split(command)[1:]
        assert words[:4] == [python, "-m", "vllm.entrypoints.cli.main", "serve"]
        assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(
            exports / "vllm"
        )
        pids = [int(n) for n in re.findall(r"\d+", Path(log.split()[-1]).read_text())[:2]]
        assert shlex.split(curl)[:2] == ["curl", f"http://127.0.0.1:{port}/v1/chat/completions"]
        assert json.loads(shlex.split(curl)[-1])["model"] == "m"
        words = shlex.split(bench)
        assert words[:3] == ["draftlab", "bench", f"http://127.0.0.1:{port}"]
        more = ("--max-prompts", "2", "--max-new-tokens", "8", "--json")
        words[words.index("PROMPTS")] = "embedded:heldout"
        result = ran(tmp_path, *words[1:], *more)
        assert json.loads(result.stdout)["points"][0]["requests"] == 4
        assert all(alive(pid) for pid in pids)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert "the server was ended" in process.stderr.read()
        assert have_ended(*pids)
        assert not Path(log.split()[-1]).exists()


def test_a_server_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "deaf")
    monkeypatch.setattr(server_process, "_GRACE_S", 0.5)
    program, port = write_program(tmp_path / "server"), free_port()
    with ServerProcess("a server", [str(program), "--port", str(port)], port) as server:
        server.wait_until_ready(lambda line: None)
        pids = [int(n) for n in re.findall(r"\d+", server.log.read_text())[:2]]
    assert have_ended(*pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends the server")
def test_the_server_of_a_killed_command_ends(exports: Path, tmp_path: Path) -> None:
    python, port = str(write_program(tmp_path / "python")), free_port()
    arguments = (str(exports / "vllm"), "--with", "vllm", "--port", str(port), "--target")
    with served(tmp_path, *arguments, "embedded", DRAFTLAB_VLLM_PYTHON=python) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stderr.readline()
        log = Path(process.stderr.readline().split()[-1]).read_text()
        server = int(re.findall(r"\d+", log)[0])
        process.kill()
        ended = have_ended(server)
        os.killpg(server, signal.SIGKILL)  # its child
        assert ended


def test_a_program_that_dies(
    exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "die")
    write_program(tmp_path / "llama/build/bin/llama-server")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "llama"))
    target = ("--target", str(exports.parent / "target.gguf"), "--port", str(free_port()))
    error = refused(tmp_path, "serve", str(exports / "llamacpp"), "--with", "llamacpp", *target)
    assert "llama.cpp ended before it answered (exit code 3):" in error
    assert "ValueError: no such layer" in error
    assert "log above" in error


def test_what_is_refused(exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAFTLAB_VLLM_PYTHON", "DRAFTLAB_SGLANG_PYTHON", "LLAMA_CPP"):
        monkeypatch.delenv(name, raising=False)
    vllm, empty = str(exports / "vllm"), tmp_path / "empty"
    head = str(exports.parent / "head")
    empty.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        python = str(write_program(tmp_path / "python"))
        monkeypatch.setenv("DRAFTLAB_VLLM_PYTHON", python)
        error = refused(tmp_path, "serve", vllm, "--with", "vllm", "--port", port)
        assert "expected a free port" in error
    monkeypatch.delenv("DRAFTLAB_VLLM_PYTHON")
    monkeypatch.setenv("PATH", str(empty))
    gguf = ("--target", str(exports.parent / "target.gguf"))
    for arguments, expected in (
        ((vllm, "--with", "vllm"), "expected an installed vLLM"),
        ((str(exports / "sglang"), "--with", "sglang"), "expected an installed SGLang"),
        ((str(exports / "llamacpp"), "--with", "llamacpp", *gguf), "llama-server, found none"),
        ((vllm, "--with", "sglang"), "expected an export for SGLang, found one for vLLM"),
        ((str(empty), "--with", "vllm"), "expected an export for vLLM, found none"),
        ((head, "--with", "vllm"), f"draftlab export --head {head} --target TARGET --to vllm"),
        (
            (str(exports / "llamacpp"), "--with", "llamacpp"),
            "target's GGUF file, found target.gguf",
        ),
        ((vllm, "--with", "tgi"), "expected a program out of vllm"),
        ((vllm, "--with", "llamacpp", "--schedule", "b"), "llama.cpp reads no drafts by load"),
        (("none", "--with", "vllm"), "expected a run"),
    ):
        assert expected in refused(tmp_path, "serve", *arguments)


def test_the_options_of_an_export(exports: Path, tmp_path: Path) -> None:
    """A moved export, another K, and a stranger's launch.md, of which known options are taken."""
    target = tmp_path / "target.gguf"
    target.touch()
    folder = shutil.copytree(exports / "llamacpp", tmp_path / "moved")
    model, words = launch_arguments(folder, "llamacpp", str(target), 2)
    assert model == str(target)
    assert words[:4] == ["-m", str(target), "-md", str(folder / "head.gguf")]
    assert words[4:] == shlex.split(
        "--spec-type draft-eagle3 --spec-draft-n-max 2 --spec-draft-p-min 0 --jinja"
    )
    _, words = launch_arguments(exports / "sglang", "sglang", None, 2)
    assert words[words.index("--speculative-num-steps") + 1] == "2"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "3"
    _, words = launch_arguments(exports / "sglang", "sglang", None, 2, [(1, 8, 2)], target)
    assert words[-3:] == ["--speculative-adaptive", "--speculative-adaptive-config", str(target)]
    folder = shutil.copytree(exports / "vllm", tmp_path / "strange")
    launch = folder / "launch.md"
    text = launch.read_text().replace('"method"', '"worker_cls": "evil", "method"')
    launch.write_text(text.replace("--spec", "--trust-remote-code --worker-cls evil --spec"))
    _, words = launch_arguments(folder, "vllm", None, 3, [(1, 8, 3), (9, 64, 0)])
    assert len(words) == 3
    assert json.loads(words[2]) == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 0]],
        "model": str(folder),
    }


@pytest.mark.slow
@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM")
def test_a_real_vllm_counts_what_the_report_does(tmp_path: Path) -> None:
    """In float32 at T = 0 its counters are those of `draftlab eval` of the same prompts."""
    head = ("--head", "reference", "--target", "embedded")
    prompts = ("--suite", "embedded:heldout", "--max-prompts", "4", "--max-new-tokens", "48")
    decoding = ("--temps", "0", "--k", "4", "--timing-prompts", "0", "--out", "report")
    for verb in (
        ("export", *head, "--to", "vllm", "--k", "4", "--out", "export"),
        ("eval", *head, *prompts, *decoding),
    ):
        result = ran(tmp_path, *verb)
    port = str(free_port())
    own = ("--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512")
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with served(tmp_path, "export", "--with", "vllm", "--port", port, *own, **cpu) as process:
        assert process.stdout
        process.stdout.readline()
        words = shlex.split(process.stdout.readline())[1:3]
        result = draftlab(tmp_path, *words, "--head", "report", "--target", "embedded")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert "they agree" in result.output
    (point,) = json.loads((tmp_path / "bench.json").read_text())["points"]
    rows = json.loads((tmp_path / "report/report.json").read_text())["rows"]
    (row,) = [row for row in rows if row["drafts"]]
    for name in ("drafts", "accepted", "accepted_at"):
        assert point["acceptance"][name] == row[name]
