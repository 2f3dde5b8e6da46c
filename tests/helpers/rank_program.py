"""The program of a rank in `test_several.py`: trains a toy head under several backends.

torchrun --nproc-per-node 2 -m tests.helpers.rank_program FOLDER CASE …
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.kernels.devices import free_memory
from draftlab.train import loop
from draftlab.train.loop import Trainer
from draftlab.train.optimizer import learning_rate
from tests.helpers import synthetic
from tests.helpers.list_store import ListStore
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import SignallingMonitor
from tests.helpers.toy_training import orthogonal_parts, toy_answer, trained

STEPS, CUT = 8, 4
"""Optimizer steps; the checkpoint that another number of processes goes on from."""


SIGNALLED = "ddp-eagle3-signalled"
"""A case in which rank 1 receives a SIGTERM after step 5."""
DIVERGING = tuple(f"{parallel}-eagle3-diverging" for parallel in ("ddp", "zero1", "zero3"))
MUON = {"optimizer": "muon", "learning_rate": 2e-3, "adamw_learning_rate": 1e-3}
"""Cases whose learning rate is infinite. Names that contain -muon have the settings of `MUON`."""


def train(
    folder: Path,
    family: str = "eagle3",
    monitor: RecordingMonitor | None = None,
    **settings: Any,
) -> tuple[Trainer, RecordingMonitor]:
    """Train on 21 answers; steps have 3 micro-batches, so that one of 2 ranks has an idle one."""
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(21)])
    fields = {
        "steps": STEPS,
        "row_tokens": 16,  # a row a record
        "batch_rows": 3,
        "micro_rows": 1,
        "checkpoint_every": CUT,
        "log_every": 1,
    }
    config, monitor = synthetic.config(family=family), monitor or RecordingMonitor()
    trainer = trained(folder, store, target, monitor, config, **fields | settings)
    return trainer, monitor


def main() -> None:
    """Run the cases (`parallel-family…`), each in its folder, from the last checkpoint if any.

    A case that ends with a UserError or a signal leaves a file of its text for each rank.
    """
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        parallel, family = name.split("-")[:2]
        rank, monitor = os.environ["RANK"], RecordingMonitor()
        gc.collect()
        gc.freeze()  # what was imported, or each search for garbage takes as long as a case
        if name == SIGNALLED and rank == "1":
            monitor = SignallingMonitor(signal.SIGTERM, 5)
        settings = {"parallel": parallel, **(MUON if "-muon" in name else {})}
        loop.learning_rate = (lambda *_: math.inf) if name in DIVERGING else learning_rate
        try:
            trainer, monitor = train(folder / name, family, monitor, **settings)
        except (UserError, SystemExit) as error:
            text = f"{error} {monitor.lines[-1]}" if name == SIGNALLED else str(error)
            (folder / f"{name}-{rank}.txt").write_text(text)
            continue
        head, ranks = trainer.backend.unwrap(), trainer.ranks
        if ranks.is_main:
            torch.save((head.state_dict(), monitor.lines), folder / name / "result.pt")
        trainer.backend.close()
        optimizer = weakref.ref(trainer.backend.optimizer)
        del trainer
        free_memory()
        assert parallel == "zero3" or optimizer() is None, f"{name}: optimizer leaked"
    gc.unfreeze()  # else compiled modules report leaks
    # gloo's threads at the end of the process abort it now and then: 1 of 25 on a busy CPU.
    ranks.leave()


if __name__ == "__main__":
    main()
