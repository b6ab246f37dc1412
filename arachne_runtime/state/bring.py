"""Brings parts to the processes of the next plan from all that hold any, also those that are not in it.

It makes no engine and forms no group: the processes meet in a world that is larger than the plan's, those of
the plan get what they will need, and go on to ``replan`` in their own world, where nothing has to move.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from ..measure.together import Together
from ..plan.moves import Kept, Moves, moves_of, parts_under
from ..plan.order import Summed
from ..plan.placement import holding, places, rank_order
from ..plan.plan import Plan
from .carry import Carrier
from .holdings import Holding, Scalars, dtype_called
from .lost import refuse_lost, refuse_lost_shards
from .old import Old
from .ownership import block_of
from .parts import shape_of, whole
from .replan import carried, heard_settings, wait_for
from .words import Word, agreed, parts_by_label, progress_of


def bring(
    old: Old | None,
    plan: Plan,
    summed: Summed,
    processes: Sequence[int],
    together: Together,
    node_of: Callable[[int], object],
) -> Old | None:
    """Send and receive all that a plan's processes will need; all of ``together`` call it.

    Args:
        old: What this process has; None: nothing.
        plan: The next one, without ZeRO: how that splits states only its engine knows.
        summed: The model.
        processes: By rank of the plan, the number of its process in ``together``.
        together: The processes of the default group: those of the plan, and others that hold parts.
        node_of: Node of a process.

    Returns:
        What this process has for the plan; None where it is not in it.

    Raises:
        LostStateError: On every process, where nobody holds a part that the plan needs.
        ReplanError: On every process, with what failed and where; the old state is whole.
        RuntimeError: A process is gone; the old state is whole.

    """
    before = agreed(together, lambda: old.word() if old is not None else Word())
    progress_of(before)
    refuse_lost_shards(before)
    kept = tuple(_kept(plan, summed, processes, before))
    moves = moves_of(kept, node_of=node_of)
    refuse_lost(moves)
    needed = _moved(old, kept, moves, before, together)
    return _brought(old, before, needed) if together.rank in processes else None


def _moved(
    old: Old | None, kept: Sequence[Kept], moves: Moves, words: Sequence[Word], together: Together
) -> list[Holding]:
    """Send and receive; what this process has then of what it is to have."""
    needed: list[Holding] = []

    def make_room() -> Word:
        needed.extend(_room(kept, words, old, together))
        return Word()

    def finish() -> Word:
        if carrier.fault is not None:
            raise carrier.fault
        carrier.copy_own()
        wait_for(together.device)
        return Word()

    agreed(together, make_room)
    had = old.holdings if old is not None else ()
    carrier = Carrier.of(had, needed, together.rank, together.device)
    carried(carrier, moves)
    agreed(together, finish)
    return needed


def _brought(old: Old | None, words: Sequence[Word], needed: Sequence[Holding]) -> Old:
    names = {each.name for each in needed}
    scalars: Scalars = {
        name: numbers for word in words for name, numbers in word.scalars.items() if name in names
    }
    return Old(
        holdings=tuple(needed),
        scalars=scalars,
        frozen=tuple(dict.fromkeys(name for word in words for name in word.frozen if name in names)),
        settings=(old.settings if old is not None else None) or heard_settings(words),
        progress=msgspec.structs.replace(progress_of(words), shards=()),
        random=old.random if old is not None else None,
        is_new=old is None or old.is_new,
    )


def _room(
    kept: Sequence[Kept], words: Sequence[Word], old: Old | None, together: Together
) -> Iterator[Holding]:
    """What this process is to have: in the same memory where it has the same part, else in new memory."""
    tellings = {told.label: told for word in words for told in word.parts}
    may_stay = old.holdings if old is not None and not old.is_kept else ()
    mine = {(each.name, each.key, each.part): each for each in may_stay}
    for tensor in kept:
        told = tellings[tensor.name]
        for part in tensor.after.get(together.rank, ()):
            stays = mine.get((told.name, told.key, part))
            dtype = dtype_called(told.dtype)
            room = stays.tensor if stays else torch.empty(shape_of(part), dtype=dtype, device=together.device)
            yield Holding(told.name, told.key, told.shape, part, room, told.is_buffer)


def _kept(plan: Plan, summed: Summed, processes: Sequence[int], words: Sequence[Word]) -> Iterator[Kept]:
    """Every tensor of the job: who has what of it, and who needs what by the plan."""
    devices = rank_order(plan)
    process_of = {device: processes[rank] for rank, device in enumerate(devices)}
    forms = {
        form.tie or form.name: (block, form)
        for block, of_block in enumerate(summed.forms)
        for form in of_block
    }
    tellings = {told.label: told for word in words for told in word.parts}
    had = parts_by_label(words)
    for name, (block, form) in forms.items():
        blocks = summed.ties[form.tie] if form.tie else (block,)
        needed = parts_under(plan, form, blocks, process_of)
        labels = {label: told.dtype for label, told in tellings.items() if told.name == name}
        sizes = {label: dtype_called(dtype).itemsize for label, dtype in labels.items()}
        for label, itemsize in ({name: form.itemsize} | sizes).items():
            yield Kept(
                name=label, shape=form.shape, itemsize=itemsize, before=had.get(label, {}), after=needed
            )
    for label, told in tellings.items():
        if told.name not in forms:
            holders = {processes[rank] for rank in _holders_of(plan, block_of(told.name))}
            yield Kept(
                name=label,
                shape=told.shape,
                itemsize=dtype_called(told.dtype).itemsize,
                before=had[label],
                after={process: (whole(told.shape),) for process in sorted(holders)},
            )


def _holders_of(plan: Plan, block: int) -> Iterator[int]:
    return (place.rank for place in places(plan) if block in holding(plan, place)[1].blocks)
