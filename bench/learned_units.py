"""One problem measured in a process of its own, and kept: contests of sources, planned cells."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from bench.learned_cells import Effort, Peer, planned
from bench.learned_contestants import (
    BRIEF_MARK,
    Contestant,
    contestants,
    every_source,
    variants,
)
from bench.learned_curves import curve, timed
from bench.learned_problems import Problem, sort_of
from bench.learned_records import SHORT_S, Contest, Curve, Planned, Record, Timed, kept
from bench.planners import kept_in
from planner.exhaustive import random_request
from planner.peers import PEERS
from planner.policy import Policy
from planner.search import Source, find_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """All contestants on one problem."""

    problem: Problem
    seeds: tuple[int, ...]
    marks: tuple[int, ...]
    """Evaluations after which plans are looked at."""
    fine_marks: tuple[int, ...]
    """The same for those that aim at another's result."""
    budgets_s: tuple[float, ...]
    ablated: bool
    """Whether the variants take part."""

    @property
    def name(self) -> str:
        """As a file may be called."""
        return f"contest-{self.problem.name}"

    def measured(self, folder: Path | None) -> Contest:
        """From the file of an earlier run, or now."""
        return kept(_file(folder, self.name), code(repr(self)), Contest, self._measured)

    def _measured(self) -> Contest:
        each = [*contestants(), *(variants() if self.ablated else ())]
        curves: list[Curve] = []
        found: list[Timed] = []
        for seed in self.seeds:  # in turns, so that a machine that slows down slows all of them
            for contestant in each:
                if seed == self.seeds[0] or contestant.drawn:
                    if contestant.counted is not None:
                        curves.append(self._curve(contestant, contestant.counted, seed))
                    found += self._timed(contestant, seed)
        return Contest(
            problem=self.problem.name,
            sort=sort_of(self.problem.request()),
            curves=tuple(curves),
            timed=tuple(found),
        )

    def _curve(self, contestant: Contestant, source: Source, seed: int) -> Curve:
        marks = self.fine_marks if contestant.fine else self.marks
        if contestant.brief:
            marks = tuple(n for n in marks if n <= BRIEF_MARK)
        values = curve(self.problem.request(), source, seed=seed, marks=marks, packed=contestant.packed)
        return Curve(contestant=contestant.name, seed=seed, evaluations=marks, samples_per_s=values)

    def _timed(self, contestant: Contestant, seed: int) -> Iterator[Timed]:
        for budget_s in self.budgets_s:
            if budget_s == SHORT_S or not contestant.brief:
                yield timed(self.problem.request(), contestant, seed=seed, budget_s=budget_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The planner on one problem."""

    problem: Problem
    effort: Effort

    @property
    def name(self) -> str:
        """As a file may be called."""
        return f"planned-{self.problem.name}"

    def measured(self, folder: Path | None) -> Planned:
        """From the file of an earlier run, or now."""
        return kept(_file(folder, self.name), code(repr(self)), Planned, lambda: self._measured(folder))

    def _measured(self, folder: Path | None) -> Planned:
        known = known_peer(folder, self.problem.name) if self.effort.peers_s else None
        return planned(self.problem, self.effort, every_source(), known)


def known_peer(folder: Path | None, name: str) -> Peer | None:
    """The best peer's figure that `bench.planners` with this code left beside our folder."""
    record = kept_in(folder.parent / "planners" / f"{name}.json") if folder else None
    if record is None or any(peer.name not in record.peers for peer in PEERS):
        return None
    return max((record.peers[peer.name].samples_per_s or 0.0, peer.name) for peer in PEERS)


def run(unit: Match | Plans, folder: Path | None) -> Record:
    """For a pool of processes."""
    warm_up()
    return unit.measured(folder)


@cache
def warm_up() -> None:
    """What a process loads for its first plan is no part of planning."""
    find_plan(random_request(0), evaluations=20, peers=())
    Policy.load()


def _file(folder: Path | None, name: str) -> Path | None:
    return folder / f"{name}.json" if folder else None


@cache
def code(settings: str) -> str:
    """Digest of all that figures depend on: planner, weights, problems, and how they are measured."""
    root = Path(__file__).parents[1]
    return sha256(b"".join(file.read_bytes() for file in _sources(root)) + settings.encode()).hexdigest()[:16]


def _sources(root: Path) -> Sequence[Path]:
    names = ("cells", "contestants", "curves", "problems", "records", "search", "units")
    files = [root / "bench" / f"learned_{name}.py" for name in names]
    files += [root / "bench" / name for name in ("grid.py", "planning_time.py")]
    files += sorted((root / "bench" / "data" / "learned").glob("*.npz"))
    for folder in ("planner", "arachne_runtime/plan"):
        kinds = (".py", ".toml", ".json", ".npz")
        files += sorted(f for f in (root / folder).rglob("*") if f.suffix in kinds)
    return files
