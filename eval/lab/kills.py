"""Kill a run repeatedly while it records and trains, and compare the bytes of its results.

    python eval/lab/kills.py [--kills 200] [--seed 0] [--recipe small.yaml]

A process that has imported everything forks one that runs the recipe up to the head, and kills it
(SIGKILL) after a random share of the time of an uninterrupted run. A run that is complete by then
loses its store and its training and starts again. At the end, store and head are compared byte for
byte with those of the uninterrupted run. The program works in the current folder, on runs named
`whole` and `killed`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.pipeline.pipeline import Pipeline
from draftlab.pipeline.recipe import load_recipe
from draftlab.progress import Monitor


def fork(recipe: Path, name: str) -> int:
    """Fork a process that runs the recipe up to the head; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        Pipeline(load_recipe(recipe, [f"name={name}"]), Monitor()).make("head")
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def wait_for(child: int) -> int:
    """Wait for a process and return its exit code; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(run: Path) -> dict[str, str]:
    """Return hashes of the files of store and head; the log of metrics is left out."""
    files = (p for stage in ("store", "head") for p in sorted((run / stage).rglob("*")))
    return {
        str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
        if p.is_file()
    }


def stage_of(run: Path) -> str:
    """Return the stage that a killed run was in."""
    if (run / "train").is_dir():
        return "training"
    if (run / "store" / "manifest.json").is_file():
        return "recording"
    return "before"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", type=Path, default=Path("small.yaml"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    whole, killed = Path("runs/whole"), Path("runs/killed")
    if wait_for(fork(options.recipe, "whole")):
        return 1
    shutil.copytree(whole, killed, dirs_exist_ok=True)  # answers are not what is tested
    generator, stages, complete = random.Random(options.seed), Counter(), 0

    def reset() -> None:
        for stage in ("store", "train", "head"):
            shutil.rmtree(killed / stage, ignore_errors=True)
        for receipt in ("store.json", "head.json"):
            (killed / "stages" / receipt).unlink(missing_ok=True)

    reset()
    started = time.monotonic()
    if wait_for(fork(options.recipe, "killed")):
        return 1
    duration = time.monotonic() - started
    reset()
    for number in range(options.kills):
        child = fork(options.recipe, "killed")
        time.sleep(generator.uniform(0, duration / 2))
        os.kill(child, signal.SIGKILL)
        if wait_for(child) == -signal.SIGKILL:
            stages[stage_of(killed)] += 1
            if (killed / "head" / "draftlab.json").is_file():
                stages["at the end"] += 1
        if contents(killed) == contents(whole):
            complete += 1
            reset()
        if (number + 1) % 20 == 0:
            print(f"{number + 1} kills: {dict(stages)}; {complete} complete runs", flush=True)
    if wait_for(fork(options.recipe, "killed")):
        return 1
    same = contents(killed) == contents(whole)
    complete += same
    print(f"{options.kills} kills ({dict(stages)}), {complete} complete runs; same bytes: {same}")
    return not same


if __name__ == "__main__":
    sys.exit(main())
