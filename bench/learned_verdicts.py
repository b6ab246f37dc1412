"""What records of contests and of planned problems show, and where enumeration is enough."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from bench.learned_records import (
    ENUMERATION,
    LEARNED,
    MIDDLE_DEVICES,
    RANDOM,
    SHORT_S,
    TOGETHER,
    USUAL,
    Contest,
    Planned,
    ratio,
)
from bench.report import EQUAL, Result, at_least, at_most

ENOUGH = 1.001
"""Median gain of the policy below which enumeration counts as enough: a tenth of the price's own error."""

MOST_DEVICES = 4096
"""Up to so many devices planning may take 3 s."""


@dataclass(frozen=True, slots=True)
class BySeed:
    """One statistic for each seed."""

    values: tuple[float, ...]

    @property
    def figure(self) -> float:
        """Their median; NaN without any, which no bound lets pass."""
        return median(self.values) if self.values else float("nan")

    @property
    def detail(self) -> dict[str, Any]:
        """For the file of figures."""
        return {"by_seed": self.values, "range": (min(self.values), max(self.values)) if self.values else ()}


def by_seed(contests: Sequence[Contest], of: Callable[[Contest, int], float], middle: bool = True) -> BySeed:
    """The median, or the mean, of a figure over all problems, for each seed."""
    seeds = list(dict.fromkeys(seed for contest in contests for seed in contest.seeds))
    rows = [[of(contest, seed) for contest in contests] for seed in seeds]
    return BySeed(tuple(median(row) if middle else sum(row) / len(row) for row in rows))


def evaluations_needed(contest: Contest, seed: int, contestant: str = LEARNED) -> float:
    """Evaluations after which a contestant has what random proposals have at the end."""
    goal = contest.curve(RANDOM, seed)
    return contest.curve(contestant, seed).needed(goal.samples_per_s[-1])


def gain(
    contest: Contest, seed: int, budget_s: float = SHORT_S, ours: str = TOGETHER, theirs: str = ENUMERATION
) -> float:
    """The plan of the search with the policy over the enumeration's, in the same time."""
    return ratio(contest.within(ours, budget_s, seed), contest.within(theirs, budget_s, seed))


def contested(contests: Sequence[Contest], most_evaluations: int) -> Iterator[Result]:
    """The policy against random proposals and enumeration."""
    needed = by_seed(contests, evaluations_needed)
    problems = [evaluations_needed(c, s) for c in contests for s in c.seeds]
    yield at_most(
        "learned-evaluations-to-random",
        needed.figure,
        f"evaluations for what random proposals have after {most_evaluations}",
        max(1, most_evaluations // 10),
        **needed.detail,
        of_problems=quartiles(problems),
    )
    told = [contest for contest in contests if _anybody(contest)]
    never_below = by_seed(told, lambda c, s: float(gain(c, s) >= 1 - EQUAL), middle=False)
    alone = by_seed(told, lambda c, s: float(gain(c, s, ours=LEARNED) >= 1 - EQUAL), middle=False)
    usual = by_seed(told, lambda c, s: float(gain(c, s, theirs=USUAL) >= 1 - EQUAL), middle=False)
    yield at_least(
        "learned-at-least-enumeration",
        never_below.figure,
        f"of problems, in {1e3 * SHORT_S:g} ms",
        0.9,
        **never_below.detail,
        policy_alone=alone.detail,
        over_the_search_without_it=usual.detail,
        mean_over_the_search_without_it=mean_gains(told, USUAL).detail,
        mean=mean_gains(told, ENUMERATION).detail,
        problems=len(told),
        nobody_has_a_plan=len(contests) - len(told),
        by_group=by_group(told),
    )
    mixed = [contest for contest in told if contest.sort.is_mixed]
    gains = by_seed(mixed, gain)
    yield at_least(
        "learned-gain-where-mixed",
        gains.figure,
        f"times enumeration, in {1e3 * SHORT_S:g} ms",
        1.02,
        **gains.detail,
        problems=len(mixed),
        policy_alone=by_seed(mixed, lambda c, s: gain(c, s, ours=LEARNED)).detail,
        over_the_search_without_it=by_seed(mixed, lambda c, s: gain(c, s, theirs=USUAL)).detail,
        mean=mean_gains(mixed, ENUMERATION).detail,
        ceiling=median([_ceiling(c, s) for c in mixed for s in c.seeds] or [inf]),
        each={c.problem: [gain(c, s) for s in c.seeds] for c in mixed},
    )


def mean_gains(contests: Sequence[Contest], theirs: str) -> BySeed:
    """Of the search with the policy over others, where both have a plan."""
    both = [c for c in contests if all(c.within(n, SHORT_S, s) for n in (TOGETHER, theirs) for s in c.seeds)]
    return by_seed(both, lambda c, s: gain(c, s, theirs=theirs), middle=False) if both else BySeed(())


def _ceiling(contest: Contest, seed: int) -> float:
    """The best plan that anybody found, in any time, over the enumeration's: no policy can gain more."""
    return ratio(contest.best, contest.within(ENUMERATION, SHORT_S, seed))


def _anybody(contest: Contest, budget_s: float = SHORT_S) -> bool:
    """Whether the comparison says anything: policy, enumeration or both have a plan by then, of any seed."""
    names, seeds = (LEARNED, ENUMERATION, TOGETHER), contest.seeds
    return any(contest.within(name, budget_s, seed) for name in names for seed in seeds)


def by_group(contests: Sequence[Contest], budget_s: float = SHORT_S) -> dict[str, tuple[int, float]]:
    """By group of problems: how many, and the median gain over the enumeration."""
    contests = [contest for contest in contests if _anybody(contest, budget_s)]
    groups: dict[str, list[float]] = {}
    for contest in contests:
        groups.setdefault(contest.sort.words, []).extend(gain(contest, s, budget_s) for s in contest.seeds)
    numbers = {g: sum(c.sort.words == g for c in contests) for g in groups}
    return {group: (numbers[group], median(found)) for group, found in sorted(groups.items())}


def enough(contests: Sequence[Contest], budget_s: float = SHORT_S) -> Iterator[str]:
    """Where enumeration is enough, in words with figures; one line says so where it is nowhere."""
    found = {g: row for g, row in by_group(contests, budget_s).items() if row[1] < ENOUGH}
    yield f"in {1e3 * budget_s:g} ms the enumeration is enough" + (
        " for:" if found else " in no group of problems"
    )
    for group, (number, figure) in found.items():
        yield f"  {group}: with the policy {figure:.4f} x enumeration (median of {number} problems)"


def planned(records: Sequence[Planned]) -> Iterator[Result]:
    """Seconds, quality and peers on the grid."""
    for most, bound in ((MIDDLE_DEVICES, 0.5), (MOST_DEVICES, 3.0)):
        least = 0 if most == MIDDLE_DEVICES else MIDDLE_DEVICES
        here = [r for r in records if least < r.sort.num_devices <= most]
        seconds = {r.problem: median(r.cpu_s) for r in here}
        if seconds:
            worst = max(seconds.values())
            yield at_most(f"learned-planning-{most}-devices", worst, "s CPU", bound, each=seconds)
    replans = {r.problem: max(r.replan_cpu_s) for r in records if r.replan_cpu_s}
    middle = {r.problem for r in records if r.sort.num_devices <= MIDDLE_DEVICES}
    worst = max((s for name, s in replans.items() if name in middle), default=inf)
    parts = [share for r in records for share in r.replan_share]
    yield at_most(
        "learned-replan", worst, "s CPU", 0.2, each=replans, share_of_planning_anew=quartiles(parts)
    )
    yield from _against("learned", records, lambda record: record.qualities, lambda record: record.over_peer)
    if later := [r for r in records if r.default_samples_per_s]:
        yield from _against(
            "learned-default",
            later,
            lambda record: record.default_qualities,
            lambda record: record.default_over_peer,
        )


def _against(
    name: str,
    records: Sequence[Planned],
    qualities: Callable[[Planned], tuple[float, ...]],
    over_peer: Callable[[Planned], float],
) -> Iterator[Result]:
    """The long refinement and the best peer."""
    yield from _qualities(f"{name}-quality", records, qualities, 0.995, 0.98)
    over = {r.problem: over_peer(r) for r in records if r.peer}
    yield at_least(
        f"{name}-over-best-peer",
        min(over.values(), default=float("nan")),
        "times, in the worst cell",
        1 - EQUAL,
        each=over,
    )


def unseen(records: Sequence[Planned]) -> Iterator[Result]:
    """Device types and a model family that training never saw."""
    yield from _qualities("learned-quality-unseen", records, lambda record: record.qualities, 0.98, None)
    if later := [r for r in records if r.default_samples_per_s]:
        yield from _qualities(
            "learned-default-quality-unseen", later, lambda record: record.default_qualities, 0.98, None
        )


def _qualities(
    name: str,
    records: Sequence[Planned],
    qualities: Callable[[Planned], tuple[float, ...]],
    wanted_median: float,
    wanted_worst: float | None,
) -> Iterator[Result]:
    each = {r.problem: qualities(r) for r in records if qualities(r)}
    number = min((len(found) for found in each.values()), default=0)
    found = BySeed(tuple(median(q[i] for q in each.values()) for i in range(number)))
    unit = "of the long refinement, in the"
    yield at_least(f"{name}-median", found.figure, f"{unit} median", wanted_median, **found.detail, each=each)
    if wanted_worst is not None:
        worst = min((min(q) for q in each.values()), default=float("nan"))
        yield at_least(f"{name}-worst", worst, f"{unit} worst", wanted_worst)


def quartiles(values: Sequence[float]) -> list[float]:
    """Least, lower quartile, median, upper quartile, largest."""
    ordered = sorted(values)
    return [ordered[round(part * (len(ordered) - 1))] for part in (0, 0.25, 0.5, 0.75, 1)] if ordered else []
