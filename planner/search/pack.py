"""Which completed pipelines to run side by side, and how many of each: an integer program inside a search.

For a time T each column can finish so many micro-batches; the program asks for the most samples that the
devices can finish in T, and T falls until they are fewer than the global batch (docs/dependencies.md: HiGHS).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from arachne_runtime.units import Seconds

from .batch import Templates
from .columns import Columns, Completion
from .supply import use_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_COLUMNS = 160
"""Columns of one program; with more, HiGHS takes tens of milliseconds for each T."""

SAME_USE = 2
"""Columns kept for the same use of devices."""

CLOSE = 0.003
"""The search over T ends at this relative width, below the error of the closed form."""

ROUNDS = 9
"""Programs of one search over T at most: one at its upper end, then half of T halved eight times."""

PRICING_ROUNDS, PRICING_STEP = 60, 0.2
"""Of the updates that price places; coarse prices only leave out columns that a program might have used."""

MOST_NODES = 400
"""Of the branch and bound of each program: a limit that does not depend on the machine's speed."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Columns with the number of pipelines of each, and micro-batches of each pipeline."""

    seconds: Seconds
    columns: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """(column, (micro-batches, micro-batch) of each pipeline)"""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Columns as the program sees them: single pipelines."""

    use: Ints
    """``[K, limits]``"""
    places: Ints
    fixed_s: Floats
    """Seconds of an iteration before the first micro-batch counts."""
    each_s: Floats
    size: Ints

    def counts(self, time_s: Seconds) -> Ints:
        """Micro-batches that each column finishes in a time."""
        most = np.floor((time_s - self.fixed_s) / self.each_s * (1 + 1e-12))
        return np.asarray(np.maximum(0, most), np.int64)


def pack(completion: Completion, columns: Columns, most_s: Seconds) -> tuple[Columns, list[Packing]]:
    """Single pipelines and mixtures of them that end before ``most_s`` by the closed form, best first."""
    single = _single(completion, columns)
    if single is None or not len(single):
        return columns, []
    problem = _problem(completion, single)
    chosen = _worthwhile(problem, most_s)
    single, problem = single.take(chosen), _problem(completion, single.take(chosen))
    if not len(single):
        return single, []
    found: dict[tuple[int, ...], Packing] = {}
    low, high = 0.5 * most_s, most_s
    for _ in range(ROUNDS):
        if high - low <= CLOSE * high:
            break
        middle = 0.5 * (low + high) if found else high
        numbers = _most_samples(problem, middle)
        samples = int((numbers * problem.counts(middle) * problem.size).sum()) if numbers is not None else 0
        if numbers is None or samples < completion.request.global_batch:
            if not found:
                break
            low = middle
            continue
        packing = _dealt(completion, problem, single, numbers, middle)
        high = middle
        if packing is not None:
            found.setdefault(tuple(int(n) for n in numbers), packing)
            high = min(high, packing.seconds)
        elif not found:
            break
    return single, sorted(found.values(), key=lambda p: p.seconds)


def _single(completion: Completion, columns: Columns) -> Columns | None:
    """Each pipeline once, its reductions priced as one of as many as the devices could hold."""
    t = columns.templates
    devices = (t.width * t.tp).sum(axis=1)
    copies = np.maximum(2, completion.supply.num_devices // np.maximum(1, devices))
    copies = np.minimum(copies, np.maximum(1, completion.request.global_batch // t.micro_batch))
    return completion.columns(Templates(t.pool, t.tp, t.width, t.tile, copies, t.micro_batch).distinct())


def _problem(completion: Completion, columns: Columns) -> _Problem:
    t, limits = columns.templates, completion.supply.limits
    counts = completion.counts(t)
    return _Problem(
        use=use_of(limits, t.pool, t.tp, t.width),
        places=np.array([limit.places for limit in limits], np.int64),
        fixed_s=columns.seconds - counts * columns.slowest_s,
        each_s=columns.slowest_s,
        size=t.micro_batch,
    )


def _worthwhile(problem: _Problem, time_s: Seconds) -> Ints:
    """Columns by samples in that time for the devices they take, few for each use of devices."""
    rate = problem.counts(time_s) * problem.size
    worth = _worth_of_places(problem, rate)
    value = rate / np.maximum(problem.use @ worth, 1e-300)
    kept: list[int] = []
    seen: dict[bytes, int] = {}
    for k in np.argsort(-value, kind="stable"):
        key = problem.use[k].tobytes()
        if rate[k] > 0 and seen.get(key, 0) < SAME_USE:
            seen[key] = seen.get(key, 0) + 1
            kept.append(int(k))
        if len(kept) == MOST_COLUMNS:
            break
    return np.array(kept, np.int64)


def _worth_of_places(problem: _Problem, rate: Ints) -> Floats:
    """A price of each place such that no column earns more than it: duals of the linear program, roughly.

    In each round prices rise where the best column for its use is too cheap. Only their proportions count.
    """
    share = problem.use / np.maximum(problem.places, 1)
    worth = np.full(len(problem.places), float(rate.max(initial=1)))
    for _ in range(PRICING_ROUNDS):
        cost = share @ worth
        ratio = np.where(rate > 0, rate / np.maximum(cost, 1e-300), 0.0)
        best = int(ratio.argmax())
        weight = share[best] / max(share[best].max(), 1e-300)
        worth = worth * (1 + PRICING_STEP * weight * (ratio[best] - 0.5))
    found: Floats = worth / np.maximum(problem.places, 1)
    return found


def _most_samples(problem: _Problem, time_s: Seconds) -> Ints | None:
    """How many pipelines of each column finish most samples in a time within the devices."""
    gain = problem.counts(time_s) * problem.size
    live = np.nonzero(gain > 0)[0]
    if not len(live):
        return None
    use = problem.use[live]
    with np.errstate(divide="ignore"):
        most = np.where(use > 0, problem.places // np.maximum(use, 1), problem.places.max()).min(axis=1)
    outcome = milp(
        -gain[live].astype(float),
        constraints=LinearConstraint(use.T, -np.inf, problem.places),
        bounds=Bounds(0, most),
        integrality=np.ones(len(live)),
        options={"node_limit": MOST_NODES, "mip_rel_gap": 1e-3},
    )
    if outcome.x is None:
        return None
    numbers = np.zeros(len(gain), np.int64)
    numbers[live] = np.round(outcome.x).astype(np.int64)
    return numbers


def _dealt(
    completion: Completion, problem: _Problem, columns: Columns, numbers: Ints, time_s: Seconds
) -> Packing | None:
    """Exact counts: what is too much is taken from the pipelines that end last."""
    counts = problem.counts(time_s)
    pipelines = [(int(k), int(counts[k])) for k in np.nonzero(numbers)[0] for _ in range(int(numbers[k]))]
    excess = sum(int(problem.size[k]) * n for k, n in pipelines) - completion.request.global_batch
    takes = _trimmed(problem, pipelines, excess, columns.templates.width.max(axis=1))
    if takes is None:
        return None
    by_column: dict[int, list[tuple[int, int]]] = {}
    for (k, _), take in zip(pipelines, takes, strict=True):
        if take[0]:
            by_column.setdefault(k, []).append(take)
    ends = [problem.fixed_s[k] + n * problem.each_s[k] for k, rows in by_column.items() for n, _ in rows]
    return Packing(float(max(ends)), tuple((k, tuple(rows)) for k, rows in by_column.items()))


def _trimmed(
    problem: _Problem, pipelines: Sequence[tuple[int, int]], excess: int, least: Ints
) -> list[tuple[int, int]] | None:
    counts = [n for _, n in pipelines]
    heap = [(-(problem.fixed_s[k] + n * problem.each_s[k]), p) for p, (k, n) in enumerate(pipelines)]
    heapq.heapify(heap)
    while heap and excess:
        _, p = heapq.heappop(heap)
        k = pipelines[p][0]
        if problem.size[k] <= excess and counts[p]:
            counts[p] -= 1
            excess -= int(problem.size[k])
            heapq.heappush(heap, (-(problem.fixed_s[k] + counts[p] * problem.each_s[k]), p))
    takes = [(n, int(problem.size[k])) for n, (k, _) in zip(counts, pipelines, strict=True)]
    return takes if not excess else _with_odd_size(takes, excess, [int(least[k]) for k, _ in pipelines])


def _with_odd_size(
    takes: list[tuple[int, int]], excess: int, least: Sequence[int]
) -> list[tuple[int, int]] | None:
    """One pipeline gets a smaller micro-batch, so that the sum is exact: one that keeps most of its size."""
    best: tuple[float, int, tuple[int, int]] | None = None
    for p, (count, size) in enumerate(takes):
        samples = count * size - excess
        sizes = [b for b in range(least[p], size + 1) if samples > 0 and samples % b == 0]
        if sizes and (best is None or sizes[-1] / size > best[0]):
            best = sizes[-1] / size, p, (samples // sizes[-1], sizes[-1])
    if best is None:
        return None
    return [best[2] if p == best[1] else take for p, take in enumerate(takes)]
