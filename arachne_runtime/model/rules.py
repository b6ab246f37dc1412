"""How the modules of a block are shared out in a tensor-parallel group: the rules of ``pipelined``.

Names and arithmetic only; what runs is in ``tensor_parallel``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Protocol, runtime_checkable

from torch import nn

from ..errors import ModelError
from ..plan.shards import Axis, Split
from .layout import Block, Layout
from .styles import NAMED_STYLES, Colwise, Count, Divides, Partial, Rowwise, Style, Styles, Vocabulary


@runtime_checkable
class CutsItself(Protocol):
    """A module that knows how its own parameters are shared out, and runs on a part of them."""

    def splits(self) -> Mapping[str, tuple[Split, ...]]:
        """By name of its own parameters; one that is not named is held whole."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks share one parameter."""

    splits: tuple[Split, ...] = ()
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """The tensor-parallel rules of a model, resolved for its blocks."""

    styles: Mapping[tuple[int, str], Style]
    """By block and name in it, of the modules that a rule names."""
    divided: Mapping[tuple[int, str], tuple[str, ...]]
    """Attributes that a rank's part of the work divides (a number of heads), by block and module."""

    @classmethod
    def of(
        cls, blocks: Sequence[Block], labels: Mapping[int, str], styles: Styles, divides: Divides
    ) -> "Rules":
        """Match patterns with the names in blocks; ``labels`` are names of blocks that are one module.

        Raises:
            ModelError: A style that is not known, or a pattern that matches nothing.

        """
        found: dict[tuple[int, str], Style] = {}
        for pattern, style in styles.items():
            known = _style(pattern, style)
            found |= dict.fromkeys(_matches(blocks, labels, pattern, "tensor_parallel"), known)
        return cls(found, _divided(blocks, labels, divides))

    def cuts(self, block: Block) -> dict[str, Cut]:
        """Of the parameters of a block that are not simply whole on every rank, by name in the block.

        Raises:
            ModelError: A rule that does not fit its module.

        """
        found: dict[str, Cut] = {}
        for path, module in modules_of(block):
            style = self.styles.get((block.index, path))
            own = dict(module.named_parameters(recurse=False))
            if style is not None:
                cut = {name: _cut(style, block, path, name, p) for name, p in own.items()}
            elif isinstance(module, CutsItself):
                cut = {name: Cut(splits) for name, splits in module.splits().items()}
            else:
                continue
            found |= {f"{path}.{name}" if path else name: c for name, c in cut.items() if c != Cut()}
        return found

    def refusals(self, block: Block, degree: int) -> Iterator[str]:
        """Attributes that ``degree`` ranks cannot share, or that are no numbers, with the way out."""
        for path, module in modules_of(block):
            for name in self.divided.get((block.index, path), ()):
                value = getattr(module, name, None)
                place = f"{block.global_name(path).removesuffix('.')}.{name}"
                if not isinstance(value, int):
                    yield f"{place} is {value!r}, no whole number; correct pipelined(divides=...)"
                elif value % degree and degree % value:
                    yield f"{place} is {value}, which {degree} ranks cannot share; let the degree divide it"


def rules_of(layout: Layout, blocks: Sequence[Block]) -> Rules:
    """The rules of a layout for its blocks; ModelError for one that matches nothing."""
    first, last = layout.labels
    labels = {
        **({0: first} if first is not None else {}),
        **({len(blocks) - 1: last} if last is not None else {}),
    }
    return Rules.of(blocks, labels, layout.tensor_parallel, layout.divides)


def cuts_of(blocks: Sequence[Block], rules: Rules) -> dict[int, Cut]:
    """By id of a parameter; ModelError where modules that share one cut it in different ways."""
    found: dict[int, tuple[str, Cut]] = {}
    for block in blocks:
        cuts = rules.cuts(block)
        for name, _, _, parameter in block.holders():
            place, cut = block.global_name(name), cuts.get(name, Cut())
            other, before = found.setdefault(id(parameter), (place, cut))
            if before != cut:
                raise ModelError(
                    f"{other} and {place} are one parameter, but the rules of pipelined(tensor_parallel=...) "
                    "cut it in two ways; give both modules the same style"
                )
    return {key: cut for key, (_, cut) in found.items() if cut != Cut()}


def modules_of(block: Block) -> Iterator[tuple[str, nn.Module]]:
    """(name in the block, module), each module once."""
    for prefix, part in block.parts:
        yield from part.named_modules(prefix=prefix)


def _divided(
    blocks: Sequence[Block], labels: Mapping[int, str], divides: Divides
) -> dict[tuple[int, str], tuple[str, ...]]:
    """Attributes by module, of those modules that have them; ModelError where none has."""
    modules = {(block.index, path): module for block in blocks for path, module in modules_of(block)}
    found: dict[tuple[int, str], tuple[str, ...]] = {}
    for pattern, names in divides.items():
        matched = _matches(blocks, labels, pattern, "divides")
        for name in names:
            having = [place for place in matched if hasattr(modules[place], name)]
            if not having:
                raise ModelError(
                    f"pipelined(divides={{{pattern!r}: ...}}) names the attribute {name!r}, which no module "
                    "that the pattern matches has"
                )
            found |= {place: (*found.get(place, ()), name) for place in having}
    return found


def _style(pattern: str, style: str | Style) -> Style:
    known = NAMED_STYLES.get(style) if isinstance(style, str) else style
    if not isinstance(known, Style):
        raise ModelError(
            f"tensor_parallel={{{pattern!r}: {style!r}}} is no style; known: {', '.join(NAMED_STYLES)}, "
            "or arachne.Colwise(...), arachne.Rowwise(...)"
        )
    return known


def _matches(
    blocks: Sequence[Block], labels: Mapping[int, str], pattern: str, argument: str
) -> list[tuple[int, str]]:
    """(block, name in it) of modules whose name, or name behind the label of their block, fits."""
    found = [
        (block.index, path)
        for block in blocks
        for path, _ in modules_of(block)
        if any(fnmatchcase(name, pattern) for name in _names(path, labels.get(block.index)))
    ]
    if not found:
        some = dict.fromkeys(name for b in blocks for name, _ in modules_of(b) if name)
        raise ModelError(
            f"pipelined({argument}={{{pattern!r}: ...}}) matches no module of any block; names in blocks "
            f"are: {', '.join(list(some)[:12])}"
        )
    return found


def _names(path: str, label: str | None) -> Iterator[str]:
    yield path
    if label is not None:
        yield f"{label}.{path}" if path else label


def _cut(style: Style, block: Block, path: str, name: str, parameter: nn.Parameter) -> Cut:
    place, dims = f"{block.global_name(path)}.{name}", parameter.dim()
    match style:
        case Partial():
            return Cut(partial=True)
        case Vocabulary():
            return Cut((_split(place, parameter, 0, 1, None, False),))
        case Colwise():
            dim = 1 if style.transposed and dims == 2 else 0
            heads = None if style.heads is None else _counts(style.heads, block, path)
            return Cut((_split(place, parameter, dim, style.parts, heads, style.repeat),))
        case Rowwise():
            if dims < 2:
                return Cut()  # a bias, added once to the sum
            return Cut((_split(place, parameter, 0 if style.transposed else 1, style.parts, None, False),))


def _split(
    place: str,
    parameter: nn.Parameter,
    dim: int,
    parts: int,
    heads: tuple[int, ...] | None,
    repeat: bool,
) -> Split:
    if parameter.dim() not in (1, 2):
        raise ModelError(f"{place} has {parameter.dim()} dims; a tensor-parallel rule is for a linear layer")
    length = parameter.shape[dim]
    weights = heads if heads is not None and len(heads) > 1 else (1,) * parts
    if length % sum(weights):
        raise ModelError(
            f"{place} has {length} features, which are not {' + '.join(map(str, weights))} equal runs; "
            "correct parts= or heads= of its rule"
        )
    lengths = tuple(length // sum(weights) * weight for weight in weights)
    units = lengths if heads is None else heads if len(heads) > 1 else heads * parts
    if any(n % u for n, u in zip(lengths, units, strict=True)):
        raise ModelError(f"{place} has runs of {lengths} features, which are not {units} heads")
    return Split(Axis.TENSOR, dim, lengths, units, repeats=repeat)


def _counts(heads: Count | tuple[Count, ...], block: Block, path: str) -> tuple[int, ...]:
    return tuple(
        count if isinstance(count, int) else _attribute(block, path, count)
        for count in (heads if isinstance(heads, tuple) else (heads,))
    )


def _attribute(block: Block, path: str, name: str) -> int:
    """An attribute of the innermost module around ``path`` that has it."""
    modules = dict(modules_of(block))
    where = path
    while True:
        try:
            value = attrgetter(name)(modules[where]) if where in modules else None
        except AttributeError:
            value = None
        if isinstance(value, int):
            return value
        if not where:
            raise ModelError(
                f"heads={name!r} of the rule for {block.global_name(path)}: no module around it has a whole "
                "number of this name"
            )
        where = where.rpartition(".")[0]
