"""Requests to the speculators library and its answers."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Subject
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.heads.block import BlockConfig, BlockHead
from draftlab.heads.folder import save_head
from draftlab.train.batch.packing import Batch


def library_rows(flat: Tensor, documents: Tensor) -> Tensor:
    """Return the library's rows of flat positions t in one row: it drops one row a document."""
    return flat - documents[flat]


def elements(documents: Tensor, num_depths: int) -> tuple[Tensor, Tensor]:
    """Return anchors and depths [M] of all elements inside their document, depth 0 first.

    Args:
        documents: int64 [T'], of the library's rows.
    """
    rows = torch.arange(len(documents))
    anchors = [
        rows[: len(rows) - d][documents[: len(rows) - d] == documents[d:]]
        for d in range(num_depths)
    ]
    depths = [torch.full_like(found, d) for d, found in enumerate(anchors)]
    return torch.cat(anchors), torch.cat(depths)


def by_depth(library: dict[str, Tensor], num_depths: int) -> dict[str, Tensor]:
    """Return the values of elements [1, M, …] as those of steps [K, T', …]; others are NaN."""
    place, rows = (library["depth"], library["anchor_pos"]), int((library["depth"] == 0).sum())
    found = {}
    for name in ("output", "logits", "draft_tokens"):
        values = library[name][0]
        blank = float("nan") if values.is_floating_point() else -1
        found[name] = values.new_full((num_depths, rows, *values.shape[1:]), blank)
        found[name][place] = values
    return library | found


def by_slot(library: dict[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
    """Return values of blocks [A, slots, …] as those of steps [K, T, …]; others are NaN.

    The block of anchor p is that of the pair at t = p − 1, so the first one is of t = 0.
    """
    found = {}
    for name, values in library.items():
        drafts = values[:, config.first_slot :].transpose(0, 1)
        blank = drafts.new_full((config.k_trained, config.block_size, *drafts.shape[2:]), torch.nan)
        found[name] = torch.cat([drafts, blank], 1)
    return found | {"draft_tokens": found["logits"].argmax(-1), "output": found["hidden"]}


def bidirectional(subject: Subject, folder: Path) -> Subject:
    """Return the subject with its head saved in `folder` as one that is not causal."""
    head = copy.deepcopy(subject.head)
    head.config = head.config.model_copy(update={"is_causal": False})
    save_head(folder, head, torch.float32)
    return replace(subject, folder=folder, head=head)


def request(
    place: Path, subject: Subject, batch: Batch, num_steps: int, attention: str
) -> dict[str, Any]:
    """Return the request for a batch of one row.

    Args:
        place: an empty folder for the export and the row.
    """
    documents, parallel = batch.documents[0], subject.head.config.family == "peagle"
    chosen, causal = {}, False
    if isinstance(subject.head, BlockHead):
        config = subject.head.config
        chosen = {"anchors": torch.arange(1, len(documents) - config.block_size + 1)}
        causal = config.is_causal
        if causal:  # no key of the layout says so
            subject = bidirectional(subject, place / "bidirectional")
    if parallel:  # in place of the anchors that the library would draw at random
        kept = documents[1:][documents[1:] == documents[:-1]]
        chosen = dict(zip(("anchor_pos", "depth"), elements(kept, num_steps), strict=True))
    features, draft = place / "features.safetensors", place / "speculators"
    subject.export(draft)
    save_file(
        {
            "hidden_states": batch.features[0].contiguous(),
            "input_ids": batch.tokens[0].contiguous(),
            "document_ids": documents.contiguous(),
            **chosen,
        },
        features,
    )
    return {
        "draft": str(draft.resolve()),
        "target": str(subject.target.folder.resolve()),
        "features": str(features),
        "steps": num_steps,
        "attention": attention,
        "causal": causal,
    }


def answer(
    file: Path, subject: Subject, num_steps: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the library's tensors, with `output` for what is fed back, and its report."""
    found, report = load_file(file), json.loads(file.with_suffix(".json").read_text())
    config = subject.head.config
    if isinstance(subject.head, BlockHead):
        return by_slot(found, config), report
    found["output"] = found["hidden" if config.norm_output else "prenorm"]
    return (by_depth(found, num_steps) if config.family == "peagle" else found), report


def loading_fault(report: dict[str, Any]) -> str | None:
    """Return which tensors of the export the library missed or did not know; None if none."""
    faults = {key: value for key, value in report["tensors"].items() if value}
    return f"the library loaded another head: {faults}" if faults else None
