"""The examination: files, then the target, then every reading; one verdict."""

from __future__ import annotations

from pathlib import Path

from draftlab.doctor.findings import Diagnosis, Finding
from draftlab.doctor.foreign_head import read_other
from draftlab.doctor.head_files import HeadFiles, read_own, whole_tensors
from draftlab.doctor.head_variant import Reading
from draftlab.doctor.hypotheses import hypotheses
from draftlab.doctor.hypothesis import About
from draftlab.doctor.identity import (
    config_findings,
    identity_findings,
    kinship_findings,
    shape_findings,
)
from draftlab.doctor.score import Scorer
from draftlab.doctor.scoring_set import entered_norm
from draftlab.doctor.search import Trials, try_readings
from draftlab.doctor.target_session import TargetSession
from draftlab.doctor.verdict import Case
from draftlab.errors import UserError
from draftlab.evaluate.decoding_config import DEFAULT_K
from draftlab.heads.folder import CONFIG
from draftlab.heads.head import EMBEDDINGS

FEW = 11  # prompts that all favour one reading by chance less often than `score.LEVEL` allows
ENOUGH = 100  # positions of the answers; fewer tell no two readings apart


def examine(folder: Path, witness: TargetSession) -> Diagnosis:
    """Examines a head with a target; what is wrong is in the diagnosis, not raised.

    Raises:
        UserError: no such folder, a target that does not load, prompts that cannot be used.
    """
    if not folder.is_dir():
        raise UserError("expected a head's folder, found none", where=folder)
    text = witness.text  # a target that does not load is no fault of the head
    case = Case(str(folder), witness.target_settings.path)
    own = (folder / CONFIG).is_file()
    try:
        files, case.findings = read_own(folder) if own else read_other(folder, witness)
    except UserError as error:
        case.findings.append(Finding(kind="unreadable", what=error.what, do=error.do))
        return case.closed()
    if files is None:
        return case.closed()
    case.layout = files.layout
    if other_shapes := shape_findings(files.config, text):
        case.findings += other_shapes
        return case.closed()
    case.findings += config_findings(files.config, text)
    case.findings += identity_findings(files.config, witness.target.fingerprint, witness.tokenizer)
    tensors, found = whole_tensors(files, witness.shared_tensors)
    case.findings += found
    if tensors is None:
        return case.closed()
    case.findings += kinship_findings(files.config, tensors, witness.shared_tensors)
    k = witness.settings.k or min(files.config.k_trained, DEFAULT_K)
    stored = Reading(files.config, tensors, template=witness.has_template)
    case.conditions = witness.conditions(stored.template, k)
    case.trials = score_readings(stored, files, witness, k)
    return case.closed(files.config.provenance)


def score_readings(stored: Reading, files: HeadFiles, witness: TargetSession, k: int) -> Trials:
    """Scores the head as stored and as every hypothesis has it."""
    target = witness.target
    about = About(
        num_layers=target.num_layers,
        rope=getattr(witness.text, "rope_parameters", None),
        target_tensors=witness.shared_tensors,
        entered=frozenset(
            b for b in range(target.num_layers + 1) if entered_norm(target, b) is not None
        ),
        templates=answered(stored.template, witness, k),
        boundaries=files.boundaries,
        own_embeddings=files.tensors.get(EMBEDDINGS),
    )
    if (count := len(witness.evidence(stored.template, k).spans)) < FEW:
        witness.monitor.say(
            f"doctor: of only {count} prompts, chance alone may make a reading look better; "
            f"{FEW} or more tell (--max-prompts)"
        )
    proposed = [h.reading for h in hypotheses(stored, about)]
    boundaries = {b for reading in (stored, *proposed) for b in reading.config.boundaries}
    for template in about.templates:
        witness.evidence(template, k).take(boundaries)  # all in one pass
    scorer = Scorer(target, lambda template: witness.evidence(template, k), k)
    return try_readings(stored, about, scorer, witness.monitor)


def answered(usual: bool, witness: TargetSession, k: int) -> frozenset[bool]:
    """With (True) and without the chat template: where the target answers at length.

    Raises:
        UserError: it does not where it should.
    """
    evidence = witness.evidence(usual, k)
    places = evidence.positions(k)
    if places < ENOUGH:
        raise UserError(
            f"expected answers with at least {ENOUGH} places to draft {k} tokens, found "
            f"{places} in {len(evidence.spans)} answers",
            where=witness.settings.prompts,
            do="give more prompts (--max-prompts), more tokens of each answer (--max-new-tokens), "
            "or prompts that this target answers at length",
        )
    if not usual:
        return frozenset({False})
    try:
        plain = witness.evidence(False, k)
    except UserError as error:  # prompts with roles mean nothing there
        witness.monitor.say(f"doctor: without the chat template nothing is tried: {error.what}")
        return frozenset({True})
    if plain.positions(k) < ENOUGH:
        witness.monitor.say(
            "doctor: without the chat template the target hardly answers "
            f"({plain.answer_tokens} tokens): not tried"
        )
        return frozenset({True})
    return frozenset({True, False})
