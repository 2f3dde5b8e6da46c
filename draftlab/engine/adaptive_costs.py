"""Measure what adaptive verification weighs: steps of all shapes, and admissions of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftlab.engine import generation_state
from draftlab.engine.admission_costs import AdmissionCosts, measure_admission_costs
from draftlab.engine.in_flight import copy_to_host
from draftlab.engine.input_batch import InputBatch
from draftlab.engine.sampling import Request
from draftlab.engine.scheduler import BlockPool, Scheduler
from draftlab.engine.step import GraphedStep, Step, StepShape
from draftlab.engine.step_costs import STEPS, ShapeFamily, StepCosts, measure_step_costs

RunStep = Callable[..., object]
Prefill = Callable[[list[generation_state.Sequence], StepShape], object]
ADMITTED = 1, 4, 16
"""Requests of the admissions whose costs are measured."""


def measure_costs(
    step: Step,
    families: Sequence[ShapeFamily],
    requests: Sequence[Request],
    *,
    run: RunStep,
    prefill: Prefill,
    least_rows: int,
) -> tuple[StepCosts, AdmissionCosts]:
    """Return the costs of steps and admissions of an engine that decodes nothing yet.

    Args:
        requests: some that will be decoded.
        run: launches a step of slots with a shape, and returns its results.
        prefill: launches the prefill of sequences with slots and blocks, and a shape's drafts.
        least_rows: rows from which on steps that state confidence are measured.
    """
    batch, num_blocks = step.input_batch, step.cache.num_blocks - 1
    different = list({request.prompt_ids: request for request in requests}.values())
    pool = BlockPool(num_blocks, step.cache.block_size)
    slots = batch.num_slots
    admitted = Scheduler(different[:slots], pool, slots, step.k, step.max_length).admit()
    # First, since prefills allocate the states of recurrent layers, which steps need.
    admissions = measure_admission_costs(
        lambda count, k: prefill(admitted[:count], StepShape(k)),
        {family.k for family in families},
        [count for count in ADMITTED if count <= len(admitted)],
        batch.device,
    )
    lengths = [len(r.prompt_ids) + r.max_new_tokens // 2 for r in requests]
    room = step.max_length - (STEPS + 2) * (step.k + 1)
    length = min(sum(lengths) // len(lengths), room)
    sizes = {1, slots, max(slots // 4, 1), max(slots // 2, 1)}
    all_sizes = sorted({padded_size(batch, size) for size in sizes})
    large = [size for size in all_sizes if size >= least_rows]
    costs = measure_step_costs(
        lambda slots, shape: copy_to_host([], run(slots, shape)),
        batch,
        {f: large if f.states_confidence else all_sizes for f in families},
        tokens=list(dict.fromkeys(token for r in requests for token in r.prompt_ids)),
        length=max(length, 1),
        num_blocks=num_blocks,
    )
    return costs, admissions


def padded_size(batch: InputBatch, rows: int) -> int:
    """Return the rows of a step with the dummies that pad its graph, up to the whole batch."""
    if batch.device.type != "cuda":
        return rows
    return min(GraphedStep.padded_size(rows), batch.num_slots)
