"""Another trainer on a run's store: its seconds, and what is refused before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from tests.helpers.drivers import load
from tests.helpers.small_run import copy_of_finished

peer_on_run = load("bench/peer_on_run")
peers = load("bench/acceptance_peers")


def test_the_seconds_are_of_steps_at_the_steady_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy_of_finished(tmp_path))
    tasks, imported = [], []

    def train(family: str, task: Any, out: Path) -> Any:
        out.mkdir(parents=True)
        tasks.append(task)
        return peers.Trained(60, 6000, 1, 1e-3, 99.0, 3.0, 1.0)  # compiled for 96 seconds

    monkeypatch.setitem(peers.PEERS, "speculators", (train, ("eagle3",)))
    monkeypatch.setattr(peers, "import_head", lambda *args, **_: imported.append(args))
    words = ["runs/small", "--seconds", "7", "--step-tokens", "100", "num_layers=2"]
    peer_on_run.main(words)
    assert [task.tokens for task in tasks] == [6000, 14_000]
    assert tasks[1].options == {"num_layers": 2}
    store = tasks[0].store
    assert 0 < len(tasks[0].indices) < len(store)
    out = Path("runs/small/speculators-eagle3-seed0")
    assert imported == [(out / "export", out / "head")]
    with pytest.raises(UserError, match="expected a new or an empty folder"):
        peer_on_run.main(words)  # which would be known only after the training


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num_layers"], "expected settings such as num_layers=2"),
        (["--peer", "specforge", "num_layers=2"], "specforge takes no settings"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        peer_on_run.main(["run", "--seconds", "1", *words])
    assert message in capsys.readouterr().err
