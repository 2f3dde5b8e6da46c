"""`prompts.source: self`: where a user's turn is, what is dropped, resuming, a run of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftlab.engine.sampling import Request
from draftlab.errors import UserError
from draftlab.recipe.recipe import parse_recipe
from draftlab.text import self_prompts
from draftlab.text.self_prompts import Filter, find_user_turn, write_self_prompts
from draftlab.text.settings import PromptSettings
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import draftlab, ran, refused
from tests.helpers.toys import toy_target_folder, toy_tokenizer

TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_user_turn_is_found_in_any_template() -> None:
    tokenizer = toy_tokenizer()  # of Llama 3
    turn = find_user_turn(tokenizer, {})
    assert tokenizer.decode(turn.prompt_ids).endswith("user<|end_header_id|>\n\n")
    assert (turn.end, [*turn.stop_ids]) == ("<|eot_id|>", [tokenizer.eos_token_id])
    turn = find_user_turn(text := toy_tokenizer(f"{TURN}assistant:"), {})
    assert (text.decode(turn.prompt_ids), turn.end) == ("user:", "assistant:")
    assert not turn.stop_ids
    for template in ("{{ messages[0].content }} answer:", "user: text", f"{TURN}{TURN}"):
        with pytest.raises(UserError, match="text before and after"):
            find_user_turn(toy_tokenizer(template), {})


def test_what_is_no_prompt_is_dropped_and_counted() -> None:
    tokenizer = toy_tokenizer()
    tries = Filter(tokenizer, "<|eot_id|>", deduplicate=True)
    for text in (
        "What is the use of a test?<|eot_id|>",
        "what is  the use of a test<|eot_id|>",
        "What is <|im_end|> the use?<|eot_id|>",
        "What is the use of",
        " \n ?!, ...<|eot_id|>",
        "ok<|eot_id|>",
        "x y z w " * 20 + "<|eot_id|>",
    ):
        tries.add(tokenizer.encode(text))
    tries.add([*tokenizer.encode("What is the use of 5 ")[:-1], tokenizer.encode("é")[0], 285])
    assert [text for _, text in tries.kept] == ["What is the use of a test?"]
    assert tries.tries == 8
    assert sorted(tries.dropped) == [
        "empty",
        "equal to an earlier one",
        "fewer than 4 tokens",
        "no end within 256 tokens",
        "not valid UTF-8",
        "repeated 4-grams",
        "special tokens inside",
    ]


def write(path: Path, folder: Path, *, fails_after: int = 100, seed: int = 0) -> list[str]:
    """Write 10 prompts by a decoder that fails after some pieces; return what is said."""
    tokenizer, monitor = toy_tokenizer(), RecordingMonitor()

    def decode(pieces: Sequence[list[Request]]) -> Iterator[list[Any]]:
        for number, piece in enumerate(pieces):
            if number == fails_after:
                raise KeyboardInterrupt
            yield [
                SimpleNamespace(
                    id=one.id,
                    token_ids=tokenizer.encode(f"{one.id[:-1]} of {seed}, the use?<|eot_id|>"),
                )
                for one in reversed(piece)
            ]

    target: Any = SimpleNamespace(fingerprint="x", dtype="float32", max_length=512, folder=folder)
    settings = PromptSettings(source="self", max_prompts=10)
    options: Any = {"arguments": {}, "piece": 4, "seed": seed, "monitor": monitor}
    write_self_prompts(path, target, tokenizer, settings, decode, **options)
    return monitor.lines


def test_an_interruption_changes_no_prompt(tmp_path: Path) -> None:
    folder, path = toy_target_folder(tmp_path / "toy"), tmp_path / "prompts.jsonl"
    write(whole := tmp_path / "whole.jsonl", folder)
    with pytest.raises(KeyboardInterrupt):
        write(path, folder, fails_after=2)
    with open(tmp_path / "prompts.partial.jsonl", "ab") as file:
        file.write(b"[[1, 2")  # a torn line
    assert "prompts: resuming after 8 tries" in write(path, folder)
    assert path.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "prompts.partial.jsonl").exists()
    assert write(path, folder, fails_after=0) == []  # nothing is decoded
    write(path, folder, seed=1)
    assert path.read_bytes() != whole.read_bytes()


def test_a_run_of_prompts_that_the_target_writes(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("target=embedded", "prompts.source=self", "prompts.max_prompts=4")
    command = ("prepare", "small.yaml", *settings, "regenerate.max_new_tokens=2")
    assert draftlab(workshop, *command, "--plan").exit_code == 0
    run, texts = workshop / "runs/small", []
    for extra in ((), ("--force",), ("--force", "seed=1")):
        ran(workshop, *command, *extra)
        texts.append((run / "prompts.jsonl").read_text())
    assert (texts[0] == texts[1], texts[0] == texts[2]) == (True, False)
    written = json.loads((run / "prompts.json").read_text())
    assert written["tries"] >= written["prompts"] + sum(written["dropped"].values())
    answers = (run / "answers.jsonl").read_text().splitlines()
    asked, given = (
        [json.loads(line)["messages"][0] for line in lines]
        for lines in (texts[2].splitlines(), answers)
    )
    assert asked == given
    monkeypatch.setattr(self_prompts, "MAX_TOKENS", 1)  # too few for any prompt
    assert "no end within 1 tokens" in refused(workshop, *command, "name=few")


def test_the_target_writes_prompts_beside_those_of_a_file(workshop: Path) -> None:
    run = workshop / "runs/small"
    more = ("prompts.self_written=3", "prompts.max_prompts=1", "regenerate.max_new_tokens=2")
    command = ("prepare", "small.yaml", "target=embedded", *more)
    assert draftlab(workshop, *command).exit_code == 0
    written = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]

    def asked(*given: dict[str, Any], number: int = 2) -> list[str]:
        file = workshop / "own.jsonl"
        file.write_text("".join(f"{json.dumps(one)}\n" for one in given))
        own = (f"prompts.source={file}", f"prompts.max_prompts={number}", "--force")
        ran(workshop, *command, *own)
        answers = map(json.loads, (run / "answers.jsonl").read_text().splitlines())
        return [one["messages"][0]["content"] for one in answers]

    texts = [one["messages"][0]["content"] for one in written]
    assert len(texts) == 3
    hello = {"id": "a", "messages": [{"role": "user", "content": "Hello"}]}
    repeated = written[1] | {"id": "b"}
    assert asked(hello, repeated) == ["Hello", texts[1], texts[0], texts[2]]
    answer = {"role": "assistant", "content": "Yes."}
    answered = repeated | {"messages": [*repeated["messages"], answer]}
    assert asked(hello, answered) == ["Hello", texts[1], texts[0], texts[2]]
    assert asked(hello, repeated, number=1) == ["Hello", *texts]
    (workshop / "own.jsonl").write_text(json.dumps(hello | {"id": written[0]["id"]}))
    own = (f"prompts.source={workshop / 'own.jsonl'}", "--force")
    assert "expected other ids" in refused(workshop, *command, *own)


def test_a_run_without_such_prompts_that_an_earlier_version_began_is_continued(
    folder: Path,
) -> None:
    record = folder / "runs/small/stages/answers.json"
    fields = json.loads(record.read_text())
    del fields["inputs"]["prompts.self_written"]
    record.write_text(json.dumps(fields))
    before = (folder / "runs/small/answers.jsonl").stat().st_mtime_ns
    ran(folder, "run", "small.yaml")
    assert (folder / "runs/small/answers.jsonl").stat().st_mtime_ns == before


def test_what_a_recipe_of_own_prompts_needs() -> None:
    for prompts, regenerate, found in (
        ({"source": "self"}, {}, "expected their number"),
        ({"source": "self", "max_prompts": 4, "self_written": 1}, {}, "all prompts in max_prompts"),
        ({"self_written": 4}, {"enabled": False}, "without answers"),
        ({"source": "self", "max_prompts": 4}, {"enabled": False}, "without answers"),
    ):
        with pytest.raises(UserError, match=found):
            parse_recipe({"name": "own", "prompts": prompts, "regenerate": regenerate})
