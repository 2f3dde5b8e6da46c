"""`--plan --ray ADDRESS` counts the nodes and GPUs of a running cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra draftlab[ray]")

from draftlab.recipe.hardware import HardwareSettings
from draftlab.workers import ray_cluster as ray_cluster_module
from draftlab.workers.ray_cluster import RayCluster
from tests.helpers.ray_nodes import NODE, ray_cluster, start_driver
from tests.helpers.small_run import new_workshop


@pytest.mark.slow
def test_a_plan_counts_the_gpus_of_the_cluster(tmp_path: Path) -> None:
    new_workshop(tmp_path)
    hardware = "hardware={gpu: L40S, gpus: 2, nodes: 5}"
    command = ("run", "small.yaml", "--plan", "train.device=cuda", hardware, "--ray")
    with ray_cluster(1) as cluster:
        plan = start_driver(tmp_path, *command, cluster.address).communicate()[0]
        assert "ray: 2 nodes with 1 CPU in all; the plan is for `hardware` of the recipe" in plan
        assert "estimate (5 × 2 × L40S; 10 work together)" in plan
        for _ in range(2):
            cluster.add_node(**NODE, num_gpus=4, resources={"accelerator_type:H100": 1})
        plan = start_driver(tmp_path, *command, cluster.address).communicate()[0]
        assert "ray: 4 nodes with 8 GPUs in all, for which the plan is" in plan
        assert "estimate (2 × 4 × H100; 8 work together)" in plan
        assert "error" not in plan
        address = cluster.address
    plan = start_driver(tmp_path, *command, address).communicate()[0]
    assert "ray: expected a Ray cluster, found none that can be used" in plan
    assert "estimate (5 × 2 × L40S; 10 work together)" in plan
    assert not (tmp_path / "runs").exists()


def test_the_kind_of_a_plans_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(*kinds: str) -> None:
        resources = [{"CPU": 8.0, "GPU": 8.0, f"accelerator_type:{kind}": 1.0} for kind in kinds]
        alive = [{"Resources": one} for one in (*resources, {"CPU": 64.0})]
        monkeypatch.setattr(ray_cluster_module, "alive_nodes", lambda: alive)

    planned = HardwareSettings(gpu="L40S", gpus=2, nodes=5)
    for kinds, expected in (
        (("H200", "H200"), ("H200", 8, 2)),
        (("A100-80G",), ("A100", 8, 1)),
        (("H200", "H100"), ("L40S", 8, 2)),
        (("V100",), ("L40S", 8, 1)),
    ):
        nodes(*kinds)
        found = RayCluster(has_gpus=True).hardware(planned)
        assert (found.gpu, found.gpus, found.nodes) == expected
