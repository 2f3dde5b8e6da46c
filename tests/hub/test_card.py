"""The model card: figures with their conditions, and metadata that the Hub reads."""

from __future__ import annotations

import yaml
from huggingface_hub import ModelCard

from draftlab.evaluate.certificate.result import Certificate, SamplingTest
from draftlab.evaluate.results import Row
from draftlab.heads.folder import load_config
from draftlab.hub.card import model_card
from draftlab.report.sections import of_head, sections
from draftlab.run.resolve import reference_head
from tests.helpers.sample_report import report

LAUNCH = "# Serving this head with vLLM\n\n```\nvllm serve org/base\n```\n"


def sampling_test(**fields: object) -> SamplingTest:
    """Return a passed test at T > 0 of level L1."""
    values = {
        "temperature": 0.8, "k": 4, "draft_probs": True, "top_k": None,
        "top_p": None, "level": "L1", "test": "G-test", "passed": True, "p_value": 0.5, "n": 4000,
        "tests": [],
    }  # fmt: skip
    return SamplingTest(**(values | fields))


GREEDY = "T = 0, K = 4, float32: tokens of 100.0% of 32 prompts equal plain decoding's"


def certificate(*arms: SamplingTest, **fields: object) -> Certificate:
    values = {"level": "L1", "prompts_equal": 1.0, "passed": True, "faults": [], "num_tests": 4}
    lines = [GREEDY, "passed, level L1"]
    return Certificate(**(values | {"arms": list(arms), "lines": lines} | fields))


def card(
    certified: Certificate | None = None, rows: list[Row] | None = None, **changes: object
) -> str:
    """Return the card of a report, by default without a certificate of the head."""
    base = report()
    name = next(row.head for row in base.rows if row.head)
    # The certificate of a head that was only compared says nothing about this one.
    certificates = {"another": certificate(sampling_test()).model_dump(mode="json")}
    if certified is not None:
        certificates[name] = certified.model_dump(mode="json")
    environment = base.environment | {"certificates": certificates}
    base = base.model_copy(update={"environment": environment, "rows": rows or base.rows})
    own = of_head(base, name)
    fields = {
        "repo": "org/head",
        "head": load_config(reference_head()),
        "layout": "speculators layout",
        "launch": LAUNCH,
        "recipe": "name: x\nnote: 'a: b'\n",
        "removed": [],
        "base_model": "org/base",
        "licence": "apache-2.0",
        "data": [("prompts", "embedded")],
        "report": own,
        "shown": sections(own, figures=True),
    }
    return model_card(**fields | changes)


MEASURED = "T = 0, K = 4, float32, draftlab-eager: tokens of {} of 64 prompts equal those of"
CLAIMS = ("lossless", "target alone", "distribution", "L1", "L2", "certificate")


def test_without_a_certificate_only_what_was_measured_is_said() -> None:
    text = card()
    assert f"- {MEASURED.format('100.0%')} decoding without drafts\n- T > 0: not tested" in text
    assert not [words for words in CLAIMS if words.lower() in text.lower()]

    unequal = [
        row.model_copy(update={"prompts_equal": 0.9 if row.temperature == 0 else None})
        for row in report().rows
    ]
    assert f"- {MEASURED.format('90.0%')}" in card(rows=unequal)
    unknown = [row.model_copy(update={"prompts_equal": None}) for row in unequal]
    assert "prompts equal" not in card(rows=unknown)


def test_a_certificate_is_claimed_for_what_it_tested() -> None:
    tests = (
        sampling_test(),
        sampling_test(k=2, draft_probs=False, top_p=0.9, level="LS"),
        sampling_test(temperature=1.5, level="L2"),
    )
    text = card(certificate(*tests, level="L2"))
    for line in (
        f"- {GREEDY}",
        "- T = 0.8, K = 4, draft probabilities on: rejection sampling and the output of "
        "the engine passed tests of their distribution (L1)",
        "- T = 0.8, top-p 0.9, K = 2, draft probabilities off: rejection sampling passed a test of "
        "its distribution; the engine around it was not tested (LS)",
        "- T = 1.5, K = 4, draft probabilities on: no equality shown (L2)",
        "### Losslessness certificate of runs/quickstart/head: L2, passed",
    ):
        assert line in text, line
    assert "the output is what" not in text


def test_a_failed_certificate_is_stated() -> None:
    faults = ["T = 0: tokens differ from plain decoding's in float32"]
    text = card(certificate(sampling_test(), level="L3", passed=False, faults=faults))
    assert f"- the certificate FAILED: {faults[0]}" in text
    assert "passed tests" not in text


def test_the_hub_can_read_the_front_matter() -> None:
    rows = [
        row.model_copy(update={"speedup_ci": row.speedup and (1.0, 9.0)}) for row in report().rows
    ]
    text = card(rows=rows)
    _, front, body = text.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert (fields["base_model"], fields["license"]) == ("org/base", "apache-2.0")
    results = fields["model-index"][0]["results"]
    kinds = {metric["type"] for result in results for metric in result["metrics"]}
    assert kinds == {"acceptance_length", "speedup"}
    names = [metric["name"] for result in results for metric in result["metrics"]]
    assert all("; 95 %: 1.000 to 9.000)" in name for name in names if name.startswith("Speed-up"))
    assert ModelCard(text).data.eval_results
    assert body.lstrip().startswith("# head")


def test_several_engines_are_told_apart() -> None:
    rows = report().rows
    vllm = [row.model_copy(update={"engine": "vllm", "engine_version": "9"}) for row in rows]
    text = card(rows=[*rows, *vllm])
    results = ModelCard(text).data.eval_results
    assert len({one.metric_name for one in results}) == len(results)
    assert "| engine | T | K |" in text
    assert "| vllm 9 | 0 | 4 |" in text
    assert "| engine | T | K |" not in card()
