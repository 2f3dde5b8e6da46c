"""What is wrong with a head's files, by themselves and beside the target's config and tokenizer.

For scoring the target's tensors replace missing ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from draftlab.doctor.diagnosis import Finding, fault, note
from draftlab.doctor.target_session import TargetSession
from draftlab.errors import UserError
from draftlab.export.foreign_config import ForeignHead, boundary_readings, read_foreign_config
from draftlab.export.importing import foreign_head_config, rename_tensors
from draftlab.export.weight_files import read_weights, weight_files
from draftlab.files import read_json, sha256_file
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import NATIVE, meta_head
from draftlab.heads.head import EMBEDDINGS
from draftlab.heads.rope import used_rope
from draftlab.heads.validate import D2T, T2D, tensor_faults
from draftlab.heads.vllm_config import native_config
from draftlab.run.resolve import run_of
from draftlab.run.stages import STAGES, read_record, record_path
from draftlab.text.chat_template import template_sha256, tokenizer_sha256

RESTORE = "copy the head again, or export it again from its training run"
ADVICE = {
    "missing tensor": f"servers leave it uninitialised without a warning: {RESTORE}",
    "unknown tensor": "remove it, or name the family and options that have it in the config",
    "shape": RESTORE,
    "dtype": "store weights as bfloat16 or float32, d2t as int64 and t2d as bool",
    "not finite": "take an earlier checkpoint: training diverged, or the file is damaged",
    "zeros": RESTORE,
    "d2t": "store target id − draft id: d2t[i] = id − i",
}
"""What to do about a fault of the validator, by its kind, in the order of the findings."""
SCORED_ALL_THE_SAME = {"unknown tensor", "zeros", "d2t"}
"""Kinds of faults in spite of which a head computes drafts."""


@dataclass(frozen=True)
class HeadFiles:
    """The contents of a head's folder.

    Attributes:
        config: its config as a draftlab.json.
        tensors: as stored, by their names in head folders.
        boundaries: further lists of boundaries that its files name.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    boundaries: tuple[tuple[int, ...], ...] = ()


def served_config_findings(folder: Path, files: HeadFiles) -> list[Finding]:
    """Return a finding if config.json is not the one that draftlab.json gives."""
    dtype = str(files.tensors["fc.weight"].dtype) if "fc.weight" in files.tensors else ""
    expected = native_config(files.config, dtype.removeprefix("torch."))
    path = folder / NATIVE
    actual = read_json(path, kind="head's config.json") if path.is_file() else None
    if not expected or actual == expected:  # no server loads heads of some families
        return []
    what = "config.json is missing: vLLM cannot load the folder as it stands"
    if actual is not None:
        leaves = actual if isinstance(actual, dict) else {}
        what = "config.json, which vLLM reads, differs from draftlab.json: " + "; ".join(
            f"{key} is {leaves.get(key, 'not there')}, by draftlab.json "
            f"{expected.get(key, 'not there')}"
            for key in sorted(expected.keys() | leaves.keys())
            if leaves.get(key, "not there") != expected.get(key, "not there")
        )
    return [fault("config.json", what, "export the head again, which writes it")]


def tensor_findings(files: HeadFiles) -> tuple[list[Finding], bool]:
    """Return the validator's faults with advice, and whether the head can be scored with them."""
    faults = tensor_faults(meta_head(files.config), files.tensors, may_be_zero=())
    if D2T in files.tensors:  # which gives t2d
        faults = [f for f in faults if (f.kind, f.tensor) != ("missing tensor", T2D)]
    order = list(ADVICE)
    faults.sort(key=lambda f: order.index(f.kind))
    findings = [fault(f.kind, f.message, ADVICE[f.kind]) for f in faults]
    return findings, SCORED_ALL_THE_SAME.issuperset(f.kind for f in faults)


def scored_tensors(files: HeadFiles, target_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a head is scored with: its own, and those that servers add.

    Args:
        target_tensors: the target's embeddings, lm_head and final norm, by their names in heads.
    """
    config, head = files.config, meta_head(files.config)
    tensors = {name: t for name, t in files.tensors.items() if name in head.tensors()}
    tensors |= {name: target_tensors[name] for name in head.shared_tensors()}
    if config.draft_vocab_size == config.vocab_size:  # other programs' files have no identity maps
        tensors.setdefault(D2T, torch.zeros(config.vocab_size, dtype=torch.int64))
    if T2D not in tensors:
        ids = torch.arange(config.draft_vocab_size) + tensors[D2T].long()
        tensors[T2D] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors[T2D][ids[(ids >= 0) & (ids < config.vocab_size)]] = True
    return tensors


def read_foreign_head(folder: Path, session: TargetSession) -> tuple[HeadFiles, list[Finding]]:
    """Read a head in the speculators layout or the native one, and what is wrong with its config.

    Raises:
        UserError: a config or weights that draftlab cannot read or compute, a target of another
            shape.
    """
    weights = read_weights(folder, "head's weights")
    foreign = read_foreign_config(folder, weights)
    tensors = rename_tensors(weights, weight_files(folder)[0])
    findings = list(_config_findings(foreign, session))
    readings = boundary_readings(foreign, session.text_config.num_hidden_layers)
    first, *others = dict.fromkeys(readings.values())
    if others:
        listed = "; ".join(f"{list(ids)} ({program})" for program, ids in readings.items())
        findings.append(
            note(
                "boundaries",
                f"programs read the boundaries in this config differently: {listed}",
                "the scores below show which fit; import with --boundaries, as inputs of layers",
            )
        )
    head_config = foreign_head_config(
        foreign,
        folder,
        session.target_settings,
        first,
        bool(foreign.config.norm_before_residual),
    )
    has_own = EMBEDDINGS in tensors or foreign.family.trains_mask
    head_config = head_config.model_copy(update={"embeddings": "own" if has_own else "target"})
    return HeadFiles(head_config, tensors, tuple(others)), findings


def _config_findings(foreign: ForeignHead, session: TargetSession) -> Iterator[Finding]:
    """Yield findings on keys that are missing or too small."""
    config = foreign.config
    yield from position_findings(config.max_position_embeddings, session.text_config)
    if config.norm_before_residual is None and "norm_before_residual" in foreign.family.options:
        yield note(
            "norm flags",
            "norm_before_residual is not in the config, and programs have different "
            "defaults; read as false here",
            "write it: the scores below show which fits",
        )
    if not (config.rope_theta or config.rope_parameters or config.rope_scaling):
        yield fault(
            "rope",
            "no RoPE base in the config: every program takes 10,000 then, without a warning",
            "write rope_theta and rope_parameters",
        )
    path, name = session.target_settings.path, foreign.verifier
    if name and name != path and Path(name).resolve() != session.folder.resolve():
        yield note(
            "target",
            f"the config names the target {name}, but the diagnosis uses {path}",
            "nothing, if the two are the same model",
        )


def changed_file_findings(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each file that is missing or has changed since its run wrote it.

    Args:
        folder: a head folder or an export; outside of a run it has no recorded hashes.
    """
    if (run := run_of(folder)) is None:
        return
    do = f"restore the file, or let `draftlab run {quote(str(run / 'recipe.yaml'))}` make it again"
    for path in (record_path(run, STAGES[stage]) for stage in ("head", "export")):
        try:
            recorded = read_record(path).get("sha256", {}) if path.is_file() else {}
            files = {run / name: expected for name, expected in recorded.items()}
            for file in (file for file in files if file.parent == folder.resolve()):
                if not file.is_file():
                    yield fault("changed file", f"{file.name} is missing; the run wrote one", do)
                elif (actual := sha256_file(file)) != files[file]:
                    what = f"{file.name} has SHA-256 {actual[:12]}, and {files[file][:12]} when the"
                    yield fault("changed file", f"{what} run wrote it", do)
        except UserError as error:
            yield fault("unreadable", f"{error.where}: {error.what}", error.do)


def shape_findings(head: HeadConfig, text: Any) -> list[Finding]:
    """Return a finding for each size of the target that is not the one in the head's config.

    Args:
        text: the target's text config, as transformers reads it.
    """
    sizes = {
        "{:,} layers": (head.target_num_layers, text.num_hidden_layers),
        "hidden size {:,}": (head.target_hidden_size, text.hidden_size),
        "{:,} tokens": (head.vocab_size, text.vocab_size),
    }
    return [
        fault(
            "target",
            f"the head was trained for a target of {size.format(expected)} ({head.target.name}); "
            f"this one has {actual:,}",
            "give the target it was trained for with --target",
        )
        for size, (expected, actual) in sizes.items()
        if expected != actual
    ]


def config_findings(head: HeadConfig, text: Any) -> Iterator[Finding]:
    """Yield findings on RoPE and positions that differ from the target's."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        head_rope, target_rope = (
            {"rope_type": "default", **fields} for fields in (head.rope_parameters, used_rope(rope))
        )
        if head_rope != target_rope:
            yield note(
                "rope",
                f"RoPE parameters {head_rope}, where the target has {target_rope}",
                "heads usually have their target's, or its base alone; programs take base 10,000 "
                "if a config has none. The scores below show which fits",
            )
    yield from position_findings(head.max_position_embeddings, text)


def position_findings(number: int | None, text: Any) -> Iterator[Finding]:
    """Yield a finding if a head's number of positions is not the target's, if that states one."""
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and number != positions:
        effect = (
            "servers stop drafting there, or shorten the target to it"
            if number is None or number < positions
            else "the target has no such positions"
        )
        shown = "none" if number is None else f"{number:,}"
        yield fault(
            "max_position_embeddings",
            f"max_position_embeddings {shown}, where the target has {positions:,}: {effect}",
            f"write {positions}, the target's",
        )


def identity_findings(head: HeadConfig, fingerprint: str, tokenizer: Any) -> list[Finding]:
    """Return a finding for each of target, tokenizer and template whose hash differs."""
    try:
        template = template_sha256(tokenizer)
    except UserError:
        template = "none"
    pairs = {
        "target": (head.target.fingerprint, fingerprint, "its weights or its config differ"),
        "tokenizer": (
            head.target.tokenizer_sha256,
            tokenizer_sha256(tokenizer),
            "the same text becomes other tokens",
        ),
        "template": (
            head.target.template_sha256,
            template,
            "chats are rendered differently than in training",
        ),
    }
    return [
        fault(
            kind,
            f"the {kind} is not the one the head was trained with ({head.target.name}): "
            f"{trained[:12]} there, {actual[:12]} here; {effect}",
            "give the checkpoint it was trained for, or train a head for this one",
        )
        for kind, (trained, actual, effect) in pairs.items()
        if trained and trained != actual  # empty in heads of other programs
    ]
