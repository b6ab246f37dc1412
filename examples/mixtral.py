"""A small Mixtral over bytes: grouped-query attention with rotary positions, and a mixture of experts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arachne_runtime as arachne


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int = 256
    sequence: int = 64
    width: int = 96
    heads: int = 6
    kv_heads: int = 2
    """Heads of keys and values; each serves ``heads / kv_heads`` queries."""
    ffn: int = 192
    """Inner width of one expert."""
    experts: int = 4
    top_k: int = 2
    """Experts that work on each token."""
    layers: int = 3
    balance: float = 0.02
    """Factor of the load-balancing loss, Mixtral's."""


class Attention(nn.Module):
    """Causal self-attention: (B, S, D) → (B, S, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width = config.width // config.heads
        self.q = nn.Linear(config.width, config.heads * self.head_width, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(config.heads * self.head_width, config.width, bias=False)

    def by_head(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        q, k, v = (self.by_head(product(x_BSD)) for product in (self.q, self.k, self.v))
        q, k = rotate(q, cos_SH, sin_SH), rotate(k, cos_SH, sin_SH)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def rotate(x_BHSW: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864): pairs of halves turned by the angles of their positions."""
    a, b = x_BHSW.chunk(2, -1)
    return torch.cat((a * cos_SH - b * sin_SH, a * sin_SH + b * cos_SH), -1)


class Layer(nn.Module):
    """Attention and a mixture of experts, each behind a norm: (B, S, D) → (B, S, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width)
        self.moe = arachne.MoE(config.width, config.ffn, config.experts, config.top_k, balance=config.balance)

    def forward(self, x_BSD: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.moe(self.moe_norm(x_BSD))


TENSOR_PARALLEL = {
    "embed": "vocabulary",
    "attention.q": arachne.Colwise(heads="heads"),
    "attention.[kv]": arachne.Colwise(heads="kv_heads", repeat=True),
    "attention.out": "rowwise",
    "head": "vocabulary",
}
"""How the devices of a replica share attention and vocabulary; the experts follow the plan's tiling."""


@arachne.pipelined(
    first="embed",
    blocks="layers",
    last=("norm", "head"),
    context="rotary",
    tensor_parallel=TENSOR_PARALLEL,
)
class Mixtral(nn.Module):
    """A decoder-only language model over bytes, with experts in every layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        half = config.width // config.heads // 2
        angles = torch.arange(config.sequence)[:, None] / 10_000.0 ** (torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotary(self, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        """Tables for as many positions as the batch has."""
        length = batch[0].shape[1]
        return {"cos": self.cos[:length], "sin": self.sin[:length]}

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, **self.rotary((tokens_BS, tokens_BS)))
        return self.head(self.norm(x_BSD))


def next_byte_loss(logits_BSV: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), batch[1].flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def random_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Bytes that cost as much as real ones: what `arachne profile` times."""
    tokens = torch.randint(Config.vocabulary, (rows, Config.sequence + 1))
    return tokens[:, :-1], tokens[:, 1:]


workload = arachne.Workload(
    name="byte-mixtral",
    model=lambda: Mixtral(Config()),
    loss=next_byte_loss,
    optimizer=adamw,
    batch=random_batch,
    sequence=Config.sequence,
)
