"""The boundaries that another program's config means (servers §1.3, §6, §9.2).

vLLM, llama.cpp and the speculators library count inputs of layers, as draftlab does; SGLang and
SpecForge count outputs, in `eagle_config`. If the readings of a config disagree, the config does
not show which program the head was trained with, and with the wrong one it drafts badly without
an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftlab.errors import UserError
from draftlab.export.foreign_config import ForeignHead
from draftlab.target_model.boundaries import check_boundaries


def read_boundaries(
    foreign: ForeignHead,
    num_layers: int,
    requested: tuple[int, ...] | None,
    where: Path,
    log: Callable[[str], None],
) -> tuple[int, ...]:
    """Return the boundaries of a foreign head.

    Args:
        num_layers: N of the target.
        requested: boundaries that the user names, which replace the config's.
        where: the config, for errors.
        log: prints what was read.

    Raises:
        UserError: readings that disagree, boundaries outside 0..N, unsorted or repeated ones.
    """
    readings = boundary_readings(foreign, num_layers)
    if requested is not None:
        others = "; ".join(f"{program}: {list(ids)}" for program, ids in readings.items())
        log(f"import: boundaries {list(requested)}, as named; in the config, {others}")
        return _checked(requested, num_layers, "--boundaries")
    if len(set(readings.values())) > 1:
        lines = [f"{p}: --boundaries {','.join(map(str, ids))}" for p, ids in readings.items()]
        raise UserError(
            "programs read the boundaries in this config differently:\n  " + "\n  ".join(lines),
            where=where,
            do="name those that the head was trained with; draftlab doctor scores them",
        )
    program, ids = next(iter(readings.items()))
    log(f"import: boundaries {list(ids)}, inputs of layers ({program})")
    return _checked(ids, num_layers, where)


def boundary_readings(foreign: ForeignHead, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the boundaries as each kind of program reads them from the config."""
    if (outputs := foreign.config.outputs_of_layers) is not None:
        return {"target_layer_ids counts outputs of layers": tuple(i + 1 for i in outputs)}
    if (inputs := foreign.config.aux_hidden_state_layer_ids) is not None:
        return {"aux_hidden_state_layer_ids counts inputs of layers": tuple(inputs)}
    top = foreign.config.eagle_aux_hidden_state_layer_ids
    nested = foreign.config.eagle_config
    inner = nested.eagle_aux_hidden_state_layer_ids if nested else None
    if top is None and inner is None:
        default = (2, num_layers // 2, num_layers - 3)
        return {"none in the config: every program's default": default}
    readings = {}
    if top is not None:
        readings["the list at the top counts inputs of layers (vLLM, llama.cpp)"] = tuple(top)
    elif inner is not None:
        program = "the list in eagle_config counts inputs of layers (vLLM's older runner)"
        readings[program] = tuple(inner)
    if inner is not None:
        # For gpt-oss, SGLang reads ids that name the last boundary as boundaries.
        shift = 0 if max(inner, default=0) == num_layers else 1
        readings["the list in eagle_config counts outputs of layers (SGLang, SpecForge)"] = tuple(
            i + shift for i in inner
        )
    return readings


def _checked(ids: tuple[int, ...], num_layers: int, where: str | Path) -> tuple[int, ...]:
    """Return boundaries that are ascending and inside the target."""
    try:
        check_boundaries(ids, num_layers)
    except UserError as error:
        raise UserError(
            error.what, where=where, do="name them with --boundaries, as inputs of layers"
        ) from None
    return ids
