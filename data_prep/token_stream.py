"""The pack: token arrays written once, and read as endless rows of training tokens."""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def pack_docs(texts: Iterable[str], stem: Path, tokenizer) -> None:
    """Write raw source as a uint16 stream of <bos> + text + <eos>, and document lengths."""
    bos, end = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    pieces, lengths, batch = [], [], []

    def flush() -> None:
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(
            batch, add_special_tokens=False
        ):
            pieces.append(np.array([bos, *encoding.ids, end], np.uint16))
            lengths.append(len(pieces[-1]))
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == 512:
            flush()
    flush()
    save_array(stem.with_name(stem.name + ".ids.xz"), np.concatenate(pieces))
    save_array(stem.with_name(stem.name + ".len.xz"), np.array(lengths, np.int32))
    print(f"{stem.name}: {sum(lengths):,} tokens in {len(lengths):,} documents")


def pack_chat(rows: list[dict], stem: Path, tokenizer) -> None:
    """Write conversations as a stream; `len` is [n, 2] = (prompt, answer with <eot>)."""
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    ids = [np.array([*r["prompt_ids"], *r["answer_ids"], eot], np.uint16) for r in rows]
    lengths = np.array([(len(r["prompt_ids"]), len(r["answer_ids"]) + 1) for r in rows], np.int32)
    save_array(stem.with_name(stem.name + ".ids.xz"), np.concatenate(ids))
    save_array(stem.with_name(stem.name + ".len.xz"), lengths)
    print(f"{stem.name}: {lengths.sum():,} tokens ({lengths[:, 1].sum():,} of answers)")


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an xz-compressed .npy (no pickled objects)."""
    with lzma.open(path, "wb", preset=6) as file:
        np.save(file, array, allow_pickle=False)


class Stream:
    """Documents in a new random order each epoch, joined and cut into rows.

    `lengths` is [n], or [n, 2] = (prompt, answer) with loss only on the answers. Documents start
    with <bos> and are not masked from each other within a row.
    """

    def __init__(self, pack: Path, name: str, device: torch.device, seed: int = 0) -> None:
        lengths = torch.from_numpy(load_array(pack / f"{name}.len.xz")).long()
        self.ids = torch.from_numpy(load_array(pack / f"{name}.ids.xz").astype(np.int32)).to(device)
        self.lengths = lengths.view(len(lengths), -1).sum(1).to(device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        counted = torch.ones(len(self.ids), dtype=torch.bool, device=device)
        if lengths.dim() == 2:
            kinds = torch.tensor([False, True]).repeat(len(lengths)).to(device)
            counted = kinds.repeat_interleave(lengths.flatten().to(device))
        self.counted = counted
        self.generator = torch.Generator(device).manual_seed(seed)
        self.epochs = -1
        self.index = self.ids[:0]
        self.cursor = 0

    def rows(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return input ids and labels, int64 [count, length]; -100 marks no loss."""
        need = count * length + 1
        if self.cursor + need > len(self.index):  # the tail of an epoch, under one batch, is left
            order = torch.randperm(
                len(self.lengths), generator=self.generator, device=self.ids.device
            )
            lengths = self.lengths[order]
            shift = self.starts[order] - (lengths.cumsum(0) - lengths)
            self.index = shift.repeat_interleave(lengths) + torch.arange(
                len(self.ids), device=self.ids.device
            )
            self.cursor = 0
            self.epochs += 1
        index = self.index[self.cursor : self.cursor + need]
        self.cursor += count * length
        ids = self.ids[index].long()
        labels = torch.where(self.counted[index], ids, -100)
        return ids[:-1].view(count, length), labels[1:].view(count, length)


def load_array(path: Path) -> np.ndarray:
    """Read an xz-compressed .npy."""
    with lzma.open(path) as file:
        return np.load(file, allow_pickle=False)
