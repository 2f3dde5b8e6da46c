"""Which prompts of a run its training saw, and which it held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.run.stages import STAGES
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.prompt_split import group_by_prompt
from draftlab.target_model.settings import TargetSettings
from draftlab.text.benchmarks import parse_benchmark
from draftlab.text.conversations import Conversation, iterate_conversations
from draftlab.text.suites import prompt_digest, read_conversations
from draftlab.train.validation import hold_out_records

NAMED_BY_USER = (
    "name prompts: eval.suite in a recipe, --suite on the command line, --prompts of the doctor (a "
    "JSONL file of conversations, mt-bench, humaneval …)"
)


def default_suite(target: TargetSettings) -> tuple[str, ...]:
    """Return the suite of an evaluation that names none; (): a run's own held-out prompts.

    The built-in prompts ask for Python functions, which are the task of the built-in target alone.
    """
    return ("embedded:heldout",) if target.path == "embedded" else ()


def check_suite(recipe: Recipe) -> None:
    """Raise a `UserError` if the recipe names no suite, and its training holds no prompts out, or
    if a suite's file cannot be read.
    """
    for source in recipe.eval.suite or ():
        if parse_benchmark(source) is None:
            read_conversations(source, Monitor(), no_images=lambda: "")
    if recipe.eval.suite or default_suite(recipe.target) or recipe.train.validation_share:
        return
    raise UserError(
        "expected prompts to evaluate: without eval.suite they are those that train."
        "validation_share holds out, found a share of 0",
        where="eval.suite",
        do=NAMED_BY_USER,
    )


def held_out_prompts(recipe: Recipe, run: Path) -> list[Conversation]:
    """Return the conversations of a run whose records were held out, one for each prompt; raise
    a `UserError` if there is no store, or nothing was held out.
    """
    folder = run / STAGES["store"].artefact
    if not (folder / MANIFEST).is_file():
        raise UserError(
            "expected the store of the run, which says what training held out, found none",
            where=folder,
            do=NAMED_BY_USER,
        )
    _, held_out = _split_ids(recipe, folder)
    answers = iterate_conversations(run / STAGES["answers"].artefact)
    found = [conversation for conversation in answers if conversation.id in held_out]
    if not found:
        raise UserError(
            "expected prompts that training held out, found none",
            where="train.validation_share",
            do=NAMED_BY_USER,
        )
    _, first = np.unique(group_by_prompt([one.id for one in found]), return_index=True)
    return [found[i] for i in sorted(first.tolist())]


def trained_prompts(recipe: Recipe, run: Path) -> frozenset[bytes]:
    """Return the `prompt_digest` of each prompt that a run's training reads; empty without a store
    or answers.
    """
    folder, answers = (run / STAGES[name].artefact for name in ("store", "answers"))
    if not (folder / MANIFEST).is_file() or not answers.is_file():
        return frozenset()
    trained, _ = _split_ids(recipe, folder)
    conversations = (one for one in iterate_conversations(answers) if one.id in trained)
    return frozenset(map(prompt_digest, conversations))


def _split_ids(recipe: Recipe, store: Path) -> tuple[set[str], set[str]]:
    """Return the ids of the records that a training on a store reads, and of the held-out ones."""
    manifest = Manifest.read(store / MANIFEST)
    ids = manifest.index.ids
    trained, held_out = hold_out_records(ids, manifest.window, recipe.train, recipe.seed)
    return {ids[int(i)] for i in trained}, {ids[int(i)] for i in held_out}
