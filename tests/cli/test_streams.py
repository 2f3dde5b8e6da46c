"""What happens to a command whose terminal cannot show, has gone, or sends Ctrl-C at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.small_run import finished

DRAFTLAB = (sys.executable, "-m", "draftlab")


def start(
    *arguments: str, folder: Path, variables: Mapping[str, str] | None = None, **options: int
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables or {})
    return subprocess.Popen(
        [*DRAFTLAB, *arguments],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )


def test_a_terminal_without_a_letter_shows_the_table_with_replacements() -> None:
    variables = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = start(
        "inspect", "small/eval", folder=finished() / "runs", variables=variables,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err.decode()
    text = out.decode("ascii")
    assert "speed-up" in text or "acceptance" in text
    assert "?" in text


def test_json_is_utf8_in_any_terminal() -> None:
    process = start(
        "run", "small.yaml", "--json", folder=finished(), stdout=subprocess.PIPE,
        variables={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err.decode()
    assert out == (finished() / "runs/small/eval/report.json").read_bytes()


def test_a_reader_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("recipe", "schema", folder=finished(), stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, b"")


def test_ctrl_c_while_torch_is_imported_ends_with_a_line_within_a_second(tmp_path: Path) -> None:
    """Torch replaces the exception, or ignores it and goes on; here a package does both."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys, types\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            from importlib.machinery import ModuleSpec\n"
        "            return ModuleSpec(name, self)\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module):\n"
        "        import time\n"
        "        pathlib.Path('importing').touch()\n"
        "        for _ in range(130):\n"
        "            try: time.sleep(0.1)\n"
        "            except BaseException: pass\n"
        "        raise ModuleNotFoundError('torch._C')\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    (tmp_path / "r.yaml").write_text("target: embedded\n")
    process = start(
        "run", "r.yaml", folder=tmp_path, variables={"PYTHONPATH": paths}, stdout=subprocess.PIPE
    )
    while not (tmp_path / "importing").exists():
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 1
    assert process.returncode == 130
    assert err.decode() == "interrupted; the same command keeps what is finished and goes on\n"
