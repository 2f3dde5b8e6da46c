"""The option --ray: the cluster that runs a recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from draftlab.errors import NoClusterError, UserError
from draftlab.formatting import pip_install

if TYPE_CHECKING:
    from draftlab.recipe.hardware import HardwareSettings
    from draftlab.workers.ray_cluster import RayCluster


@contextmanager
def connected(address: str | None) -> Iterator[RayCluster | None]:
    """Connect this process to a Ray cluster for the duration of the block; without one yield None.

    Raises:
        UserError: Ray is not installed, or this process was launched with others.
    """
    if address is None:
        yield None
        return
    from draftlab.train.distributed.ranks import num_launched

    if num_launched() > 1:
        raise UserError(
            "expected one process that uses the cluster, found several launched together",
            where="--ray",
            do="start it without torchrun or accelerate launch: Ray starts the processes",
        )
    if importlib.util.find_spec("ray") is None:
        raise NoClusterError(
            "expected Ray, found that it is not installed",
            where="--ray",
            do=f"{pip_install('ray')} on all nodes",
        )
    from draftlab.workers.ray_cluster import RayCluster

    with RayCluster.connect(address) as cluster:
        yield cluster


def planned_hardware(
    address: str | None, planned: HardwareSettings
) -> tuple[HardwareSettings, str]:
    """Return the GPUs of a running cluster, for a plan, and a line about them.

    Without a cluster, and of one without GPUs, they are those of the recipe.

    Raises:
        UserError: the address has another form, or this process was launched with others.
    """
    try:
        with connected(address) as cluster:
            if cluster is None:
                return planned, ""
            line = cluster.describe()
            if cluster.has_gpus:
                return cluster.hardware(planned), f"{line}, for which the plan is"
    except NoClusterError as error:
        line = f"ray: {error.what}"
    return planned, f"{line}; the plan is for `hardware` of the recipe"


def refuse_both(gpus: int | None, address: str | None) -> None:
    """Raise a `UserError` if both --gpus and --ray are given to a verb that does not train."""
    if gpus is not None and address is not None:
        raise UserError(
            "expected --gpus or --ray, found both",
            where="--gpus",
            do="with --ray all GPUs of the cluster answer and record",
        )
