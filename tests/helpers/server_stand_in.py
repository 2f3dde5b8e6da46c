"""The program of a stand-in server, with a child process, as its text and in its own process."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"""\
#!{sys.executable}
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.helpers.bench_server import BenchServer
fault = os.environ.get("STAND_IN_FAULT")
child = subprocess.Popen(["sleep", "600"])
print(f"pids {{os.getpid()}} {{child.pid}}", flush=True)
if fault == "die":
    print("ValueError: no such layer", flush=True)
    sys.exit(3)
if fault == "deaf":  # to SIGTERM, as a server that hangs
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1)  # it loads
BenchServer(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
"""


def write_program(path: Path) -> Path:
    """Write the stand-in as an executable file that takes a server's options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path
