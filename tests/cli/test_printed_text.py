"""Names from strangers' files and servers reach a terminal as visible text only."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftlab.cli import plain_text
from draftlab.cli.console import ConsoleMonitor
from draftlab.cli.errors import guard
from draftlab.cli.plain_text import PlainConsole
from draftlab.errors import UserError
from draftlab.formatting import visible, visible_json
from draftlab.heads.folder import CONFIG
from draftlab.run.inspect import inspect_path
from draftlab.run.resolve import reference_head
from tests.helpers.small_run import ran

TITLE = "\x1b]0;owned\x07"
HOSTILE = f"a{TITLE}b\x1b[2J\x9b31m\r\x08\u202e[/red][bold]:bomb:\x7f\udc80"
"""Sets a window's title, clears the screen, goes back, reorders, and is markup."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
STYLE = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[\d*[AK]|\x1b\[2K|\r")
"""The sequences of rich: colours, and those of the progress bar."""


def printed(*renderables: Any, terminal: bool = False, **options: Any) -> str:
    file = io.StringIO()
    to = PlainConsole(file=file, width=100, force_terminal=terminal)
    for renderable in renderables:
        to.print(renderable, **options)
    return file.getvalue()


def table(cell: Any) -> Table:
    result = Table(title=HOSTILE)
    result.add_column(HOSTILE)
    result.add_row(cell)
    return result


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("soft_wrap", [False, True])
@pytest.mark.parametrize(
    "renderable",
    [
        HOSTILE,
        Text(HOSTILE, style="red"),
        Text("x ").append(HOSTILE, style="bold"),
        table(HOSTILE),
        table(Text(HOSTILE, style="red")),
        table(table(HOSTILE)),
        Panel(Text(HOSTILE), title="error"),
    ],
    ids=["str", "text", "joined", "cell", "cell of text", "table in a table", "panel"],
)
def test_no_control_sequence_is_printed(renderable: Any, terminal: bool, soft_wrap: bool) -> None:
    output = printed(renderable, terminal=terminal, soft_wrap=soft_wrap)
    if terminal:
        output = STYLE.sub("", output)
    assert CONTROL.search(output) is None
    assert "␛]0;owned" in output
    assert "[/red][bold]:bomb:" in output


@pytest.mark.parametrize("hidden", ["\u200b", "\ufeff", "\u00ad", "\U000e0041", "\U000e007f"])
def test_what_is_not_seen_has_a_picture(hidden: str) -> None:
    """A name that differs from another by it would look the same."""
    assert visible(f"qw{hidden}en") == "qw\ufffden"
    assert json.loads(visible_json(f'"{hidden}"')) == hidden


@given(st.text(alphabet=st.characters() | st.sampled_from("\x1b\x9b\x07\u202e\U000e0041\n\t")))
def test_visible_text(text: str) -> None:
    shown = visible(text)
    assert CONTROL.search(shown) is None
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a in "\n\t" or a.isalnum())
    as_json = visible_json(json.dumps([text], ensure_ascii=False, indent=1))
    assert json.loads(as_json) == [text]
    assert CONTROL.search(as_json) is None


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_and_errors(terminal: bool) -> None:
    file = io.StringIO()
    monitor = ConsoleMonitor(PlainConsole(file=file, width=100, force_terminal=terminal))
    monitor.progress(HOSTILE, 1, 2, HOSTILE)
    monitor.progress(HOSTILE, 2, 2, HOSTILE)
    with pytest.raises(BaseException), guard(True, monitor=monitor):  # noqa: B017, PT011
        raise UserError(HOSTILE, where=HOSTILE, do=HOSTILE)
    with pytest.raises(BaseException), guard(True, monitor=monitor):  # noqa: B017, PT011
        raise KeyError(HOSTILE)
    output = file.getvalue()
    assert "internal error" in output
    assert CONTROL.search(STYLE.sub("", output)) is None


def test_lines_and_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    plain_text.echo(HOSTILE)
    plain_text.echo_json(json.dumps({"name": HOSTILE}, ensure_ascii=False))
    line, as_json = capsys.readouterr().out.splitlines()
    assert CONTROL.search(line + as_json) is None
    assert json.loads(as_json) == {"name": HOSTILE}


def test_messages_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory = logging.getLogRecordFactory()
    try:
        plain_text.clean_library_messages()
        record = logging.getLogger("x").makeRecord("x", 30, "f", 1, "%s", (HOSTILE,), None)
        assert CONTROL.search(record.getMessage()) is None
        assert CONTROL.search(warnings.formatwarning(HOSTILE, UserWarning, "f", 1)) is None
    finally:
        logging.setLogRecordFactory(factory)


def test_a_strangers_head(tmp_path: Path) -> None:
    fields = json.loads((reference_head() / CONFIG).read_text())
    fields["target"]["name"] = HOSTILE.encode("utf-8", "replace").decode()
    fields["provenance"] |= {"made by[/red]\x1b[2J": TITLE, "imported": {"layout": TITLE}}
    head = tmp_path / f"head{TITLE}[red]"
    head.mkdir()
    for file in reference_head().iterdir():
        (head / file.name).write_bytes(file.read_bytes())
    (head / CONFIG).write_text(json.dumps(fields))
    file = io.StringIO()
    inspect_path(str(head), 0, PlainConsole(file=file, width=200))
    assert "␛]0;owned" in file.getvalue()
    assert CONTROL.search(file.getvalue()) is None
    (head / "model.safetensors").unlink()
    for command in (["inspect"], ["eval", "--head"], ["export", "--to", "vllm", "--head"]):
        result = ran(tmp_path, *command, str(head), code=2)
        assert CONTROL.search(result.output) is None
