"""Kills a run again and again while it records and trains; it must end with the same bytes.

    python eval/lab/kills.py [--kills 200] [--seed 0] [--recipe small.yaml]

A process with everything imported forks one that carries out the recipe up to the head, and kills
it (SIGKILL) after a random part of the time an uninterrupted run takes. When the run is whole
before it is killed, its store or its training is taken away and it begins anew. At the end store
and head are compared with those of the uninterrupted run, byte for byte. Works in the folder it is
started in, on runs named `whole` and `killed`.
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
    """A process that carries out the recipe up to the head."""
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


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(run: Path) -> dict[str, str]:
    """Hashes of all that recording and training made; the log of metrics holds times."""
    files = (p for stage in ("store", "head") for p in sorted((run / stage).rglob("*")))
    return {
        str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
        if p.is_file()
    }


def place(run: Path) -> str:
    """How far a killed run had come."""
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
    if finish(fork(options.recipe, "whole")):
        return 1
    shutil.copytree(whole, killed, dirs_exist_ok=True)  # answers are not what is tested
    generator, where, lives = random.Random(options.seed), Counter(), 0

    def anew() -> None:
        for stage in ("store", "train", "head"):
            shutil.rmtree(killed / stage, ignore_errors=True)
        for book in ("store.json", "head.json"):
            (killed / "stages" / book).unlink(missing_ok=True)

    anew()
    started = time.monotonic()
    if finish(fork(options.recipe, "killed")):
        return 1
    span = time.monotonic() - started
    anew()
    for number in range(options.kills):
        child = fork(options.recipe, "killed")
        time.sleep(generator.uniform(0, span / 2))
        os.kill(child, signal.SIGKILL)
        if finish(child) == -signal.SIGKILL:
            where[place(killed)] += 1
            if (killed / "head" / "draftlab.json").is_file():
                where["at the end"] += 1
        if contents(killed) == contents(whole):
            lives += 1
            anew()
        if (number + 1) % 20 == 0:
            print(f"{number + 1} kills: {dict(where)}; {lives} runs came to their end", flush=True)
    if finish(fork(options.recipe, "killed")):
        return 1
    same = contents(killed) == contents(whole)
    print(f"{options.kills} kills ({dict(where)}), {lives + same} whole runs; same bytes: {same}")
    return not same


if __name__ == "__main__":
    sys.exit(main())
