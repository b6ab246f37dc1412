"""Names the parts of a user's module that become blocks: the decorator ``pipelined``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from ..errors import ModelError
from .halves import Halves, half_name, halves_of
from .styles import Divides, Styles

ContextFunction: TypeAlias = Callable[[Any], Mapping[str, Tensor]]
InitFunction: TypeAlias = Callable[[nn.Module, int], None]
ValueFunction: TypeAlias = Callable[[int, Sequence[str]], Mapping[str, Tensor]]
Names: TypeAlias = str | tuple[str, ...]
ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])

_Chain: TypeAlias = list[tuple[str, nn.Module]]

_ATTRIBUTE = "__arachne_layout__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a class keeps its blocks, as dotted names of submodules."""

    first: tuple[str, ...]
    """Together the first block, one after the other; empty: there is none."""
    blocks: tuple[str, ...]
    """A list of modules (each is a block), or a module that is one block."""
    last: tuple[str, ...]
    """Together the last block, one after the other; empty: there is none."""
    context: str | ContextFunction | None = None
    init: InitFunction | None = None
    values: ValueFunction | None = None
    """From a block and names in it to first values on the CPU, read from files; instead of ``init``."""
    tensor_parallel: Styles = field(default_factory=dict)
    """By pattern of names in blocks, how modules are shared out; empty: the model runs TP 1 only."""
    divides: Divides = field(default_factory=dict)
    """By pattern, attributes of modules that are divided by the degree."""
    halves: Halves = field(default_factory=dict)
    """What each element of ``blocks`` runs, one block after the other; empty: it is one block itself."""

    @property
    def labels(self) -> tuple[str | None, str | None]:
        """Names of the first and the last block where they are one module each."""
        short = [
            names[0].rpartition(".")[2] if len(names) == 1 else None for names in (self.first, self.last)
        ]
        return short[0], short[1]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a constructed model: one module, or a few that run one after the other."""

    index: int
    parts: tuple[tuple[str, nn.Module], ...]
    """Name inside the block and module; a block of a single module has the name ``""``."""
    half: str | None = None
    """Which part of a layer it is, where layers are cut."""

    def holders(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        """Every (name in the block, module, attribute, parameter), shared parameters as often as held."""
        for prefix, part in self.parts:
            for path, module in part.named_modules(prefix=prefix, remove_duplicate=False):
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    yield f"{path}.{name}" if path else name, module, name, parameter

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name in the block; one that the block holds twice appears under its first name."""
        named: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, _, _, parameter in self.holders():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[name] = parameter
        return named

    def global_name(self, name: str) -> str:
        """The name in a checkpoint of the parameter called ``name`` in this block."""
        return f"blocks.{self.index}.{name}"

    def __str__(self) -> str:
        """Number and classes, for messages: ``block 5 (LayerNorm, Linear)``."""
        return f"block {self.index} ({', '.join(type(part).__name__ for _, part in self.parts)})"


def pipelined(
    *,
    blocks: Names,
    first: Names | None = None,
    last: Names | None = None,
    context: str | ContextFunction | None = None,
    init: InitFunction | None = None,
    tensor_parallel: Styles | None = None,
    divides: Divides | None = None,
    halves: Halves | None = None,
) -> Callable[[ModuleClass], ModuleClass]:
    """Say which submodules of a class are the blocks that a plan may place; the class itself stays as it is.

    The blocks run one after the other. Each is called with what the one before returned (a tensor, or a tuple
    of tensors that becomes its positional arguments); the first with the inputs of the batch. Running them in
    a row must give what the class's own ``forward`` gives: ``ModelParts.verify`` checks it.

        @arachne.pipelined(first="embed", blocks="layers", last=("norm", "head"))
        class GPT(nn.Module): ...

    Args:
        blocks: Dotted name of an ``nn.ModuleList`` (or ``nn.Sequential``, ``nn.ModuleDict``) each of whose
            children is a block, or of a module that is one block; several names follow each other.
        first: Submodules that together are the first block (an embedding), one after the other.
        last: Submodules that together are the last block (final norm and head), one after the other.
        context: A function ``batch -> {keyword: tensor}``, or the name of a method of the class that is one
            (position ids, masks, rotary tables). Every block gets those keywords that its ``forward`` takes.
            A method may read the model's buffers, not its parameters.
        init: ``init(module, block)`` sets the parameters of a named submodule or list element, under the seed
            of its block, after the ``reset_parameters`` of its parts. Needed where a class initialises its
            parameters itself.
        tensor_parallel: Patterns of names of modules inside a block → how they are shared out in a replica of
            several devices: ``"colwise"`` and ``"rowwise"`` linear layers (in pairs: what is between them
            works on a part of the features), ``"vocabulary"`` for the embedding and the head, ``"partial"``
            for a norm of q or k; ``arachne.Colwise(...)`` for a fused q, k, v and for heads. Everything else
            is whole on each device. ``{"qkv": arachne.Colwise(parts=3, heads="num_heads"), "out":
            "rowwise", "embed": "vocabulary", "head": "vocabulary"}``.
        divides: Patterns of names (``""``: the block itself) → attributes that forward reads and that the
            number of devices divides: ``{"attention": ("num_heads",)}``.
        halves: Cuts each element of ``blocks`` into several blocks: methods of its class (or functions that
            take it first) → the submodules that each uses, in the order in which they run; together they are
            its ``forward``. ``{"attend": ("norm_1", "attention"), "feed": ("norm_2", "mlp")}``.

    Raises:
        ModelError: The decorated object is not a class of ``nn.Module``, or ``blocks`` names nothing.

    """
    layout = Layout(
        first=_names(first),
        blocks=_names(blocks),
        last=_names(last),
        context=context,
        init=init,
        tensor_parallel=dict(tensor_parallel or {}),
        divides=dict(divides or {}),
        halves=dict(halves or {}),
    )
    if not layout.blocks:
        raise ModelError("pipelined(blocks=...) names no submodule; name the list of layers, blocks='layers'")

    def remember(cls: ModuleClass) -> ModuleClass:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ModelError(f"@pipelined marks a class of nn.Module, and {cls!r} is none")
        setattr(cls, _ATTRIBUTE, layout)
        return cls

    return remember


def layout_of(model: nn.Module) -> Layout | None:
    """The layout of a decorated class, or of a plain ``nn.Sequential`` (each child is a block); else None.

    An adapter, which knows its blocks only when it is constructed, has a layout of its own (``give_layout``).
    """
    layout = getattr(model, _ATTRIBUTE, None)
    if isinstance(layout, Layout):
        return layout
    if isinstance(model, nn.Sequential):
        return Layout(first=(), blocks=("",), last=())
    return None


def give_layout(model: nn.Module, layout: Layout) -> None:
    """Say of one constructed model where it keeps its blocks."""
    object.__setattr__(model, _ATTRIBUTE, layout)


def find_blocks(model: nn.Module, layout: Layout) -> tuple[Block, ...]:
    """The blocks of a constructed model, in the order in which they run."""
    chains: list[tuple[_Chain, str | None]] = [(_chain(model, layout.first), None)] if layout.first else []
    for module in (module for name in layout.blocks for module in _elements(_submodule(model, name))):
        chains += [([("", part)], half) for part, half in _cut(module, layout.halves)]
    if layout.last:
        chains.append((_chain(model, layout.last), None))
    if not chains:
        raise ModelError(f"{type(model).__name__} has no blocks: {', '.join(layout.blocks)} is an empty list")
    return tuple(Block(index, tuple(parts), half) for index, (parts, half) in enumerate(chains))


def _cut(module: nn.Module, halves: Halves) -> list[tuple[nn.Module, str | None]]:
    """A layer whole, or its halves with their names."""
    if not halves:
        return [(module, None)]
    return list(zip(halves_of(module, halves), map(half_name, halves), strict=True))


def _names(names: Names | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(child for child, _ in model.named_children())
        raise ModelError(
            f"{type(model).__name__} has no submodule {name!r}, which @pipelined names; it has: {known}"
        ) from None


def _chain(model: nn.Module, names: tuple[str, ...]) -> _Chain:
    modules = [_submodule(model, name) for name in names]
    if len(modules) == 1:
        return [("", modules[0])]
    short = [name.rpartition(".")[2] for name in names]
    labels = short if len(set(short)) == len(short) else [name.replace(".", "_") for name in names]
    return list(zip(labels, modules, strict=True))


def _elements(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return list(module)
    if isinstance(module, nn.ModuleDict):
        return list(module.values())
    return [module]
