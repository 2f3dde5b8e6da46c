"""The target's own answers: exact tokens, any interruption, refusals, rounds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.target_model.model import TargetSettings, load_target, load_tokenizer
from draftlab.text.answer_workers import answering
from draftlab.text.answers import RegenerateSettings, regenerate
from draftlab.text.conversations import Answer, Conversation, read_conversations
from draftlab.text.render import prompt_ids, render
from draftlab.text.samples import samples
from tests.helpers.toys import CHATML_TEMPLATE, toy_target_folder, toy_tokenizer

STOP = 285


class Lines(Monitor):
    """Keeps what is said, and the last progress."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last: tuple = ()

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        self.last = (stage, done, total, detail)


class Fake:
    """A decoder whose answer is a function of the request; completion order is reversed."""

    def __init__(self, *, die_after: int | None = None) -> None:
        self.requests: list[Request] = []
        self.left = die_after

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        for request in reversed(requests):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
            assert len(request.prompt_ids) + request.max_new_tokens <= max_length
            self.requests.append(request)
            # Also of its company, as rounding on real machines is: pieces must not depend on kills.
            company = sum(r.id.encode()[-1] for r in requests) + len(requests)
            temperature = int(request.sampling.temperature * 10)
            key = [sum(request.id.encode()), temperature, len(request.prompt_ids), company]
            rng = np.random.default_rng(key)
            ids = rng.integers(256, 281, size=int(rng.integers(0, 9))).tolist()
            ids = ([*ids, STOP])[: request.max_new_tokens]
            finish = "stop" if ids[-1] == STOP else "length"
            yield Generation(request.id, tuple(ids), finish, Counters(0), (), (), 0.0, 0.0)


def fake_target(max_length: int = 512):
    return SimpleNamespace(
        folder=Path("nowhere"), fingerprint="f", dtype=torch.float32, max_length=max_length
    )


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def prompts(count: int = 10) -> list[Conversation]:
    """Every third conversation has two rounds, given answers included."""
    made = []
    for i in range(count):
        chat = user(f"write {i}")
        if i % 3 == 1:
            chat += [{"role": "assistant", "content": "given"}, *user("again")]
        made.append(Conversation(f"p{i}", chat, "test"))
    return made


SETTINGS = RegenerateSettings(piece=4, batch=2, max_new_tokens=6)


def run(
    path: Path,
    fake: Fake | None = None,
    *,
    settings=SETTINGS,
    seed=1,
    count=10,
    monitor=None,
    asked=None,
):
    return regenerate(
        fake_target(),
        toy_tokenizer(),
        asked or prompts(count),
        settings,
        path,
        seed=seed,
        monitor=monitor or Monitor(),
        decode=fake or Fake(),
    )


def test_answers_are_in_prompt_order_with_the_temperature_of_their_place(tmp_path: Path):
    lines = Lines()
    done = run(tmp_path / "answers.jsonl", monitor=lines)
    assert [c.id for c in done] == [f"p{i}" for i in range(10)]
    assert [c.temperature for c in done] == [0.0, 0.8] * 5
    assert read_conversations(tmp_path / "answers.jsonl") == done
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.json", "answers.jsonl"]
    assert lines.last[:3] == ("answers", 13, 13)
    assert "tokens/s" in lines.last[3]
    manifest = json.loads((tmp_path / "answers.json").read_text())
    assert manifest["answers"] == 13
    assert manifest["tokens"] == sum(len(a.token_ids) for c in done for a in c.answers)


def test_with_tools_the_target_answers_up_to_the_first_call(tmp_path: Path):
    """What a tool said answers to a call that the target may not have made."""
    tools = ({"type": "function", "function": {"name": "add"}},)
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [
        *user("2+2?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
        *user("sure?"),
    ]
    template = "{{ tools | tojson if tools else '' }}" + CHATML_TEMPLATE
    fake, tokenizer = Fake(), toy_tokenizer(template)
    (done,) = regenerate(
        fake_target(),
        tokenizer,
        [Conversation("c", chat, "s", tools=tools)],
        SETTINGS,
        tmp_path / "a.jsonl",
        seed=1,
        monitor=Monitor(),
        decode=fake,
    )
    (request,) = fake.requests
    assert request.prompt_ids == prompt_ids(tokenizer, user("2+2?"), tools)
    assert '"name": "add"' in tokenizer.decode(request.prompt_ids)
    assert [m["role"] for m in done.messages] == ["user", "assistant"]
    assert done.tools == tools
    assert read_conversations(tmp_path / "a.jsonl") == [done]


def test_the_requests_say_what_the_settings_say(tmp_path: Path):
    fake = Fake()
    settings = RegenerateSettings(temperatures=(0.7,), top_p=0.9, top_k=5, max_new_tokens=3)
    done = run(tmp_path / "a.jsonl", fake, settings=settings, seed=9)
    first = next(r for r in fake.requests if r.id == "p0")
    assert first.prompt_ids == prompt_ids(toy_tokenizer(), user("write 0"))
    assert first.stop_ids == {STOP}
    assert first.max_new_tokens == 3
    wanted = (0.7, 5, 0.9, 9)
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == wanted
    assert {c.temperature for c in done} == {0.7}


def test_later_rounds_answer_to_the_targets_own_earlier_answers(tmp_path: Path):
    fake = Fake()
    done = run(tmp_path / "a.jsonl", fake)
    two = done[1]
    assert [m["role"] for m in two.messages] == ["user", "assistant", "user", "assistant"]
    assert "given" not in {m["content"] for m in two.messages}
    tokenizer = toy_tokenizer()
    assert two.answers[1].prompt_ids == prompt_ids(tokenizer, two.messages[:3])
    ids = list(two.answers[0].token_ids)
    assert two.messages[1]["content"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert {r.id for r in fake.requests if r.id.startswith("p1")} == {"p1", "p1/1"}


@pytest.mark.parametrize("die_after", [0, 3, 4, 7, 12])
def test_killed_between_answers_it_resumes_to_the_same_bytes(tmp_path: Path, die_after: int):
    run(tmp_path / "whole.jsonl")
    fake = Fake(die_after=die_after)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a.jsonl", fake)
    again, lines = Fake(), Lines()
    run(tmp_path / "a.jsonl", again, monitor=lines)
    for suffix in (".jsonl", ".json"):
        whole = (tmp_path / "whole").with_suffix(suffix).read_bytes()
        assert (tmp_path / "a").with_suffix(suffix).read_bytes() == whole
    answered = {r.id for r in again.requests}
    assert ("p0" in answered) == (die_after < 5)  # a piece of four conversations, five answers
    third = Fake()
    run(tmp_path / "a.jsonl", third)
    assert third.requests == []


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_write_torn_at_any_byte_resumes_to_the_same_bytes(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("torn")
    run(folder / "whole.jsonl")
    wanted = (folder / "whole.jsonl").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(folder / "a.jsonl", Fake(die_after=12))
    partial = folder / "a.partial.jsonl"
    full = partial.read_bytes() + b'{"id":"p8","messages'
    partial.write_bytes(full[: data.draw(st.integers(0, len(full)))])
    with contextlib.suppress(KeyboardInterrupt):
        run(folder / "a.jsonl", Fake(die_after=data.draw(st.sampled_from([0, 6, 99]))))
    run(folder / "a.jsonl")
    assert (folder / "a.jsonl").read_bytes() == wanted


def test_other_settings_are_refused_by_name(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a.jsonl", Fake(die_after=6))
    before = (tmp_path / "a.partial.jsonl").read_bytes()
    hotter = RegenerateSettings(piece=4, batch=2, max_new_tokens=6, temperatures=(1.0,))
    with pytest.raises(UserError) as caught:
        run(tmp_path / "a.jsonl", settings=hotter, seed=2)
    assert "temperatures: [0.0, 0.8] there, [1.0] wanted" in caught.value.what
    assert "seed: 1 there, 2 wanted" in caught.value.what
    assert "max_new_tokens" not in caught.value.what
    assert (tmp_path / "a.partial.jsonl").read_bytes() == before
    run(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="prompts: "):
        run(tmp_path / "a.jsonl", count=9)


def test_a_foreign_file_and_a_changed_result_are_noticed(tmp_path: Path):
    (tmp_path / "a.partial.jsonl").write_text('{"id": "mine"}\n')
    with pytest.raises(UserError, match="another file"):
        run(tmp_path / "a.jsonl")
    assert (tmp_path / "a.partial.jsonl").read_text() == '{"id": "mine"}\n'
    run(tmp_path / "b.jsonl")
    wanted = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(wanted[:-9])
    lines = Lines()
    run(tmp_path / "b.jsonl", monitor=lines)
    assert "not what its manifest says" in lines.lines[0]
    assert (tmp_path / "b.jsonl").read_bytes() == wanted


def test_prompts_without_room_are_dropped_and_counted(tmp_path: Path):
    tokenizer, lines = toy_tokenizer(), Lines()
    room = len(prompt_ids(tokenizer, user("short"))) + 3
    chats = [user("x" * 200), user("short"), user("short", "y" * 200)]
    chats[2].insert(1, {"role": "assistant", "content": "?"})
    given = [Conversation(str(i), chat, "s") for i, chat in enumerate(chats)]

    def go(which: list[Conversation], path: Path) -> list[Conversation]:
        return regenerate(
            fake_target(room),
            tokenizer,
            which,
            SETTINGS,
            path,
            seed=0,
            monitor=lines,
            decode=Fake(),
        )

    done = go(given, tmp_path / "a.jsonl")
    assert [c.id for c in done] == ["1", "2"]
    assert [c.temperature for c in done] == [0.8, 0.0]
    assert [len(c.messages) for c in done] == [2, 2]
    assert all(1 <= len(c.answers[0].token_ids) <= 3 for c in done)
    assert "dropped 1 prompts (first: 0): no room" in lines.lines[0]
    assert any("1 later turns were left out" in said for said in lines.lines)
    with pytest.raises(UserError, match="no room"):
        go(given[:1], tmp_path / "b.jsonl")


def test_several_answers_to_a_prompt_have_ids_and_temperatures_of_their_own(tmp_path: Path):
    settings = SETTINGS.model_copy(update={"samples": 3, "temperatures": (0.0, 0.8)})
    found = run(tmp_path / "a.jsonl", settings=settings, count=2)
    assert [(c.id, c.temperature) for c in found] == [
        ("p0", 0.0), ("p0~1", 0.8), ("p0~2", 0.0), ("p1", 0.8), ("p1~1", 0.0), ("p1~2", 0.8)
    ]  # fmt: skip
    asked, fake = [Conversation(id_, user("write"), "test") for id_ in ("p", "p~1")], Fake()
    with pytest.raises(UserError, match="that no other prompt has, found 'p~1' twice"):
        run(tmp_path / "b.jsonl", fake, settings=settings, asked=asked)
    assert not fake.requests


def test_given_answers_need_no_target(tmp_path: Path):
    settings, lines = RegenerateSettings(enabled=False), Lines()
    kept = regenerate(
        None, toy_tokenizer(), prompts(), settings, tmp_path / "a.jsonl", seed=0, monitor=lines
    )
    assert [c.id for c in kept] == ["p1", "p4", "p7"]
    assert "dropped 7 " in lines.lines[0]
    assert read_conversations(tmp_path / "a.jsonl") == kept


def test_the_engines_greedy_answer_is_the_models_and_resumes(tmp_path: Path):
    folder = toy_target_folder(tmp_path / "target", layers=2, hidden=32, max_length=64)
    target, tokenizer = load_target(TargetSettings(path=str(folder))), toy_tokenizer()
    settings = RegenerateSettings(piece=2, batch=2, max_new_tokens=8)
    four = prompts(4)
    done = regenerate(
        target, tokenizer, four, settings, tmp_path / "a.jsonl", seed=0, monitor=Monitor()
    )
    answer = done[0].answers[0]
    assert answer.prompt_ids == prompt_ids(tokenizer, four[0].messages)
    out = target.model.generate(
        torch.tensor([answer.prompt_ids]), max_new_tokens=8, do_sample=False
    )
    assert tuple(out[0, len(answer.prompt_ids) :].tolist()) == answer.token_ids

    header = {"format": "draftlab answers 1"} | {
        "made_with": json.loads((tmp_path / "a.json").read_text())["made_with"]
    }
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    head = json.dumps(header, sort_keys=True, separators=(",", ":")) + "\n"
    (tmp_path / "b.partial.jsonl").write_text(head + lines[0] + lines[1] + lines[2][:50])
    regenerate(target, tokenizer, four, settings, tmp_path / "b.jsonl", seed=0, monitor=Monitor())
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_own_answers_keep_their_tokens_and_given_ones_are_rendered():
    tokenizer = toy_tokenizer()
    chat = [*user("q"), {"role": "assistant", "content": "def"}]
    prompt = prompt_ids(tokenizer, chat[:1])
    # "def" in two tokens, as sampling may write it and tokenising never would.
    split = (*tokenizer.convert_tokens_to_ids(["de", "f"]), STOP)
    lone = Conversation("own", chat, "s", 0.8, (Answer(prompt, split, "stop"),))
    given = Conversation("given", chat, "s")
    silent = Conversation("silent", chat[:1], "s")
    lines = Lines()
    own, rendered = samples([lone, silent, given], tokenizer, lines)
    assert own.token_ids == prompt + split
    assert own.spans == (0,) * len(prompt) + (1,) * 3
    assert own.temperature == 0.8
    wanted = render(tokenizer, chat)
    assert (rendered.token_ids, rendered.spans) == (wanted.token_ids, wanted.spans)
    assert rendered.temperature is None
    assert "dropped 1 (first: silent)" in lines.lines[0]
    with pytest.raises(UserError, match="no assistant turn"):
        samples([silent], tokenizer, lines)


def test_rounds_share_a_sample_only_where_the_tokens_agree():
    tokenizer = toy_tokenizer(CHATML_TEMPLATE, eos="<|im_end|>")
    end = tokenizer.eos_token_id
    chat = [*user("q"), {"role": "assistant", "content": "def"}, *user("r")]
    first = prompt_ids(tokenizer, chat[:1])
    again = prompt_ids(tokenizer, chat)
    whole = tuple(tokenizer("def")["input_ids"])
    split = tuple(tokenizer.convert_tokens_to_ids(["de", "f"]))

    def made(answer: tuple[int, ...], finish: str) -> list:
        answers = (Answer(first, answer, finish), Answer(again, (65, end), "stop"))
        return samples([Conversation("c", chat, "s", 0.0, answers)], tokenizer, Monitor())

    (one,) = made((*whole, end), "stop")
    assert one.token_ids == (*again, 65, end)
    assert len(whole) == 1
    assert [s for s in one.spans if s] == [1] * (len(whole) + 1) + [2, 2]
    (cut,) = made(whole, "length")  # the closing tag is then the template's
    assert [s for s in cut.spans if s] == [1] * len(whole) + [2, 2]
    assert cut.spans[cut.token_ids.index(end, len(first))] == 0
    a, b = made((*split, end), "stop")
    assert (a.id, a.token_ids) == ("c", (*first, *split, end))
    assert (b.id, b.token_ids) == ("c#2", (*again, 65, end))
    assert b.spans == (0,) * len(again) + (1, 1)


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.data.test_regenerate import Fake, run
class Slow(Fake):
    def __call__(self, requests, max_length):
        for generation in super().__call__(requests, max_length):
            time.sleep(0.01)
            yield generation
run(Path({path!r}), Slow(), count=120)
"""


def test_a_killed_process_resumes_to_the_same_bytes(tmp_path: Path):
    root = str(Path(__file__).parents[2])
    script = textwrap.dedent(KILLED).format(root=root, path=str(tmp_path / "a.jsonl"))
    partial = tmp_path / "a.partial.jsonl"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 120
        while not (partial.exists() and partial.stat().st_size > 4000):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(UserError, match="another process"):
            run(tmp_path / "a.jsonl", count=120)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    lines = Lines()
    run(tmp_path / "a.jsonl", count=120, monitor=lines)
    assert any("were there; going on" in said for said in lines.lines)
    run(tmp_path / "whole.jsonl", count=120)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("others", [1, 3])
def test_whoever_takes_a_piece_the_bytes_are_the_same(tmp_path: Path, others: int):
    run(tmp_path / "alone.jsonl", count=30)
    fakes = [Fake() for _ in range(others + 1)]
    lines = Lines()
    regenerate(
        fake_target(),
        toy_tokenizer(),
        prompts(30),
        SETTINGS,
        tmp_path / "answers.jsonl",
        seed=1,
        monitor=lines,
        decode=fakes[0],
        others=fakes[1:],
    )
    alone, found = (tmp_path / name for name in ("alone.jsonl", "answers.jsonl"))
    assert found.read_bytes() == alone.read_bytes()
    assert sum(len(fake.requests) for fake in fakes) == 40  # each once
    assert lines.last[:3] == ("answers", 40, 40)


def test_when_one_of_several_fails_the_pieces_before_are_kept(tmp_path: Path):
    run(tmp_path / "alone.jsonl", count=30)
    failing = Fake(die_after=5)
    path = tmp_path / "answers.jsonl"
    others = [failing, Fake()]
    with pytest.raises(KeyboardInterrupt):
        regenerate(
            fake_target(),
            toy_tokenizer(),
            prompts(30),
            SETTINGS,
            path,
            seed=1,
            monitor=Monitor(),
            decode=Fake(),
            others=others,
        )
    run(path, count=30)
    assert path.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_answers_of_a_process_on_another_device(tmp_path: Path):
    """On a CPU: the same bytes with it; its end and its errors are told."""
    folder = tmp_path / "target"
    toy_target_folder(folder, layers=1, hidden=32, max_length=128)
    asked, made = TargetSettings(path=str(folder), device="cpu"), []
    settings = SETTINGS.model_copy(update={"temperatures": (0.0,)})
    with answering(asked, ["cpu"], settings.batch) as others:
        for name, beside in (("alone", []), ("together", others)):
            path = tmp_path / f"{name}.jsonl"
            regenerate(
                load_target(asked),
                load_tokenizer(asked),
                prompts(12),
                settings,
                path,
                seed=1,
                monitor=Monitor(),
                others=beside,
            )
            made.append(path.read_bytes())
        assert made[0] == made[1]
        others[0]._process.kill()
        with pytest.raises(UserError, match="killed by SIGKILL"):
            next(others[0]([Request("a", (1, 2), 3, Sampling())], 16))
    missing = TargetSettings(path=str(tmp_path / "nowhere"), device="cpu")
    with (
        answering(missing, ["cpu"], 1) as others,
        pytest.raises(UserError, match=r"on cpu failed: .*nowhere"),
    ):
        next(others[0]([Request("a", (1, 2), 3, Sampling())], 16))
