"""The settings of an evaluation: what is decoded, how, and what is measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from draftlab.settings import Listed, Settings
from draftlab.target_model.settings import VllmSettings


def _distinct(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Without repetitions: the same cell of the grid is measured once."""
    return values if values is None else tuple(dict.fromkeys(values))


_Distinct = AfterValidator(_distinct)
_Count = Annotated[int, Field(ge=1)]
_Temperature = Annotated[float, Field(ge=0)]


class EvalSettings(Settings):
    """What is decoded, how, and what is measured."""

    engine: Literal["paged", "reference", "vllm"] = "paged"
    """What decodes: draftlab's device engine, its eager reference, or an installed vLLM beside the
    device engine, with the same prompts and head."""
    suite: str = "embedded:heldout"
    """Prompts: "embedded:heldout", or a JSONL file of conversations."""
    raw: bool = False
    """Prompts as plain text, without the chat template."""
    max_prompts: int | None = Field(default=64, ge=1)
    """Prompts taken from the suite's start; None: all."""
    compare: Annotated[tuple[str, ...], Listed, _Distinct] = ()
    """Further heads in the same report: "reference", or head folders. One that was made for another
    target is left out, and named."""
    k: Annotated[tuple[_Count, ...] | None, Listed, _Distinct] = Field(default=None, min_length=1)
    """Drafts a step, one or several; None: what the head was trained for, at most 4."""
    temperatures: Annotated[tuple[_Temperature, ...], Listed, _Distinct] = Field(
        default=(0.0, 0.8), min_length=1
    )
    """Each gives its own rows; 0 is greedy."""
    draft_probs: Literal["on", "off", "both"] = "both"
    """Drafts sampled from the head and verified with its probabilities (on), or its argmax verified
    without (off, the default of vLLM). Temperature 0 knows no difference and is decoded once."""
    draft_temperature: float | None = Field(default=None, gt=0)
    """Temperature of sampled drafts; None: the row's own."""
    greedy_below: float = Field(default=0.0, ge=0)
    """Rows at a lower temperature draft greedily."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep the k most likely tokens of the target; None: off."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the most likely tokens that reach this mass; None: off."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens of an answer."""
    batch: int = Field(default=16, ge=1)
    """Prompts decoded at once for the counters."""
    timing_prompts: int = Field(default=10, ge=0)
    """Prompts timed, at least one batch of them; 0: no times."""
    timing_tokens: int = Field(default=64, ge=2)
    """Tokens of a timed answer; stop tokens are ignored there."""
    timing_batches: Annotated[tuple[_Count, ...], Listed, _Distinct] = Field(
        default=(1,), min_length=1
    )
    """Prompts decoded at once when timed, one or several; the first is the row's own time."""
    certify: bool = False
    """Also test that drafting changes no output: equal tokens at T = 0, an equal distribution
    above."""
    seed: int = 0
    """Of every noise that sampling uses."""
    packed: bool = True
    """On a CPU, the engine "paged" multiplies with packed weights (oneDNN): a copy of the target's
    and the head's, and results that differ in the last bits from the plain products of parity runs.
    Without effect on a GPU, and where layers have no such path."""
    vllm: VllmSettings = VllmSettings()
    """Of the engine "vllm"."""
