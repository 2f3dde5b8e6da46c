"""Kill workers, nodes and the driver of a Ray cluster, and compare every file with one process's.

    python eval/lab/kill_nodes.py [--kills 30] [--seed 0] [--folder FOLDER] [--nodes 3] [--window]

A cluster of several nodes runs on this machine. `draftlab run RECIPE --ray ADDRESS` works on it,
and at random moments of the stages one of these gets SIGKILL:

    worker     a process of an actor or of Ray Train; the run goes on
    node       a node with all its processes, and an empty node joins; the run goes on
    driver     the command itself; the same command is started again

With --window the store is a window, which actors record while another process trains. When the
command has ended by itself, all files of the run must have the bytes of a run by one
process without kills. Target and prompts are the tests' toys. FOLDER must not exist; by default it
is a temporary one. Commit nothing meanwhile: the files of a run name draftlab's commit.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from eval.lab.kills import (
    CASES,
    OVERRIDES,
    RECIPE,
    command_line,
    contents,
    current_stage,
    differences,
    enter_workshop,
)
from tests.helpers.ray_nodes import NODE, processes, ray_cluster, start_driver

COMMAND = ("run", str(RECIPE), *(o for o in OVERRIDES if "device" not in o))
STAGES = ("start", "answers", "store", "head", "eval")
KINDS = ("worker", "node", "driver")
LONGEST_S = {"start": 15.0, "answers": 30.0, "store": 2.0, "head": 50.0, "eval": 12.0}
"""Longest wait in a stage before a kill, in seconds: about the time that it takes."""
PATIENCE_S, POLL_S = 600.0, 0.02
LOG = Path("driver.log")
GIVES_UP = "without a new checkpoint"
"""What training says when it ends after several failures in a row."""


class NodeKills:
    """The kills of a session of this program, and what went wrong.

    Args:
        cluster: whose nodes are killed.
        command: of draftlab, without --ray.
        expected: hashes of the files that it makes with one process.
    """

    def __init__(
        self, cluster: Any, command: Sequence[str], expected: dict[str, str], seed: int
    ) -> None:
        self.cluster, self.command, self.expected = cluster, command, expected
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.faults: list[str] = []
        self.turn = self.gave_up = 0

    def life(self, most: int) -> None:
        """Run the command on the cluster until it ends, with a few kills; compare the files."""
        shutil.rmtree("runs", ignore_errors=True)
        self.replace_dead_nodes()
        kills = min(most, self.random.randint(4, 7))
        driver = self.start()
        for stage in sorted(self.random.choices(STAGES, k=kills), key=STAGES.index):
            kind = KINDS[self.turn % len(KINDS)]
            delay = self.random.uniform(0, LONGEST_S[stage])
            if not self.wait(driver, stage, delay):
                break
            if self.kill(kind, driver):
                self.turn += 1
                self.kills[f"{kind} in {current_stage()}"] += 1
                if kind == "driver":
                    driver = self.start()
        end = time.monotonic() + PATIENCE_S
        while driver.poll() is None and time.monotonic() < end:
            time.sleep(POLL_S)
            if driver.poll() == 2 and GIVES_UP in LOG.read_text():  # after several kills in a row
                self.gave_up += 1
                driver = self.start()
        if driver.poll() != 0:
            driver.kill()
            self.fault(f"the command ended with {driver.wait()}")
            return
        for difference in differences(self.expected):
            self.fault(difference)

    def start(self) -> Any:
        """Start the driver, which prints into a log."""
        with open(LOG, "w") as log:
            return start_driver(Path(), *self.command, "--ray", self.cluster.address, output=log)

    def wait(self, driver: Any, stage: str, delay: float) -> bool:
        """Wait until a stage has begun, and a time in it; return whether the driver still runs."""
        while current_stage() != stage and driver.poll() is None:
            if STAGES.index(stage) < STAGES.index(current_stage_or_last()):
                break  # the stage has gone by
            time.sleep(POLL_S)
        end = time.monotonic() + delay
        while time.monotonic() < end and driver.poll() is None and current_stage() == stage:
            time.sleep(POLL_S)
        return driver.poll() is None

    def kill(self, kind: str, driver: Any) -> bool:
        """Kill something of a kind; return whether there was any."""
        if kind == "driver":
            driver.kill()
            driver.wait()
            return True
        nodes = list(self.cluster.worker_nodes)
        if kind == "node":
            busy = [node for node in nodes if processes(node)] or nodes
            self.cluster.remove_node(self.random.choice(busy), allow_graceful=False)
            self.cluster.add_node(**NODE)
            return True
        alive: list[psutil.Process] = []
        while not alive and driver.poll() is None:  # between stages there are none
            alive = [process for node in nodes for process in processes(node)]
            time.sleep(POLL_S)
        if not alive:
            return False
        with suppress(psutil.NoSuchProcess):
            self.random.choice(alive).kill()
            return True
        return False

    def replace_dead_nodes(self) -> None:
        """Replace nodes that ended by themselves: Ray gives up those that a busy machine slows."""
        for node in [node for node in self.cluster.worker_nodes if node.dead_processes()]:
            print("a node has ended by itself", flush=True)
            self.cluster.remove_node(node, allow_graceful=False)
            self.cluster.add_node(**NODE)

    def fault(self, text: str) -> None:
        """Record and print a fault, with the driver's log."""
        self.faults.append(text)
        print(f"FAULT: {text}", flush=True)
        if len(self.faults) == 1:
            print(LOG.read_text(), flush=True)


def current_stage_or_last() -> str:
    """Return the current stage; "eval" for those after it."""
    stage = current_stage()
    return stage if stage in STAGES else "eval"


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__, 30)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--window", action="store_true")
    options = parser.parse_args(arguments)
    command = (*COMMAND, *CASES["window"].options * options.window)
    enter_workshop(options.folder)
    with open(LOG, "w") as log:
        undisturbed = start_driver(Path(), *command, output=log)
    if undisturbed.wait():
        raise SystemExit(f"the undisturbed run failed: {LOG.read_text()}")
    expected, lives = contents(), 0
    with ray_cluster(options.nodes) as cluster:
        kills = NodeKills(cluster, command, expected, options.seed)
        while (left := options.kills - kills.kills.total()) > 0:
            kills.life(left)
            lives += 1
            print(f"{kills.kills.total()} kills, {lives} complete runs", flush=True)
            if len(kills.faults) > 20:
                raise SystemExit("too many faults")
    print(f"{dict(sorted(kills.kills.items()))}; training gave up {kills.gave_up} times")
    print(
        f"{kills.kills.total()} kills, {lives} complete runs, {len(kills.faults)} faults; "
        f"same bytes: {not kills.faults}"
    )
    return bool(kills.faults)


if __name__ == "__main__":
    sys.exit(main())
