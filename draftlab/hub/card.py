"""The model card (README.md): the head, its target, the measurements, serving and training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from draftlab.evaluate.results import Report, Row
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.hub.upload import TAG
from draftlab.report import formatting


@dataclass(frozen=True)
class CardContent:
    """The content of a model card.

    Attributes:
        repo: the repository's id, "org/name".
        rows: the report's rows of this head and of plain decoding.
        layout: the title of the export's layout.
        launch: the text of launch.md, with the repository as the head's path.
        base_model: the target's Hub id, if it has one.
        licence: the licence's id on the Hub, such as "apache-2.0".
        data: (name, value) pairs about the training data.
        plots: the file names of the plots.
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


def model_card(content: CardContent) -> str:
    """Return README.md: YAML front matter as the Hub reads it, then Markdown."""
    sections = [
        _description(content),
        _results(content),
        _certificates(content.report),
        _serving(content),
        _training(content),
    ]
    text = "\n".join(section for section in sections if section)
    return str(ModelCard(f"---\n{metadata(content).to_yaml()}\n---\n\n{text}")).rstrip() + "\n"


def metadata(content: CardContent) -> ModelCardData:
    """Return the front matter, without unknown values."""
    drafted = [row for row in content.rows if formatting.has_drafter(row)]
    results = [result for row in drafted for result in _eval_results(row)]
    return ModelCardData(
        base_model=content.base_model,
        license=content.licence,
        library_name=TAG,
        pipeline_tag="text-generation",
        tags=[TAG, "speculative-decoding", "draft-model", content.head.family],
        # The Hub requires a model name for results.
        model_name=content.repo.split("/")[-1] if results else None,
        eval_results=results or None,
    )


def _eval_results(row: Row) -> Iterator[EvalResult]:
    probs = {"on": ", draft probabilities on", "off": ", draft probabilities off"}
    condition = f"K = {row.k}, T = {formatting.temperature(row.temperature)}"
    condition += probs.get(formatting.draft_probs(row), "")
    for kind, name, value in (
        ("acceptance_length", "Acceptance length", row.acceptance_length),
        ("speedup", "Speed-up over plain decoding", row.speedup),
    ):
        if value is not None:
            yield EvalResult(
                task_type="text-generation",
                dataset_type=row.suite.replace(":", "-"),
                dataset_name=row.suite,
                metric_type=kind,
                metric_name=f"{name} ({condition})",
                metric_value=round(value, 3),
            )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _description(content: CardContent) -> str:
    head, base_model = content.head, content.base_model
    target = f"`{content.report.target.get('name', 'a local target')}`"
    if base_model:
        target = f"[{base_model}](https://huggingface.co/{base_model})"
    hashes = (head.target.tokenizer_sha256, head.target.template_sha256)
    properties = [
        ("kind", get_family(head.family).description),
        ("target", f"{target}, {head.target.architecture}, {head.target_num_layers} layers"),
        ("target's fingerprint", f"`{head.target.fingerprint}`"),
        ("tokenizer, template", ", ".join(f"`{text[:12]}`" for text in hashes)),
        ("boundaries", f"{list(head.boundaries)}, each the input of that layer"),
        ("draft vocabulary", f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens"),
        ("trained for", f"{head.k_trained} draft tokens"),
        ("layout", content.layout),
    ]
    return (
        f"# {content.repo.split('/')[-1]}\n\n"
        f"A draft head for speculative decoding of {target}. It proposes tokens and the target "
        "verifies them; the output is what the target alone would write.\n\n" + _table(properties)
    )


def _result_cells(row: Row) -> dict[str, str]:
    """Return the cells of a row of the results table by column title."""
    drafted = formatting.has_drafter(row)
    rates = (row.counters.acceptance_at if drafted else None) or ()
    return {
        "T": formatting.temperature(row.temperature),
        "K": str(row.k) if drafted else "no drafting",
        "draft probs": formatting.draft_probs(row),
        "AL [95 %]": formatting.with_interval(row.acceptance_length, row.acceptance_length_ci),
        "accepted at 1 …": " ".join(f"{rate:.2f}" for rate in rates) or formatting.NONE,
        "drafts": formatting.count(row.drafts),
        "draft tokens": formatting.count(row.draft_tokens),
        "accepted": formatting.count(row.accepted),
        "output tokens": formatting.count(row.output_tokens),
        "TPOT ms [95 %]": formatting.milliseconds(row.tpot_ms, row.tpot_ms_ci),
        "plain TPOT ms": formatting.milliseconds(row.baseline_tpot_ms),
        "speed-up [95 %]": formatting.speedup(row.speedup, row.speedup_ci),
        "repeated 4-grams": formatting.number(row.repetition_rate, 2),
    }


def _results(content: CardContent) -> str:
    rows = [_result_cells(row) for row in content.rows]
    lines = [" | ".join(rows[0]), "---|" * len(rows[0]), *(" | ".join(r.values()) for r in rows)]
    plots = (f"![{p.removesuffix('.png').replace('_', ' ')}]({p})\n" for p in content.plots)
    return (
        "## Measured\n\n"
        + "\n".join(f"|{line}" if line.startswith("---") else f"| {line} |" for line in lines)
        + "\n\nAL = 1 + accepted / drafts, as vLLM counts it; intervals over prompts. "
        "TPOT: ms per output token after the first.\n\n"
        f"Conditions:\n\n{_table(_conditions(content))}\n{''.join(plots)}"
    )


def _conditions(content: CardContent) -> list[tuple[str, str]]:
    row, environment = content.rows[0], content.report.environment
    conditions = [
        ("engine", f"{row.engine} {row.engine_version}"),
        ("device, dtype", f"{row.device}, {row.dtype}"),
        ("prompts", f"{row.prompts} of {row.suite} (sha256 `{row.suite_sha256[:12]}`)"),
        ("chat template", f"`{formatting.short_hash(row.template)}`"),
        ("new tokens at most", str(row.max_new_tokens)),
        ("batch of the counted pass", str(row.batch)),
        ("seed", str(row.seed)),
    ]
    if timing := environment.get("timing"):
        text = ", ".join(f"{key} {value}" for key, value in timing.items() if value is not None)
        conditions.append(("times", text))
    versions = {k: v for k, v in environment.items() if isinstance(v, str) and k != "device"}
    conditions.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items())))
    warnings = dict.fromkeys(text for row in content.rows for text in row.warnings)
    return conditions + [("warning", text) for text in warnings]


def _certificates(report: Report) -> str:
    certificates = formatting.certificates(report)
    if not certificates:
        return ""
    blocks = ("\n".join(f"    {line}" for line in lines) for _, lines in certificates)
    return "## Losslessness certificate\n\n" + "\n\n".join(blocks) + "\n"


def _serving(content: CardContent) -> str:
    launch = content.launch
    body = launch.split("\n", 1)[1] if launch.startswith("# ") else launch  # without its title
    return f"## Serving\n\n{body.strip()}\n"


def _training(content: CardContent) -> str:
    licence = content.licence or "not stated; the target's own licence may apply"
    return (
        f"## Training\n\n{_table(content.data)}\nLicence: {licence}.\n\n"
        "<details><summary>recipe.yaml</summary>\n\n```yaml\n"
        f"{content.recipe.rstrip()}\n```\n\n</details>\n\n"
        "Files: `report.json` has every figure above, `head.json` the head's configuration. "
        f"`draftlab import {content.repo}` converts the head to draftlab's format.\n"
    )
