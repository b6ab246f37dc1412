"""When a plan ends, given when each stage is ready: reductions depend on cuts and devices only."""

from collections.abc import Sequence
from dataclasses import dataclass

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..cost.actors import seats_of
from ..cost.sync import commit_seconds, reductions_of
from ..cost.tables import Tables
from .grow import Spans
from .lines import Lines

MEMBER_BITS = 8
"""Members of a pool in one number for all pools: there are fewer than 2 ** 8 of them."""


@dataclass(frozen=True, slots=True)
class End:
    """What follows the last backwards of some pipelines, whatever their shares and counts."""

    reductions: Sequence[tuple[tuple[int, ...], Seconds]]
    """In order: the stages that take part, counted through all pipelines, and seconds."""
    after_s: Seconds
    """Commit, slowest optimizer and fixed seconds."""

    @classmethod
    def of(cls, plan: Plan, tables: Tables) -> "End":
        """As the price has it."""
        seats = seats_of(plan, tables)
        stages = [(p, s) for p, row in enumerate(seats) for s in range(len(row))]
        at = {stage: i for i, stage in enumerate(stages)}
        reductions = [
            (tuple(dict.fromkeys(at[p, s] for p, s, _ in r.members)), r.seconds)
            for r in reductions_of(plan, seats, tables)
        ]
        updates = [
            tables.update_seconds(*plan.pipelines[p].stages[s].layers, seat.node.device.name, seat.tp)
            for p, s in stages
            for seat in seats[p][s]
        ]
        return cls(reductions, commit_seconds(seats, tables) + max(updates) + tables.profile.step_s)

    def seconds(self, ready_s: list[Seconds]) -> Seconds:
        """When all is done if each stage is ready then. It moves ``ready_s`` on.

        With each pipeline's times alone a lower bound: no stage is ready earlier in the plan than alone.
        """
        for members, seconds in self.reductions:
            end = seconds + max([ready_s[at] for at in members])
            for at in members:
                ready_s[at] = end
        return max(ready_s) + self.after_s


@dataclass(frozen=True, slots=True)
class Part:
    """A stage as far as rings have to do with it."""

    stop: int
    members: int
    """Replicas by pool, ``MEMBER_BITS`` for each."""
    width: int
    least_tp: int
    most_tp: int


class EarlyEnds:
    """Ends without what other rings, ties, latencies and the commit add: never later, and quickly told."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        tables = lines.tables
        self._bytes = [n * tables.model.bytes_per_parameter.gradient for n in tables.own_parameters]
        self._per_byte: dict[tuple[int, int], float] = {}

    def parts(self, stages: Spans) -> tuple[Part, ...]:
        """Of one pipeline."""
        return tuple(
            Part(
                stop=stop,
                members=sum(1 << MEMBER_BITS * pool for pool, _, _ in line.units),
                width=line.width,
                least_tp=line.least_tp,
                most_tp=max(tp for _, tp, _ in line.units),
            )
            for _, stop, _, line in stages
        )

    def update_s(self, stages: Spans) -> Seconds:
        """The slowest optimizer step of one pipeline."""
        return max(float(self.lines.update(line.look)[start, stop]) for start, stop, _, line in stages)

    def of(self, pipelines: Sequence[Sequence[Part]], update_s: Seconds) -> End:
        """For some pipelines of which the slowest optimizer needs so long."""
        reductions: list[tuple[tuple[int, ...], Seconds]] = []
        at, first, start = [0] * len(pipelines), [], 0
        for parts in pipelines:
            first.append(start)
            start += len(parts)
        start = 0
        while start < self.lines.num_blocks:
            held = [parts[i] for parts, i in zip(pipelines, at, strict=True)]
            stop = min([part.stop for part in held])
            stages = tuple([f + i for f, i in zip(first, at, strict=True)])
            seconds = self._seconds(held, self._bytes[stop] - self._bytes[start])
            if seconds > 0:
                reductions.append((stages, seconds))
            for p, part in enumerate(held):
                at[p] += part.stop == stop
            start = stop
        reductions.reverse()
        return End(reductions, update_s + self.lines.tables.profile.step_s)

    def _seconds(self, held: list[Part], size: float) -> Seconds:
        """As ``tails.Tails`` has it: 2 (n - 1) messages of 1 / n over the slowest link."""
        width = sum([part.width for part in held])
        if width < 2:
            return 0.0
        key = (sum([part.members for part in held]), max([part.most_tp for part in held]))
        per_byte = self._per_byte.get(key)
        if per_byte is None:
            per_byte = self._per_byte[key] = self._slowest(*key)
        return 2 * (width - 1) / width / min([part.least_tp for part in held]) * size * per_byte

    def _slowest(self, members: int, most_tp: int) -> float:
        """Seconds a byte of the slowest link among so many replicas of each pool."""
        names: list[str] = []
        for p, pool in enumerate(self.lines.pools):
            count = members >> MEMBER_BITS * p & (1 << MEMBER_BITS) - 1
            names += [node_of(device) for device in pool.devices[:count]]
        return self.lines.per_byte(names, most_tp)
