"""Whether the policy earns its place: against random proposals, enumeration, a long refinement, the peers.

``python -m bench.learned --out DIR`` keeps every problem in ``DIR/learned/``, so that a run that was
interrupted goes on where it stopped; other planning code or weights are measured again. Budgets are CPU time
of one core. What the best plan is compared with and why: docs/policy.md.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from bench.learned_cells import Effort
from bench.learned_contestants import BRIEF_MARK
from bench.learned_pictures import draw
from bench.learned_problems import Composition, grid
from bench.learned_records import SHORT_S, Contest, Planned, Record
from bench.learned_tables import Ablation, shares, shares_in_time, table, with_variants
from bench.learned_units import Match, Plans, run
from bench.learned_verdicts import contested, enough, planned, unseen
from bench.report import Options, Result, run_bench

NUM_PROCESSES = 2
SHORT_MARKS = (10, 30, 100)
MARKS = (*SHORT_MARKS, 300, 1000)
"""Evaluations at which plans are told."""

FINE_MARKS = (1, 3, 5, 10, 15, 20, 30, 50, 70, 100, 200, 300, 500, 1000)
"""Evaluations at which the policy's are looked at: what it needs is known to the next of these."""

BUDGETS_S = (0.01, 0.1, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    seeds: tuple[int, ...]
    marks: tuple[int, ...]
    fine_marks: tuple[int, ...]
    budgets_s: tuple[float, ...]
    compositions: int
    ablated: int
    """Compositions on which the variants take part."""
    unseen: int
    most_devices: int
    whole_grid: bool
    refined_s: float
    refined_every: int
    """Every which cell of the grid is refined for long."""

    def units(self) -> list[Match | Plans]:
        """Longest first, so that two processes end together."""
        cells = [
            Plans(problem=problem, effort=self._effort(k % self.refined_every == 0))
            for k, problem in enumerate(grid(whole=self.whole_grid))
        ]
        others = [Plans(problem=self._composition(k, True), effort=self._unseen) for k in range(self.unseen)]
        matches = [self._match(k) for k in range(self.compositions)]
        return [*sorted(cells, key=lambda unit: -unit.effort.refined_s), *others, *matches]

    def _composition(self, number: int, unseen: bool) -> Composition:
        return Composition(number=number, unseen=unseen, most_devices=self.most_devices)

    def _match(self, k: int) -> Match:
        return Match(
            problem=self._composition(k, False),
            seeds=self.seeds,
            marks=self.marks,
            fine_marks=self.fine_marks,
            budgets_s=self.budgets_s,
            ablated=k < self.ablated,
        )

    def _effort(self, refined: bool) -> Effort:
        return Effort(seeds=self.seeds, refined_s=self.refined_s if refined else 0.0, peers_s=PEERS_S)

    @property
    def _unseen(self) -> Effort:
        return Effort(seeds=self.seeds, refined_s=self.refined_s, peers_s=0.0, replans=False)


PEERS_S = 2.0
"""CPU time of each peer, where `bench.planners` has kept none of this code's."""

FULL = Scale(
    seeds=(0, 1, 2),
    marks=MARKS,
    fine_marks=FINE_MARKS,
    budgets_s=BUDGETS_S,
    compositions=18,
    ablated=8,
    unseen=6,
    most_devices=1024,
    whole_grid=True,
    refined_s=60.0,
    refined_every=3,
)
QUICK = Scale(
    seeds=(0,),
    marks=SHORT_MARKS,
    fine_marks=tuple(n for n in FINE_MARKS if n <= SHORT_MARKS[-1]),
    budgets_s=BUDGETS_S[1:],
    compositions=4,
    ablated=1,
    unseen=1,
    most_devices=128,
    whole_grid=False,
    refined_s=5.0,
    refined_every=1,
)


def measure(options: Options) -> Iterator[Result]:
    scale = QUICK if options.quick else FULL
    folder = options.out / "learned" if options.out and not options.quick else None
    if folder is not None:
        folder.mkdir(exist_ok=True)
    units = scale.units()
    records = dict(zip((unit.name for unit in units), _measured(units, folder), strict=True))
    contests = [r for r in records.values() if isinstance(r, Contest)]
    plans = [(unit.problem, records[unit.name]) for unit in units if isinstance(unit, Plans)]
    new = [r for p, r in plans if isinstance(p, Composition) and isinstance(r, Planned)]
    cells = [r for p, r in plans if not isinstance(p, Composition) and isinstance(r, Planned)]
    marks = [n for n in scale.marks if n <= BRIEF_MARK]
    parts = Ablation.of(with_variants(contests), marks, (SHORT_S,))
    for line in (*told(contests, scale), *table("without one part each", parts.heads, parts.rows)):
        print(line, flush=True)
    if options.out is not None:
        draw(contests, scale.marks, scale.budgets_s, options.out / "learned.png")
    yield from contested(contests, scale.marks[-1])
    yield from planned(cells)
    yield from unseen(new)
    yield parts.result()


def _measured(units: Sequence[Match | Plans], folder: Path | None) -> Iterator[Record]:
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        for unit, record in zip(units, pool.map(partial(run, folder=folder), units), strict=True):
            print(f"{unit.name}: {said(record)}", flush=True)
            yield record


def said(record: Record) -> str:
    """A record in a line."""
    if isinstance(record, Planned):
        quality = ", ".join(f"{q:.4f}" for q in record.qualities) or "not refined"
        default = ", ".join(f"{v:.4g}" for v in record.default_samples_per_s) or "not asked"
        seconds = ", ".join(f"{s:.2f}" for s in record.cpu_s)
        peer = f"{record.over_peer:.3f} x {record.peer}" if record.peer else "peers not asked"
        return f"{record.samples_per_s[0]:.4g}/s in {seconds} s; {quality}; {peer}; by default {default}/s"
    assert isinstance(record, Contest)
    return f"{record.sort.words}; best {record.best:.4g}/s"


def told(contests: Sequence[Contest], scale: Scale) -> Iterator[str]:
    """Tables of the contests, and where enumeration is enough."""
    rest = "part of the best plan known, median of problems [range over seeds]"
    heads = [f"{n} evaluations" for n in scale.marks]
    yield from table(f"{rest}, by evaluations", heads, shares(contests, scale.marks))
    heads = [f"{1e3 * s:g} ms" for s in scale.budgets_s]
    yield from table(f"{rest}, by CPU time", heads, shares_in_time(contests, scale.budgets_s))
    for budget_s in scale.budgets_s:
        yield from enough(contests, budget_s)


if __name__ == "__main__":
    raise SystemExit(run_bench("learned", measure))
