"""What ``bench.planners`` keeps of a cell, as it stands in its file, and what the cell says in the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Seconds


class Figures(Document, frozen=True, kw_only=True):
    """What a strategy reaches on a cell."""

    samples_per_s: float | None
    """None without a plan."""
    seconds: Seconds
    """CPU time of a peer, wall time of our search."""
    reason: str = ""
    """Why there is no plan."""

    def __str__(self) -> str:
        return f"{self.samples_per_s:.2f}/s in {self.seconds:.1f} s" if self.samples_per_s else "has none"


class Planned(Document, frozen=True, kw_only=True):
    """The plan that our search found, and its work."""

    cpu_s: Seconds
    evaluations: int
    same_as: tuple[str, ...]
    """Peers that propose this very plan."""
    schedule: ScheduleKind
    pipelines: int
    idle: int
    """Devices without a stage."""
    iteration_s: Seconds
    ideal_s: Seconds
    losses_s: dict[str, Seconds]
    """What takes the rest of the iteration."""
    in_larger: float | None
    """Its samples a second as a plan of the larger space; None for a plan that was found there."""


class Searched(Figures, frozen=True, kw_only=True):
    """What our search reaches on a cell."""

    planned: Planned | None = None

    @property
    def share(self) -> float:
        """Of the ideal; 0 without a plan."""
        return self.planned.ideal_s / self.planned.iteration_s if self.planned else 0.0

    @property
    def rest(self) -> dict[str, float]:
        """What takes the rest, as parts of the iteration."""
        if self.planned is None:
            return {}
        return {kind: s / self.planned.iteration_s for kind, s in self.planned.losses_s.items()}


class Record(Document, frozen=True, kw_only=True):
    """One cell, as far as it was measured."""

    cell: str
    group: str
    commit: str
    code: str
    """Digest of what its figures depend on."""
    budget_s: Seconds
    """Of each strategy."""
    peers: Mapping[str, Figures] = {}
    ours: Searched | None = None
    larger: Searched | None = None
    """In the larger space."""


def read(file: Path | None, code: str) -> Record | None:
    """What a run of this code left in a cell's file; None where another wrote it, or in another form."""
    if file is None or not file.exists():
        return None
    try:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
    except msgspec.DecodeError:  # of an older version of this file, or cut short
        return None
    return record if record.code == code else None


def write(record: Record, file: Path | None) -> None:
    """Into the cell's file, where there is one."""
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell that was measured: what it says."""

    cell: str
    group: str
    peers: Mapping[str, Figures]
    found: Searched
    larger: Searched

    @classmethod
    def of(cls, record: Record) -> "Outcome":
        """Of a complete record."""
        assert record.ours is not None
        assert record.larger is not None
        return cls(record.cell, record.group, record.peers, record.ours, record.larger)

    @property
    def ours(self) -> float | None:
        """Our samples a second."""
        return self.found.samples_per_s

    @property
    def best(self) -> tuple[float, str] | None:
        """The best peer's samples a second, and its name."""
        found = [(f.samples_per_s, name) for name, f in self.peers.items() if f.samples_per_s is not None]
        return max(found, default=None)

    @property
    def ratio(self) -> float | None:
        """Ours over the best peer; None where no peer has a plan; 0 where only peers have one."""
        return None if self.best is None else (self.ours or 0.0) / self.best[0]

    @property
    def gain(self) -> float | None:
        """The best of the larger space over our plan, which is in it too, under the same prices."""
        plain = self.found.planned.in_larger if self.found.planned else None
        return max(self.larger.samples_per_s or 0.0, plain) / plain if plain else None

    def __str__(self) -> str:
        peers = " ".join(f"{name} {figures}" for name, figures in self.peers.items())
        lead = f"{self.ratio:.3f} x {self.best[1]}" if self.best and self.ratio else "no peer has a plan"
        rest = ", ".join(
            f"{kind} {100 * part:.0f} %" for kind, part in self.found.rest.items() if part >= 0.005
        )
        gain = f"; larger space {self.gain:.3f} x" if self.gain else ""
        return (
            f"{self.cell}: ours {self.found}, {lead}{gain}\n  {peers}\n"
            f"  {100 * self.found.share:.0f} % of the ideal; {rest}"
        )
