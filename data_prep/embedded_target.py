"""Rebuild the embedded target: the small language model and the prompts that the package ships.

    python data_prep/embedded_target.py            # every stage, in order
    python data_prep/embedded_target.py corpus tokenizer prompts pack --pack FOLDER     # no GPU
    python data_prep/embedded_target.py train --pack FOLDER --out FOLDER --minutes 9   # no network

Stages (each reads what the one before left in --work):
  corpus     fetch the wheels pinned in corpus.json, filter, split, extract functions
  tokenizer  learn the BPE; write tokenizer, config.json, generation_config.json into the package
  prompts    write the held-out and head prompts into the package
  pack       write the training run's token arrays to --pack (46 MB)
  train      train, evaluate, save model parts and metrics.json to --out (CUDA; see train_target.py)
  card       join the model parts into the package and write its README.md

All stages but `train` are deterministic for a given interpreter and version of tokenizers (shipped:
Python 3.11, tokenizers 0.23.3). Training runs for a time, on bf16 kernels: the shipped weights are
one outcome of this recipe.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from dataclasses import asdict
from pathlib import Path

from chosen_prompts import (
    EMBEDDED,
    by_hash,
    functions_of,
    held_out,
    load_tokenizer,
    prompt_lines,
    read_jsonl,
    unshared,
    write_jsonl,
)

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("corpus", "tokenizer", "prompts", "pack", "train", "card")
CONTEXT = 2048
HEAD_BYTES = 1_500_000
HEAD_PROMPTS = 3_000
MODEL_CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def stage_corpus(work: Path) -> None:
    """Write `work`/docs.{split}.jsonl (one text a line) and functions.{split}.jsonl."""
    import corpus
    import wheels

    pins = wheels.read_pins()
    wheels.fetch(pins, work / "wheels")
    docs, why = corpus.documents(pins, work / "wheels")
    print("files:", dict(why.most_common()))
    with multiprocessing.Pool() as pool:
        found = pool.map(corpus.functions, docs, chunksize=64)
    by_split: dict[str, list[corpus.Function]] = {split: [] for split in corpus.SPLITS}
    texts: dict[str, list[str]] = {split: [] for split in corpus.SPLITS}
    for (_, text), functions in zip(docs, found, strict=True):
        split = corpus.split_of(text)
        texts[split].append(text)
        by_split[split] += functions
    kept = corpus.disjoint(by_split)
    report = {"packages": len(pins), "files_refused": dict(why)}
    for split in corpus.SPLITS:
        write_jsonl(work / f"docs.{split}.jsonl", texts[split])
        write_jsonl(work / f"functions.{split}.jsonl", map(asdict, kept[split]))
        report[split] = {
            "files": len(texts[split]),
            "mb": sum(map(len, texts[split])) / 1e6,
            "functions_found": len(by_split[split]),
            "functions": len(kept[split]),
        }
    (work / "corpus_report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


def stage_tokenizer(work: Path) -> None:
    """Learn the tokenizer from a sample of the target split; write the model's small files."""
    from bpe import EOS, EOT, VOCAB_SIZE, train_tokenizer
    from transformers import GenerationConfig, LlamaConfig

    rng = random.Random(0)  # 22 %: merges hardly change with more, and learning them takes memory
    texts = [text for text in read_jsonl(work / "docs.target.jsonl") if rng.random() < 0.22]
    for row in read_jsonl(work / "functions.target.jsonl"):
        if rng.random() < 0.22:
            texts += [row["prompt"], row["answer"]]
    folder = EMBEDDED / "target"
    tokenizer = train_tokenizer(texts, folder)
    print(f"tokenizer from {sum(map(len, texts)) / 1e6:.0f} MB")
    bos, eot, end = (tokenizer.convert_tokens_to_ids(t) for t in (tokenizer.bos_token, EOT, EOS))
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        bos_token_id=bos,
        eos_token_id=[eot, end],
        pad_token_id=end,
        dtype="bfloat16",
        **MODEL_CONFIG,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=bos, eos_token_id=[eot, end], pad_token_id=end).save_pretrained(
        folder
    )


def stage_prompts(work: Path) -> None:
    """Write the package's prompt files; to `work`, head_all.jsonl and target_all.jsonl.

    The latter are prompts of the split that the target learned from, none of them held out: for
    heads that want more answers than the head split's prompts get.
    """
    head = sorted(unshared(functions_of(work, "head"), work, ["target"]), key=by_hash)
    seen = sorted(unshared(functions_of(work, "target"), work, ["head", "heldout"]), key=by_hash)
    heldout = held_out(work, functions_of(work, "heldout"))
    head_lines, heldout_lines = prompt_lines(head, "head"), prompt_lines(heldout, "heldout")
    shipped, size = 0, 0
    while shipped < min(HEAD_PROMPTS, len(head)) and size + len(head_lines[shipped]) < HEAD_BYTES:
        size += len(head_lines[shipped])
        shipped += 1
    folder = EMBEDDED / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heldout.jsonl").write_text("".join(heldout_lines))
    (folder / "head.jsonl").write_text("".join(head_lines[:shipped]))
    (work / "head_all.jsonl").write_text("".join(head_lines))
    (work / "target_all.jsonl").write_text("".join(prompt_lines(seen, "target")))
    packages = {row["source"].split("/")[0] for row in heldout}
    print(
        f"prompts: {len(heldout)} held-out from {len(packages)} packages; "
        f"head {shipped} shipped of {len(head)}; target {len(seen)}"
    )


def stage_pack(work: Path, pack: Path) -> None:
    """Write what `train` reads: token arrays, and the held-out prompts with reference answers."""
    from token_stream import pack_chat, pack_docs

    tokenizer = load_tokenizer()
    pack.mkdir(parents=True, exist_ok=True)
    for split in ("target", "heldout"):
        rows = functions_of(work, split)
        pack_chat(rows, pack / f"chat.{split}", tokenizer)
        pack_docs(read_jsonl(work / f"docs.{split}.jsonl"), pack / f"docs.{split}", tokenizer)
    evaluation = [
        {"prompt": row["prompt_ids"], "answer": row["answer_ids"], "source": row["source"]}
        for row in held_out(work, rows)
    ]
    (pack / "evaluation.json").write_text(json.dumps(evaluation))


def stage_card(work: Path, out: Path) -> None:
    """Join the model parts of `out` into the package and write the model card."""
    from card import model_card

    folder = EMBEDDED / "target"
    parts = sorted(out.glob("model.safetensors.part*"))
    (folder / "model.safetensors").write_bytes(b"".join(p.read_bytes() for p in parts))
    metrics = json.loads((out / "metrics.json").read_text())
    report = json.loads((work / "corpus_report.json").read_text())
    answers = json.loads((out / "answers.json").read_text())
    (folder / "README.md").write_text(model_card(metrics, report, answers))


def main() -> None:
    """Run the stages named on the command line, or all of them."""
    from train_target import Schedule, train

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "stages",
        nargs="*",
        metavar="STAGE",
        help=f"of {', '.join(STAGES)} (default: all, in this order)",
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embedded")
    parser.add_argument("--pack", type=Path, help="token arrays (default: WORK/pack)")
    parser.add_argument("--out", type=Path, help="training output (default: WORK/out)")
    parser.add_argument("--minutes", type=float, default=9, help="of training, compiling included")
    parser.add_argument("--rate", type=float, default=Schedule.rate, help="peak learning rate")
    parser.add_argument("--optimizer", default=Schedule.optimizer, choices=["muon", "adamw"])
    parser.add_argument("--init", type=Path, help="model folder to go on from")
    args = parser.parse_args()
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; there are {', '.join(STAGES)}")
    pack, out = args.pack or args.work / "pack", args.out or args.work / "out"
    for stage in args.stages or STAGES:
        print(f"== {stage}", flush=True)
        if stage == "corpus":
            args.work.mkdir(parents=True, exist_ok=True)
            stage_corpus(args.work)
        elif stage == "tokenizer":
            stage_tokenizer(args.work)
        elif stage == "prompts":
            stage_prompts(args.work)
        elif stage == "pack":
            stage_pack(args.work, pack)
        elif stage == "train":
            schedule = Schedule(args.minutes, rate=args.rate, optimizer=args.optimizer)
            train(EMBEDDED / "target", pack, out, schedule, init=args.init)
        else:
            stage_card(args.work, out)


if __name__ == "__main__":
    main()
