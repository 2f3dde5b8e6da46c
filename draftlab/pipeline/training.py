"""Train a recipe's head on a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_config, load_head, save_head
from draftlab.heads.head import DraftHead
from draftlab.kernels.devices import free_memory, use_device
from draftlab.pipeline.recording import Recording
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import draft_vocabulary, head_config, mask_token
from draftlab.recipe.recipe import Recipe
from draftlab.run.resolve import find_head
from draftlab.store.manifest import template_arguments_setting
from draftlab.store.store import Store
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.parts import TargetParts, load_parts
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.initial_weights import fingerprint
from draftlab.train.loop import Trainer
from draftlab.train.metrics import NOT_TRAINING
from draftlab.train.validation import Validation
from draftlab.version import git_commit
from draftlab.workers.window.devices import NewPool, window_recording


def train_and_save(
    recording: Recording, folder: Path, ranks: Ranks | None, new_pool: NewPool
) -> None:
    """Train the head of a recipe on the store of its run; the first rank writes it to a folder.

    For rank 0 `new_pool` returns the workers that record the shards of a window meanwhile.
    """
    recipe = recording.recipe
    store, ranks = recording.open_store(), ranks or Ranks.join(recipe.train.device)
    with window_recording(recipe, store, ranks, new_pool, recording.monitor):
        head = _train(recording, store, ranks)
        if ranks.is_main:
            target = resolve_target(recipe.target)
            head = get_family(head.config.family).as_exported(head, target)
            save_head(folder, head, torch.bfloat16)


def _train(recording: Recording, store: Store, ranks: Ranks) -> DraftHead:
    """Train the head of a recipe, and return it with its provenance."""
    recipe, tokenizer, monitor = recording.recipe, recording.tokenizer, recording.monitor
    trained = recipe.head.init and load_config(find_head(recipe.head.init))
    trained_mask = getattr(trained, "mask_token_id", None)
    mask = mask_token(recipe, store, tokenizer, monitor, trained_mask)
    vocabulary = draft_vocabulary(recipe, store, tokenizer, monitor, mask=mask)
    parts = load_parts(
        resolve_target(recipe.target), trust_remote_code=recipe.target.trust_remote_code
    )
    config = head_config(recipe, store.identity, len(vocabulary.target_ids), monitor, mask=mask)
    data = {"records": len(store), "tokens": int(np.sum(store.lengths))}
    with use_device(ranks.device):
        initial = _initial_head(recipe, config, parts, monitor)
        trainer = Trainer(
            store,
            parts,
            config,
            vocabulary,
            recipe.train,
            seed=recipe.seed,
            folder=recording.run / "train",
            monitor=monitor,
            initial=initial,
            tracked_config={**recipe.model_dump(mode="json"), "data": data},
            ranks=ranks,
        )
        validation = trainer.run()
        head = trainer.backend.unwrap()
        trainer.backend.close()
        if recipe.record.rolls:
            monitor.say(_window_line(trainer))
        provenance = _provenance(trainer, validation, vocabulary)
        provenance |= template_arguments_setting(store.manifest.template_arguments)
        if initial is not None:
            provenance["initial_head"] = {
                "sha256": fingerprint(initial),
                "target": initial.config.target.model_dump(mode="json"),
            }
        if trainer.best.better is not None:
            provenance["better_validation"] = trainer.best.better
    head.config = head.config.model_copy(update={"provenance": provenance})
    del trainer
    free_memory()  # the next stage, perhaps in another process, loads a target
    return head


def _initial_head(
    recipe: Recipe, config: HeadConfig, parts: TargetParts, monitor: Monitor
) -> DraftHead | None:
    if recipe.head.init is None:
        folder = resolve_target(recipe.target)
        return get_family(config.family).head_of_target(config, folder, monitor)
    return load_head(
        find_head(recipe.head.init),
        target_tensors={name: tensor.float() for name, tensor in parts.shared_tensors.items()},
        dtype=torch.float32,
        device="cpu",
    )


def _window_line(trainer: Trainer) -> str:
    """Return for how much of its time the training has waited for shards of the window."""
    seconds = trainer.timer.totals
    trained = sum(value for phase, value in seconds.items() if phase != NOT_TRAINING)
    share = seconds.get("window", 0.0) / trained if trained else 0.0
    return f"window: the training waited for shards {share:.1%} of the time"


def _provenance(
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
