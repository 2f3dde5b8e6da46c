"""The RoPE parameters that another program's config means."""

from __future__ import annotations

from typing import Any

from draftlab.export.foreign_config import ForeignConfig

DEFAULT_ROPE_THETA = 10000.0
"""Every program's RoPE base for a config without one."""


def read_rope(config: ForeignConfig) -> tuple[dict[str, Any], bool]:
    """Return the `rope_parameters`, and whether the config names a base.

    transformers 4 and 5 spell them differently.

    Raises:
        ValueError: two spellings that contradict each other, or a part of the channels rotates.
    """
    old, new = dict(config.rope_scaling or {}), dict(config.rope_parameters or {})
    if "type" in old:
        old.setdefault("rope_type", old.pop("type"))
    if config.rope_theta is not None:
        old.setdefault("rope_theta", config.rope_theta)
        if old["rope_theta"] != config.rope_theta:
            raise ValueError(f"rope_theta {config.rope_theta} against {old['rope_theta']}")
    if new and (old.keys() - {"rope_theta"}):
        new.setdefault("rope_type", "default")
    clashes = [key for key in old.keys() & new.keys() if old[key] != new[key]]
    if clashes:
        key = sorted(clashes)[0]
        raise ValueError(f"{key} {new[key]!r} in rope_parameters against {old[key]!r} outside")
    has_base = "rope_theta" in old or "rope_theta" in new
    merged = {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA} | old | new
    theta = merged["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e30:
        raise ValueError(f"rope_theta {theta!r} is no base")
    if (share := merged.get("partial_rotary_factor", 1)) != 1:
        raise ValueError(f"partial_rotary_factor {share!r}: heads of draftlab rotate all channels")
    return merged, has_base
