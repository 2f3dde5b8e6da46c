"""The Python API behind every verb: what each stage reads, calls and leaves in the run folder.

    answers ─► store ─► head ─► eval
                          └───► export

What is there and fits the recipe is kept, what is missing is made; a run whose expensive stages
were made with other settings is refused, the settings named. `draftlab.pipeline.run_folder` keeps
the
books, `draftlab.pipeline.recording` makes answers and store, `draftlab.pipeline.training` the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.evaluate.evaluator import environment
from draftlab.files import sha256_file, write_json
from draftlab.heads.folder import WEIGHTS, save_head
from draftlab.heads.head import DraftHead
from draftlab.pipeline.api import evaluate_head, export_head
from draftlab.pipeline.estimate import estimate
from draftlab.pipeline.head_spec import check_early, target_config
from draftlab.pipeline.head_workspace import input_files
from draftlab.pipeline.recipe import Recipe, flatten, to_yaml
from draftlab.pipeline.recording import Recording
from draftlab.pipeline.resolve import find_head
from draftlab.pipeline.run_folder import RUNS, Run, Status, git_commit, lock
from draftlab.pipeline.sizes import check_initial, planned_head, planned_identity
from draftlab.pipeline.stages import STAGES
from draftlab.pipeline.training import train_head
from draftlab.progress import Monitor
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.locate import resolve_target
from draftlab.text.prompts import prompt_file
from draftlab.train.distributed.ranks import Ranks, num_launched


@dataclass
class Pipeline:
    """A recipe being carried out in its run folder.

    Args:
        recipe: what to make.
        monitor: for lines and progress.
        runs: folder of all runs.
        gpus: that answer and record, each by a process with the whole target.

    Attributes:
        ranks: the processes that `make` trains with; None: this one alone.
    """

    recipe: Recipe
    monitor: Monitor
    runs: Path = RUNS
    gpus: int = 1
    ranks: Ranks | None = field(default=None, init=False)
    _training: bool = field(default=False, init=False)

    @cached_property
    def run(self) -> Run:
        """The run folder's books; input files enter a stage's key by their content."""
        target = resolve_target(self.recipe.target)
        files = {
            "answers": {
                "target.fingerprint": fingerprint(target),
                "prompts.sha256": sha256_file(prompt_file(self.recipe.prompts.source)),
            },
            "eval": input_files(self.recipe.eval),
        }
        initial = self.recipe.head.init
        if initial is not None:
            files["head"] = {"head.init.sha256": sha256_file(find_head(initial) / WEIGHTS)}
        return Run(self.runs / self.recipe.name, flatten(self.recipe), files)

    @property
    def leads(self) -> bool:
        """Whether this process, and no other, prints and writes."""
        return self.ranks is None or self.ranks.is_main

    @cached_property
    def recording(self) -> Recording:
        """The target, its answers and states."""
        return Recording(self.recipe, self.runs / self.recipe.name, self.monitor)

    def plan(self, *last: str) -> list[Status]:
        """How each stage up to those of `last` stands; without a run nothing is downloaded."""
        folder = self.runs / self.recipe.name
        run = self.run if folder.exists() else Run(folder, flatten(self.recipe), {})
        return [
            replace(status, lacks=self._lacks(status.stage.name))
            if status.state in ("missing", "unfinished", "changed")
            else status
            for status in run.plan(*last)
        ]

    def _lacks(self, stage: str) -> str:
        """An input file of a stage that is not there, if there is one."""
        recipe = self.recipe
        inputs: dict[str, Callable[[], object]] = {
            "answers": lambda: prompt_file(recipe.prompts.source),
            "head": lambda: recipe.head.init and find_head(recipe.head.init),
            "eval": lambda: input_files(recipe.eval),
        }
        try:
            inputs.get(stage, lambda: None)()
        except UserError as error:
            if Path(error.where).exists():  # then it is something else
                raise
            return error.where
        return ""

    def estimate(self, *last: str) -> Iterator[str]:
        """Lines on the disk, memory and time that the stages up to those of `last` need."""
        return estimate(self.recipe, self.runs, [s.stage.name for s in self.plan(*last)])

    def make(self, *last: str, force: bool = False) -> Path:
        """Makes what is missing up to each stage of `last`; returns the final one's artefact.

        Args:
            force: a stage whose settings changed is made again, with all that follows it.

        Raises:
            UserError: settings changed under the run without `force`, or a stage's own complaint.
        """
        trains = any(stage.name == "head" for name in last for stage in self.run.chain(name))
        if trains and num_launched() > 1:
            self.ranks = Ranks.join(self.recipe.train.device)
        if self.ranks is None:
            self._make(*last, force=force)
        elif not self.ranks.is_main:
            self._assist(self.ranks)
        else:
            try:
                self._make(*last, force=force)
            finally:
                if not self._training:  # else they would not be listening
                    self.ranks.broadcast(None)
        if self.ranks is not None:
            self.ranks.leave()
        return self.run.folder / STAGES[last[-1]].artefact

    def _assist(self, ranks: Ranks) -> None:
        """What ranks other than the first do: they wait until it trains, and train along."""
        self.monitor = Monitor()
        while ranks.broadcast(None) == "head":
            self._train()

    def _make(self, *last: str, force: bool) -> None:
        run = self.run
        check_early(self.recipe)
        self._check_initial()
        if run.status(STAGES["answers"]).state != "done":
            _ = self.recording.prompts  # a broken file must not leave a run folder
        with lock(run.folder):
            statuses = run.plan(*last)
            if not force:
                run.refuse_changes(statuses)
            run.adopt(to_yaml(self.recipe))
            for status in statuses:
                stage = status.stage
                if status.state in ("done", "unneeded"):
                    there = "there" if status.state == "done" else "not there, and not needed"
                    self.monitor.say(f"{stage.name}: {there} ({run.folder / stage.artefact})")
                    continue
                if status.state == "changed":
                    for key, (made, asked) in status.changes.items():
                        self.monitor.say(f"{stage.name}: {key} was {made!r}, is {asked!r}")
                    run.remove(stage)
                self._provenance()
                started = time.perf_counter()
                with run.making(stage) as artefact:
                    self._makers[stage.name](artefact)
                self.monitor.say(f"{stage.name}: done in {time.perf_counter() - started:.0f} s")

    def _check_initial(self) -> None:
        """Whether the head can start from head.init is known before anything is recorded."""
        recipe = self.recipe
        if recipe.head.init is not None:
            config, folder = target_config(recipe.target), resolve_target(recipe.target)
            identity = planned_identity(recipe, config, fingerprint(folder))
            check_initial(recipe, planned_head(recipe, config, identity).config)

    @property
    def _makers(self) -> dict[str, Callable[[Path], None]]:
        return {
            "answers": lambda path: self.recording.answer(path, self._gpus),
            "store": self._store,
            "head": self._head,
            "eval": self._eval,
            "export": self._export,
        }

    def _provenance(self) -> None:
        write_json(
            self.run.folder / "provenance.json",
            {
                "environment": environment(self._device()),
                "draftlab_commit": git_commit(),
                "target": self.recipe.target.path,
                "target_revision": self.recipe.target.revision,
                "seed": self.recipe.seed,
                "inputs": self.run.files,
            },
        )

    def _device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _store(self, folder: Path) -> None:
        if self.recipe.record.online:
            self.recording.write_plan(folder)
            return
        self.recording.lead(folder, self._gpus)

    @property
    def _gpus(self) -> int:
        """GPUs for answers and store: also those that wait for the training."""
        if self.ranks is not None and self.recipe.target.gpus == 1:
            return self.ranks.local_gpus
        return self.gpus

    def join_recording(self) -> None:
        """Takes shards of this run's recording, which another process makes; waits for its plan.

        Any number may join, come and go, on any machine that sees the run folder.

        Raises:
            UserError: the run's answers were made with other settings than this recipe's.
        """
        run, waited = self.run, 0
        while (status := run.status(STAGES["answers"])).state != "done":
            run.refuse_changes([status])
            if waited % 300 == 0:
                for_long = f", {waited // 60} minutes by now: is another process making it?"
                place = run.folder / STAGES["answers"].artefact
                self.monitor.say(f"waiting for {place}{for_long if waited else ''}")
            waited += 1
            time.sleep(1)
        self.recording.help(run.folder / STAGES["store"].artefact)

    def _head(self, folder: Path) -> None:
        if self.ranks is not None:
            self.ranks.broadcast("head")
        self._training = True
        save_head(folder, self._train(), torch.bfloat16)
        self._training = False

    def _train(self) -> DraftHead:
        recording = self.recording
        return train_head(
            self.recipe,
            recording.opened(self.ranks),
            recording.tokenizer,
            self.run.folder / "train",
            monitor=self.monitor,
            ranks=self.ranks,
        )

    def _eval(self, folder: Path) -> None:
        evaluate_head(
            self.recipe.target,
            self.run.folder / STAGES["head"].artefact,
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
        for layout in self.recipe.export.formats:
            export_head(
                self.run.folder / STAGES["head"].artefact,
                self.recipe.target,
                folder / layout,
                layout,
                settings=self.recipe.export,
                monitor=self.monitor,
            )
