"""Time the target's answers to a recipe's prompts: with captures, and again when all are captured.

    python eval/lab/answers.py my.yaml regenerate.batch=1024 prompts.max_prompts=8000

It decodes the first turns twice with one engine, in this process. Tokens/s are those of the engine:
loading, templates and the parsing of answers are left out. What Triton compiles on a new machine is
in the first figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.engine.engine import decoding_threads
from draftlab.engine.sampling import Request, Sampling
from draftlab.recipe.recipe import Recipe, load_recipe
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.text.chat_template import Chat, Encoded, encode_prompts, stop_ids
from draftlab.text.conversations import split_rounds
from draftlab.text.decode import answer_engine
from draftlab.text.prompts import load_prompts
from eval.measurements import PrintMonitor


def measure(recipe: Recipe) -> dict[str, float]:
    """Return the number of tokens and tokens a second of the first and of the second time."""
    monitor, settings = PrintMonitor(), recipe.regenerate
    target, tokenizer = load_target(recipe.target), load_tokenizer(recipe.target)
    stops = stop_ids(tokenizer, target.folder)
    prompts = load_prompts(
        recipe.prompts, monitor, reads_answers=False, modes=recipe.target.modes, seed=recipe.seed
    )
    chats = (Chat(split_rounds(p.messages)[0], p.tools, p.template_arguments) for p in prompts)
    longest = target.max_length - settings.max_new_tokens
    requests = []
    for i, (prompt, encoded) in enumerate(
        zip(prompts, encode_prompts(tokenizer, chats), strict=True)
    ):
        if isinstance(encoded, Encoded) and len(encoded.ids) <= longest:
            temperature = settings.temperatures[i % len(settings.temperatures)]
            sampling = Sampling(temperature, settings.top_k, settings.top_p, recipe.seed)
            request = Request(prompt.id, encoded.ids, settings.max_new_tokens, sampling, stops)
            requests.append(request)
    max_length = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    engine = answer_engine(target, min(settings.batch, len(requests)), max_length, monitor)
    results: dict[str, float] = {"requests": len(requests)}
    with decoding_threads(target):
        for name in ("first", "again"):
            started = time.perf_counter()
            tokens = sum(len(g.token_ids) for g in engine.generate(requests))
            seconds = time.perf_counter() - started
            results |= {"tokens": tokens, f"{name}_tokens_s": round(tokens / seconds)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("changes", nargs="*", help="settings of the recipe, such as a.b=1")
    options = parser.parse_args()
    print(json.dumps(measure(load_recipe(options.recipe, options.changes))))


if __name__ == "__main__":
    main()
