"""Number formats and row names."""

from __future__ import annotations

from draftlab.heads.folder import load_config
from draftlab.report import formatting as fmt
from draftlab.report.conditions import row_labels, split_conditions
from draftlab.run.resolve import reference_head
from tests.helpers import sample_report as sample


def test_labels_name_what_differs_and_are_unique() -> None:
    report = sample.report()
    assert row_labels(report.rows) == [
        "T = 0, no drafting",
        "T = 0, argmax drafts",
        "T = 0.8, no drafting",
        "T = 0.8, argmax drafts",
        "T = 0.8, sampled drafts",
    ]
    rows = [sample.row(k=2), sample.row(k=4, batch=8), sample.row(k=4, batch=8)]
    assert row_labels(rows) == [
        "T = 0, K = 2, batch 1",
        "T = 0, K = 4, batch 8 (#2)",
        "T = 0, K = 4, batch 8 (#3)",
    ]


def test_the_trained_k_of_several_heads_names_the_head() -> None:
    rows = [sample.baseline(), sample.row(head="a", k_trained=4), sample.row(head="b", k_trained=6)]
    shared, varying = split_conditions(rows)
    assert shared["trained K"] == "4 (a), 6 (b)"
    assert set(varying) == {"head"}
    assert row_labels(rows) == ["T = 0, no drafting", "T = 0, a", "T = 0, b"]


def test_the_note_on_the_reference_head_is_true() -> None:
    tokens = load_config(reference_head()).provenance["tokens_seen"]
    assert f"on {tokens / 1e6:.0f} M tokens" in fmt.HEAD_NOTES["reference"]
