"""What bench.memory keeps of each plan beside its figures, so that a run that was cut short goes on.

One file a kind of plans, a line a plan. A line stays true only for its commit, which the figures name: delete
the file of a kind to measure it anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from arachne_runtime.plan import digest
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Bytes

from .report import commit


class Weighed(Document, frozen=True, kw_only=True):
    """A plan whose ranks were weighed."""

    plan: str
    """Digest."""
    commit: str
    predicted_bytes: tuple[Bytes, ...]
    """By rank."""
    measured_bytes: tuple[Bytes, ...]


@dataclass(slots=True)
class Records:
    """Of one kind; without a file they are forgotten."""

    file: Path | None = None
    by_plan: dict[str, Weighed] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Path | None) -> "Records":
        """Those that are there; a last line that was cut short is left out, and out of the file."""
        if file is None or not file.exists():
            return cls(file)
        whole = file.read_bytes().rpartition(b"\n")[0]
        file.write_bytes(whole + b"\n" * bool(whole))
        lines = [msgspec.json.decode(line, type=Weighed) for line in whole.splitlines()]
        return cls(file, {line.plan: line for line in lines})

    def find(self, plan: Plan) -> Weighed | None:
        """Of an earlier run."""
        return self.by_plan.get(digest(plan))

    def add(self, plan: Plan, predicted: Sequence[Bytes], measured: Sequence[Bytes]) -> Weighed:
        """Write down at once what was found, by rank."""
        found = Weighed(
            plan=digest(plan),
            commit=commit(),
            predicted_bytes=tuple(predicted),
            measured_bytes=tuple(measured),
        )
        self.by_plan[found.plan] = found
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")
        return found

    @property
    def commits(self) -> tuple[str, ...]:
        """Of all that is here, each once."""
        return tuple(sorted({line.commit for line in self.by_plan.values()}))
