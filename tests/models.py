"""Small models that tests train: a GPT with rotary tables as context, with and without tied embeddings."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arachne_runtime.model import pipelined


class Layer(nn.Module):
    """Causal self-attention with rotary positions, and an MLP."""

    def __init__(self, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.register_buffer("hidden", torch.ones(sequence, sequence).triu(1).bool(), persistent=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        qkv = self.qkv(self.norm(x_BSD)).view(B, S, 3, self.heads, D // self.heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2) / (D // self.heads) ** 0.5
        mixed = scores.masked_fill(self.hidden[:S, :S], float("-inf")).softmax(-1) @ v
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(B, S, D))
        return x_BSD + self.mlp(x_BSD)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of halves of the last dim by the angles of their positions."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


@pipelined(first="embed", blocks="layers", last=("norm", "head"), context="rotary")
class GPT(nn.Module):
    """``layers + 2`` blocks; tokens in, logits out."""

    def __init__(
        self,
        *,
        vocabulary: int = 31,
        width: int = 16,
        heads: int = 2,
        layers: int = 3,
        sequence: int = 8,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, sequence) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        half = width // heads // 2
        angles = torch.arange(sequence)[:, None] / 100.0 ** (torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotary(self, batch: Tensor) -> Mapping[str, Tensor]:
        """Tables for as many positions as the batch has."""
        return {"cos": self.cos[: batch.shape[1]], "sin": self.sin[: batch.shape[1]]}

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x = self.embed(tokens_BS)
        for layer in self.layers:
            x = layer(x, **self.rotary(tokens_BS))
        return self.head(self.norm(x))


def next_token_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Mean over samples of the mean cross-entropy of the next token."""
    return cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
