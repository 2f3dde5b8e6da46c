"""Another program's head under examination: read as that program reads it, mended in nothing."""

from __future__ import annotations

from pathlib import Path

from draftlab.doctor.findings import Finding
from draftlab.doctor.head_files import HeadFiles
from draftlab.doctor.target_session import TargetSession
from draftlab.export.boundaries import boundary_readings
from draftlab.export.foreign_config import Foreign, read_foreign
from draftlab.export.importing import foreign_head_config
from draftlab.export.renaming import rename
from draftlab.export.weight_files import read_weights, weight_files
from draftlab.heads.head import EMBEDDINGS


def read_other(folder: Path, witness: TargetSession) -> tuple[HeadFiles | None, list[Finding]]:
    """A head in the speculators layout or the native one; None where the target cannot be its own.

    Raises:
        UserError: a config or weights that draftlab cannot read or compute.
    """
    found, text = read_weights(folder, "head's weights"), witness.text
    foreign = read_foreign(folder, found)
    tensors = rename(found, weight_files(folder)[0], _no_one)
    if other := _shape_findings(foreign, witness):
        return None, other
    findings = _config_findings(foreign, witness)
    readings = boundary_readings(foreign, text.num_hidden_layers)
    lists = tuple(dict.fromkeys(readings.values()))
    if len(lists) > 1:
        said = "; ".join(f"{list(ids)} ({who})" for who, ids in readings.items())
        findings.append(
            Finding(
                kind="boundaries",
                what=f"programs read the boundaries in this config differently: {said}",
                do="the scores below say which fit; import with --boundaries, as inputs of layers",
                severity="note",
            )
        )
    flag = foreign.config.norm_before_residual
    config = foreign_head_config(
        foreign, folder, witness.target_settings, lists[0], bool(flag), None, _no_one
    )
    own = "own" if EMBEDDINGS in tensors or foreign.family.has_mask_token else "target"
    config = config.model_copy(update={"embeddings": own})
    return HeadFiles(foreign.kind, config, tensors, lists[1:]), findings


def _no_one(line: str) -> None:
    """What an import would say of its choices; here findings and scores do."""


def _shape_findings(foreign: Foreign, witness: TargetSession) -> list[Finding]:
    config, text = foreign.config, witness.text
    width = config.target_hidden_size or config.hidden_size
    pairs = {
        "{:,} tokens": (config.vocab_size, text.vocab_size),
        "hidden size {:,}": (width, text.hidden_size),
    }
    return [
        Finding(
            kind="target",
            what=f"the head was trained for a target of {size.format(mine)}; this one has "
            f"{theirs:,}",
            do="give the target it was trained for with --target",
        )
        for size, (mine, theirs) in pairs.items()
        if mine != theirs
    ]


def _config_findings(foreign: Foreign, witness: TargetSession) -> list[Finding]:
    """What programs fill in or cut short where a config does not say, or says too little."""
    config, findings = foreign.config, []
    positions = getattr(witness.text, "max_position_embeddings", None)
    if config.max_position_embeddings != positions:
        findings.append(
            Finding(
                kind="max_position_embeddings",
                what=f"max_position_embeddings {config.max_position_embeddings}, where the target "
                f"has {positions}: servers stop drafting there, or shorten the target to it",
                do=f"write {positions}, the target's",
            )
        )
    if config.norm_before_residual is None and "norm_before_residual" in foreign.family.options:
        findings.append(
            Finding(
                kind="norm flags",
                what="norm_before_residual is not in the config, and programs differ in what they "
                "take it for; read as false here",
                do="write it: the scores below say which fits",
                severity="note",
            )
        )
    if not (config.rope_theta or config.rope_parameters or config.rope_scaling):
        findings.append(
            Finding(
                kind="rope",
                what="no RoPE base in the config: every program takes 10,000 then, in silence",
                do="write rope_theta and rope_parameters",
            )
        )
    given = witness.target_settings.path
    named = foreign.verifier
    if named and named != given and Path(named).resolve() != witness.target.folder.resolve():
        findings.append(
            Finding(
                kind="target",
                what=f"the config names the target {named}; given is {given}",
                do="fine where the two are the same model",
                severity="note",
            )
        )
    return findings
