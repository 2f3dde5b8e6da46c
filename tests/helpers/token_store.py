"""A store of tokens and spans without hidden states."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class TokenStore:
    """The part of a store that vocabulary statistics read: (tokens, spans) per conversation."""

    def __init__(self, *conversations: tuple[list[int], list[int]], vocab_size: int = 20) -> None:
        self.conversations = conversations
        self.identity = SimpleNamespace(vocab_size=vocab_size)

    def __len__(self) -> int:
        return len(self.conversations)

    def tokens_and_spans(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, spans = self.conversations[index]
        return torch.tensor(tokens), torch.tensor(spans)
