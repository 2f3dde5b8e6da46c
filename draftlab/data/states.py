"""What one forward pass records: boundary states, and a summary of the target's distributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.base import UserError
from draftlab.data.manifest import StoreIdentity
from draftlab.data.store import DTYPES, Sample
from draftlab.target.model import Target

LOGITS_AT_ONCE = 64 * 2**20  # elements; the full-vocabulary logits of a whole batch never exist


def batch_states(
    target: Target, samples: Sequence[Sample], identity: StoreIdentity
) -> dict[str, Tensor]:
    """What one right-padded forward pass records, padding taken out again.

    Returns:
        features [n, F] and last [n, Ht] in the store's dtype, logsumexp float32 [n] and argmax
        int32 [n], on the CPU; n tokens of all samples in order.
    """
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    ids = torch.zeros(len(samples), int(lengths.max()), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
    real = (torch.arange(ids.shape[1]) < lengths[:, None]).to(target.device)
    try:
        states = target.states(ids.to(target.device), identity.boundaries)
        features, last = states.features[real], states.last[real]
        logsumexp, argmax = summarise(target, last)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a forward pass of {ids.shape[0]} × {ids.shape[1]} tokens does not fit: {error}",
            do="lower record.batch_tokens (or record.max_length)",
        ) from None
    dtype = DTYPES[identity.dtype]
    stored = {"features": features.to(dtype), "last": last.to(dtype), "logsumexp": logsumexp}
    _check_finite(stored, samples, identity)
    stored["argmax"] = argmax.to(torch.int32)
    return {name: values.cpu() for name, values in stored.items()}


def summarise(target: Target, last: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp float32 [n] and argmax int64 [n] of the full distributions of last states [n, Ht].

    Give it the states as the target computed them, not as they are stored, so that argmax is the
    token the target itself emits. torch.argmax gives the first of equal maxima: the lowest id.
    """
    rows = max(1, LOGITS_AT_ONCE // target.vocab_size)
    sums, tokens = [], []
    for part in last.split(rows):
        logits = target.logits(part)
        sums.append(logits.logsumexp(-1))
        tokens.append(logits.argmax(-1))
    return torch.cat(sums), torch.cat(tokens)


def _check_finite(
    stored: dict[str, Tensor], samples: Sequence[Sample], identity: StoreIdentity
) -> None:
    for name, values in stored.items():
        if bool(values.isfinite().all()):
            continue
        # One NaN spreads to every position in the next layer: the lowest boundary tells most.
        bad = ~values.isfinite().view(len(values), -1)
        column, position = bad.T.nonzero()[0].tolist()
        if name == "features":
            place = f"boundary {identity.boundaries[column // identity.hidden_size]}"
        else:
            place = (
                "the logits" if name == "logsumexp" else f"boundary {identity.num_layers} (last)"
            )
        for sample in samples:
            if position < len(sample.token_ids):
                break
            position -= len(sample.token_ids)
        raise UserError(
            f"expected finite states, found NaN or infinity at {place}, position {position}",
            where=f"sample {sample.id!r}",
            do="load the target in float32 or bfloat16 (target.dtype); float16 overflows easily",
        )
