"""Changes the plan of a running job between two steps: the same processes, the same training to the last bit
of its state.

The engine of the new plan is built beside the old one, which is let go only when every process has all of
its new state. What fails before that leaves the old one as it was.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..engine import Engine
from ..errors import ReplanError, UsageError
from ..measure.together import Together
from ..model.parameters import Values
from ..plan.moves import Moves, moves_of
from ..plan.shards import ParameterForm, Part
from ..units import Bytes, Seconds
from .carry import Carrier, messages
from .holdings import VALUE, Holding, holdings, make_states, scalars, settle
from .parts import shape_of
from .words import Settings, Told, Word, agreed, kept_of, states_told

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


def replan(engine: Engine, make: Make, node_of: Callable[[int], object], *, is_split: bool) -> Moved:
    """Let ``engine`` go on by another plan; every process of the job calls it between the same two steps.

    Args:
        engine: Becomes the other.
        make: Makes the engine of the new plan.
        node_of: Node of a process.
        is_split: Whether ZeRO splits what this process has by the new plan.

    Raises:
        ReplanError: On every process, with what failed and where; the old plan goes on.

    """
    together = Together.of_default_group(engine.device)
    made: list[Engine] = []
    try:
        moved = _built(engine, make, node_of, is_split, together, made)
    except BaseException:
        for other in made:
            other.close()
        raise
    engine.become(made[0])
    return moved


def _built(
    engine: Engine,
    make: Make,
    node_of: Callable[[int], object],
    is_split: bool,
    together: Together,
    made: list[Engine],
) -> Moved:
    """Make the other engine, append it to ``made``, and give it its state."""
    had: list[Holding] = []
    needed: list[Holding] = []

    def tell() -> Word:
        had.extend(holdings(engine))
        return _word_of(engine, had)

    def build() -> Word:
        other = make(_values_from(() if is_split else had, engine.device))
        made.append(other)
        make_states(other, states_told(before), _states_that_stay(had, other))
        needed.extend(holdings(other))
        return Word(parts=tuple(map(Told.of, needed)))

    def finish() -> Word:
        if carrier.fault is not None:
            raise carrier.fault
        carrier.copy_own()
        settle(made[0])
        _take_over(made[0], engine, before)
        _wait_for(engine.device)
        return Word()

    before = agreed(together, tell)
    after = agreed(together, build)
    moves = moves_of(kept_of(before, after), node_of=node_of)
    _refuse_lost(moves)
    carrier = Carrier.of(had, needed, together.rank, engine.device)
    every, start = messages(moves.moves), time.perf_counter()
    carrier.carry(every)
    seconds = time.perf_counter() - start
    agreed(together, finish)
    return Moved(moves, carrier.sent_bytes, seconds)


def _word_of(engine: Engine, had: Sequence[Holding]) -> Word:
    frozen = tuple(name for name, p in engine.named_parameters() if not p.requires_grad)
    return Word(
        parts=tuple(map(Told.of, had)),
        scalars=scalars(engine),
        frozen=frozen,
        settings=_told_settings(engine),
    )


def _values_from(had: Sequence[Holding], device: torch.device) -> Values:
    """A parameter of which this process has the same part stays where it is; others get memory.

    Under ZeRO all get memory (``had`` is empty): DeepSpeed gives a group the values of its first process,
    which has not all of them yet, and would write them over the old engine's.
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


def _refuse_lost(moves: Moves) -> None:
    """Alike on every process."""
    if moves.lost:
        first = moves.lost[0]
        raise ReplanError(
            f"the job keeps its plan: nobody has {first.name} (and {len(moves.lost) - 1} other parts), which "
            f"process {first.targets[0]} would need; load a checkpoint"
        )


def _take_over(other: Engine, engine: Engine, words: Sequence[Word]) -> None:
    """All that is no tensor: counts, loss scale, what optimizer and schedule go by, what was frozen."""
    other.num_steps = other.first_step = engine.num_steps
    other.scale = engine.scale
    frozen = {name for word in words for name in word.frozen}
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if other.optimizer is None:
        return
    settings = _settings_of(engine) or _heard_settings(words)
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


def _settings_of(engine: Engine) -> Settings | None:
    """None on a process without an optimizer."""
    if engine.optimizer is None:
        return None
    schedule = engine.schedule
    if schedule is not None and not hasattr(schedule, "state_dict"):
        raise UsageError(
            f"{type(schedule).__name__} has no state_dict(), so that no other plan can take it over; use a "
            "schedule of torch.optim.lr_scheduler"
        )
    return Settings(
        groups=tuple({k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups),
        schedule=None if schedule is None else schedule.state_dict(),
    )


def _told_settings(engine: Engine) -> bytes:
    """For those without; nothing where they hold what no message does, such as a tensor."""
    settings = _settings_of(engine)
    try:
        return b"" if settings is None else msgspec.msgpack.encode(settings)
    except TypeError:
        return b""


def _heard_settings(words: Sequence[Word]) -> Settings:
    for word in words:
        if word.settings:
            return msgspec.msgpack.decode(word.settings, type=Settings)
    raise UsageError(
        "this process had nothing to train and now has, but no other can tell it what the optimizer goes by: "
        "its parameter groups hold what is no number or text"
    )


def _like(fresh: Any, value: Any) -> Any:
    """A message knows lists alone: a tuple where there was one."""
    return tuple(value) if isinstance(fresh, tuple) and isinstance(value, list) else value


def _wait_for(device: torch.device) -> None:
    """What was copied must be there before others hear that it is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
