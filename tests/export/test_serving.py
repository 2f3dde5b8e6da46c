"""What servers read of a calibration: files, launch commands, the baked temperature, refusals."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.errors import UserError
from draftlab.evaluate.calibration.result import Calibration
from draftlab.export.settings import ExportSettings
from draftlab.run.head_workspace import export_files
from tests.helpers import sample_report as sample
from tests.helpers.draft_blocks import calibrated, simulate
from tests.helpers.export_toys import DFLASH, DSPARK, export, read_tensors
from tests.helpers.server_files import read_sts

K = 7
WEIGHT, BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def calibration(head: Path, own: bool = True, **changes: Any) -> Calibration:
    blocks = simulate([0.5] * K, [0.1] * K, blocks=3000)
    source = "confidence head" if own else "draft probability"
    digest = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    return calibrated(blocks, source, head_sha256=digest, **changes)


def write_report(folder: Path, calibrations: Sequence[Calibration]) -> Path:
    report = sample.report().model_copy(update={"calibrations": list(calibrations)})
    folder.mkdir(exist_ok=True)
    report.write(folder / "report.json")
    return folder


@pytest.fixture
def head(make_head: Callable[..., Path]) -> Path:
    return make_head(**DSPARK, dtype=torch.float32)


def command(folder: Path, start: str) -> list[str]:
    """Return the words of the first command in launch.md that starts so."""
    for block in (folder / "launch.md").read_text().split("```\n")[1::2]:
        text = block.replace("\\\n", " ")
        for line in text.splitlines():
            if line.startswith(start):
                return shlex.split(line)
    raise AssertionError(f"no command {start}")


def test_sglang_reads_a_temperature_for_each_slot(head: Path, target: Path, tmp_path: Path) -> None:
    one = calibration(head)
    report = write_report(tmp_path / "eval", [one])
    out = export(head, target, tmp_path / "out", "sglang", calibration=report)
    temperatures = read_sts(out / "sts.json", K)
    assert temperatures == [p.temperature for p in one.positions]
    words = command(out, "python -m sglang")
    path = words[words.index("--speculative-dspark-confidence-sts-path") + 1]
    assert Path(path) == (out / "sts.json").resolve()
    assert words[words.index("--speculative-num-draft-tokens") + 1] == str(K + 1)
    assert "dspark_sps_profiler" in (out / "launch.md").read_text()
    facts = json.loads((out / "calibration.json").read_text())
    assert facts["cutoff"] == one.cutoff
    assert (
        facts["report_sha256"] == hashlib.sha256((report / "report.json").read_bytes()).hexdigest()
    )
    assert facts["baked_temperature"] is None
    with pytest.raises(ValueError, match="each draft of the block"):
        read_sts(out / "sts.json", K - 1)


@pytest.mark.parametrize("fields", [{}, DFLASH], ids=["eagle3", "dflash"])
def test_sglang_is_said_to_read_no_calibration_of_draft_probabilities(
    make_head: Callable[..., Path], target: Path, tmp_path: Path, fields: dict
) -> None:
    head = make_head(**fields)
    report = write_report(tmp_path / "eval", [calibration(head, own=False)])
    out = export(head, target, tmp_path / "out", "sglang", calibration=report)
    text = (out / "launch.md").read_text()
    assert "SGLang reads the calibration of DSpark heads only" in text
    assert "confidence-sts-path" not in text
    assert not (out / "sts.json").exists()


@pytest.mark.parametrize("program", ["vllm", "llamacpp", "speculators", "sglang"])
def test_a_baked_temperature_divides_the_logits(
    head: Path, target: Path, tmp_path: Path, program: str
) -> None:
    one = calibration(head)
    baked = one.common_temperature
    assert baked not in (None, 1.0)
    report = write_report(tmp_path / "eval", [one])
    options = {"calibration": report, "bake_temperature": True}
    out = export(head, target, tmp_path / "out", program, **options)
    before, after = read_tensors(head), read_tensors(out)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (name not in (WEIGHT, BIAS))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, before[WEIGHT].shape[1], dtype=torch.float64, generator=generator)
    raw = inputs @ before[WEIGHT][0].double() + before[BIAS].double()
    served = inputs @ after[WEIGHT][0].double() + after[BIAS].double()
    torch.testing.assert_close(served, raw / baked, rtol=1e-5, atol=1e-5)
    facts = json.loads((out / "calibration.json").read_text())
    assert facts["baked_temperature"] == baked
    if program == "sglang":  # it divides by its own temperatures again
        for k, t in enumerate(read_sts(out / "sts.json", K)):
            expected = raw / one.positions[k].temperature
            torch.testing.assert_close(served / t, expected, rtol=1e-5, atol=1e-5)
    else:
        assert f"divided by the temperature {baked:.3g}" in (out / "launch.md").read_text()


def test_llamacpp_stops_a_draft_at_the_cutoff(head: Path, target: Path, tmp_path: Path) -> None:
    one = calibration(head)
    assert 0 < one.cutoff < 0.9
    report = write_report(tmp_path / "eval", [one])

    def p_min(**options: Any) -> float:
        out = export(head, target, tmp_path / "out", "llamacpp", **options)
        words = command(out, "llama-server")
        return float(words[words.index("--spec-draft-p-min") + 1])

    assert p_min() == 0
    assert p_min(calibration=report) == one.cutoff
    odds = one.cutoff / (1 - one.cutoff)
    divided = odds ** (1 / one.common_temperature)
    baked = p_min(calibration=report, bake_temperature=True)
    assert baked == pytest.approx(divided / (1 + divided), abs=0.006)


def test_llamacpp_takes_no_cutoff_of_another_temperature(
    make_head: Callable[..., Path], target: Path, tmp_path: Path
) -> None:
    """It computes the probability of a draft at temperature 1, whatever the request's is."""
    head = make_head(dtype=torch.float32)
    sampled = calibration(head, own=False, confidence_temperature=0.6, draft_probs=True)
    report = write_report(tmp_path / "eval", [sampled])
    options = {"calibration": report, "k": K}
    with pytest.raises(UserError, match=r"at temperature 1, this calibration states it at 0\.6"):
        export(head, target, tmp_path / "out", "llamacpp", **options)
    assert not (tmp_path / "out").exists()
    vllm = export(head, target, tmp_path / "vllm", "vllm", **options)
    facts = json.loads((vllm / "calibration.json").read_text())
    assert (facts["confidence_temperature"], facts["temperature"]) == (0.6, 0.0)
    at_1 = sampled.model_copy(update={"confidence_temperature": 1.0})
    write_report(tmp_path / "eval", [at_1])
    words = command(export(head, target, tmp_path / "out", "llamacpp", **options), "llama-server")
    assert words[words.index("--spec-draft-p-min") + 1] == f"{at_1.cutoff:.2g}"


def test_adaptive_verification_is_named_for_heads_with_a_confidence(
    head: Path, target: Path, tmp_path: Path
) -> None:
    report = write_report(tmp_path / "eval", [calibration(head)])
    out = export(head, target, tmp_path / "out", "vllm", calibration=report)
    text = (out / "launch.md").read_text()
    assert '"enable_adaptive_verification": true' in text
    assert "--bake-temperature" in text
    plain = export(head, target, tmp_path / "plain", "vllm")
    assert "Under load" not in (plain / "launch.md").read_text()
    assert not (plain / "calibration.json").exists()


def test_the_calibration_of_the_wanted_temperature_is_taken(
    head: Path, target: Path, tmp_path: Path
) -> None:
    both = [
        calibration(head),
        calibration(head, temperature=0.8, draft_probs=True),
        calibration(head, temperature=0.8),
    ]
    report = write_report(tmp_path / "eval", both)

    def used(**options: Any) -> tuple[float, bool]:
        out = export(head, target, tmp_path / "out", "vllm", calibration=report, **options)
        facts = json.loads((out / "calibration.json").read_text())
        return facts["temperature"], facts["draft_probs"]

    assert used() == (0.0, False)
    assert used(calibration_temperature=0.8) == (0.8, False)
    with pytest.raises(UserError, match=r"temperature 0\.5, found 0, 0\.8"):
        used(calibration_temperature=0.5)


def test_reports_that_do_not_fit_are_refused(head: Path, target: Path, tmp_path: Path) -> None:
    def refused(
        calibrations: list[Calibration], message: str, program: str = "vllm", **options: Any
    ) -> None:
        report = write_report(tmp_path / "eval", calibrations)
        with pytest.raises(UserError, match=message):
            export(head, target, tmp_path / "out", program, calibration=report, **options)
        assert not (tmp_path / "out").exists()

    one = calibration(head)
    refused([], "calibration of this head's weights, found none")
    other = one.model_copy(update={"head_sha256": "0" * 64, "head": "another"})
    refused([other], r"found those of other weights \(another\)")
    refused([one], "with k 4, found 7", k=4)
    four = calibration(head).model_copy(update={"k": 4, "positions": one.positions[:4]})
    refused([four], "SGLang drafts all 7 slots", "sglang", k=4)
    fitted = calibration(head, own=False)
    refused([fitted], "head with a confidence of its own", bake_temperature=True)
    (tmp_path / "eval" / "report.json").write_text("{}")
    with pytest.raises(UserError, match=r"expected a report\.json of draftlab"):
        export(head, target, tmp_path / "out", "vllm", calibration=tmp_path / "eval")
    with pytest.raises(UserError):
        export(head, target, tmp_path / "out", "vllm", calibration=tmp_path / "nowhere")


def test_an_earlier_export_is_replaced(head: Path, target: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "eval", [calibration(head)])
    out = export(head, target, tmp_path / "out", "sglang", calibration=report)
    before = (out / "sts.json").read_bytes()
    (out / "sts.json").write_text("{}")
    export(head, target, out, "sglang", calibration=report)
    assert (out / "sts.json").read_bytes() == before
    export(head, target, out, "sglang")
    assert not (out / "sts.json").exists()


def test_the_options_of_the_command(head: Path, target: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "eval", [calibration(head)])
    words = ["export", "--head", head, "--target", target, "--to", "llamacpp", "--out"]
    words += [tmp_path / "out", "--calibration", report, "--bake-temperature"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "--spec-draft-p-min 0." in (tmp_path / "out" / "launch.md").read_text()
    assert "export: K = 7 speculative tokens, as the head was calibrated for" in result.stderr
    words = ["export", "--head", head, "--target", target, "--to", "vllm", "--bake-temperature"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2
    assert "expected export.calibration too" in result.stderr


def test_a_changed_report_makes_an_export_again(head: Path, tmp_path: Path) -> None:
    settings = ExportSettings(calibration=str(tmp_path / "eval"))
    assert export_files(ExportSettings()) == export_files(settings) == {}
    report = write_report(tmp_path / "eval", [calibration(head)])
    before = export_files(settings)
    named = ExportSettings(calibration=str(report / "report.json"))
    assert export_files(named) == before != {}
    write_report(tmp_path / "eval", [])
    assert export_files(settings).keys() == before.keys()
    assert export_files(settings) != before
