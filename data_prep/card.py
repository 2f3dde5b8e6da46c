"""The embedded target's model card, from the run's metrics and the corpus report."""

# ruff: noqa: E501  (a Markdown table row cannot be wrapped)

from __future__ import annotations

import textwrap
from collections import defaultdict

from corpus import read_pins

SAMPLES = (20, 130, 200)  # positions in answers.json, one card example each


def model_card(metrics: dict, report: dict, answers: list[dict]) -> str:
    """Return Markdown; its numbers come from `metrics` (metrics.json) and `report` (corpus)."""
    by_licence = defaultdict(list)
    for pin in read_pins():
        by_licence[pin.licence].append(f"{pin.package} {pin.version}")
    licences = "\n".join(
        f"| {licence} | {', '.join(sorted(packages))} |"
        for licence, packages in sorted(by_licence.items())
    )
    files = "\n".join(
        f"| {split} | {report[split]['files']:,} | {report[split]['mb']:.0f} | "
        f"{report[split]['functions']:,} |"
        for split in ("target", "head", "heldout")
    )
    t0, t8 = metrics["t0.0"], metrics["t0.8"]
    schedule, epochs, pack = metrics["schedule"], metrics["epochs"], metrics["pack_tokens"]
    examples = "\n\n".join(
        f"`{answers[i]['source']}`\n\n" + textwrap.indent(answers[i]["answer_t0.0"], "    ")
        for i in SAMPLES
        if i < len(answers)
    )
    return f"""\
# The embedded target

An 11 M parameter Llama that completes documented Python functions, trained from scratch for
draftlab so that speculative decoding can be trained, measured and tested end to end without a
download. It is a real language model with a real chat template, and a small one: its code looks
like code, and is seldom right. Use it as a target for draft heads, not as an assistant.

| | |
| --- | --- |
| architecture | LlamaForCausalLM, 12 layers, hidden 256, 8 heads of 32 (4 key/value), MLP 768, tied embeddings, bfloat16 |
| tokenizer | byte-level BPE, 6,144 ids (the last 16 are specials), Llama 3's split rule, header format and `<\\|eot_id\\|>` |
| reserved ids | `<\\|mask\\|>` and ten `<\\|reserved_special_token_N\\|>`: never in the training data, free for parallel draft heads |
| context | trained on rows of 1,024 tokens; positions up to 2,048 are accepted, beyond 1,024 untested |

## Data

Python source of {report["packages"]} packages under permissive licences, pinned by version and sha256 in
 `data_prep/corpus.json`, without tests, vendored, generated or near-copied files. The
Python standard library is left out: no requirement can pin it.

| licence (of the package's metadata) | packages |
| --- | --- |
{licences}

Files are split by the hash of their content, and functions of one split whose body, or name and
docstring, occurs in a split trained on are removed:

| split | files | MB | documented functions |
| --- | --- | --- | --- |
{files}

`target` trained this model ({pack["docs"]:,} tokens of source, {pack["chat"]:,} tokens of
conversations "write this function" with the loss on the answers), `head` gives the prompts for
training draft heads (`../prompts/head.jsonl`), `heldout` the prompts to evaluate on
(`../prompts/heldout.jsonl`). The source's own answers are not shipped: the target answers itself.

## Training

{metrics["tokens_seen"] / 1e6:,.0f} M tokens in {metrics["steps"]:,} steps of {schedule["rows"]} rows of {schedule["length"]:,} tokens: {epochs["docs"]:.1f}
passes over the source, {epochs["chat"]:.1f} over the conversations; {metrics["seconds"]:.0f} s on one {metrics["device"]} at
{metrics["tokens_per_second"] / 1e6:.2f} M tokens/s. Muon for the blocks' matrices, AdamW for the rest; peak rate
{schedule["rate"]:g}, constant for the first {schedule["decay_from"]:.0%} of the time, then linear to zero. Conversations are
{schedule["chat_share"][0]:.0%} of the rows, {schedule["chat_share"][1]:.0%} in the last {1 - schedule["chat_from"]:.0%} of the time. Documents in a row are not
masked from each other. The last logged training loss, {metrics["log"][-1]["loss"]:.2f} over both kinds, is below both
held-out losses: the model knows files it has seen better than new ones.

## Evaluation

These bfloat16 weights as transformers runs them; held-out split, which also served to choose between
optimizers and rates in five one-minute runs.

| | |
| --- | --- |
| loss on source | {metrics["heldout_docs_loss"]:.3f} nats a token ({metrics["heldout_docs_tokens"]:,.0f} tokens in packed rows of 1,024) |
| loss on answers | {metrics["heldout_chat_loss"]:.3f} nats a token ({metrics["heldout_chat_tokens"]:,.0f} tokens) |

| {t0["prompts"]} held-out prompts, up to 192 new tokens | greedy | T = 0.8 | the source itself |
| --- | --- | --- | --- |
| share of repeated 4-grams, first 128 tokens | {t0["repetition_128"]:.3f} | {t8["repetition_128"]:.3f} | {metrics["repetition_reference"]:.3f} |
| answers ended by `<\\|eot_id\\|>` within 128 tokens | {t0["ended_within_128"]:.1%} | {t8["ended_within_128"]:.1%} | |
| answers ended within 192 tokens | {t0["ended_within_192"]:.1%} | {t8["ended_within_192"]:.1%} | |
| mean answer length (cut at 192), tokens | {t0["mean_tokens"]:.0f} | {t8["mean_tokens"]:.0f} | |

## Limits

One kind of prompt: a Python signature with its docstring. Other requests get code-like text. No
safety training. Code of the packages above may
come back as their authors wrote it.

## Examples (greedy, held-out prompts)

{examples}

## How it was made

    python data_prep/embedded_target.py

builds corpus, tokenizer, prompts, weights and this card. All but the weights are deterministic for
a given interpreter and version of tokenizers; the weights are one run of the recipe, which trains
for a time (here `train --minutes {schedule["minutes"]:g} --rate {schedule["rate"]:g}`, torch
{metrics["torch"]}).
"""
