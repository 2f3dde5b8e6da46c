"""The adviser under load: predict the goodput of every K at each measured concurrency.

It is the model of `speedup_model.py`, with acceptance and steps of the decoded streams. An answer
also takes its TTFT, and the prefills of other requests are part of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from draftlab.evaluate.advice_check import check_left_out
from draftlab.evaluate.results import LoadPoint, Row
from draftlab.evaluate.speedup_model import goodput_tables


@dataclass(frozen=True)
class LoadPrediction:
    """The predicted goodput of K drafts a step under load; the fields are as in `Prediction`."""

    k: int
    goodput_tok_s: float
    speedup: float
    measured_speedup: float | None
    left_out_speedup: float | None = None
    error: float | None = None
    met: bool | None = None
    close: bool | None = None


@dataclass(frozen=True)
class LoadAdvice:
    """The predictions for one head, temperature, drafter setting and concurrency.

    Attributes:
        best_k: the K with the highest predicted goodput; 0: plain decoding.
    """

    engine: str
    head: str | None
    temperature: float
    draft_probs: bool
    concurrency: int
    best_k: int
    predictions: tuple[LoadPrediction, ...]


def load_advice(points: Sequence[LoadPoint], rows: Sequence[Row]) -> list[LoadAdvice]:
    """Return the advice for each table under load and each of its concurrencies."""
    plain = {(p.engine, p.temperature, p.concurrency): p.goodput_tok_s for p in points if not p.k}
    advice = []
    for key, table in goodput_tables(points, rows).items():
        for concurrency in table.batches:
            measured = table.at_batch(concurrency)
            known = {k: m.acceptance for k, m in measured.items() if m.acceptance}
            goodput = plain[key[0], key[2], concurrency]
            predictions = []
            for k in range(1, max(measured) + 1):
                if (predicted := table.predict(concurrency, k, known)) is None:
                    continue
                check = check_left_out(table, concurrency, k)
                prediction = LoadPrediction(
                    k,
                    goodput * predicted[2],
                    predicted[2],
                    measured[k].speedup if k in measured else None,
                    **(asdict(check) if check else {}),
                )
                predictions.append(prediction)
            best = max(predictions, key=lambda p: p.speedup, default=None)
            if best is not None:
                best_k = best.k if best.speedup > 1 else 0
                advice.append(LoadAdvice(*key, concurrency, best_k, tuple(predictions)))
    return advice
