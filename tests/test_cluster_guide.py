"""The guide's Slurm script and KubeRay manifest parse, and the commands in them exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import yaml
from typer.testing import CliRunner

from draftlab.cli import app

GUIDE = (Path(__file__).parents[1] / "docs/guide/scale.md").read_text()


def block(kind: str) -> str:
    (text,) = re.findall(
        rf"^```{kind}\n(.*?)^```$", GUIDE.split("## Slurm")[1], re.MULTILINE | re.DOTALL
    )
    return text


def exists(command: str) -> bool:
    """Return whether draftlab has a verb with the options of a command line."""
    program, *arguments = shlex.split(command)
    result = CliRunner().invoke(app, [*arguments, "--help"], prog_name="draftlab")
    return program == "draftlab" and result.exit_code == 0


def draftlab_command(text: str) -> str:
    (command,) = re.findall(r"draftlab run [^\"\n]*", text)
    return command


def test_the_slurm_script(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(block("bash"))
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert exists(draftlab_command(script.read_text()))
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    ray_command = re.search(r"srun (ray .*?) -- draftlab", script.read_text())
    assert ray_command is not None
    arguments = dict(re.findall(r"--([a-z-]+) (\S+)", ray_command[1]))
    assert arguments["num-gpus"] == options["gpus-per-node"]
    assert arguments["num-cpus"] == options["cpus-per-task"]
    assert options["ntasks-per-node"] == "1"  # one Ray a node


def test_the_kubernetes_manifest() -> None:
    job, claim = yaml.safe_load_all(block("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    subprocess.run(["bash", "-nc", spec["entrypoint"]], check=True)
    shell, option, inner = shlex.split(spec["entrypoint"])
    assert (shell, option) == ("bash", "-c")
    change, command = inner.split(" && ")
    assert exists(command)
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert f"cd {mounts['runs']}" == change  # the same path on all nodes
        assert claim["metadata"]["name"] in str(pod["volumes"])
