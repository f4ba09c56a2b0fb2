"""A language model in the shape of Llama: one file, plain PyTorch.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv 2302.13971, section 2.2; grouped queries:
Ainslie et al., "GQA", arXiv 2305.13245.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `n_key_heads` divides `n_heads`."""

    vocabulary: int
    hidden: int
    n_layers: int
    n_heads: int
    n_key_heads: int
    feed_forward: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.hidden // self.n_heads


TINY = Shape(vocabulary=256, hidden=128, n_layers=4, n_heads=4, n_key_heads=2, feed_forward=512)  # 1.0 million
# 135 million; `smollm2.load` reads its parameters.
SMOLLM2 = Shape(
    vocabulary=49_152, hidden=576, n_layers=30, n_heads=9, n_key_heads=3, feed_forward=1536, rope_base=100_000.0
)


class Cache:
    """Keys and values of a layer's tokens so far, which the next token needs and which need not be computed again.

    Attributes:
        length: tokens so far.
    """

    def __init__(self) -> None:
        self.length = 0

    def extended(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens so far, these included: batch x key heads x length x head each."""
        if self.length:
            key, value = torch.cat((self._key, key), 2), torch.cat((self._value, value), 2)
        self._key, self._value, self.length = key, value, key.shape[2]
        return key, value


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.hidden, shape.n_heads * shape.head, bias=False)
        self.key = nn.Linear(shape.hidden, shape.n_key_heads * shape.head, bias=False)
        self.value = nn.Linear(shape.hidden, shape.n_key_heads * shape.head, bias=False)
        self.out = nn.Linear(shape.n_heads * shape.head, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """`x`: batch x length x hidden, of length 1 if the cache has entries; `turn`: see `turns`."""
        query, key, value = (
            each(x).unflatten(-1, (-1, self.shape.head)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        query, key = turned(query, turn), turned(key, turn)
        if cache is not None:
            key, value = cache.extended(key, value)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(2))


def turns(start: int, length: int, shape: Shape) -> torch.Tensor:
    """For positions from `start` on and each pair of elements of a head, cosine and sine of its angle.

    2 x length x head.
    """
    speeds = shape.rope_base ** (-torch.arange(0, shape.head, 2) / shape.head)
    angles = torch.outer(torch.arange(start, start + length), speeds).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions, with the halves of a head as pairs: Su et al., "RoFormer", arXiv 2104.09864, section 3.2."""
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


class Block(nn.Module):
    """A layer: attention and a gated feed-forward network, each on the normalized sum of all before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = (nn.RMSNorm(shape.hidden, shape.norm_epsilon) for _ in range(2))
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turn, cache)
        normal = self.feed_norm(x)
        return x + self.down(functional.silu(self.gate(normal)) * self.up(normal))


class LanguageModel(nn.Module):
    """The model; the embedding serves as the last layer, too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        for matrix in (each for each in self.parameters() if each.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token at each position: batch x length x vocabulary, for tokens of batch x length."""
        return functional.linear(self.hidden_states(tokens), self.embedding.weight)

    def hidden_states(self, tokens: torch.Tensor, caches: Sequence[Cache | None] = ()) -> torch.Tensor:
        """The normalized sum of all layers at each position: batch x length x hidden, for tokens of batch x length.

        Args:
            tokens: those after the tokens in `caches`: one for each sequence, unless these are empty.
            caches: one of each layer.
        """
        x = self.embedding(tokens)
        caches = caches or [None] * len(self.blocks)
        turn = turns(caches[0].length if caches[0] else 0, tokens.shape[1], self.shape)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, turn, cache)
        return self.norm(x)


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Mean negative logarithm of the probability of each token but the first, in nats.

    Args:
        model: a `LanguageModel`, perhaps in DDP.
        text: batch x length tokens.
    """
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, text: torch.Tensor) -> float:
    """The `loss_of` many samples, a few of which are computed at a time."""
    return sum(loss_of(model, part).item() * len(part) for part in text.split(8)) / len(text)
