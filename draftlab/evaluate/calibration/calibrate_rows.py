"""The calibrations of all rows of an evaluation."""

from __future__ import annotations

from draftlab.errors import UserError
from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.calibrate import calibrate
from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.workload import EngineResults, Workload
from draftlab.files import known_sha256
from draftlab.heads.folder import WEIGHTS


def calibrate_rows(workload: Workload, results: EngineResults) -> list[Calibration]:
    """Return a calibration for each drafting configuration and temperature, in the rows' order.

    A row with too few steps has none, and a warning is printed.

    Args:
        results: of draftlab's engine, whose generations have their drafts' confidence.
    """
    calibrations = []
    for t in workload.settings.temperatures:
        for config in workload.configs_at(t):
            if config.head is None:
                continue
            named = config.head
            blocks = DraftBlocks.from_generations(results.generations[t, config])
            own = getattr(named.head.config, "confidence", False)
            drafts_at = config.confidence_temperature(t, workload.settings)
            try:
                calibration = calibrate(
                    blocks,
                    "confidence head" if own else "draft probability",
                    confidence_temperature=None if own else drafts_at,
                    engine=results.engine,
                    head=named.name,
                    head_sha256=named.folder and known_sha256(named.folder / WEIGHTS),
                    temperature=t,
                    k=config.k,
                    draft_probs=config.draft_probs,
                    suite=workload.suite.name,
                    suite_sha256=workload.suite.sha256,
                )
            except UserError as error:
                workload.monitor.say(
                    f"warning: {config.name_at(t)} at T = {t:g} is not calibrated: {error.what}; "
                    f"{error.do}"
                )
                continue
            calibrations.append(calibration)
    return calibrations
