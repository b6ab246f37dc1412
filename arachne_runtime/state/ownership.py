"""Which rank writes which part of what several hold: every element once, the bytes spread over the ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..engine import Engine
from ..plan.placement import places
from ..plan.plan import Plan
from ..plan.shards import ParameterForm, atoms, holders
from ..plan.zero import zero_group_of
from .holdings import VALUE, Holding, holdings
from .parts import Part, crossing


@dataclass(frozen=True, slots=True)
class Owned:
    """A part of a parameter and the rank that writes it."""

    part: Part
    writer: int


def owned_parts(plan: Plan, forms: Sequence[Sequence[ParameterForm]]) -> Mapping[str, tuple[Owned, ...]]:
    """By parameter, shared ones under the name of their tie; equal on every rank.

    One pipeline writes a block, by turns, so that its stage's parts fit together; of the ranks that hold an
    atom the one with least to write does.
    """
    loads: dict[int, int] = defaultdict(int)
    found: dict[str, tuple[Owned, ...]] = {}
    for block, all_of_block in enumerate(forms):
        for form in all_of_block:
            name = form.tie or form.name
            if name not in found:  # a shared one belongs to the lowest block
                found[name] = tuple(_owned(plan, form, block, loads))
    return found


def parts_to_write(engine: Engine) -> Iterator[tuple[Holding, Part]]:
    """What this rank writes of what it holds."""
    rank = engine.places[0].rank
    owned = owned_parts(engine.plan, engine.forms)
    for held in holdings(engine):
        if held.is_buffer:
            if rank == _first_rank(engine.plan, block_of(held.name)):
                yield held, held.part
            continue
        for each in owned[held.name]:
            if _writes(engine.plan, rank, each.writer, held.key):
                part = crossing(held.part, each.part)
                if part is not None:
                    yield held, part


def block_of(name: str) -> int:
    """From a global name, ``blocks.<id>.<name inside>``."""
    return int(name.split(".", 2)[1])


def _writes(plan: Plan, rank: int, writer: int, key: str) -> bool:
    """States that a group splits are written by each of its ranks, the rest by the writer."""
    group = zero_group_of(plan, writer) if key != VALUE else ()
    return rank in group if group else rank == writer


def _owned(plan: Plan, form: ParameterForm, block: int, loads: dict[int, int]) -> Iterator[Owned]:
    pipeline, stage = _stage_of(plan, block)
    mine = [each for each in holders(plan, form, [block]) if each.unit[:2] == (pipeline, stage)]
    for atom in atoms(form, mine):
        writer = _least(atom.members, loads)
        loads[writer] += atom.numel * form.itemsize
        yield Owned(atom.intervals, writer)


def _least(ranks: Iterable[int], loads: Mapping[int, int]) -> int:
    return min(ranks, key=lambda rank: (loads[rank], rank))


def _stage_of(plan: Plan, block: int) -> tuple[int, int]:
    """The pipeline whose turn it is to write a block, and its stage that holds it."""
    pipeline = block % len(plan.pipelines)
    stages = plan.pipelines[pipeline].stages
    return pipeline, next(s for s, stage in enumerate(stages) if block in stage.blocks)


def _first_rank(plan: Plan, block: int) -> int:
    """Of the stage that writes a block."""
    where = _stage_of(plan, block)
    return next(p.rank for p in places(plan) if (p.pipeline, p.stage, p.replica, p.tp_rank) == (*where, 0, 0))
