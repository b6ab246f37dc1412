"""Contests in tables: parts of the best plan known, by evaluations and by time; what each part is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite

from bench.learned_contestants import VARIANTS
from bench.learned_records import LEARNED, Contest
from bench.learned_verdicts import BySeed, by_seed, evaluations_needed
from bench.report import Result, at_least

Rows = dict[str, list[BySeed]]
"""By contestant, one figure for each column."""


def shares(contests: Sequence[Contest], marks: Sequence[int]) -> Rows:
    """By contestant: the median part of the best plan known that it has after so many evaluations."""
    each = [{curve.contestant: None for curve in contest.curves} for contest in contests]
    return {
        name: [by_seed(contests, partial(_part_after, name, mark)) for mark in marks]
        for name in _in_all(each)
    }


def shares_in_time(contests: Sequence[Contest], budgets_s: Sequence[float]) -> Rows:
    """By contestant: the same within budgets of CPU time."""
    each = [{timed.contestant: None for timed in contest.timed} for contest in contests]
    return {
        name: [by_seed(contests, partial(_part_within, name, budget_s)) for budget_s in budgets_s]
        for name in _in_all(each)
    }


def _part_after(contestant: str, evaluations: int, contest: Contest, seed: int) -> float:
    return contest.curve(contestant, seed).at(evaluations) / (contest.best or 1)


def _part_within(contestant: str, budget_s: float, contest: Contest, seed: int) -> float:
    return contest.within(contestant, budget_s, seed) / (contest.best or 1)


def _in_all(each: Sequence[dict[str, None]]) -> list[str]:
    """Names that every contest has, in the first one's order."""
    return [name for name in (each[0] if each else ()) if all(name in names for names in each)]


def with_variants(contests: Sequence[Contest]) -> list[Contest]:
    """Those in which the policy met what is left of it without one of its parts."""
    return [c for c in contests if any(timed.contestant in VARIANTS for timed in c.timed)]


@dataclass(frozen=True, slots=True)
class Ablation:
    """The policy with all its parts, and without one of them each."""

    heads: list[str]
    rows: Rows

    @classmethod
    def of(cls, contests: Sequence[Contest], marks: Sequence[int], budgets_s: Sequence[float]) -> "Ablation":
        """From contests with variants."""
        after, within = shares(contests, marks), shares_in_time(contests, budgets_s)
        blank = BySeed(())
        rows: Rows = {}
        for name in [name for name in within if name in (LEARNED, *VARIANTS)]:
            needed = blank
            if name in after:
                needed = by_seed(contests, partial(evaluations_needed, contestant=name))
            rows[name] = [*after.get(name, [blank] * len(marks)), needed, *within[name]]
        heads = [f"{n} evaluations" for n in marks]
        return cls([*heads, "to random's end", *(f"{1e3 * s:g} ms" for s in budgets_s)], rows)

    def result(self) -> Result:
        """How many variants were measured, with all figures for the file."""
        table = {name: [(c.figure, c.detail) for c in cells] for name, cells in self.rows.items()}
        measured = sum(name in self.rows for name in VARIANTS)
        return at_least(
            "learned-ablation", measured, "variants measured", len(VARIANTS), heads=self.heads, table=table
        )


def table(title: str, heads: Sequence[str], rows: Rows) -> Iterator[str]:
    """Medians with their range over the seeds, in columns."""
    width = max((len(name) for name in rows), default=0)
    yield f"{title}\n  {'':{width}}" + "".join(f"  {head:>22}" for head in heads)
    for name, cells in rows.items():
        yield f"  {name:{width}}" + "".join(f"  {_cell(cell):>22}" for cell in cells)


def _cell(found: BySeed) -> str:
    if not found.values or not isfinite(found.figure):
        return "not reached" if found.figure == inf else "-"
    low, high = min(found.values), max(found.values)
    return f"{found.figure:.4g} [{low:.4g}, {high:.4g}]"
