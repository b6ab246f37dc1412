"""The words of a tensor-parallel rule: how one module of a block is shared out in a replica."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Count: TypeAlias = int | str
"""A number, or the dotted name of an attribute of the module or of one that it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colwise:
    """A linear layer whose output features are shared out; what follows works on a part of them."""

    parts: int = 1
    """Its output is so many tensors of equal length side by side (q, k and v), each shared out alone."""
    heads: Count | tuple[Count, ...] | None = None
    """Heads, which are not cut through; several: of each tensor side by side, as long as it has heads."""
    repeat: bool = False
    """Ranks more than heads each hold a copy of one (k and v of grouped-query attention)."""
    transposed: bool = False
    """Whether the weight is (in, out), as in GPT-2's Conv1D."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rowwise:
    """A linear layer whose input features are shared out; its outputs are summed."""

    parts: int = 1
    """As for ``Colwise``, of the input."""
    transposed: bool = False
    """Whether the weight is (in, out)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """An embedding, or a head, whose vocabulary is shared out; it need not divide evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A small module that each rank holds whole and runs on its own heads (a norm of q and k): the sum of
    their gradients is its gradient.
    """


Style: TypeAlias = Colwise | Rowwise | Vocabulary | Partial
NAMED_STYLES: Mapping[str, Style] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "vocabulary": Vocabulary(),
    "partial": Partial(),
}
"""What a rule may say in a word."""
Styles: TypeAlias = Mapping[str, str | Style]
Divides: TypeAlias = Mapping[str, tuple[str, ...]]
