"""The blocks of one stage, allocated and initialised: what a rank runs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ModelError
from .layout import Block

_MANY = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter that several blocks share."""

    name: str
    """Its global name in the lowest of the blocks, ``blocks.0.weight``."""
    blocks: tuple[int, ...]
    """Every block that holds it, ascending; the first owns it."""
    source: int
    """The block whose module gives its first values, under that block's seed, on whichever rank."""


class Chain(nn.Module):
    """A few modules that run one after the other as one block."""

    def __init__(self, parts: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, part in parts:
            self.add_module(name, part)


class StageModule(nn.Module):
    """The blocks of one stage; its ``state_dict`` has the global names, ``blocks.<id>.<name inside>``."""

    def __init__(self, blocks: Sequence[Block], ties: Mapping[int, Tie]) -> None:
        """Wrap blocks whose parameters exist; ``ties`` names, by id, those that blocks of the model share."""
        super().__init__()
        self.block_range = range(blocks[0].index, blocks[-1].index + 1)
        self.blocks = nn.ModuleDict({str(b.index): _module(b) for b in blocks})
        self._own = {b.index: _untied(b, ties) for b in blocks}
        self._tied = _tied(blocks, ties)
        self._calls = tuple((b.index, part, accepted_keywords(part)) for b in blocks for _, part in b.parts)

    def forward(
        self, inputs: tuple[Tensor, ...], context: Mapping[str, Tensor], blocks: range | None = None
    ) -> tuple[Tensor, ...]:
        """Run the blocks (or some of them) in order on the tensors that cross the boundary before them.

        Raises:
            ModelError: A block returned something else than a tensor or a tuple of tensors.
            Exception: What a block raised, with a note that names the block and what it was called with.

        """
        for index, part, accepted in self._calls:
            if blocks is not None and index not in blocks:
                continue
            keywords = {k: v for k, v in context.items() if accepted is None or k in accepted}
            try:
                output = part(*inputs, **keywords)
            except Exception as error:
                error.add_note(_call(index, part, inputs))
                raise
            inputs = _as_boundary(output, index, part)
        return inputs

    def block_parameters(self, block: int) -> tuple[tuple[str, nn.Parameter], ...]:
        """(global name, parameter) of one block, each once, without those that blocks share."""
        return self._own[block]

    def tied_parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """(name of the tie, parameter) of those that blocks share, in this stage or across stages."""
        return self._tied


def accepted_keywords(module: nn.Module) -> frozenset[str] | None:
    """Keywords that a module's ``forward`` takes; None: any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in _MANY)


def _call(block: int, part: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs)
    return f"in block {block} ({type(part).__name__}), called with {shapes}"


def _as_boundary(output: Any, block: int, part: nn.Module) -> tuple[Tensor, ...]:
    tensors = tuple(output) if isinstance(output, tuple | list) else (output,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ModelError(
            f"block {block} ({type(part).__name__}) returned {_describe(output)}; "
            "what leaves a block is a tensor or a tuple of tensors"
        )
    return tensors


def _describe(output: Any) -> str:
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} of {', '.join(type(item).__name__ for item in output) or 'nothing'}"
    return type(output).__name__


def _module(block: Block) -> nn.Module:
    return block.parts[0][1] if len(block.parts) == 1 else Chain(block.parts)


def _untied(block: Block, ties: Mapping[int, Tie]) -> tuple[tuple[str, nn.Parameter], ...]:
    named = block.parameters().items()
    return tuple((block.global_name(name), p) for name, p in named if id(p) not in ties)


def _tied(blocks: Sequence[Block], ties: Mapping[int, Tie]) -> tuple[tuple[str, nn.Parameter], ...]:
    found = {ties[id(p)].name: p for b in blocks for p in b.parameters().values() if id(p) in ties}
    return tuple(sorted(found.items()))
