"""A byte-level GPT and the text it learns: the source of the Python standard library on this machine."""

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arachne_runtime as arachne


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int = 256
    sequence: int = 128
    width: int = 192
    heads: int = 6
    layers: int = 4


class Embedding(nn.Module):
    """Token and position embeddings: (B, S) bytes → (B, S, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return self.token(tokens_BS) + self.position(positions_S)


class Layer(nn.Module):
    """Causal self-attention and an MLP, each behind a norm: (B, S, D) → (B, S, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def attention(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BSD).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(-2))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.down(F.gelu(self.up(self.mlp_norm(x_BSD))))


def initialise(module: nn.Module, block: int) -> None:
    """GPT-2's initialisation; the engine calls it for each block, under the block's own seed."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.LayerNorm):
            part.reset_parameters()


@arachne.pipelined(
    first="embed",
    blocks="layers",
    last=("norm", "head"),
    init=initialise,
    tensor_parallel={
        "embed.token": "vocabulary",
        "qkv": arachne.Colwise(parts=3, heads="heads"),
        "projection": "rowwise",
        "up": "colwise",
        "down": "rowwise",
        "head": "vocabulary",
    },
    divides={"": ("heads",)},
)
class GPT(nn.Module):
    """A decoder-only language model over bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(self.norm(x_BSD))


def next_byte_loss(logits_BSV: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch[1].flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class StandardLibrary(torch.utils.data.Dataset):
    """Windows of the standard library's source: item i is (bytes, the same bytes one position later)."""

    def __init__(self, sequence: int, max_bytes: int = 4_000_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for path in sorted(folder.glob("*.py")):
            text += path.read_bytes()
            if len(text) >= max_bytes:
                break
        self.bytes = torch.frombuffer(text[:max_bytes], dtype=torch.uint8).long()
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[index * self.sequence : (index + 1) * self.sequence + 1]
        return window[:-1], window[1:]


def random_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Bytes that cost as much as real ones: what `arachne profile` times."""
    tokens = torch.randint(Config.vocabulary, (rows, Config.sequence + 1))
    return tokens[:, :-1], tokens[:, 1:]


workload = arachne.Workload(
    name="byte-gpt",
    model=lambda: GPT(Config()),
    loss=next_byte_loss,
    optimizer=adamw,
    batch=random_batch,
    sequence=Config.sequence,
)
