"""The model card: what the head is, for which target, what was measured, and how it is served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from draftlab.evaluate.results import Report, Row
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.report import formatting as wording

TAG = "draftlab"
"""Tag of every repository that draftlab pushes; it tells them from others'."""


@dataclass(frozen=True)
class CardFacts:
    """What a card states.

    Attributes:
        repo: "org/name". base_model: the target's Hub id, if it has one. licence: SPDX-like id.
        layout: the export's title. launch: launch.md, with the repository for a path.
        rows: of this head, and of plain decoding beside it.
        data: (what, value) of the training data. files: names of the plots.
    """

    repo: str
    head: HeadConfig
    report: Report
    rows: list[Row]
    layout: str
    launch: str
    recipe: str
    base_model: str | None = None
    licence: str | None = None
    data: list[tuple[str, str]] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)


def model_card(facts: CardFacts) -> str:
    """README.md: YAML front matter as the Hub reads it, then Markdown."""
    parts = [
        _head(facts),
        _results(facts),
        _certificates(facts.report),
        _served(facts),
        _trained(facts),
    ]
    text = "\n".join(part for part in parts if part)
    return str(ModelCard(f"---\n{metadata(facts).to_yaml()}\n---\n\n{text}")).rstrip() + "\n"


def metadata(facts: CardFacts) -> ModelCardData:
    """The front matter; what is not known is left out."""
    results = [r for row in facts.rows if wording.has_drafter(row) for r in _eval_results(row)]
    return ModelCardData(
        base_model=facts.base_model,
        license=facts.licence,
        library_name=TAG,
        pipeline_tag="text-generation",
        tags=[TAG, "speculative-decoding", "draft-model", facts.head.family],
        # The Hub knows results only of a named model.
        model_name=facts.repo.split("/")[-1] if results else None,
        eval_results=results or None,
    )


def _eval_results(row: Row) -> Iterable[EvalResult]:
    probs = {"on": ", draft probabilities on", "off": ", draft probabilities off"}
    how = f"K = {row.k}, T = {wording.temperature(row.temperature)}"
    how += probs.get(wording.draft_probs(row), "")
    figures = {
        "acceptance_length": ("Acceptance length", row.acceptance_length, 3),
        "speedup": ("Speed-up over plain decoding", row.speedup, 3),
    }
    for kind, (name, value, digits) in figures.items():
        if value is not None:
            yield EvalResult(
                task_type="text-generation",
                dataset_type=row.suite.replace(":", "-"),
                dataset_name=row.suite,
                metric_type=kind,
                metric_name=f"{name} ({how})",
                metric_value=round(value, digits),
            )


def _head(facts: CardFacts) -> str:
    head = facts.head
    target = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
    name = target if facts.base_model else f"`{facts.report.target.get('name', 'a local target')}`"
    vocabulary = f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens"
    facts_of = [
        ("kind", get_family(head.family).description),
        ("target", f"{name}, {head.target.architecture}, {head.target_num_layers} layers"),
        ("target's fingerprint", f"`{head.target.fingerprint}`"),
        ("tokenizer, template", _hashes(head)),
        ("boundaries", f"{list(head.boundaries)}, each the input of that layer"),
        ("draft vocabulary", vocabulary),
        ("trained for", f"{head.k_trained} draft tokens"),
        ("layout", facts.layout),
    ]
    return (
        f"# {facts.repo.split('/')[-1]}\n\n"
        f"A draft head for speculative decoding of {name}: it proposes tokens, the target verifies "
        "them, and what comes out is what the target alone would write.\n\n" + _table(facts_of)
    )


def _hashes(head: HeadConfig) -> str:
    found = (head.target.tokenizer_sha256, head.target.template_sha256)
    return ", ".join(f"`{text[:12]}`" for text in found)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _results(facts: CardFacts) -> str:
    columns = (
        "T",
        "K",
        "draft probs",
        "AL [95 %]",
        "accepted at 1 …",
        "drafts",
        "draft tokens",
        "accepted",
        "output tokens",
        "TPOT ms [95 %]",
        "plain TPOT ms",
        "speed-up [95 %]",
        "repeated 4-grams",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in facts.rows:
        rates = row.counters.acceptance_at if wording.has_drafter(row) else None
        cells = (
            wording.temperature(row.temperature),
            str(row.k) if wording.has_drafter(row) else "no drafting",
            wording.draft_probs(row),
            wording.with_interval(row.acceptance_length, row.acceptance_length_ci),
            " ".join(f"{rate:.2f}" for rate in rates) if rates else wording.NONE,
            wording.count(row.drafts),
            wording.count(row.draft_tokens),
            wording.count(row.accepted),
            wording.count(row.output_tokens),
            wording.milliseconds(row.tpot_ms, row.tpot_ms_ci),
            wording.milliseconds(row.baseline_tpot_ms),
            wording.speedup(row.speedup, row.speedup_ci),
            wording.number(row.repetition_rate, 2),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return (
        "## Measured\n\n" + "\n".join(lines) + "\n\nAL = 1 + accepted / drafts, as vLLM counts it; "
        "intervals over prompts. TPOT: ms per output token after the first.\n\n"
        + _conditions(facts)
        + "\n"
        + "".join(
            f"![{name.removesuffix('.png').replace('_', ' ')}]({name})\n" for name in facts.plots
        )
    )


def _conditions(facts: CardFacts) -> str:
    row, environment = facts.rows[0], facts.report.environment
    timing = environment.get("timing") or {}
    said: list[tuple[str, str]] = [
        ("engine", f"{row.engine} {row.engine_version}"),
        ("device, dtype", f"{row.device}, {row.dtype}"),
        ("prompts", f"{row.prompts} of {row.suite} (sha256 `{row.suite_sha256[:12]}`)"),
        ("chat template", f"`{wording.short_hash(row.template)}`"),
        ("new tokens at most", str(row.max_new_tokens)),
        ("batch of the counted pass", str(row.batch)),
        ("seed", str(row.seed)),
    ]
    if timing:
        said.append(("times", ", ".join(f"{k} {v}" for k, v in timing.items() if v is not None)))
    versions = {k: v for k, v in environment.items() if isinstance(v, str)}
    said.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items() if k != "device")))
    warnings = [text for _, text in wording.warnings(Report.model_construct(rows=facts.rows))]
    said += [("warning", text) for text in dict.fromkeys(warnings)]
    return "Conditions:\n\n" + _table(said)


def _certificates(report: Report) -> str:
    found = wording.certificates(report)
    if not found:
        return ""
    blocks = ("\n".join(f"    {line}" for line in lines) for _, lines in found)
    return "## Losslessness certificate\n\n" + "\n\n".join(blocks) + "\n"


def _served(facts: CardFacts) -> str:
    # launch.md has a title of its own.
    body = facts.launch.split("\n", 1)[1] if facts.launch.startswith("# ") else facts.launch
    return f"## Serving\n\n{body.strip()}\n"


def _trained(facts: CardFacts) -> str:
    licence = facts.licence or "not stated; the target's own licence may bind it"
    return (
        "## Training\n\n"
        + _table(facts.data)
        + f"\nLicence: {licence}.\n\n<details><summary>recipe.yaml</summary>\n\n```yaml\n"
        + facts.recipe.rstrip()
        + "\n```\n\n</details>\n\n"
        "Files: `report.json` has every figure above, `head.json` what the head is. "
        f"`draftlab import {facts.repo}` makes it a head of draftlab's again.\n"
    )


def own_rows(report: Report, name: str) -> list[Row]:
    """Rows of one head, with the plain ones they were compared with."""
    return [row for row in report.rows if row.head in (name, None)]
