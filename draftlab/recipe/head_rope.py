"""The rotary embedding and the norms' epsilon of a new head, from the target's config."""

from __future__ import annotations

from typing import Any

from draftlab.heads.config import ROPE_KEYS
from draftlab.heads.family import Family
from draftlab.progress import Monitor

_DEFAULT_THETA = 10_000.0
_EPSILONS = (
    "rms_norm_eps",
    "norm_eps",
    "norm_epsilon",
    "layer_norm_epsilon",
    "layer_norm_eps",
    "layernorm_epsilon",
)
_DEFAULT_EPSILON = 1e-5


def head_rope(config: Any, family: Family, monitor: Monitor) -> dict[str, Any]:
    """Return the `rope_parameters` of a head: the target's, as far as heads and servers know them.

    A head rotates all channels of a head of attention. What it leaves out of the target's is said.

    Args:
        config: of the target's text model.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if kinds := {name: one for name, one in rope.items() if isinstance(one, dict)}:
        name = "full_attention" if "full_attention" in kinds else next(iter(kinds))
        monitor.say(f"rope: of the target's ({', '.join(kinds)}) the head has that of {name}")
        rope = kinds[name]
    if "rope_theta" not in rope:
        monitor.say(
            "rope: the target's attention does not rotate; the head does, with rope_theta "
            f"{_DEFAULT_THETA:g}"
        )
        return {"rope_type": "default", "rope_theta": _DEFAULT_THETA}
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1:
        monitor.say(f"rope: the target rotates {share:.0%} of the channels, and the head all")
    kind = rope.get("rope_type", "default")
    if kind not in (("default",) if family.default_rope else ROPE_KEYS):
        # Other types extend a target beyond its training length. A head is trained at the
        # positions that it serves, and servers know only these for heads.
        monitor.say(
            f"rope: the head uses only rope_theta {rope['rope_theta']:g} of the target's {kind}"
        )
        kind = "default"
    return {"rope_type": kind} | {key: rope[key] for key in ("rope_theta", *ROPE_KEYS[kind])}


def norm_epsilon(config: Any, monitor: Monitor) -> float:
    """Return the epsilon of the target's norms, which configs spell differently."""
    for name in _EPSILONS:
        if (value := getattr(config, name, None)) is not None:
            return float(value)
    monitor.say(f"norms: the target's config names no epsilon; the head's is {_DEFAULT_EPSILON:g}")
    return _DEFAULT_EPSILON
