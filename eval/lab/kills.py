"""Kill runs at random moments, start them again, and compare every file with an undisturbed run's.

    python eval/lab/kills.py [--kills 60] [--seed 0] [--folder FOLDER] [--cases CASE ...]

A process that has imported everything forks one that runs a command of draftlab. It waits until a
stage chosen at random has begun, and sends SIGKILL or SIGTERM within the time that the stage takes.
The same command is started again, and killed again, until it ends. Then all files of the run
must have the bytes of an undisturbed run, and nothing else may be left in the current folder. The
cases are

    run        draftlab run RECIPE
    force      draftlab run RECIPE OVERRIDE --force, in a finished run
    two        two processes of the same run at once
    gpus       draftlab run RECIPE --gpus 2, two ranks that train on the CPU through gloo
    window     draftlab run RECIPE WINDOW, one process trains and one records meanwhile
    windows    the same with --gpus 4: two ranks train, and two processes record
    workers    draftlab record RECIPE --gpus 2, which answers and records in two processes

Of several processes either all are killed or one of them. Target and prompts are the tests' toys,
and the recipe takes seconds on a CPU. FOLDER must not exist; by default it is a temporary one.
Commit nothing meanwhile: the files of a run name draftlab's commit.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.numpy import load

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.cli import app
from draftlab.run.stages import STAGES
from draftlab.store.shard import NO_TIME
from draftlab.train.verification import VERIFIED
from draftlab.workers.window.shards import JOURNAL
from tests.helpers.small_run import new_workshop, write_prompts

RECIPE, RUN, LOG = Path("small.yaml"), Path("runs/kills"), Path("kills.log")
OVERRIDES = (
    "name=kills",
    "target.device=cpu",
    "train.device=cpu",
    "train.steps=60",
    "train.checkpoint_every=7",
)
WINDOW = ("record.shard_tokens=32", "record.window=200KB", "train.row_tokens=64")
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
ENDED = (0, *(code for number in SIGNALS for code in (-number, 128 + number)))
"""Exit codes of a process that finished or was killed."""
LOCKED = "another draftlab process is working in this run"
POLL_S, PATIENCE_S = 0.005, 120.0
TIMES = {
    *("tokens_per_s", "loss_tokens_per_s", "predictions_per_s", "phases", "peak_memory_gib"),
    "recording_waited",
}
"""Keys of metrics.jsonl that differ from run to run."""


@dataclass(frozen=True)
class Case:
    """A command that is killed.

    Attributes:
        verb, options: of the command; the recipe and `OVERRIDES` stand between them.
        processes: started at once.
        before: options of a run that is finished first; None: there is no run.
    """

    verb: str = "run"
    options: tuple[str, ...] = ()
    processes: int = 1
    before: tuple[str, ...] | None = None


CASES = {
    "run": Case(),
    "force": Case(options=("seed=1", "--force"), before=()),
    "force, head": Case(options=("train.learning_rate=2.0e-3", "--force"), before=()),
    "two": Case(processes=2),
    "gpus": Case(options=("--gpus", "2")),
    "window": Case(options=(*WINDOW, "train.batch_rows=1")),
    "windows": Case(options=(*WINDOW, "train.batch_rows=2", "--gpus", "4")),
    "workers": Case("record", ("--gpus", "2")),
}


@dataclass
class Undisturbed:
    """What a case leaves without kills: hashes of its files, and the seconds of each stage."""

    files: dict[str, str] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)


def start(verb: str, options: Sequence[str]) -> int:
    """Fork a process that runs a command in a session of its own; return its id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        torch.set_num_threads(1)
        app([verb, str(RECIPE), *OVERRIDES, *options], prog_name="draftlab")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def members(sessions: Sequence[int]) -> list[psutil.Process]:
    """Return the running processes of sessions."""
    running = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
        except (psutil.Error, ProcessLookupError):
            pass
    return running


def current_stage() -> str:
    """Return the stage that is running, or "start" before and between stages."""
    for stage in STAGES:
        try:
            if not json.loads((RUN / "stages" / f"{stage}.json").read_text())["complete"]:
                return stage
        except OSError:
            pass
    return "start"


def wait(children: Sequence[int], until: Callable[[], bool] = lambda: False) -> dict[int, int]:
    """Wait until all processes have ended, or a condition holds; return the exit codes."""
    codes: dict[int, int] = {}
    while len(codes) < len(children) and not until():
        for child in set(children) - codes.keys():
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    return codes


def contents() -> dict[str, str]:
    """Return a hash of every file in the current folder, and the links.

    Times are left out, and checkpoints before the last step: a SIGTERM writes further ones. So are
    logs: that of a killed worker stays if it says something.
    """
    files = {}
    older = sorted(RUN.glob("train/checkpoints/step-*"))[:-1]
    for path in sorted(Path().rglob("*")):
        if path.is_symlink():
            files[str(path)] = f"→ {os.readlink(path)}"
        elif path.name == JOURNAL:  # shards in the order in which they were first recorded
            files[str(path)] = ""
        elif path.is_file() and path.suffix != ".log" and path.parent not in older:
            data = path.read_bytes()
            if path.name == "metrics.jsonl":
                rows = [json.loads(line) for line in data.splitlines()]
                rows = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
                data = json.dumps(rows).encode()
            elif path.name == VERIFIED:  # with the times of the shards' files
                columns = load(data)
                data = columns["store_sha256"].tobytes() + bytes(columns["modified_ns"] != NO_TIME)
            elif path.parent == RUN / "stages":
                data = json.dumps(json.loads(data) | {"seconds": None}).encode()
            files[str(path)] = hashlib.sha256(data).hexdigest()
    return files


def differences(expected: dict[str, str]) -> Iterator[str]:
    """Yield each difference of the current folder's `contents` from the expected ones."""
    actual = contents()
    for path in sorted(expected.keys() | actual.keys()):
        if expected.get(path) != actual.get(path):
            yield f"{path}: {expected.get(path)} became {actual.get(path)}"


def command_line(description: str, kills: int) -> argparse.ArgumentParser:
    """Return the options of a program that kills."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    return parser


def enter_workshop(folder: Path | None) -> None:
    """Make the folder of all runs, with their prompts and recipe, the current one."""
    os.chdir(new_workshop(folder or Path(tempfile.mkdtemp(prefix="kills-")) / "work"))
    write_prompts(Path("prompts.jsonl"), [f"def f{i}(use): the user {i}" for i in range(48)])


class Kills:
    """The kills of a session of this program, and what went wrong."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.undisturbed = {name: Undisturbed() for name in CASES}
        self.kills: Counter[str] = Counter()
        self.cases: Counter[str] = Counter()
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        """Record and print a fault; print the log once for all faults of a case."""
        self.faults.append(text)
        print(f"FAULT: {text}\n{LOG.read_text()}", flush=True)
        LOG.write_text("")

    def begin(self, case: Case) -> None:
        """Make the state in which a case starts."""
        shutil.rmtree("runs", ignore_errors=True)
        LOG.write_text("")
        if case.before is not None and any(wait([start("run", case.before)]).values()):
            raise SystemExit(f"the undisturbed run failed: {LOG.read_text()}")

    def measure(self, name: str) -> None:
        """Run a case undisturbed."""
        case, one = CASES[name], self.undisturbed[name]
        self.begin(case)
        last = [time.monotonic()]

        def watch() -> bool:
            now = time.monotonic()
            one.seconds[current_stage()] += now - last[0]
            last[0] = now
            return False

        child = start(case.verb, case.options)
        if wait([child], watch)[child]:
            raise SystemExit(f"the undisturbed {name} failed: {LOG.read_text()}")
        one.files = contents()

    def attempt(self, name: str, *, kill: bool) -> bool:
        """Run a case, with a kill at a random moment; return whether it has ended by itself."""
        case, seconds = CASES[name], self.undisturbed[name].seconds
        LOG.write_text("")
        stage = self.random.choice([s for s, time_ in seconds.items() if time_ > 0])
        delay, number = self.random.uniform(0, seconds[stage]), self.random.choice(SIGNALS)
        alone, pick = self.random.random() < 0.5, self.random.random()
        children = [start(case.verb, case.options) for _ in range(case.processes)]
        codes, killed = {}, False
        if kill:
            codes = wait(children, lambda: current_stage() == stage)
            codes |= wait([c for c in children if c not in codes], after(delay))
            alive = members(children)
            victims = [alive[int(pick * len(alive))]] if alone and alive else alive
            for process in victims:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
                    killed = True
            if killed:
                self.kills[f"{number.name} in {stage}"] += 1
                self.cases[name] += 1
        codes |= wait([c for c in children if c not in codes])
        late = time.monotonic() + PATIENCE_S
        while alive := members(children):
            if time.monotonic() > late:
                self.fault(f"{name}: {alive} still run {PATIENCE_S:g} s after their parent's end")
                for process in alive:
                    process.kill()
            time.sleep(10 * POLL_S)
        self.check_exit_codes(case, list(codes.values()), killed=killed)
        return 0 in codes.values()

    def check_exit_codes(self, case: Case, codes: list[int], *, killed: bool) -> None:
        """Record a fault if a process ended neither by a signal nor by itself."""
        log = LOG.read_text()
        wrong = [code for code in codes if code not in ENDED]
        if case.processes > 1 and LOCKED in log:
            wrong = [code for code in wrong if code != 2]
        if "--gpus" in case.options and killed:  # the others lose the connection to the killed one
            wrong = []
        if wrong or "internal error" in log or "Traceback" in log:
            self.fault(f"exit codes {codes} of {case}, killed: {killed}")

    def life(self, name: str, kills: int) -> None:
        """Start and kill a case until it ends, at most so many times; compare what it leaves."""
        self.begin(CASES[name])
        last = sum(self.kills.values()) + kills
        while not self.attempt(name, kill=sum(self.kills.values()) < last):
            if len(self.faults) > 20:
                raise SystemExit("too many faults")
        for difference in differences(self.undisturbed[name].files):
            self.fault(f"{name}: {difference}")


def after(seconds: float) -> Callable[[], bool]:
    """Return a condition that holds after some time."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__, 60)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args(arguments)
    enter_workshop(options.folder)
    temporary = Path(tempfile.mkdtemp(prefix="kills-tmp-"))
    os.environ["TMPDIR"] = str(temporary)
    importlib.import_module("draftlab.pipeline.pipeline")  # before the forks
    kills, lives = Kills(options.seed), 0
    while (left := options.kills - sum(kills.kills.values())) > 0:
        name = options.cases[lives % len(options.cases)]
        if not kills.undisturbed[name].files:
            kills.measure(name)
        kills.life(name, left)
        lives += 1
        print(f"{sum(kills.kills.values())} kills, {lives} complete runs: {name}", flush=True)
    rest = sorted(path.name for path in temporary.iterdir())
    print(f"{dict(kills.kills)}\n{dict(kills.cases)}\nin the system's temporary folder: {rest}")
    print(
        f"{sum(kills.kills.values())} kills, {lives} complete runs, {len(kills.faults)} faults; "
        f"same bytes: {not kills.faults}"
    )
    return bool(kills.faults)


if __name__ == "__main__":
    sys.exit(main())
