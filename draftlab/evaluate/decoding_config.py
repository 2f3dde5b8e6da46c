"""The decoding configurations of an evaluation: head, K and drafter setting by temperature."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from draftlab.evaluate.settings import MAX_K, EvalSettings
from draftlab.heads.head import DraftHead


@dataclass(frozen=True)
class NamedHead:
    """A head under evaluation.

    Attributes:
        name: name in the rows of the report.
        head: the head on the target's device.
        folder: head folder, for engines that load the head themselves.
        trained_on: `prompt_digest` of the prompts of its training; empty if they are not known.
    """

    name: str
    head: DraftHead = field(repr=False)
    folder: Path | None = None
    trained_on: frozenset[bytes] = field(default=frozenset(), repr=False)

    @property
    def k_trained(self) -> int:
        """Number of drafts that the head was trained for."""
        return self.head.config.k_trained

    @property
    def drafter(self) -> Literal["chain", "parallel"]:
        """How the head drafts, as rows name it."""
        return self.head.family.drafting

    def ks(self, settings: EvalSettings) -> tuple[int, ...]:
        """Return the values of K to evaluate the head at."""
        ks = settings.k or (min(self.head.config.default_k, MAX_K),)
        self.head.check_drafts(max(ks))
        return ks


@dataclass(frozen=True)
class DecodingConfig:
    """A head with its K and drafter setting; without a head, plain decoding.

    Attributes:
        k: drafts of a step.
    """

    head: NamedHead | None = None
    k: int = 0
    draft_probs: bool = False

    def name_at(self, temperature: float) -> str:
        """Return the name in progress lines and tables; at temperature 0 all drafts are argmax."""
        if self.head is None:
            return "no drafting"
        drafts = "sampled" if self.draft_probs and temperature > 0 else "argmax"
        return f"{self.head.name}, K={self.k}, {drafts} drafts"

    def confidence_temperature(self, temperature: float) -> float:
        """Return the temperature of the draft probabilities that rows state as confidence.

        Argmax drafts state them at 1, sampled drafts at the temperature they are sampled at.
        """
        return temperature if self.draft_probs and temperature > 0 else 1.0


PLAIN_DECODING = DecodingConfig()


def configs_at(
    heads: Sequence[NamedHead], settings: EvalSettings, temperature: float
) -> list[DecodingConfig]:
    """Return plain decoding, then every head, K and drafter setting that this temperature needs.

    If no K is named, the first temperature also has smaller ones, so that the best is measured.
    """
    modes = {"on": [True], "off": [False], "both": [False, True]}[settings.draft_probs]
    if temperature == 0:
        modes = modes[:1]  # greedy decoding does not use draft probabilities: one row is enough
    is_first = settings.k is None and temperature == settings.temperatures[0]
    return [
        PLAIN_DECODING,
        *(
            DecodingConfig(head, k, draft_probs)
            for head in heads
            for k in sorted({*head.ks(settings), *(more_ks(head.ks(settings)) if is_first else ())})
            for draft_probs in (modes if k in head.ks(settings) else modes[:1])
        ),
    ]


def more_ks(ks: Collection[int]) -> set[int]:
    """Return the smaller K's that belong to a measurement of some.

    With K = 1 the adviser interpolates; with three K's it can predict one from the others.
    """
    more = {1} - {*ks}
    if len({*ks} | more) < 3:
        more |= {(max(ks) + 1) // 2} - {*ks}
    return more
