"""What `bench.learned` keeps of a problem: throughputs by source, seed and budget; a later run reads it."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.report import EQUAL

LEARNED, RANDOM, ENUMERATION = "learned", "random", "enumeration"
UNIFORM = "uniform plans"
"""One TP degree, stages of one replica."""
RANKED = "random, ranked"
"""Uniform random choice, of which sand tells the best first, as of the policy's."""
USUAL = "without the policy"
"""What the search asks by itself, the deterministic set: enumeration and uniform plans, in turns."""
TOGETHER = "with the policy"
"""What the search asks with ``learned=True``: enumeration, the policy, uniform plans, in turns."""

MIDDLE_DEVICES = 512
"""Clusters up to this size are planned in half a second, larger ones in three."""

SHORT_S = 0.1
"""CPU seconds in which policy, enumeration and variants are compared."""

Kept = TypeVar("Kept", bound=msgspec.Struct)


def ratio(ours: float, theirs: float) -> float:
    """1 where neither has a plan, ``inf`` where only we have."""
    return ours / theirs if theirs else (inf if ours else 1.0)


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of all records."""


class Sort(Record, frozen=True, kw_only=True):
    """What kind of problem it is."""

    num_devices: int
    num_types: int
    mixed_nodes: bool
    """Whether its nodes have several sizes."""
    experts: bool

    @property
    def is_mixed(self) -> bool:
        """Where a policy should gain most: four or more types, or nodes of several sizes."""
        return self.num_types >= 4 or self.mixed_nodes

    @property
    def words(self) -> str:
        """Its group in a report."""
        size = next(f"up to {n:,} devices" for n in (16, 64, 256, 1024, 4096) if self.num_devices <= n)
        types = "4 or more types" if self.num_types >= 4 else f"{self.num_types} types"
        nodes = "mixed nodes" if self.mixed_nodes else "equal nodes"
        return f"{types if self.num_types > 1 else '1 type'}, {nodes}, {size}"


class Curve(Record, frozen=True, kw_only=True):
    """Best plan of one contestant after so many evaluations."""

    contestant: str
    seed: int
    evaluations: tuple[int, ...]
    samples_per_s: tuple[float, ...]
    """Of the best plan so far; 0 before there is one."""

    def at(self, evaluations: int) -> float:
        """Samples a second after at most so many."""
        reached = [v for n, v in zip(self.evaluations, self.samples_per_s, strict=True) if n <= evaluations]
        return max(reached, default=0.0)

    def needed(self, samples_per_s: float) -> float:
        """Evaluations after which a plan is as fast as that; ``inf`` where none is."""
        for n, value in zip(self.evaluations, self.samples_per_s, strict=True):
            if value > 0 and value >= samples_per_s * (1 - EQUAL):
                return n
        return inf


class Timed(Record, frozen=True, kw_only=True):
    """What one contestant found in a budget of CPU time."""

    contestant: str
    seed: int
    budget_s: float
    cpu_s: float
    """What it took."""
    samples_per_s: float
    """0 where it found no plan."""


class Contest(Record, frozen=True, kw_only=True):
    """All contestants on one problem."""

    problem: str
    sort: Sort
    curves: tuple[Curve, ...]
    timed: tuple[Timed, ...]

    @property
    def best(self) -> float:
        """Samples a second of the best plan that anybody found."""
        curves = (value for curve in self.curves for value in curve.samples_per_s)
        return max((*curves, *(timed.samples_per_s for timed in self.timed)), default=0.0)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of any contestant."""
        return tuple(dict.fromkeys([*(c.seed for c in self.curves), *(t.seed for t in self.timed)]))

    def curve(self, contestant: str, seed: int) -> Curve:
        """Of one contestant; one that draws nothing at random has the first seed's."""
        found = [curve for curve in self.curves if curve.contestant == contestant]
        return next((curve for curve in found if curve.seed == seed), found[0])

    def within(self, contestant: str, budget_s: float, seed: int) -> float:
        """Samples a second that a contestant reaches in a time."""
        found = [t for t in self.timed if t.contestant == contestant and t.budget_s == budget_s]
        return next((t for t in found if t.seed == seed), found[0]).samples_per_s


class Planned(Record, frozen=True, kw_only=True):
    """The planner as it ships on one problem, against a long refinement and the peers."""

    problem: str
    sort: Sort
    cpu_s: tuple[float, ...]
    """Of planning, by seed."""
    samples_per_s: tuple[float, ...]
    """Of the plan, by seed; 0 where none was found."""
    default_cpu_s: tuple[float, ...] = ()
    """Of planning in the budget that is there by default, with peers; empty where that was not measured."""
    default_samples_per_s: tuple[float, ...] = ()
    replan_cpu_s: tuple[float, ...] = ()
    """After a node has gone, and after one more has come than there were; of the first seed; empty where that
    was not measured."""
    replan_share: tuple[float, ...] = ()
    """Of the throughput that planning from nothing reaches there."""
    refined_s: float = 0.0
    """CPU seconds of the long refinement; 0 where it was not made."""
    refined: float = 0.0
    """Its samples a second."""
    peer: str = ""
    """The best peer."""
    peer_samples_per_s: float = 0.0

    @property
    def qualities(self) -> tuple[float, ...]:
        """Parts of the best plan known, by seed; empty without a long refinement."""
        return self._parts(self.samples_per_s)

    @property
    def default_qualities(self) -> tuple[float, ...]:
        """The same in the budget that is there by default."""
        return self._parts(self.default_samples_per_s)

    def _parts(self, found: tuple[float, ...]) -> tuple[float, ...]:
        best = max(self.refined, *self.samples_per_s, *self.default_samples_per_s)
        return tuple(value / best for value in found) if self.refined and best else ()

    @property
    def over_peer(self) -> float:
        """The worst seed's throughput over the best peer's; ``inf`` where no peer has a plan."""
        return self._over_peer(self.samples_per_s)

    @property
    def default_over_peer(self) -> float:
        """The same in the budget that is there by default."""
        return self._over_peer(self.default_samples_per_s)

    def _over_peer(self, found: tuple[float, ...]) -> float:
        return min(found) / self.peer_samples_per_s if self.peer_samples_per_s else inf


class _File(Record, frozen=True, kw_only=True):
    code: str
    record: msgspec.Raw


def kept(file: Path | None, code: str, kind: type[Kept], measure: Callable[[], Kept]) -> Kept:
    """What a run of the same code left in a file, else what is measured now, which it then holds."""
    if file is not None and file.exists():
        found = msgspec.json.decode(file.read_bytes(), type=_File)
        if found.code == code:
            return msgspec.json.decode(found.record, type=kind)
    record = measure()
    if file is not None:
        whole = msgspec.json.encode(_File(code=code, record=msgspec.Raw(msgspec.json.encode(record))))
        file.write_bytes(msgspec.json.format(whole, indent=1) + b"\n")
    return record
