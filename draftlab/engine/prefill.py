"""Prefill: run prompts in chunks through target and drafter, and sample first tokens.

Equal prompts are computed once and the other rows copy their cache blocks: what differs between
them begins with their first tokens. Sampling a prompt many times then costs little more than
decoding.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from draftlab.engine.base_drafter import VerifiedFeatures
from draftlab.engine.generation_state import InFlight, Sequence, copy_to_host
from draftlab.engine.step import Step
from draftlab.kernels.compile_ahead import is_fake
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.sampling import sample_token
from draftlab.kernels.step_layout import pack_results
from draftlab.target_model.hidden_states import HiddenStates
from draftlab.target_model.images import token_ids

Tokens = tuple[int, ...]


@torch.inference_mode()
def launch_prefill(step: Step, sequences: list[Sequence], chunk_tokens: int) -> InFlight:
    """Launch the prefill of sequences in chunks, then their first drafts.

    Args:
        step: the engine's step; its input batch is written.
        sequences: admitted sequences, with slots and blocks.
        chunk_tokens: about the tokens in a forward pass of all rows, including padding.
    """
    batch = step.input_batch
    index = batch.index([sequence.slot for sequence in sequences])
    # After a preemption the newest token is known; as always, it has no cached key yet.
    inputs = [tuple(s.tokens[:-1] if s.resumed else s.tokens) for s in sequences]
    first_row: dict[Tokens, int] = {}  # each prompt is computed in its first row
    for row, tokens in enumerate(inputs):
        first_row.setdefault(tokens, row)
    prompts = sorted(first_row, key=len, reverse=True)
    prompt_rows = [first_row[tokens] for tokens in prompts]
    sources = [first_row[tokens] for tokens in inputs]
    prompt_index = index[batch.to_device(prompt_rows, torch.int64)]
    passes = [slice(0, len(prompts))]
    if step.cache.states is not None:
        passes = _whole_prompts(prompts, chunk_tokens)
    states = HiddenStates.join(
        [_run_prompts(step, prompt_index[rows], prompts[rows], chunk_tokens) for rows in passes]
    )
    _copy_blocks(step, sequences, sources, [len(tokens) for tokens in inputs])

    gather = batch.to_device([prompt_rows.index(row) for row in sources], torch.int64)
    lengths = batch.to_device([len(tokens) for tokens in inputs], torch.int64)
    resumed = batch.to_device([s.resumed for s in sequences], torch.bool)
    newest = batch.to_device([s.tokens[-1] for s in sequences], torch.int64)
    limited = any(s.limited for s in sequences)
    states = HiddenStates(states.features[gather], states.last[gather])
    known = resumed, newest
    result, verified = emit_first_tokens(step, index, lengths, states, limited=limited, known=known)
    launched = copy_to_host(sequences, result)  # first tokens do not wait for drafts
    if verified is not None:
        step.draft(index, verified)
    return launched


def emit_first_tokens(
    step: Step,
    index: Tensor,
    lengths: Tensor,
    states: HiddenStates,
    *,
    limited: bool,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, VerifiedFeatures | None]:
    """Sample first tokens after prompts and write them to the input batch.

    Args:
        index: slots, int64 [B].
        lengths: of the prompts, int64 [B]; 0 for the dummy, which stays empty.
        states: of their last positions, [B, …].
        known: rows whose token is known, bool [B], and their tokens, int64 [B].

    Returns:
        The tokens as packed results with num_drafts = −1, and the features to propose from; None:
        there is no drafter.
    """
    batch = step.input_batch
    keys = batch.keys[index]
    newest = sample_token(step.target.logits(states.last), lengths, keys, limited=limited)
    if known is not None:
        is_known, tokens = known
        newest = tokens.where(is_known, newest)
    batch.length[index] = (lengths + 1).where(lengths > 0, 0)
    zeros = torch.zeros_like(lengths)
    batch.newest[index], batch.stored[index] = newest, zeros  # a graph cannot copy a number
    no_probability = newest.new_empty(len(index), 0)
    no_confidence = None if batch.confidence is None else no_probability
    result = pack_results(newest[:, None], zeros, zeros - 1, no_probability, no_confidence)
    if step.drafter is None:
        return result, None
    # The last pair has the newest token, which differs between equal prompts.
    return result, VerifiedFeatures(
        newest[:, None],
        states.features[:, None],
        lengths[:, None] - 1,
        torch.ones_like(lengths),
        batch.block_table[index],
        keys,
    )


def _whole_prompts(prompts: list[Tokens], chunk_tokens: int) -> list[slice]:
    """Return the prompts of each pass where a prompt must run at once, as recurrent layers need.

    Args:
        prompts: the longest first.
        chunk_tokens: tokens in a pass, with padding; a longer prompt has a pass of its own.
    """
    passes, start = [], 0
    while start < len(prompts):
        end = min(start + max(chunk_tokens // len(prompts[start]), 1), len(prompts))
        passes.append(slice(start, end))
        start = end
    return passes


def _run_prompts(
    step: Step, index: Tensor, prompts: list[Tokens], chunk_tokens: int
) -> HiddenStates:
    """Run prompts through the target, and all their pairs but the last through the drafter.

    A pass has the prompts that are not computed yet, so that short ones do not wait as padding for
    the end of the longest.

    Args:
        index: the prompts' slots, int64 [R].
        prompts: R prompts, the longest first.
        chunk_tokens: about the tokens in a forward pass of all rows, including padding.

    Returns:
        The states [R, …] of their last positions.
    """
    to_device = step.input_batch.to_device
    lengths = to_device([len(prompt) for prompt in prompts], torch.int64)
    longest, end = len(prompts[0]), 0
    last_states: list[HiddenStates] = []  # of the prompts that end in each pass
    while prompts:
        rows = slice(len(prompts))
        # Kernels are compiled for multiples of 16 and once more for other numbers of columns.
        columns = max(round(chunk_tokens / len(prompts) / 16), 1) * 16
        start, end = end, min(end + columns, longest)
        if step.cache.states is not None:
            end = longest
        states = run_columns(
            step,
            index[rows],
            lengths[rows],
            _columns(to_device, prompts, start, end),
            _columns(to_device, prompts, start + 1, end + 1),
            start,
            num_pairs=min(end, longest - 1) - start,
            ends=[len(prompt) for prompt in prompts],
        )
        # Of kernels that are compiled ahead, the first pass asks for most.
        prompts = [prompt for prompt in prompts if len(prompt) > end and not is_fake()]
        ended = slice(len(prompts), rows.stop)
        column = (lengths[ended] - 1 - start)[:, None, None]
        last_states.append(
            HiddenStates(
                *(
                    values[ended].gather(1, column.expand(-1, 1, values.shape[-1]))[:, 0]
                    for values in (states.features, states.last)
                )
            )
        )
    return HiddenStates.join(last_states[::-1])


def run_columns(
    step: Step,
    index: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    following: Tensor,
    start: int,
    *,
    num_pairs: int,
    ends: list[int] | None = None,
) -> HiddenStates:
    """Run some columns of prompts through the target; give the drafter their pairs but the last.

    Args:
        index: the prompts' slots, int64 [R].
        lengths: of the prompts, int64 [R]; 0 for the dummy.
        tokens, following: int64 [R, M], the tokens from position `start` on, and those after them.
        num_pairs: the most pairs of a prompt among these columns, without its last one.
        ends: `lengths` on the host, if they are known there.
    """
    batch, cache = step.input_batch, step.cache
    columns = torch.arange(start, start + tokens.shape[1], device=index.device).expand_as(tokens)
    positions, table = columns.where(columns < lengths[:, None], -1), batch.block_table[index]
    slots = slot_mapping(table, positions, cache.block_size)
    states = step.decoder.states(
        tokens,
        step.boundaries,
        positions=positions,
        cache=cache.at(table, positions, slots, index, ends),
    )
    if step.drafter is not None and num_pairs > 0:
        pair_positions = columns.where(columns < lengths[:, None] - 1, -1)
        counts = (pair_positions >= 0).sum(1).clamp(min=1)
        pairs = VerifiedFeatures(
            token_ids(step.target, following),
            states.features,
            pair_positions,
            counts,
            table,
            batch.keys[index],
        )
        step.drafter.extend_cache(pairs.first_columns(num_pairs))
    return states


def _copy_blocks(
    step: Step, sequences: list[Sequence], sources: list[int], lengths: list[int]
) -> None:
    """Copy the blocks of each sequence's prompt from the row that computed it (`sources`)."""
    pairs: list[tuple[int, int]] = []
    for row, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        if source != row:
            prompt_blocks = sequences[source].blocks[: -(-length // step.cache.block_size)]
            pairs += zip(prompt_blocks, sequences[row].blocks, strict=False)
    if not pairs:
        return
    index_from, index_to = (
        step.input_batch.to_device(blocks, torch.int64) for blocks in zip(*pairs, strict=True)
    )
    draft_pools = chain.from_iterable(step.drafter.pools if step.drafter else ())
    for pool in (*step.cache.pools, *draft_pools):
        pool.index_copy_(0, index_to, pool.index_select(0, index_from))
    if step.cache.states is not None:
        to_device = step.input_batch.to_device
        slots = [[sequences[source].slot for source in sources], [s.slot for s in sequences]]
        step.cache.states.copy_rows(*(to_device(rows, torch.int64) for rows in slots))


def _columns(to_device, rows: list[Tokens], start: int, end: int) -> Tensor:
    """Return columns start … end − 1 of ragged rows, int64 [R, end − start], padded with 0."""
    chunks = [list(row[start:end]) for row in rows]
    return to_device([chunk + [0] * (end - start - len(chunk)) for chunk in chunks], torch.int64)
