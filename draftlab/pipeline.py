"""The Python API behind every verb: what each stage reads, calls and leaves in the run folder.

    answers ─► store ─► head ─► eval
                          └───► export

What is there and fits the recipe is kept, what is missing is made; a run whose expensive stages
were made with other knobs is refused, the knobs named. `draftlab.run` keeps the books.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from draftlab.base import Monitor, UserError, sha256_file, write_json, write_text
from draftlab.chat.render import prompt_ids, stop_ids, template_sha256, tokenizer_sha256
from draftlab.data.conversations import (
    PromptKnobs,
    conversation_file,
    load_prompts,
    read_conversations,
)
from draftlab.data.draft_vocab import DraftVocabulary, build_draft_vocabulary
from draftlab.data.record import record
from draftlab.data.regenerate import regenerate
from draftlab.data.samples import samples
from draftlab.data.store import Store, StoreIdentity
from draftlab.decode.evaluate import EvalKnobs, Evaluator, Suite, environment
from draftlab.export import find_layout
from draftlab.heads.config import HeadConfig, TargetIdentity
from draftlab.heads.folder import load_config, load_head, save_head
from draftlab.recipe import Recipe, flat, load_recipe, to_yaml
from draftlab.report import write_html
from draftlab.results import Report
from draftlab.run import RUNS, STAGES, Run, Status, find_run, git_commit
from draftlab.target.model import (
    EMBEDDED,
    Target,
    TargetKnobs,
    check_boundaries,
    default_boundaries,
    fingerprint,
    load_target,
    load_tokenizer,
    resolve_target,
)
from draftlab.target.parts import load_parts
from draftlab.train.loop import Trainer
from draftlab.train.validate import Validation

REFERENCE = "reference"


def reference_head() -> Path:
    """The head for the embedded target that ships in the package."""
    return Path(str(resources.files("draftlab") / "embedded" / "heads" / REFERENCE))


@dataclass
class Pipeline:
    """A recipe being carried out in its run folder.

    Args:
        recipe: what to make.
        monitor: for lines and progress.
        runs: folder of all runs.
    """

    recipe: Recipe
    monitor: Monitor
    runs: Path = RUNS

    @cached_property
    def run(self) -> Run:
        """The run folder's books; input files enter a stage's key by their content."""
        target = resolve_target(self.recipe.target)
        files = {
            "answers": {
                "target.fingerprint": fingerprint(target),
                "prompts.sha256": sha256_file(conversation_file(self.recipe.prompts.source)),
            },
            "eval": {"eval.suite.sha256": sha256_file(conversation_file(self.recipe.eval.suite))},
        }
        return Run(self.runs / self.recipe.name, flat(self.recipe), files)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self.recipe.target)

    @cached_property
    def target(self) -> Target:
        """The target, loaded when the first stage needs it."""
        self.monitor.say(f"loading target {self.recipe.target.path}")
        return load_target(self.recipe.target)

    def plan(self, last: str) -> list[Status]:
        """How each stage up to `last` stands."""
        return [self.run.status(stage) for stage in self.run.chain(last)]

    def make(self, last: str, *, force: bool = False) -> Path:
        """Makes what is missing up to stage `last`; returns that stage's artefact.

        Args:
            force: a stage whose knobs changed is made again, with all that follows it.

        Raises:
            UserError: knobs changed under the run without `force`, or a stage's own complaint.
        """
        run, chain = self.run, self.run.chain(last)
        with run.lock():
            if not force:
                run.refuse_changes(chain)
            for stage in chain:
                status = run.status(stage)
                if status.state == "done":
                    self.monitor.say(f"{stage.name}: there ({run.folder / stage.artefact})")
                    continue
                if status.state == "changed":
                    run.remove(stage)
                write_text(run.folder / "recipe.yaml", to_yaml(self.recipe))
                run.mark_latest()
                self._provenance()
                started = time.perf_counter()
                with run.making(stage) as artefact:
                    self._makers[stage.name](artefact)
                self.monitor.say(f"{stage.name}: done in {time.perf_counter() - started:.0f} s")
        return run.folder / STAGES[last].artefact

    @property
    def _makers(self) -> dict[str, Callable[[Path], None]]:
        return {
            "answers": self._answers,
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

    def _answers(self, path: Path) -> None:
        recipe = self.recipe
        prompts = load_prompts(recipe.prompts, self.monitor)
        regenerate(
            self.target if recipe.regenerate.enabled else None,
            self.tokenizer,
            prompts,
            recipe.regenerate,
            path,
            seed=recipe.seed,
            monitor=self.monitor,
        )

    def boundaries(self) -> tuple[int, ...]:
        """The recipe's boundaries, or the target's default ones, said."""
        number = self.target.num_layers
        chosen = self.recipe.record.boundaries
        if chosen is None:
            chosen = default_boundaries(number)
            usual = [2, number // 2, number - 3]
            note = "" if list(chosen) == usual else f" (the usual {usual} collide or fall outside)"
            self.monitor.say(f"boundaries {list(chosen)} of {number} layers, by default{note}")
        check_boundaries(chosen, number)
        return chosen

    def _store(self, folder: Path) -> None:
        boundaries = self.boundaries()
        identity = StoreIdentity.of(
            self.target,
            tokenizer_sha256=tokenizer_sha256(self.tokenizer),
            template_sha256=template_sha256(self.tokenizer),
            boundaries=boundaries,
            dtype=self.recipe.record.dtype,
        )
        answers = read_conversations(self.run.folder / STAGES["answers"].artefact)
        recorded = samples(answers, self.tokenizer, self.monitor)
        record(self.target, recorded, folder, self.recipe.record, identity, monitor=self.monitor)

    def draft_vocabulary(self, store: Store) -> DraftVocabulary:
        """The store's draft vocabulary under the recipe, its coverage said."""
        tokenizer = self.tokenizer
        special = set(tokenizer.all_special_ids)
        stops = stop_ids(tokenizer, resolve_target(self.recipe.target))
        mask = tokenizer.convert_tokens_to_ids("<|mask|>")
        never = {mask} if mask in special else set()
        vocabulary = build_draft_vocabulary(
            store,
            self.recipe.draft_vocab.size,
            (special | stops) - never,
            never,
            store.identity.vocab_size,
        )
        self.monitor.say(
            f"draft vocabulary: {len(vocabulary.target_ids):,} of {store.identity.vocab_size:,} "
            f"tokens, covering {vocabulary.coverage:.2%} of predicted tokens"
        )
        return vocabulary

    def _head(self, folder: Path) -> None:
        recipe, monitor = self.recipe, self.monitor
        store = Store.open(self.run.folder / STAGES["store"].artefact)
        target_folder = resolve_target(recipe.target)
        vocabulary = self.draft_vocabulary(store)
        parts = load_parts(target_folder, trust_remote_code=recipe.target.trust_remote_code)
        trainer = Trainer(
            store,
            parts,
            self.head_config(store, vocabulary, target_folder),
            vocabulary,
            recipe.train,
            seed=recipe.seed,
            folder=self.run.folder / "train",
            monitor=monitor,
        )
        validation = trainer.run()
        head = trainer.head
        head.config = head.config.model_copy(
            update={"provenance": _training_provenance(trainer, validation, vocabulary)}
        )
        save_head(folder, head, torch.bfloat16)

    def head_config(
        self, store: Store, vocabulary: DraftVocabulary, target_folder: Path
    ) -> HeadConfig:
        """The head's draftlab.json: the target's shapes where the recipe names none."""
        from transformers import AutoConfig

        knobs, identity = self.recipe.head, store.identity
        whole = AutoConfig.from_pretrained(
            target_folder, trust_remote_code=self.recipe.target.trust_remote_code
        )
        config = whole.get_text_config()
        heads = knobs.num_attention_heads or config.num_attention_heads
        rope = dict(getattr(config, "rope_parameters", None) or {})
        if "rope_theta" not in rope:
            raise UserError(
                f"expected rope_parameters with rope_theta in the target's config, found {rope}",
                where=target_folder,
                do="targets with other position encodings cannot lend theirs to the head",
            )
        size = config.hidden_size
        return HeadConfig(
            boundaries=identity.boundaries,
            target_num_layers=identity.num_layers,
            target_hidden_size=identity.hidden_size,
            hidden_size=size,
            intermediate_size=knobs.intermediate_size or config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=knobs.num_key_value_heads or config.num_key_value_heads,
            head_dim=knobs.head_dim or getattr(config, "head_dim", None) or size // heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=rope,
            max_position_embeddings=config.max_position_embeddings,
            vocab_size=identity.vocab_size,
            draft_vocab_size=len(vocabulary.target_ids),
            norm_before_residual=knobs.norm_before_residual,
            k_trained=self.recipe.train.ttt_steps,
            target=TargetIdentity(
                name=identity.target_name,
                fingerprint=identity.target_fingerprint,
                architecture=(whole.architectures or [type(whole).__name__])[0],
                tokenizer_sha256=identity.tokenizer_sha256,
                template_sha256=identity.template_sha256,
            ),
        )

    def _eval(self, folder: Path) -> None:
        evaluate(
            self.recipe.target,
            self.run.folder / STAGES["head"].artefact,
            self.recipe.eval,
            folder,
            monitor=self.monitor,
            target=self.target,
            head_name=self.recipe.name,
        )

    def _export(self, folder: Path) -> None:
        for layout in self.recipe.export.formats:
            export(
                self.run.folder / STAGES["head"].artefact,
                self.recipe.target,
                folder / layout,
                layout,
                k=self.recipe.export.k,
                dtype=self.recipe.export.dtype,
                monitor=self.monitor,
            )


def _training_provenance(
    trainer: Trainer, validation: Validation | None, vocabulary: DraftVocabulary
) -> dict[str, Any]:
    return {
        "draftlab_commit": git_commit(),
        "steps": trainer.step,
        "tokens_seen": trainer.tokens_seen,
        "records": len(trainer.training),
        "draft_vocabulary_coverage": vocabulary.coverage,
        "validation": validation.metrics() if validation else None,
    }


def load_suite(source: str, tokenizer: Any, monitor: Monitor) -> Suite:
    """A prompt suite, rendered by the target's template."""
    prompts = load_prompts(PromptKnobs(source=source), monitor)
    return Suite(
        source,
        template_sha256(tokenizer),
        tuple((p.id, prompt_ids(tokenizer, _until_answer(p.messages))) for p in prompts),
    )


def _until_answer(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The turns before the first answer."""
    roles = [message["role"] for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


def check_fits(head: HeadConfig, target: Target, tokenizer: Any, folder: Path) -> None:
    """Refuses a head that was trained for another target, tokenizer or template."""
    pairs = {
        "target": (head.target.fingerprint, target.fingerprint),
        "tokenizer": (head.target.tokenizer_sha256, tokenizer_sha256(tokenizer)),
        "chat template": (head.target.template_sha256, template_sha256(tokenizer)),
    }
    faults = [
        f"{name}: the head was trained with {trained[:12]}, found {found[:12]}"
        for name, (trained, found) in pairs.items()
        if trained != found
    ]
    if faults:
        raise UserError(
            f"the head was trained for {head.target.name}, which is not the target given:\n  "
            + "\n  ".join(faults),
            where=folder,
            do="give its own target with --target",
        )


def evaluate(
    target_knobs: TargetKnobs,
    head_folder: Path | None,
    knobs: EvalKnobs,
    out: Path,
    *,
    monitor: Monitor,
    target: Target | None = None,
    head_name: str | None = None,
) -> Report:
    """Evaluates a head and writes report.json, report.html and plots into `out`.

    Args:
        head_folder: None measures plain decoding only.
        target: the loaded target, when there is one already.
        head_name: as rows call it; None: the folder's name.
    """
    target = target or load_target(target_knobs)
    tokenizer = load_tokenizer(target_knobs)
    head = None
    if head_folder is not None:
        config = load_config(head_folder)
        check_fits(config, target, tokenizer, head_folder)
        head = load_head(
            head_folder,
            embeddings=target.parts.embeddings.to("cpu", torch.float32),
            dtype=target.dtype,
            device=target.device,
        )
    report = Evaluator(
        target,
        head,
        (head_name or head_folder.name) if head_folder else None,
        load_suite(knobs.suite, tokenizer, monitor),
        stop_ids(tokenizer, target.folder),
        knobs,
        monitor=monitor,
    ).run()
    report.write(out / "report.json")
    write_html(report, out)
    monitor.say(f"report: {out / 'report.html'}")
    return report


def export(
    head_folder: Path,
    target_knobs: TargetKnobs,
    out: Path,
    layout: str,
    *,
    k: int | None = None,
    dtype: str | None = None,
    monitor: Monitor,
) -> Path:
    """Exports a head to a layout; it is loaded back and compared before this returns."""
    path = find_layout(layout)(
        head_folder,
        resolve_target(target_knobs),
        out,
        target_name=target_knobs.path,
        k=k,
        dtype=dtype,
        monitor=monitor,
    )
    monitor.say(f"export: {path} holds the head in {layout} layout, read back and equal")
    return path


@dataclass(frozen=True)
class Subject:
    """What `eval` and `export` work on.

    Attributes:
        head: head folder. name: as reports call it. target: its target.
        knobs: evaluation knobs to start from. out: where the report goes.
    """

    head: Path
    name: str
    target: TargetKnobs
    knobs: EvalKnobs
    out: Path


def eval_subject(run_name: str | None, head: str | None, target: str | None) -> Subject:
    """The head of a run (None: the latest), or a head folder with its target.

    Raises:
        UserError: no such run or head, or a head folder without a target.
    """
    if head is None:
        folder = find_run(run_name)
        recipe = recipe_of(folder)
        if not (folder / "head" / "draftlab.json").is_file():
            raise UserError(
                "expected the run to have a trained head, found none",
                where=folder,
                do="`draftlab train` finishes it",
            )
        knobs = recipe.target
        if target is not None:
            knobs = knobs.model_copy(update={"path": target})
        return Subject(folder / "head", folder.name, knobs, recipe.eval, folder / "eval")
    path = reference_head() if head == REFERENCE else Path(head)
    if target is None:
        if load_config(path).target.name != EMBEDDED:
            raise UserError(
                f"expected --target beside --head (it was trained for "
                f"{load_config(path).target.name})",
                where=path,
            )
        target = EMBEDDED
    return Subject(
        path, path.name, TargetKnobs(path=target), EvalKnobs(), RUNS / f"eval-{path.name}" / "eval"
    )


def recipe_of(run_folder: Path) -> Recipe:
    """The resolved recipe a run was made with."""
    return load_recipe(run_folder / "recipe.yaml")


__all__ = [
    "EMBEDDED",
    "REFERENCE",
    "Pipeline",
    "Subject",
    "eval_subject",
    "evaluate",
    "export",
    "find_run",
    "load_suite",
    "recipe_of",
    "reference_head",
]
