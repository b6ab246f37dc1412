"""Changes the plan of a running job between two steps: the same training to the last bit of its state.

The engine of the new plan is built beside the old state, which is let go only when the caller says that the
change counts. What fails before that leaves the old state as it was. Processes may go and come: one that
joins has no state, and hears all that the others can tell.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..engine import Engine
from ..engine.precision import LossScale
from ..errors import UsageError
from ..measure.together import Together
from ..model.parameters import Values
from ..plan.moves import Moves, moves_of
from ..plan.shards import ParameterForm, Part
from ..units import Bytes, Seconds
from .carry import Carrier, messages
from .holdings import VALUE, Holding, holdings, make_states, settle
from .job import RandomState, draw_as
from .lost import refuse_lost, refuse_lost_shards
from .old import Old
from .parts import shape_of
from .words import Progress, Settings, Told, Word, agreed, kept_of, progress_of, states_told

Make = Callable[[Values], Engine]
"""Makes the engine of the new plan, whose parameters are given."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a change of plan sent."""

    moves: Moves
    """Of all processes, as it was to be."""
    sent_bytes: Bytes
    """By this process, as it was."""
    seconds: Seconds
    """From the first message of this process to its last."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of plan for which this process has all it needs; it counts when ``commit`` is called."""

    engine: Engine
    """Of the new plan; it may share memory with the old state, so it must not step before."""
    moved: Moved
    heard: Progress
    """Steps done, places in the data and notes, as a holder of state told them."""
    set_random: Callable[[], None]
    """Gives this process the random states that it goes on from."""

    def commit(self, old: Engine | None = None) -> Engine:
        """The change counts: let the old state go. ``old`` becomes the new engine, where there is one.

        Returns the engine that trains on.
        """
        if old is None or self.engine.recipe.stochastic:  # else a script that trained draws on as it was
            self.set_random()
        if old is None:
            return self.engine
        old.become(self.engine)
        return old

    def drop(self) -> None:
        """The change does not count: close what was made; the old state is whole."""
        self.engine.close()


def replan(
    old: Old | None,
    make: Make,
    together: Together,
    node_of: Callable[[int], object],
    *,
    is_split: bool = False,
) -> Change:
    """Make the engine of another plan and give it its state; all its processes call it together.

    Processes that hold state and are not in the plan first bring what is missing: see ``bring``.

    Args:
        old: What this process has; None: nothing, it joins.
        make: Makes the engine of the new plan.
        together: The processes of the new plan, which are those of the default group.
        node_of: Node of a process.
        is_split: Whether ZeRO splits what this process has by the new plan.

    Raises:
        LostStateError: On every process, where nobody holds a part that somebody needs.
        ReplanError: On every process, with what failed and where; the old state is whole.
        RuntimeError: A process is gone; the old state is whole, the group is of no use any more.

    """
    made: list[Engine] = []
    try:
        return _built(old, make, together, node_of, is_split, made)
    except BaseException:
        for other in made:
            other.close()
        raise


def _built(
    old: Old | None,
    make: Make,
    together: Together,
    node_of: Callable[[int], object],
    is_split: bool,
    made: list[Engine],
) -> Change:
    """Make the other engine, append it to ``made``, and give it its state."""
    had = old.holdings if old is not None else ()
    to_take = () if is_split or old is None or old.is_kept else had
    needed: list[Holding] = []

    def build() -> Word:
        other = make(_values_from(to_take, together.device))
        made.append(other)
        make_states(other, states_told(before), _states_that_stay(to_take, other))
        needed.extend(holdings(other))
        return Word(parts=tuple(map(Told.of, needed)), random=_told_random(old, before, other.device))

    def finish() -> Word:
        if carrier.fault is not None:
            raise carrier.fault
        carrier.copy_own()
        settle(made[0])
        _take_over(made[0], old, before)
        wait_for(together.device)
        return Word()

    before = agreed(together, lambda: old.word() if old is not None else Word())
    heard = progress_of(before)
    refuse_lost_shards(before)
    after = agreed(together, build)
    moves = moves_of(kept_of(before, after), node_of=node_of)
    refuse_lost(moves)
    carrier = Carrier.of(had, needed, together.rank, together.device)
    moved = carried(carrier, moves)
    agreed(together, finish)
    return Change(made[0], moved, heard, _random_of(old, made[0], after))


def carried(carrier: Carrier, moves: Moves) -> Moved:
    """Send and receive this process's part of all moves."""
    every, start = messages(moves.moves), time.perf_counter()
    carrier.carry(every)
    return Moved(moves, carrier.sent_bytes, time.perf_counter() - start)


def _values_from(had: Sequence[Holding], device: torch.device) -> Values:
    """A parameter of which this process has the same part stays where it is; others get memory.

    Under ZeRO all get memory (``had`` is empty): DeepSpeed gives a group the values of its first process,
    which has not all of them yet, and would write them over the old ones.
    """
    held = {each.name: each for each in had if each.key == VALUE and not each.is_buffer}

    def values(form: ParameterForm, part: Part, dtype: torch.dtype) -> Tensor:
        mine = held.get(form.tie or form.name)
        if mine is not None and mine.part == part and mine.tensor.dtype == dtype:
            return mine.tensor
        return torch.empty(shape_of(part), dtype=dtype, device=device)

    return values


def _states_that_stay(had: Sequence[Holding], other: Engine) -> dict[tuple[str, str], Tensor]:
    """Those of the same part before and after: they stay in the same memory too."""
    parts = other.held_parts()
    return {(h.name, h.key): h.tensor for h in had if h.key != VALUE and parts.get(h.name) == h.part}


def _take_over(other: Engine, old: Old | None, words: Sequence[Word]) -> None:
    """All that is no tensor: counts, loss scale, what optimizer and schedule go by, what was frozen."""
    heard = progress_of(words)
    other.num_steps = other.first_step = heard.num_steps
    if other.scale is not None and heard.scale is not None:
        other.scale = LossScale(*heard.scale)
    frozen = {name for word in words for name in word.frozen}
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if other.optimizer is None:
        return
    settings = (old.settings if old is not None else None) or heard_settings(words)
    if settings is None:
        raise UsageError(
            "this process had nothing to train and now has, but no other can tell it what the optimizer goes "
            "by: its parameter groups hold what is no number or text"
        )
    groups = other.optimizer.param_groups
    if len(settings.groups) != len(groups):
        raise UsageError(
            f"optimizer= makes {len(groups)} parameter groups of the parameters that this process has now, "
            f"and made {len(settings.groups)} before, so that learning rates cannot be carried over; make as "
            "many groups of any parameters (an empty one is fine)"
        )
    for group, told in zip(groups, settings.groups, strict=True):
        group.update({key: _like(group.get(key), value) for key, value in told.items()})
    if other.schedule is not None:
        other.schedule.load_state_dict(settings.schedule)  # type: ignore[attr-defined]


def heard_settings(words: Sequence[Word]) -> Settings | None:
    """Of the first process that could tell any."""
    told = next((word.settings for word in words if word.settings), None)
    return None if told is None else msgspec.msgpack.decode(told, type=Settings)


def _like(fresh: Any, value: Any) -> Any:
    """A message knows lists alone: a tuple where there was one."""
    return tuple(value) if isinstance(fresh, tuple) and isinstance(value, list) else value


def _is_new(old: Old | None) -> bool:
    return old is None or old.is_new


def _told_random(old: Old | None, before: Sequence[Word], device: torch.device) -> RandomState | None:
    """Of a process that has trained, where another has not; ten kilobytes that others need not hear."""
    if _is_new(old) or all(word.progress is not None and not word.is_new for word in before):
        return None
    assert old is not None
    return old.random or RandomState.here(device)


def _random_of(old: Old | None, other: Engine, words: Sequence[Word]) -> Callable[[], None]:
    """One that trained goes on, or back to what it kept; one that joins draws as the others do."""
    if old is not None and not old.is_new:
        return partial(old.random.restore, other.device) if old.random is not None else _stay
    states = [word.random for word in words if word.random is not None]
    seed = zlib.crc32(f"{other.recipe.seed}:{other.num_steps}:{other.places[0].rank}".encode())
    return partial(draw_as, states, seed, other.device)


def _stay() -> None:
    """The generators are where they should be."""


def wait_for(device: torch.device) -> None:
    """What was copied must be there before others hear that it is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
