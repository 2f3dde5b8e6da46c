"""Steps between two decisions, and the wall times that adaptive steps report to the policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftlab.engine import adaptive_steps
from draftlab.engine.step import GraphedStep
from draftlab.engine.wall_times import START_STEPS, Window
from tests.helpers.simulated_steps import Machine, SimulatedEngine


class Loop:
    """An engine's loop that reads a result each millisecond; graphs have a GPU's sizes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adaptive_steps, "padded_size", lambda _, n: GraphedStep.padded_size(n))
        machine = Machine(lambda shape, _: 1.0 + 0.1 * shape.k, 0.1, lambda _: [0.8] * 3, 16)
        self.steps = SimulatedEngine(machine, 3).steps
        self.now_s, self.windows, self.chosen = 0.0, [], []
        policy, choose = self.steps.policy, self.steps.policy.family
        policy.observe_window = self.windows.append
        policy.family = lambda rows: self.chosen.append(rows) or choose(rows)

    def step(self, rows: int) -> None:
        sequences = [SimpleNamespace(epoch=0, has_draft_cache=True, tokens=[0])] * rows
        self.steps.choose(sequences)
        self.now_s += 0.001
        self.steps.waited(self.now_s, self.now_s)


def test_requests_that_end_within_a_graph_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large batch they end in most steps, and a choice takes the time of a short step."""
    loop = Loop(monkeypatch)
    for number in range(100):
        loop.step(16 - number % 4)
    assert loop.chosen == []
    loop.step(8)
    assert loop.chosen == [8]


def test_a_window_has_the_steps_between_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first ones, and up to a change of the graph's size or the next requests."""
    loop = Loop(monkeypatch)
    loop.step(16)
    first = loop.steps._decision.steps
    for _ in range(START_STEPS + 2):
        loop.step(16)
    loop.steps.admitted(3)
    for _ in range(first):
        loop.step(16)
    window = loop.windows[0]
    assert window == Window(window.family, 16, first - START_STEPS, window.ms, 1, 3)
    assert window.ms == pytest.approx(window.steps)
    count = len(loop.windows)
    loop.step(8)
    assert [each.rows for each in loop.windows[count:]] == [16]
    for _ in range(START_STEPS + 5):
        loop.step(8)
    count = len(loop.windows)
    loop.steps.measure([])
    assert [each.rows for each in loop.windows[count:]] == [8]
    assert all(each.ms == pytest.approx(each.steps) for each in loop.windows)
