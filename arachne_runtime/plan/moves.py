"""Which bytes must go from where to where when a job changes its plan; pure arithmetic, no tensors.

Ranks are numbered here as processes of the job, which keep their number while plans number devices anew.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ..units import Bytes
from .order import Summed
from .placement import rank_order
from .plan import Plan
from .shards import Cell, ParameterForm, Part, cells, grids, held, holders, lies_in

Parts: TypeAlias = Mapping[int, tuple[Part, ...]]
"""By process, the disjoint parts of one tensor that it has."""
_Frozen: TypeAlias = tuple[tuple[int, tuple[Part, ...]], ...]
"""``Parts`` as a key of a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that lives through a change of plan, and who has what of it."""

    name: str
    """Global name."""
    shape: tuple[int, ...]
    """Whole."""
    itemsize: Bytes
    before: Parts
    """Under the old plan; where several have an element, it is the same number."""
    after: Parts
    """Under the new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A part of a tensor that one process sends to another."""

    name: str
    part: Part
    source: int
    target: int
    nbytes: Bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the dense tensor that is sent."""
        return tuple(sum(map(len, runs)) for runs in self.part)

    @property
    def itemsize(self) -> Bytes:
        """Of an element."""
        return self.nbytes // math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A part that is needed and that nobody alive has: it comes from a snapshot or a checkpoint."""

    name: str
    part: Part
    targets: tuple[int, ...]
    """Who needs it."""
    nbytes: Bytes
    """Of the part, once."""


@dataclass(frozen=True, slots=True)
class Moves:
    """All that must be sent, by tensor, part and target."""

    moves: tuple[Move, ...]
    lost: tuple[Lost, ...]

    @property
    def nbytes(self) -> Bytes:
        """Bytes sent, by all processes."""
        return sum(move.nbytes for move in self.moves)


@dataclass(frozen=True, slots=True)
class _Want:
    """A part that one process lacks."""

    tensor: Kept
    part: Part
    sources: tuple[int, ...]
    """Alive."""
    target: int

    @property
    def nbytes(self) -> Bytes:
        return _nbytes(self.part, self.tensor)


def moves_of(
    tensors: Sequence[Kept],
    *,
    node_of: Callable[[int], object] = lambda process: None,
    dead: Set[int] = frozenset(),
) -> Moves:
    """The fewest bytes that give everybody what it needs: what stays is not sent, and no byte comes twice.

    A part comes from a live holder in the receiver's node where there is one; of several, from that which
    sends least so far, when the largest parts are given out first.

    Args:
        tensors: Who has what and who needs what; each name once.
        node_of: Node of a process; default: all are in one.
        dead: Processes that cannot send; they need nothing.

    """
    wants: list[_Want] = []
    lost: list[Lost] = []
    for tensor in tensors:
        for part, sources, targets in _wanted(
            _frozen(tensor.before, dead), _frozen(tensor.after, dead), len(tensor.shape)
        ):
            if sources:
                wants += [_Want(tensor, part, sources, target) for target in targets]
            else:
                lost.append(Lost(name=tensor.name, part=part, targets=targets, nbytes=_nbytes(part, tensor)))
    return Moves(tuple(_given_out(wants, node_of)), tuple(lost))


def kept_between(old: Plan, new: Plan, model: Summed, process_of: Mapping[str, int]) -> tuple[Kept, ...]:
    """The parameters of a model between two plans, by block; one that blocks share is there once.

    Args:
        old: The plan now running.
        new: The next one.
        model: The forms of its parameters.
        process_of: By device, of both plans.

    """
    named = {
        form.tie or form.name: (form, model.ties[form.tie] if form.tie else (block,))
        for block, forms in enumerate(model.forms)
        for form in forms
    }
    return tuple(
        Kept(
            name=name,
            shape=form.shape,
            itemsize=form.itemsize,
            before=parts_under(old, form, blocks, process_of),
            after=parts_under(new, form, blocks, process_of),
        )
        for name, (form, blocks) in named.items()
    )


def parts_under(
    plan: Plan, form: ParameterForm, blocks: Sequence[int], process_of: Mapping[str, int]
) -> Parts:
    """Who has what of a parameter of some ``blocks`` (several where they share it) under a plan."""
    devices = rank_order(plan)
    found = {process_of[devices[h.rank]]: (held(form, h.position),) for h in holders(plan, form, blocks)}
    return dict(sorted(found.items()))


def _given_out(wants: Sequence[_Want], node_of: Callable[[int], object]) -> Iterator[Move]:
    """The move that satisfies each."""
    sent: dict[int, Bytes] = {}
    source_of: dict[int, int] = {}
    for index in sorted(range(len(wants)), key=lambda index: (-wants[index].nbytes, index)):
        want = wants[index]
        near = [process for process in want.sources if node_of(process) == node_of(want.target)]
        source = min(near or want.sources, key=lambda process: (sent.get(process, 0), process))
        sent[source] = sent.get(source, 0) + want.nbytes
        source_of[index] = source
    for index, want in enumerate(wants):
        yield Move(
            name=want.tensor.name,
            part=want.part,
            source=source_of[index],
            target=want.target,
            nbytes=want.nbytes,
        )


@lru_cache(maxsize=4096)
def _wanted(
    before: _Frozen, after: _Frozen, num_dims: int
) -> tuple[tuple[Part, tuple[int, ...], tuple[int, ...]], ...]:
    """Parts that somebody lacks, with who has and who lacks them; blocks of one kind have them alike."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Cell]] = {}
    everything = [part for _, parts in (*before, *after) for part in parts]
    for cell in cells(everything, num_dims):
        sources = _having(cell, before)
        targets = tuple(process for process in _having(cell, after) if process not in sources)
        if targets:
            found.setdefault((sources, targets), []).append(cell)
    return tuple(
        (part, sources, targets)
        for (sources, targets), alike in found.items()
        for part in grids(alike, num_dims)
    )


def _having(cell: Cell, parts: _Frozen) -> tuple[int, ...]:
    return tuple(process for process, mine in parts if any(lies_in(cell, part) for part in mine))


def _frozen(parts: Parts, dead: Set[int]) -> _Frozen:
    return tuple((process, mine) for process, mine in sorted(parts.items()) if process not in dead)


def _nbytes(part: Part, tensor: Kept) -> Bytes:
    return math.prod(sum(map(len, runs)) for runs in part) * tensor.itemsize
