"""The diagnosis of a head: check its files, compare it with the target, score its variants."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from draftlab.doctor.diagnosis import Diagnosis, fault, note
from draftlab.doctor.head_files import (
    HeadFiles,
    changed_file_findings,
    complete_tensors,
    read_draftlab_head,
    read_foreign_head,
)
from draftlab.doctor.hypotheses import HeadVariant, HypothesisContext, hypotheses
from draftlab.doctor.identity import (
    config_findings,
    identity_findings,
    resemblance_findings,
    shape_findings,
)
from draftlab.doctor.score import Scorer
from draftlab.doctor.search import VariantSearch, search_variants
from draftlab.doctor.target_session import TargetSession, input_norm
from draftlab.doctor.verdict import make_diagnosis
from draftlab.errors import UserError
from draftlab.export.foreign_config import layout_name
from draftlab.heads.config import USUAL_K, HeadConfig
from draftlab.heads.folder import meta_head
from draftlab.heads.head import EMBEDDINGS
from draftlab.target_model.fingerprint import fingerprint

MIN_PLAIN_POSITIONS = 100
"""Positions in answers to plain text; with fewer the head is not scored on them."""


def diagnose(folder: Path, session: TargetSession) -> Diagnosis:
    """Diagnose a head with its target. Faults of the head are findings, not exceptions.

    The files are checked first. If the head cannot be scored after faults were found there, the
    reason is a note of the diagnosis.

    Raises:
        UserError: no such folder, or a head without faults in its files cannot be scored: the
            target does not load, or the prompts cannot be used.
    """
    if not folder.is_dir():
        raise UserError(
            "expected a head's folder, found none",
            where=folder,
            do="give a folder with a head, or the name of a run",
        )
    text_config = session.text_config  # raises here: it is no fault of the head
    layout = layout_name(folder)
    conclude = partial(make_diagnosis, str(folder), session.target_settings.path, layout=layout)
    changed = changed_file_findings(folder)
    try:
        if layout == "draftlab":
            files, findings = read_draftlab_head(folder)
        else:
            files, findings = read_foreign_head(folder, session)
    except UserError as error:
        return conclude([fault("unreadable", error.what, error.do), *changed])
    findings += changed
    config, target_tensors = files.config, session.shared_tensors
    if shape_faults := shape_findings(config, text_config):
        return conclude(findings + shape_faults)
    findings += config_findings(config, text_config)
    findings += identity_findings(config, fingerprint(session.folder), session.tokenizer)
    tensors, tensor_findings = complete_tensors(files, target_tensors)
    findings += tensor_findings
    if tensors is None:
        return conclude(findings)
    findings += resemblance_findings(config, tensors, target_tensors)
    k = session.settings.k or usual_drafts(config)
    stored = HeadVariant(config, tensors, template=session.tokenizer.chat_template is not None)
    kinds = ", ".join(dict.fromkeys(f.kind for f in findings if f.severity == "fault"))
    session.monitor.say(
        f"doctor: the files have {f'faults ({kinds})' if kinds else 'no faults'}; now the target "
        "answers prompts"
    )
    try:
        conditions = session.conditions(stored.template, k)
        search = score_variants(stored, files, session, k)
    except UserError as error:
        if not kinds:
            raise
        return conclude([*findings, note("not scored", f"not scored: {error.what}", error.do)])
    return conclude(findings, conditions=conditions, search=search, provenance=config.provenance)


def score_variants(
    stored: HeadVariant, files: HeadFiles, session: TargetSession, k: int
) -> VariantSearch:
    """Score the head as stored, and the variant of every hypothesis."""
    target = session.target
    context = HypothesisContext(
        num_layers=target.num_layers,
        rope=getattr(session.text_config, "rope_parameters", None),
        target_tensors=session.shared_tensors,
        boundaries_with_norm=frozenset(
            b for b in range(target.num_layers + 1) if input_norm(target, b) is not None
        ),
        templates=usable_templates(stored.template, session, k),
        boundaries=files.boundaries,
        own_embeddings=files.tensors.get(EMBEDDINGS),
    )
    variants = [stored, *(h.variant for h in hypotheses(stored, context))]
    boundaries = {b for variant in variants for b in variant.config.boundaries}
    for template in context.templates:
        session.scoring_set(template, k).compute_states(boundaries)  # all in one pass
    scorer = Scorer(target, lambda template: session.scoring_set(template, k), k)
    return search_variants(stored, context, scorer, session.monitor)


def usual_drafts(config: HeadConfig) -> int:
    """Return the drafts a step that a head and its exports are scored at alike."""
    try:
        meta_head(config).check_drafts(USUAL_K)
    except UserError:  # a block with fewer slots
        return config.k_trained
    return USUAL_K


def usable_templates(default: bool, session: TargetSession, k: int) -> frozenset[bool]:
    """Return whether to score with (True) and without (False) the chat template.

    Args:
        default: how the target is prompted usually; without the template only if it has none.

    Raises:
        UserError: all answers to the default prompts are too short.
    """
    scoring_set = session.scoring_set(default, k)
    if not scoring_set.num_positions(k):
        raise UserError(
            f"expected answers with places to draft {k} tokens, found none in "
            f"{len(scoring_set.spans)} answers",
            where=session.suite_name,
            do="give more prompts (--max-prompts), more tokens of each answer (--max-new-tokens), "
            "or prompts that this target answers at length",
        )
    if not default:
        return frozenset({False})
    try:
        plain = session.scoring_set(False, k)
    except UserError as error:  # prompts with roles cannot be plain text
        reason = error.what
    else:
        if plain.num_positions(k) >= MIN_PLAIN_POSITIONS:
            return frozenset({True, False})
        reason = "the target's answers are too short"
    session.monitor.say(f"doctor: the head is not scored without the chat template: {reason}")
    return frozenset({True})
