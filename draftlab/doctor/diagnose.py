"""The diagnosis of a head: check its files, compare it with the target, score its variants."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from draftlab.doctor.diagnosis import Diagnosis, fault, note
from draftlab.doctor.head_files import (
    HeadFiles,
    changed_file_findings,
    config_findings,
    identity_findings,
    read_foreign_head,
    scored_tensors,
    served_config_findings,
    shape_findings,
    tensor_findings,
)
from draftlab.doctor.hypotheses import HeadVariant, HypothesisContext, hypotheses
from draftlab.doctor.score import Scorer
from draftlab.doctor.target_session import TargetSession, input_norm
from draftlab.doctor.verdict import VariantResult, VariantSearch, make_diagnosis
from draftlab.errors import UserError
from draftlab.export.foreign_config import layout_name
from draftlab.export.weight_files import read_weights
from draftlab.heads.config import USUAL_K, HeadConfig
from draftlab.heads.folder import load_config, meta_head
from draftlab.heads.head import EMBEDDINGS
from draftlab.target_model.fingerprint import fingerprint


def diagnose(folder: Path, session: TargetSession) -> Diagnosis:
    """Diagnose a head with its target. Faults of the head are findings, not exceptions.

    The files are checked first. If the head cannot be scored after faults were found there, the
    reason is a note of the diagnosis.

    Raises:
        UserError: a head without faults in its files cannot be scored: the target does not load, or
            the prompts cannot be used.
    """
    text_config = session.text_config  # raises here: it is no fault of the head
    layout = layout_name(folder)
    conclude = partial(make_diagnosis, str(folder), session.target_settings.path, layout=layout)
    changed = list(changed_file_findings(folder))
    try:
        if layout == "draftlab":
            files = HeadFiles(load_config(folder), read_weights(folder, "head's weights"))
            findings = served_config_findings(folder, files)
        else:
            files, findings = read_foreign_head(folder, session)
    except UserError as error:
        return conclude([fault("unreadable", error.what, error.do), *changed])
    findings += changed
    config = files.config
    if shape_faults := shape_findings(config, text_config):
        return conclude(findings + shape_faults)
    findings += config_findings(config, text_config)
    findings += identity_findings(config, fingerprint(session.folder), session.tokenizer)
    faults, scorable = tensor_findings(files)
    findings += faults
    if not scorable:
        return conclude(findings)
    k = session.settings.k or usual_drafts(config)
    stored = HeadVariant(config, scored_tensors(files, session.shared_tensors))
    kinds = ", ".join(dict.fromkeys(f.kind for f in findings if f.severity == "fault"))
    session.monitor.say(
        f"doctor: the files have {f'faults ({kinds})' if kinds else 'no faults'}; now the target "
        "answers prompts"
    )
    try:
        conditions = session.conditions(k)
        search = score_variants(stored, files, session, k)
    except UserError as error:
        if not kinds:
            raise
        return conclude([*findings, note("not scored", f"not scored: {error.what}", error.do)])
    return conclude(findings, conditions=conditions, search=search, provenance=config.provenance)


def score_variants(
    stored: HeadVariant, files: HeadFiles, session: TargetSession, k: int
) -> VariantSearch:
    """Score the head as stored, and the variant of every hypothesis.

    Raises:
        UserError: the prompts cannot be used, or all answers are too short.
    """
    target, scoring_set = session.target, session.scoring_set(k)
    if not scoring_set.num_positions(k):
        raise UserError(
            f"expected answers with places to draft {k} tokens, found none in "
            f"{len(scoring_set.spans)} answers",
            where=session.suite_name,
            do="give more prompts (--max-prompts), more tokens of each answer (--max-new-tokens), "
            "or prompts that this target answers at length",
        )
    context = HypothesisContext(
        num_layers=target.num_layers,
        rope=getattr(session.text_config, "rope_parameters", None),
        target_tensors=session.shared_tensors,
        boundaries_with_norm=frozenset(
            b for b in range(target.num_layers + 1) if input_norm(target, b) is not None
        ),
        boundaries=files.boundaries,
        own_embeddings=files.tensors.get(EMBEDDINGS),
    )
    rows = list(hypotheses(stored, context))
    boundaries = {b for v in (stored, *(row.variant for row in rows)) for b in v.config.boundaries}
    scoring_set.compute_states(boundaries)  # all in one pass
    scorer = Scorer(scoring_set, k)
    base, others = scorer(stored), []
    for number, row in enumerate(rows, 1):
        score = scorer(row.variant)
        others.append(VariantResult(row, score, *score.gain(base, len(rows))))
        session.monitor.progress("doctor: variants", number, len(rows), row.name)
    others.sort(key=lambda result: result.gain, reverse=True)
    return VariantSearch(VariantResult(None, base), others)


def usual_drafts(config: HeadConfig) -> int:
    """Return the drafts a step that a head and its exports are scored at alike."""
    try:
        meta_head(config).check_drafts(USUAL_K)
    except UserError:  # a block with fewer slots
        return config.k_trained
    return USUAL_K
