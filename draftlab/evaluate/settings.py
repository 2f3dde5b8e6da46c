"""The settings of an evaluation: heads, decoding, prompts and timing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from draftlab.settings import Settings, SingleOrList
from draftlab.target_model.settings import TemplateMix, VllmSettings


def _without_repetitions(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return values if values is None else tuple(dict.fromkeys(values))


_Distinct = AfterValidator(_without_repetitions)
_Count = Annotated[int, Field(ge=1)]
MAX_K = 64
"""Most drafts a step: several times what any head is trained for; each one costs a pass."""
_Drafts = Annotated[int, Field(ge=1, le=MAX_K)]
_Temperature = Annotated[float, Field(ge=0)]


class EvalSettings(Settings):
    """Settings of `draftlab eval` and of the recipe's section `eval`."""

    engine: Literal["paged", "vllm"] = "paged"
    """Decoding engine: draftlab's own (paged), or an installed vLLM in addition to it, with the
    same prompts and heads (vllm)."""
    suite: Annotated[tuple[str, ...] | None, SingleOrList, _Distinct] = Field(
        default=None, min_length=1
    )
    """Prompts, one or several suites: a JSONL file of conversations, mt-bench, humaneval, gsm8k,
    spec-bench:PATH, speed-bench:PATH or "embedded:heldout" (Python functions). None: the run's own
    prompts that training held out; for the built-in target "embedded:heldout"."""
    raw: bool = False
    """Use the prompts as plain text, without the chat template."""
    template_arguments: TemplateMix | None = None
    """Template arguments of the evaluation, such as {"enable_thinking": true}. With a list of such
    objects each prompt gets one of them, evenly and by `seed`, and AL is reported for each. None:
    those of the target; held-out prompts have those of their recording."""
    max_prompts: int | None = Field(default=64, ge=1)
    """Number of prompts, drawn by `seed` from all of the suite so that each category has its share;
    None: all."""
    by_length: bool = False
    """Report AL and speed-up by the length of the prompts, in place of the suite's categories."""
    compare: Annotated[tuple[str, ...], SingleOrList, _Distinct] = ()
    """Further heads in the same report: "reference", or head folders. A head that was trained for
    another target is skipped with a message."""
    k: Annotated[tuple[_Drafts, ...] | None, SingleOrList, _Distinct] = Field(
        default=None, min_length=1
    )
    """Drafts a step, one or several values up to 64; None: what an imported head's files name, else
    what the head was trained for, at most 4, and at the first temperature also 1 and the half."""
    temperatures: Annotated[tuple[_Temperature, ...], SingleOrList, _Distinct] = Field(
        default=(0.0, 0.8), min_length=1
    )
    """Sampling temperatures, each with its own rows; 0 is greedy decoding."""
    draft_probs: Literal["on", "off", "both"] = "both"
    """on: sample drafts from the head and verify them with its probabilities. off (vLLM's default):
    draft the head's argmax and verify without its probabilities. At temperature 0 both are the
    same and are decoded once."""
    verification: Literal["token", "block"] = "token"
    """token: accept or reject each sampled draft by itself. block: judge the drafts of a step
    together, which accepts at least as many on average; the output's distribution stays the
    target's. Both are the same at temperature 0 and with draft_probs off."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep the k most likely tokens of the target; None: off."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the most likely tokens of the target that reach this probability mass; None: off."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Largest number of tokens in an answer; the first one comes from the prompt, not drafts."""
    batch: int = Field(default=64, ge=1)
    """Prompts decoded at once for the counters; fewer where memory is short."""
    timing_prompts: int = Field(default=10, ge=0)
    """Number of timed prompts, at least one batch, drawn in the same way from the evaluated ones; a
    suite of fewer is repeated. 0: measure no times."""
    timing_tokens: int = Field(default=64, ge=2)
    """Largest number of tokens in a timed answer."""
    timing_batches: Annotated[tuple[_Count, ...], SingleOrList, _Distinct] = Field(
        default=(1,), min_length=1
    )
    """Prompts decoded at once when timed, one or several values; rows show the first."""
    certify: bool = False
    """Also test that drafting changes no output: equal tokens at temperature 0, an equal
    distribution above."""
    calibrate: bool = False
    """Also calibrate each head's confidence: fit, on half of the prompts, the probability that the
    first k drafts are accepted, and measure its error on the others."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the sampling noise."""
    packed: bool = True
    """On a CPU, let the paged engine multiply with packed weights (oneDNN). It needs a copy of the
    weights of target and head, and its results differ in the last bits from the plain products of
    parity runs. It has no effect on a GPU or for layers without packed products."""
    vllm: VllmSettings = VllmSettings()
    """Settings of the engine vllm."""

    @model_validator(mode="after")
    def _settings_fit(self) -> EvalSettings:
        if self.calibrate and self.suite and len(self.suite) > 1:
            raise ValueError(f"calibrate: expected one suite, found {len(self.suite)}")
        if self.raw and self.template_arguments is not None:
            raise ValueError("template_arguments has no effect: raw prompts have no template")
        sampled = self.draft_probs != "off" and any(self.temperatures)
        idle = {
            "verification": self.verification == "block" and not sampled,
            "top_k": self.top_k is not None and not any(self.temperatures),
            "top_p": self.top_p is not None and not any(self.temperatures),
        }
        for name in [name for name, is_idle in idle.items() if is_idle]:
            rows = "its tokens" if name in ("top_k", "top_p") else "its drafts"
            raise ValueError(
                f"{name} has no effect: no row samples {rows} (temperatures, draft_probs)"
            )
        return self
