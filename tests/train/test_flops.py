"""Operations that training counts are those that torch counts in the reference pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftlab.train import flops, metrics
from draftlab.train.batch.packing import pack
from draftlab.train.flops import StepWork
from draftlab.train.metrics import PhaseTimer, Window, speed_line
from draftlab.train.settings import TrainSettings
from tests.helpers import synthetic

LAST = {"boundaries": (4,), "draft_vocab_size": synthetic.VOCAB}
KINDS: dict[str, dict[str, object]] = {
    "eagle3": {},
    "eagle3, wide": {"intermediate_size": 200, "num_attention_heads": 12},
    "peagle": {"family": "peagle", "num_layers": 1},
    "peagle, two layers": {"family": "peagle", "num_layers": 2},
    "dspark": {"family": "dspark", "num_layers": 2},
    "dspark, whole vocabulary": {"family": "dspark", "draft_vocab_size": synthetic.VOCAB},
    "dflash": {"family": "dflash", "intermediate_size": 120},
    "dflash2": {"family": "dflash2", "num_layers": 2},
    "eagle": {"family": "eagle", "num_layers": 2, **LAST},
}
TURNS = {"answer": [(2, 40)], "prompt": [(40, 9)], "two": [(3, 8), (20, 12)]}


def added_product(total: Any, left: Any, right: Any, **_: Any) -> int:
    """Return the operations of a product into a given tensor, which torch's counter passes over."""
    return 2 * left[0] * left[1] * right[1]


COUNTED = {torch.ops.aten.addmm_: added_product}


@pytest.mark.parametrize(("turns", "passes"), [("answer", 1), ("prompt", 1), ("two", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_counted_as_torch_counts_them(kind: str, turns: str, passes: int) -> None:
    """Without attention, whose reference also multiplies what it masks."""
    target = synthetic.parts()
    head = synthetic.head(target, **KINDS[kind])
    record = synthetic.record(synthetic.spans_of(TURNS[turns]), target)
    batch = pack([[record], [record]], 64, 3, num_passes=passes)
    objective = head.family.objective()
    terms = objective.loss_terms(TrainSettings())
    expected = own = 0.0
    for part in batch.split():
        counter: Any = FlopCounterMode(display=False, custom_mapping=COUNTED)
        with counter:
            loss, _ = synthetic.family_loss(head, target, part, gamma=0.8, terms=terms)
            loss.backward()
        by_op = counter.get_flop_counts()["Global"]
        expected += sum(n for op, n in by_op.items() if op is not torch.ops.aten.bmm)
        own += objective.flops(
            head, StepWork(part.num_tokens, part.counts, part.num_teachers, context=0)
        )
    assert own == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("window", "seen"), [(None, 5), (4, 4), (6, 5)])
def test_attention_counts_two_products_of_each_key_that_is_seen(
    window: int | None, seen: int
) -> None:
    head = synthetic.head(synthetic.parts(), sliding_window=window, k_trained=3)
    none, some = (flops.chain_flops(head, StepWork(10, [6, 4], 6, c)) for c in (0, 5))
    assert some - none == 2 * 3 * 2 * 4 * 8 * seen * (6 + 4)  # 4 heads of 8, with gradients


@pytest.mark.parametrize(("seconds", "shown"), [(1e-9, "MFU 0%"), (1e9, "MFU not known")])
def test_an_mfu_above_one_is_not_shown(seconds: float, shown: str) -> None:
    window, timer = Window.empty(1, torch.device("cpu")), PhaseTimer(torch.device("cpu"))
    timer.start()
    timer.mark("step")
    row = window.compute(timer, mfu_seconds=seconds * 1e-3)
    assert (row["mfu"] is None) == (seconds > 1)
    assert shown in speed_line(row)


def test_memory_in_use_before_the_training_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target may stay on the GPU."""
    monkeypatch.setattr(metrics, "peak_memory", lambda _: 5 * 2**30)
    window, timer = Window.empty(1, torch.device("cpu")), PhaseTimer(torch.device("cpu"))
    timer.start()
    timer.mark("step")
    row = window.compute(timer, mfu_seconds=None, bytes_before=2**31)
    assert row["peak_memory_gib"] == 3.0
