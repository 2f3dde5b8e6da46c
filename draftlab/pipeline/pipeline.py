"""Run the stages of a recipe in its run folder.

    answers ─► store ─► head ─► eval
                          └───► export

Complete stages whose inputs are the recipe's are kept, and missing ones run. If an expensive stage
has other inputs, the run is refused, and the message names the settings. Stages are defined in
`run/stages.py`; `run/stage_status.py` decides what is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from draftlab.evaluate.evaluator import environment
from draftlab.files import check_folder, known_sha256, write_json
from draftlab.heads.folder import WEIGHTS
from draftlab.kernels.devices import reuse_freed_memory
from draftlab.pipeline.recording import Recording
from draftlab.pipeline.training import train_and_save
from draftlab.pipeline.training_compiler import TrainingCompiler
from draftlab.plan.estimate import estimate_table, estimate_warnings, predicted_seconds
from draftlab.plan.preflight import (
    Planned,
    check_before_run,
    check_given_answers,
    missing_input,
)
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe, flatten, to_yaml
from draftlab.run.api import evaluate_head, export_layouts
from draftlab.run.folder import RUNS, lock, write_recipe
from draftlab.run.head_workspace import export_files, input_files
from draftlab.run.resolve import find_head, with_family_defaults
from draftlab.run.stage_status import Run, Status
from draftlab.run.stages import REPORT, STAGES, Stage
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.locate import resolve_target
from draftlab.text.prompts import data_set_commit, fetch_prompts, find_prompts
from draftlab.text.settings import SELF
from draftlab.train.distributed.ranks import Ranks, num_launched
from draftlab.version import git_commit
from draftlab.workers.pool import LocalPool, WorkerPool, worker_devices
from draftlab.workers.window.devices import local_window_pool, num_recorders

if TYPE_CHECKING:
    from draftlab.workers.ray_cluster import RayCluster


@dataclass
class Pipeline:
    """A recipe and the run folder in which its stages run.

    Args:
        recipe: the recipe.
        monitor: receives lines and progress.
        runs: folder of all runs.
        gpus: number of GPUs that answer and record, each with a process and the whole target; on
            a cluster the number of processes that train together. None: one, or all of the cluster.
        cluster: the Ray cluster that does the work; None: this machine.
        on_cluster: whether a cluster will do it, for plans without one.

    Attributes:
        ranks: the processes that train together in `make`; None: only this one.
    """

    recipe: Recipe
    monitor: Monitor
    runs: Path = RUNS
    gpus: int | None = None
    cluster: RayCluster | None = None
    on_cluster: bool = False
    ranks: Ranks | None = field(default=None, init=False)
    _training: bool = field(default=False, init=False)
    _default_note: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.recipe, self._default_note = with_family_defaults(self.recipe, self.folder)

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.runs / self.recipe.name

    @cached_property
    def run(self) -> Run:
        """Return the run folder with the inputs of its stages, among them hashes of files."""
        target = resolve_target(self.recipe.target)
        files = {
            "answers": {
                "target.fingerprint": fingerprint(target),
                # The target and the seed decide what the target writes itself.
                "prompts.sha256": SELF
                if self.recipe.prompts.source == SELF
                else known_sha256(fetch_prompts(self.recipe.prompts, self.monitor)),
            },
            "eval": input_files(self.recipe.eval),
            "export": export_files(self.recipe.export),
        }
        initial = self.recipe.head.init
        if initial is not None:
            files["head"] = {"head.init.sha256": known_sha256(find_head(initial) / WEIGHTS)}
        return Run(self.folder, flatten(self.recipe), files)

    @property
    def is_main(self) -> bool:
        """Return whether this process is the one that prints and writes."""
        return self.ranks is None or self.ranks.is_main

    @cached_property
    def recording(self) -> Recording:
        """Return what computes answers and store."""
        return Recording(self.recipe, self.folder, self.monitor)

    def plan(self, *last: str) -> list[Status]:
        """Return the states of the stages up to `last`; without a run folder download nothing."""
        run = self.run if self.folder.exists() else Run(self.folder, flatten(self.recipe), {})
        return [
            replace(status, missing_input=error.where)
            if status.runs and (error := missing_input(self.recipe, status.stage.name))
            else status
            for status in run.plan(*last)
        ]

    def estimate(self, *last: str) -> Iterator[str]:
        """Yield a table of disk, memory and time for the stages up to those named `last`."""
        hardware = self.recipe.hardware
        working = hardware.gpus * hardware.nodes if self.on_cluster else self.gpus or 1
        names = [status.stage.name for status in self.plan(*last)]
        yield from estimate_table(self.recipe, self.runs, names, working)
        if "head" in names and self._default_note:
            yield f"  {self._default_note}"

    def check(self, statuses: Sequence[Status], *, plan: bool) -> None:
        """Check that the stages that are not complete can succeed, as `check_before_run` with
        `plan` does; report warnings.
        """
        check_folder(self.folder)
        names = [status.stage.name for status in statuses if status.runs]
        self.recording.trains, self.recording.evaluates = "head" in names, "eval" in names
        here = self.cluster is None and not self.on_cluster
        for warning in check_before_run(self.recipe, names, plan=plan, here=here):
            self.monitor.say(warning)
        if here and not plan and {"answers", "store", "head"} & {*names}:  # a plan has a table
            for warning in estimate_warnings(self.recipe, self.runs, names, self.gpus or 1):
                self.monitor.say(warning)
        hardware, each = self.recipe.hardware, self.recipe.target.gpus
        working = (self.gpus or num_launched()) * each
        if here and not plan and names and hardware.nodes == 1 and working < hardware.gpus:
            self.monitor.say(
                f"warning: hardware.gpus is {hardware.gpus}, which estimates alone read, and "
                f"{working} may work: --gpus {hardware.gpus // each} lets all of them work"
            )
        settings = self.recipe.prompts
        unread = settings.source == SELF or (plan and find_prompts(settings) is None)
        if "answers" in names and not unread:
            prompts = self.recording.given_prompts  # a broken file must not leave a run folder
            planned = Planned(self.recipe, names, plan, here)
            for warning in check_given_answers(planned, prompts):
                self.monitor.say(warning)

    def make(self, *last: str, force: bool = False) -> Path:
        """Run what is missing up to each stage of `last`; return the artefact of the final one.

        Stages whose settings changed run again with `force`, with all later stages; without it they
        raise a `UserError`, as does a stage that fails.
        """
        trains = any(stage.name == "head" for name in last for stage in self.run.stages_up_to(name))
        if trains and num_launched() > 1:
            self.ranks = Ranks.join(self.recipe.train.device)
        if self.ranks is None:
            self._run_stages(*last, force=force)
        else:
            try:
                self._run_with_ranks(self.ranks, *last, force=force)
            except SystemExit:  # a signal, at which all ranks end after the same step
                self.ranks.leave()
                raise
            self.ranks.leave()
        return self.folder / STAGES[last[-1]].artefact

    def _run_with_ranks(self, ranks: Ranks, *last: str, force: bool) -> None:
        if not ranks.is_main:
            self._train_with_main(ranks)
            return
        try:
            self._run_stages(*last, force=force)
        finally:
            if not self._training:  # otherwise the other ranks are not waiting for a broadcast
                ranks.broadcast(None)

    def _train_with_main(self, ranks: Ranks) -> None:
        """Wait until rank 0 trains, and train with it; for all other ranks."""
        self.monitor = Monitor()
        while ranks.broadcast(None) == "head":
            self._train(self.folder / STAGES["head"].artefact)

    def _run_stages(self, *last: str, force: bool) -> None:
        run = self.run
        statuses = run.plan(*last)  # reads whole files, to compare their hashes
        self.check(statuses, plan=False)
        predicted = self._predict(statuses)
        start = time.perf_counter()
        pool = self._new_pool()
        with lock(run.folder), pool or nullcontext(), ExitStack() as opened:
            statuses = run.plan(*last)
            if not force:
                run.refuse_changes(statuses)
            for status in statuses:
                if status.damage and status.state != "unneeded":
                    run.check_store(status)
            if note := write_recipe(run.folder, to_yaml(self.recipe)):
                self.monitor.say(note)
            compiler = self._compile_training([s.stage.name for s in statuses if s.runs])
            if compiler is not None:
                opened.enter_context(closing(compiler))
            for number, status in enumerate(statuses, 1):
                stage = status.stage
                for line in status.lines(run.folder):
                    self.monitor.say(line)
                if not status.runs:
                    continue
                if status.state == "changed":
                    run.remove(stage)
                if pool is not None and stage.name not in ("answers", "store"):
                    pool.close()  # the next stages need the memory
                self.monitor.say(f"stage {number} of {len(statuses)}: {stage.name}")
                if stage.name == "head" and compiler is not None:
                    compiler.finish(self.monitor)
                self._run_stage(stage, pool)
        if sum(status.runs for status in statuses) > 1:
            took = timedelta(seconds=round(time.perf_counter() - start))
            self.monitor.say(f"all stages: done in {took}{predicted}")

    def _compile_training(self, stages: list[str]) -> TrainingCompiler | None:
        """Start the process that compiles the training step, if stages precede the training."""
        if self.cluster is not None or self.ranks is not None or "head" not in stages[1:]:
            return None
        return TrainingCompiler.start(self.recipe, self.folder, self.monitor)

    def _predict(self, statuses: Sequence[Status]) -> str:
        """Say how long the stages will take, if an earlier run tells it, and return it."""
        stages, devices = [one.stage.name for one in statuses if one.runs], self._devices
        begun = any(status.state == "unfinished" for status in statuses)
        if len(stages) < 2 or begun or devices is None:
            return ""
        found = predicted_seconds(self.recipe, self.runs, stages, devices)
        if found is None:
            return ""
        seconds = timedelta(seconds=round(found[0]))
        self.monitor.say(f"all stages: about {seconds}, by the times of {self.runs / found[1]}")
        return f", predicted {seconds}"

    @property
    def _devices(self) -> str | None:
        """The devices of this process, such as "1 × NVIDIA L4"; None: others work, too."""
        if self.cluster is not None or (self.gpus or num_launched()) > 1 or num_recorders():
            return None
        found = environment(_device())
        return f"{torch.cuda.device_count() or found['threads']} × {found['device']}"

    def _run_stage(self, stage: Stage, pool: WorkerPool | None) -> None:
        functions = {
            "answers": lambda path: self.recording.write_answers(path, pool),
            "store": lambda path: self.recording.write_store(path, pool),
            "head": self._head,
            "eval": self._evaluate,
            "export": self._export,
        }
        write_provenance(self.recipe, self.run)
        start = time.perf_counter()
        with reuse_freed_memory(), self.run.recorded_stage(stage, self._devices) as artefact:
            functions[stage.name](artefact)
        self.monitor.say(f"{stage.name}: done in {time.perf_counter() - start:.0f} s")

    def _new_pool(self) -> WorkerPool | None:
        """Return the workers that answer and record; None: this process does.

        They start when they are needed. The GPUs of processes that wait to train work, too.
        """
        if self.cluster is not None:
            self.monitor.say(self.cluster.describe())
            return self.cluster.new_pool(self.recipe, self.folder, self.monitor)
        count = self.gpus or 1
        if self.ranks is not None and self.recipe.target.gpus == 1:
            count = self.ranks.local_gpus
        count += num_recorders()
        if count == 1:
            return None
        devices = worker_devices(count, self.recipe.target.device)
        return LocalPool(self.recipe, self.folder, devices, self.monitor)

    def _head(self, folder: Path) -> None:
        if self.ranks is not None:
            self.ranks.broadcast("head")
        if self._default_note:
            self.monitor.say(self._default_note)
        if self.cluster is not None:
            from draftlab.pipeline.ray_training import train

            train(self.cluster, self.recipe, self.folder, self.monitor, self.gpus)
            return
        self._training = True
        self._train(folder)
        self._training = False

    def _train(self, folder: Path) -> None:
        new_pool = partial(local_window_pool, self.recipe, self.folder, self.monitor)
        train_and_save(self.recording, folder, self.ranks, new_pool)

    def _evaluate(self, folder: Path) -> None:
        if self.cluster is not None:
            from draftlab.pipeline.ray_training import evaluate

            evaluate(self.cluster, self.recipe, self.folder, folder, self.monitor)
            return
        evaluate_head(
            self.recipe.target,
            self.folder / STAGES["head"].artefact,
            self.recipe.eval,
            folder,
            monitor=self.monitor,
            target=self.recording.target,
            head_name=self.recipe.name,
        )

    def _export(self, folder: Path) -> None:
        if not self.recipe.export.formats:
            folder.mkdir(parents=True, exist_ok=True)
            self.monitor.say("export: nothing is written, since export.formats is empty")
            return
        export_layouts(
            self.folder / STAGES["head"].artefact,
            self.recipe.target,
            {layout: folder / layout for layout in self.recipe.export.formats},
            settings=self.recipe.export,
            report=self.folder / STAGES["eval"].artefact / REPORT,
            monitor=self.monitor,
        )


def write_provenance(recipe: Recipe, run: Run) -> None:
    """Write what a run was made with into its folder."""
    write_json(
        run.folder / "provenance.json",
        {
            "environment": environment(_device()),
            "draftlab_commit": git_commit(),
            "target": recipe.target.path,
            "target_revision": recipe.target.revision,
            "prompts": recipe.prompts.source,
            "prompts_commit": data_set_commit(recipe.prompts),
            "seed": recipe.seed,
            "inputs": run.files,
        },
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
