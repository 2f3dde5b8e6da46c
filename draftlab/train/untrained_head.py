"""The head as it is before training."""

from __future__ import annotations

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead, initialise_head
from draftlab.target_model.parts import TargetParts
from draftlab.text.draft_vocabulary import DraftVocabulary


def untrained_head(
    config: HeadConfig, parts: TargetParts, vocabulary: DraftVocabulary, seed: int
) -> DraftHead:
    """Return a float32 head on the CPU, with the values that `initialise_head` sets.

    Args:
        parts: of the target, in any dtype.
        seed: of the values that are random.

    Raises:
        UserError: the target's final norm is of no known form.
    """
    if (form := parts.norm_form) is None:
        raise UserError(
            f"expected a final norm that divides states by their root mean square or standard "
            f"deviation and multiplies them by a weight, found {type(parts.norm).__name__}, which "
            "computes something else",
            where="target",
            do="choose another target: a draft head cannot start from this norm",
        )
    head = new_head(config)
    # A head's logits have no factor: its lm_head takes the target's, or, if that is frozen, its
    # norm does. EAGLE heads imitate the last state, and have the target's logits as they are.
    family = head.family
    of_norm = parts.scale if family.freezes_lm_head else 1.0
    of_lm_head = 1.0 if family.freezes_lm_head or family.uses_target_lm_head else parts.scale
    initialise_head(
        head,
        embeddings=parts.embeddings.float(),
        final_norm=of_norm * form.weight.float(),
        lm_head=of_lm_head * parts.lm_head.float(),
        target_ids=vocabulary.target_ids,
        seed=seed,
    )
    return head
