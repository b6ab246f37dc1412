"""Schedules in torch's notation: ``2F0`` is stage 2, forward, micro-batch 0; ``2B0`` its backward.

A zero-bubble schedule splits a backward: ``2I0`` is the gradient of the input, ``2W0`` that of the weights.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from ..errors import UsageError
from .plan import Pipeline, ScheduleKind

PRICEABLE = tuple(ScheduleKind)
"""Schedules that this version orders and prices."""
_NOTATION = re.compile(r"(\d+)([FBIW])(\d+)")


class Work(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The gradient of the input, which the stage before waits for."""
    WEIGHT = "W"
    """The gradient of the weights, which nobody waits for."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage on one micro-batch."""

    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """``"2F0"`` → stage 2, forward, micro-batch 0; UsageError where the text is not an action."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise UsageError(f"no action in {text!r}; an action is written like 2F0 or 2B0")
        return cls(int(match[1]), Work(match[2]), int(match[3]))


def first_backward(kind: ScheduleKind) -> Work:
    """What gives the gradients that the stage before waits for."""
    return Work.INPUT if kind == ScheduleKind.ZERO_BUBBLE else Work.BACKWARD


def last_work(kind: ScheduleKind) -> Work:
    """What completes the gradients of a stage's parameters."""
    return Work.WEIGHT if kind == ScheduleKind.ZERO_BUBBLE else Work.BACKWARD


def num_rows(kind: ScheduleKind, pipeline: Pipeline) -> int:
    """Rows of a pipeline's schedule: its stages; interleaved, its different sets of devices."""
    if kind is not ScheduleKind.INTERLEAVED:
        return len(pipeline.stages)
    return len({stage.devices for stage in pipeline.stages})


def stage_actions(
    kind: ScheduleKind, stage: int, num_stages: int, num_micro_batches: int, *, num_rows: int | None = None
) -> tuple[Action, ...]:
    """The actions of one stage in order; ``num_rows`` as for ``row_actions``.

    1F1B starts with ``min(num_stages - stage, num_micro_batches)`` forwards, then alternates one backward
    with one forward; GPipe does all forwards first. Fewer micro-batches than stages are fine.
    """
    rows = num_stages if num_rows is None else num_rows
    row = row_actions(kind, stage % rows, rows, num_stages, num_micro_batches)
    return row if rows == num_stages else tuple(action for action in row if action.stage == stage)


@lru_cache(maxsize=4096)
def row_actions(
    kind: ScheduleKind, row: int, num_rows: int, num_stages: int, num_micro_batches: int
) -> tuple[Action, ...]:
    """What the devices of one row do, in order: row r holds stages r, r + num_rows, r + 2 num_rows, ...

    Only an interleaved schedule has fewer rows than stages. UsageError where it does not fit.
    """
    # compared by ``==``, as the memory of this function compares: a spelled kind is the named one
    if num_rows == num_stages and kind == ScheduleKind.INTERLEAVED:
        kind = ScheduleKind.ONE_F_ONE_B
    if kind == ScheduleKind.INTERLEAVED:
        if num_stages % num_rows:
            raise UsageError(f"{num_rows} rows cannot hold {num_stages} stages, the same number each")
        return tuple(_interleaved(row, num_rows, num_stages // num_rows, num_micro_batches))
    if num_rows != num_stages:
        raise UsageError(f"schedule {kind} has a row for each stage: {num_stages}, not {num_rows}")
    if kind == ScheduleKind.ZERO_BUBBLE:
        return tuple(_zero_bubble(row, num_stages, num_micro_batches))
    ahead = num_micro_batches
    if kind == ScheduleKind.ONE_F_ONE_B:
        ahead = min(num_stages - row, num_micro_batches)
    return tuple(_one_forward_one_backward(row, ahead, num_micro_batches))


def in_flight(
    kind: ScheduleKind, stage: int, num_stages: int, micro_batches: int, num_rows: int | None = None
) -> int:
    """Micro-batches whose activations a stage holds at once."""
    if kind is ScheduleKind.GPIPE:
        return micro_batches
    if kind is ScheduleKind.ZERO_BUBBLE:
        return min(micro_batches, num_stages)
    if kind is ScheduleKind.ONE_F_ONE_B or num_rows in (None, num_stages):
        return min(micro_batches, num_stages - stage)
    assert num_rows is not None
    return _most_held(kind, stage, num_rows, num_stages, micro_batches)


def deferred(kind: ScheduleKind, stage: int, micro_batches: int) -> int:
    """Micro-batches whose gradient of the weights a stage still owes, beside the one in use."""
    return min(stage, micro_batches - 1) if kind is ScheduleKind.ZERO_BUBBLE else 0


def _one_forward_one_backward(stage: int, ahead: int, count: int) -> Iterator[Action]:
    for m in range(ahead):
        yield Action(stage, Work.FORWARD, m)
    for m in range(count):
        yield Action(stage, Work.BACKWARD, m)
        if ahead + m < count:
            yield Action(stage, Work.FORWARD, ahead + m)


def _zero_bubble(stage: int, num_stages: int, count: int) -> Iterator[Action]:
    """ZB-H1 (arXiv 2401.10241, §2.1): 1F1B whose stage s owes the gradients of weights of s micro-batches.

    So its input gradients leave earlier, what it owes fills the bubble at the end, and no stage holds more
    micro-batches than the first stage of 1F1B.
    """
    ahead = min(num_stages - stage, count)
    for m in range(ahead):
        yield Action(stage, Work.FORWARD, m)
    for m in range(count):
        yield Action(stage, Work.INPUT, m)
        if m >= stage:
            yield Action(stage, Work.WEIGHT, m - stage)
        if ahead + m < count:
            yield Action(stage, Work.FORWARD, ahead + m)
    for m in range(max(0, count - stage), count):
        yield Action(stage, Work.WEIGHT, m)


def _interleaved(row: int, num_rows: int, chunks: int, count: int) -> Iterator[Action]:
    """Megatron-LM's interleaved 1F1B (arXiv 2104.04473, §2.2).

    Micro-batches go in rounds of at least ``num_rows`` through the first chunk of every row, then through the
    second, and so on; where they don't divide, the rounds are as equal as possible.
    """
    rounds = _rounds(count, num_rows)
    forwards = [
        Action(row + chunk * num_rows, Work.FORWARD, m)
        for batches in rounds
        for chunk in range(chunks)
        for m in batches
    ]
    backwards = [
        Action(row + chunk * num_rows, Work.BACKWARD, m)
        for batches in rounds
        for chunk in reversed(range(chunks))
        for m in batches
    ]
    ahead = min(len(forwards), (chunks - 1) * len(rounds[0]) + 2 * (num_rows - 1 - row))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _rounds(count: int, num_rows: int) -> list[range]:
    """Consecutive micro-batches, the longer rounds first."""
    rounds = max(1, count // num_rows)
    sizes = [count // rounds + (i < count % rounds) for i in range(rounds)]
    starts = [sum(sizes[:i]) for i in range(rounds)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@lru_cache(maxsize=4096)
def _most_held(kind: ScheduleKind, stage: int, num_rows: int, num_stages: int, micro_batches: int) -> int:
    held = most = 0
    for action in stage_actions(kind, stage, num_stages, micro_batches, num_rows=num_rows):
        held += 1 if action.work is Work.FORWARD else -1
        most = max(most, held)
    return most
