"""The grid of an evaluation: which head drafts how much, and in which way, at each temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftlab.evaluate.settings import EvalSettings
from draftlab.heads.head import DraftHead
from draftlab.heads.peagle import PeagleHead

DEFAULT_K = 4


@dataclass(frozen=True)
class NamedHead:
    """A head under evaluation.

    Attributes:
        name: as rows call it.
        head: on the target's device.
        folder: where it lies, for engines that load it themselves.
    """

    name: str
    head: DraftHead = field(repr=False)
    folder: Path | None = None

    @property
    def k_trained(self) -> int:
        """Steps the head was unrolled for in training, or depths of a parallel head."""
        return self.head.config.k_trained

    @property
    def stretches(self) -> list[dict[str, Any]]:
        """α by position in the conversation, as its training validated it; empty where none did."""
        validation = self.head.config.provenance.get("validation") or {}
        return validation.get("by_position", [])

    @property
    def drafter(self) -> Literal["chain", "parallel"]:
        """How it drafts, as rows call it."""
        return "parallel" if isinstance(self.head, PeagleHead) else "chain"

    def depths(self, settings: EvalSettings) -> tuple[int, ...]:
        """The K's it is evaluated at."""
        return settings.k or (min(self.k_trained, DEFAULT_K),)


@dataclass(frozen=True)
class Arm:
    """One way of decoding; without a head it is plain decoding."""

    head: NamedHead | None = None
    k: int = 0
    draft_probs: bool = False

    @property
    def name(self) -> str:
        """As progress lines call it."""
        if self.head is None:
            return "no drafting"
        return f"{self.head.name}, K={self.k}, draft probs {'on' if self.draft_probs else 'off'}"


PLAIN = Arm()


def arms(heads: Sequence[NamedHead], settings: EvalSettings, temperature: float) -> list[Arm]:
    """Plain decoding, then every head, K and drafter setting that differs at a temperature."""
    ways = {"on": [True], "off": [False], "both": [False, True]}[settings.draft_probs]
    if temperature == 0:
        ways = ways[:1]  # greedy decoding makes no use of draft probabilities: one row says it all
    elif temperature < settings.greedy_below:
        ways = [False]
    return [
        PLAIN,
        *(Arm(head, k, way) for head in heads for k in head.depths(settings) for way in ways),
    ]


def all_arms(heads: Sequence[NamedHead], settings: EvalSettings) -> list[Arm]:
    """Every arm that some temperature has, plain decoding first."""
    return list(
        dict.fromkeys(arm for t in settings.temperatures for arm in arms(heads, settings, t))
    )
