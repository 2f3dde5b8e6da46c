"""A file of conversations → a suite of long prompts, to see AL by the length of the context.

    python data_prep/long_prompts.py prompts.jsonl --target Qwen/Qwen3-8B --out long.jsonl
    draftlab eval --suite long.jsonl --by-length --max-prompts 128

Half of the prompts are conversations: turns of the file's, answers too, and then a question of it.
The others hide a number among the same turns and ask for it. A prompt is one message, of at most so
many tokens of the target with its template. The answers of `draftlab prepare` are such a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from draftlab.errors import UserError
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.conversations import iterate_conversations

LENGTHS = (2048, 4096, 8192, 16384, 32768)


def long_prompts(
    source: Path, tokenizer: Any, lengths: list[int], count: int, seed: int
) -> list[dict[str, Any]]:
    """Return `count` prompts of each length and kind, as lines of a suite.

    Raises:
        UserError: the file has too little text, or a length has no room for any of it.
    """

    def tokens(text: str) -> int:
        chat = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])

    messages = [m for one in iterate_conversations(source) for m in one.messages if m["content"]]
    turns = [f"{m['role'].capitalize()}: {m['content']}" for m in messages if m["role"] != "system"]
    questions = [n for n, turn in enumerate(turns) if turn.startswith("User: ")]
    if not questions:
        what = "expected turns of users, found none"
        raise UserError(what, where=source, do="name a file of conversations")
    # The joints of turns take two tokens at most.
    sizes = [len(ids) + 2 for ids in tokenizer(turns, add_special_tokens=False)["input_ids"]]
    generator, lines = np.random.default_rng(seed), []
    for length in lengths:
        too_few = UserError(
            f"expected turns for prompts of {length:,} tokens, found too few that fit",
            where=source,
            do="name a larger file, or other --lengths",
        )
        short = [n for n in questions if sizes[n] <= length // 2]
        if not short:
            raise too_few
        for number in range(2 * count):
            kind = ("conversation", "retrieval")[number % 2]
            last = int(generator.choice(short))
            code = generator.integers(10_000, 100_000)
            fact, question = "", turns[last]
            if kind == "retrieval":
                fact = f"The code of the archive is {code}."
                question = "User: What is the code of the archive? Answer with its digits."
            room, chosen = length - tokens(f"{fact}\n\n{question}"), []
            for n in generator.permutation(np.setdiff1d(np.arange(len(turns)), [last])).tolist():
                if sizes[n] <= room:
                    room -= sizes[n]
                    chosen.append(turns[n])
                if room < length // 16:
                    break
            if room > length // 4 or not chosen:
                raise too_few
            if fact:
                chosen.insert(int(generator.integers(len(chosen) + 1)), fact)
            content = "\n\n".join([*chosen, question])
            found = {"id": f"{kind}-{length}-{number // 2}", "category": kind}
            lines.append(found | {"messages": [{"role": "user", "content": content}]})
    return lines


def positive(text: str) -> int:
    """Return a number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        what = f"expected a number greater than or equal to 1, found {text!r}"
        raise argparse.ArgumentTypeError(what)
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--target", required=True, help="as target.path of a recipe")
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--count", type=positive, default=8, help="prompts of each length and kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        tokenizer = load_tokenizer(TargetSettings(path=options.target))
        lines = long_prompts(
            options.source, tokenizer, options.lengths, options.count, options.seed
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{options.out}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
