"""The answers file: interruptions at any point, other settings, other files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.errors import UserError
from tests.helpers.fake_decoder import SETTINGS, FakeDecoder, generate, prompts
from tests.helpers.monitors import RecordingMonitor


@pytest.mark.parametrize("fail_after", [0, 3, 4, 7, 12])
def test_resuming_after_a_failure_gives_the_same_bytes(tmp_path: Path, fail_after: int):
    generate(tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "a.jsonl", FakeDecoder(fail_after=fail_after))
    resumed, repeated = FakeDecoder(), FakeDecoder()
    generate(tmp_path / "a.jsonl", resumed)
    for suffix in (".jsonl", ".json"):
        whole = (tmp_path / "whole").with_suffix(suffix).read_bytes()
        assert (tmp_path / "a").with_suffix(suffix).read_bytes() == whole
    answered = {r.id for r in resumed.requests}
    assert ("p0" in answered) == (fail_after < 5)  # a chunk of four conversations has five answers
    generate(tmp_path / "a.jsonl", repeated)
    assert repeated.requests == []


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_resuming_after_a_write_torn_at_any_byte_gives_the_same_bytes(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("torn")
    generate(folder / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        generate(folder / "a.jsonl", FakeDecoder(fail_after=12))
    partial = folder / "a.partial.jsonl"
    content = partial.read_bytes() + b'{"id":"p8","messages'
    partial.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(KeyboardInterrupt):
        decoder = FakeDecoder(fail_after=data.draw(st.sampled_from([0, 6, 99])))
        generate(folder / "a.jsonl", decoder)
    generate(folder / "a.jsonl")
    assert (folder / "a.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_other_settings_are_refused_by_name(tmp_path: Path):
    path, partial = tmp_path / "a.jsonl", tmp_path / "a.partial.jsonl"
    with pytest.raises(KeyboardInterrupt):
        generate(path, FakeDecoder(fail_after=6))
    content = partial.read_bytes()
    hotter = SETTINGS.model_copy(update={"temperatures": (1.0,)})
    with pytest.raises(UserError) as caught:
        generate(path, settings=hotter, seed=2)
    assert "temperatures: [0.0, 0.8] in the file, [1.0] now" in caught.value.what
    assert "seed: 1 in the file, 2 now" in caught.value.what
    assert "max_new_tokens" not in caught.value.what
    assert partial.read_bytes() == content
    generate(path)
    with pytest.raises(UserError, match="prompts: "):
        generate(path, prompts=prompts(9))


def test_another_file_is_refused_and_a_damaged_one_is_generated_again(tmp_path: Path):
    partial, path = tmp_path / "a.partial.jsonl", tmp_path / "b.jsonl"
    partial.write_text('{"id": "other"}\n')
    with pytest.raises(UserError, match="another file"):
        generate(tmp_path / "a.jsonl")
    assert partial.read_text() == '{"id": "other"}\n'
    generate(path)
    content, monitor = path.read_bytes(), RecordingMonitor()
    path.write_bytes(content[:-9])
    generate(path, monitor=monitor)
    assert "differs from its manifest" in monitor.lines[0]
    assert path.read_bytes() == content
