"""Which boundaries another program's config means (servers §1.3, §6, §9.2).

vLLM, llama.cpp and the speculators library count inputs of layers, as draftlab does; SGLang and
SpecForge count outputs, in `eagle_config`. Where the readings of a config disagree, nobody knows
which program it was trained with, and the wrong one drafts badly without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftlab.errors import UserError
from draftlab.export.foreign_config import Foreign
from draftlab.target_model.boundaries import check_boundaries


def read_boundaries(
    foreign: Foreign,
    num_layers: int,
    named: tuple[int, ...] | None,
    where: Path,
    say: Callable[[str], None],
) -> tuple[int, ...]:
    """A foreign head's boundaries.

    Args:
        num_layers: N of the target.
        named: by the user; taken as they are.
        where: the config, for errors.
        say: told what was read, and how.

    Raises:
        UserError: readings that disagree, boundaries outside 0..N, unsorted or repeated ones.
    """
    readings = boundary_readings(foreign, num_layers)
    if named is not None:
        others = "; ".join(f"{who}: {list(ids)}" for who, ids in readings.items())
        say(f"import: boundaries {list(named)}, as named; in the config, {others}")
        return _checked(named, num_layers, "--boundaries")
    if len(set(readings.values())) > 1:
        lines = [f"{who}: --boundaries {','.join(map(str, i))}" for who, i in readings.items()]
        raise UserError(
            "programs read the boundaries in this config differently:\n  " + "\n  ".join(lines),
            where=where,
            do="name the ones the head was trained with; draftlab doctor finds them by trying",
        )
    ((who, ids),) = list(readings.items())[:1]
    say(f"import: boundaries {list(ids)}, inputs of layers ({who})")
    return _checked(ids, num_layers, where)


def boundary_readings(foreign: Foreign, num_layers: int) -> dict[str, tuple[int, ...]]:
    """What each kind of program that reads the config takes for its boundaries."""
    top = foreign.config.eagle_aux_hidden_state_layer_ids
    nested = foreign.config.eagle_config
    inner = nested.eagle_aux_hidden_state_layer_ids if nested else None
    if top is None and inner is None:
        return {"none in the config: every program's default": _default(num_layers)}
    readings = {}
    if top is not None:
        readings["the list at the top counts inputs of layers (vLLM, llama.cpp)"] = tuple(top)
    elif inner is not None:
        readings["the list in eagle_config counts inputs of layers (vLLM's older runner)"] = tuple(
            inner
        )
    if inner is not None:
        # Of gpt-oss, SGLang takes ids that name the last boundary as they are.
        shift = 0 if max(inner, default=0) == num_layers else 1
        readings["the list in eagle_config counts outputs of layers (SGLang, SpecForge)"] = tuple(
            i + shift for i in inner
        )
    return readings


def _default(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def _checked(ids: tuple[int, ...], num_layers: int, where: str | Path) -> tuple[int, ...]:
    try:
        check_boundaries(ids, num_layers)
    except UserError as error:
        raise UserError(
            error.what, where=where, do="name them with --boundaries, as inputs of layers"
        ) from None
    return ids
