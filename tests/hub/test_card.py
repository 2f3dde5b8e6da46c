"""The model card: figures with their conditions, and metadata that the Hub reads."""

from __future__ import annotations

import yaml
from huggingface_hub import ModelCard

from draftlab.heads.folder import load_config
from draftlab.hub.card import model_card
from draftlab.pipeline.resolve import reference_head
from tests.helpers.sample_report import report

LAUNCH = "# Serving this head with vLLM\n\n```\nvllm serve org/base\n```\n"
CERTIFICATE = {
    "level": "L1",
    "passed": True,
    "lines": ["T = 0: 32 of 32 prompts equal", "T = 1.5: G = 61.2, p = 0.5"],
}


def card(**changes: object) -> str:
    certified = report()
    environment = certified.environment | {"certificates": {"head": CERTIFICATE}}
    name = next(row.head for row in certified.rows if row.head)
    fields = {
        "repo": "org/head",
        "head": load_config(reference_head()),
        "report": certified.model_copy(update={"environment": environment}),
        "rows": [row for row in certified.rows if row.head in (name, None)],
        "layout": "speculators layout",
        "launch": LAUNCH,
        "recipe": "name: x\nnote: 'a: b'\n",
        "base_model": "org/base",
        "licence": "apache-2.0",
        "data": [("prompts", "embedded")],
        "plots": ["tpot.png"],
    }
    return model_card(**fields | changes)


def test_the_hub_can_read_the_front_matter() -> None:
    text = card()
    _, front, body = text.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert (fields["base_model"], fields["license"]) == ("org/base", "apache-2.0")
    results = fields["model-index"][0]["results"]
    kinds = {metric["type"] for result in results for metric in result["metrics"]}
    assert kinds == {"acceptance_length", "speedup"}
    assert ModelCard(text).data.eval_results
    assert body.lstrip().startswith("# head")


def test_the_card_has_counters_conditions_certificate_and_commands() -> None:
    text = card()
    row = next(row for row in report().rows if row.head)
    for words in (
        f"{row.acceptance_length:.2f} [",
        f"| {row.drafts:,} | {row.draft_tokens:,} | {row.accepted:,} |",
        f"{row.prompts} of {row.suite}",
        row.suite_sha256[:12],
        "## Losslessness certificate",
        "L1, passed",
        "32 of 32 prompts equal",
        "vllm serve org/base",
        "![tpot](tpot.png)",
        "note: 'a: b'",
    ):
        assert words in text, words


def test_unknown_values_are_left_out() -> None:
    text = card(base_model=None, licence=None)
    fields = yaml.safe_load(text.split("---\n", 2)[1])
    assert not {"base_model", "license"} & set(fields)
    assert "Licence: not stated" in text
