"""Reading another program's head for a diagnosis: as that program reads it, without corrections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftlab.doctor.findings import Finding, fault, note
from draftlab.doctor.head_files import HeadFiles
from draftlab.doctor.identity import size_findings
from draftlab.doctor.target_session import TargetSession
from draftlab.export.foreign_config import ForeignHead, boundary_readings, read_foreign_config
from draftlab.export.importing import foreign_head_config
from draftlab.export.renaming import rename_tensors
from draftlab.export.weight_files import read_weights, weight_files
from draftlab.heads.head import EMBEDDINGS


def read_foreign_head(
    folder: Path, session: TargetSession
) -> tuple[HeadFiles | None, list[Finding]]:
    """Read a head in the speculators layout or the native one.

    Returns:
        The head (None: the target cannot be its own), and what is wrong with its config.

    Raises:
        UserError: a config or weights that draftlab cannot read or compute.
    """
    weights, text_config = read_weights(folder, "head's weights"), session.text_config
    foreign = read_foreign_config(folder, weights)
    tensors = rename_tensors(weights, weight_files(folder)[0], _ignore)
    config = foreign.config
    sizes = {
        "{:,} tokens": (config.vocab_size, text_config.vocab_size),
        "hidden size {:,}": (
            config.target_hidden_size or config.hidden_size,
            text_config.hidden_size,
        ),
    }
    if shape_faults := size_findings(sizes):
        return None, shape_faults
    findings = list(_config_findings(foreign, session))
    readings = boundary_readings(foreign, text_config.num_hidden_layers)
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
        bool(config.norm_before_residual),
        None,
        _ignore,
    )
    has_own = EMBEDDINGS in tensors or foreign.family.trains_mask
    head_config = head_config.model_copy(update={"embeddings": "own" if has_own else "target"})
    return HeadFiles(head_config, tensors, tuple(others)), findings


def _ignore(line: str) -> None:
    """Ignore what an import would print: findings and scores say it here."""


def _config_findings(foreign: ForeignHead, session: TargetSession) -> Iterator[Finding]:
    """Yield findings on keys that are missing or too small."""
    config = foreign.config
    positions = getattr(session.text_config, "max_position_embeddings", None)
    if positions is not None and config.max_position_embeddings != positions:
        yield fault(
            "max_position_embeddings",
            f"max_position_embeddings {config.max_position_embeddings}, where the target "
            f"has {positions}: servers stop drafting there, or shorten the target to it",
            f"write {positions}, the target's",
        )
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
