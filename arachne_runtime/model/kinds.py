"""Gives blocks of equal structure one name, since they cost the same: embedding, layer, layer-2, head."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from .layout import Block

Signature: TypeAlias = tuple[object, ...]

_POSITIONS = frozenset(
    ("idx", "index", "layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_id")
)
"""Attributes that tell where a block stands, not what it costs."""


def kinds_of(blocks: Sequence[Block]) -> tuple[str, ...]:
    """The kind of every block: the first and the last are ``embedding`` and ``head`` where they differ.

    Half layers are named by their halves.
    """
    signatures = [_signature(block) for block in blocks]
    names: dict[Signature, str] = {}
    middle = list(zip(signatures, blocks, strict=True))
    for signature, block in middle[1:-1] or middle[:1]:
        if signature not in names:
            name, count = block.half or "layer", len(names) + 1
            names[signature] = (
                f"{name}-{count}" if name in names.values() or (names and not block.half) else name
            )
    names.setdefault(signatures[0], "embedding")
    names.setdefault(signatures[-1], "head")
    return tuple(names[signature] for signature in signatures)


def _signature(block: Block) -> Signature:
    return tuple(
        (path, type(module).__qualname__, _tensors(module), _settings(module))
        for prefix, part in block.parts
        for path, module in part.named_modules(prefix=prefix)
    )


def _tensors(module: nn.Module) -> Signature:
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in named)


def _settings(module: nn.Module) -> Signature:
    """Whole numbers, names and switches of a module (heads, stride, window): what its cost may depend on."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in _POSITIONS and name != "training" and _is_setting(value)
    )


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_setting(item) for item in value)
    return isinstance(value, int | str)
