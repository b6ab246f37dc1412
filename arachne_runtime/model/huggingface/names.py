"""How parameters are called in files: as in the model, but for the experts, which files keep one by one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

Where: TypeAlias = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a file."""

    name: str
    where: Where
    """The part of the parameter that it is; empty: all of it."""


_EXPERTS = {
    "mixtral": (".block_sparse_moe.", "w1", "w3", "w2"),
    "qwen3_moe": (".mlp.", "gate_proj", "up_proj", "down_proj"),
}
"""By model type: how files call the MoE block, and gate, up and down of an expert."""
_STACKED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.+)\.mlp\.gate\.weight")


def pieces_of(model_type: str, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The tensors that published files hold for a parameter of the model."""
    if model_type in _EXPERTS:
        if match := _STACKED.fullmatch(name):
            return tuple(_of_experts(model_type, match[1], match[2], shape))
        if match := _ROUTER.fullmatch(name):
            return (Piece(f"{match[1]}{_EXPERTS[model_type][0]}gate.weight", ()),)
    return (Piece(name, ()),)


def _of_experts(model_type: str, layer: str, kind: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    block, gate, up, down = _EXPERTS[model_type]
    num_experts, half = shape[0], shape[1] // 2
    for expert in range(num_experts):
        place = f"{layer}{block}experts.{expert}"
        if kind == "down_proj":
            yield Piece(f"{place}.{down}.weight", (expert,))
        else:
            yield Piece(f"{place}.{gate}.weight", (expert, slice(0, half)))
            yield Piece(f"{place}.{up}.weight", (expert, slice(half, None)))
