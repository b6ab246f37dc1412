"""Unequal data parallelism on real ranks: step times on labs beside other splits, overhead, drift.

On each lab (``unequal_labs``) the ranks learn shares, then time in turns: even shares by torch's own
DistributedDataParallel, equal compute (LB-BSP), the two-line model (Cannikin) and ours. The best split that a
direct search then finds is timed beside ours in alternating pairs. Linux and root.

The arithmetic (solver, regret in simulation, noise scale) is ``bench.unequal_dp_numbers``.

``--quick`` takes one lab, of four devices.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from arachne_runtime.errors import ArachneError

from .report import Options, Result, at_least, at_most, interval, run_bench
from .unequal_drift import drift_results
from .unequal_equal import equal_results
from .unequal_labs import CASES, QUICK, Case, train_on
from .unequal_records import Found

OFF_THE_BEST = 1.02
"""Time of a step with our split over that with the best one found."""
GAIN = 1.6
"""Of even DDP's step on four devices of 0.8, 0.4, 0.2 and 0.2 cores, over ours."""
CONFIDENCE = 0.90


def lab_results(quick: bool) -> Iterator[Result]:
    """Every lab."""
    with tempfile.TemporaryDirectory(prefix="arachne-unequal-") as scratch:
        for case in (QUICK,) if quick else CASES:
            try:
                found = train_on(case, Path(scratch))
            except ArachneError as error:  # the others are worth having
                print(f"{case.name}: {error}", flush=True)
                yield at_most(f"{case.name}-off-the-best", math.nan, "of its time", bound=OFF_THE_BEST)
                continue
            print(table(case, found), flush=True)
            yield from _judged(case, found)
            if found.drift is not None:
                yield from drift_results(found.drift)


PARTS: tuple[Callable[[bool], Iterator[Result]], ...] = (equal_results, lab_results)
"""Called with whether to be quick."""


def measure(options: Options) -> Iterator[Result]:
    """All parts."""
    for part in PARTS:
        yield from part(options.quick)


def _judged(case: Case, found: Found) -> Iterator[Result]:
    """Ours beside the best split, and beside even DDP where that is claimed."""
    yield off_the_best(case.name, found)
    if found.evens_s:
        yield gain(case.name, found)


def off_the_best(name: str, found: Found) -> Result:
    """The median of the pairs' ratios; above the bound, the lower end of its interval, which may reach it."""
    ratios = [ours / best for ours, best in found.pairs]
    at = interval(ratios, CONFIDENCE)
    figure = at.median if at.median <= OFF_THE_BEST else at.low
    print(f"{name}: ours over the best split {at} in {len(ratios)} pairs", flush=True)
    return at_most(
        f"{name}-off-the-best", figure, "of its time", bound=OFF_THE_BEST, median=at.median, low=at.low,
        high=at.high, splits=found.splits, turns=found.turns, pairs=found.pairs,
        learning_steps=found.learning_steps, rebalances=found.rebalances, predicted_s=found.predicted_s,
    )  # fmt: skip


def gain(name: str, found: Found) -> Result:
    """Even DDP's step over ours beside it: the median of the ratios."""
    ratios = [even_s / ours_s for even_s, (ours_s, _) in zip(found.evens_s, found.pairs, strict=True)]
    at = interval(ratios, CONFIDENCE)
    print(f"{name}: even DDP's step over ours {at} in {len(ratios)} turns", flush=True)
    return at_least(
        f"{name}-gain", at.median, "x even DDP", bound=GAIN, low=at.low, high=at.high, ratios=ratios
    )


def table(case: Case, found: Found) -> str:
    """Step times by contestant."""
    kind = "a slow link" if case.network is not None else "computing binds"
    head = (
        f"{case.name}: {len(case.shares)} devices, {case.ratio:.3g}:1, {kind}; "
        f"{found.rebalances} rebalances in {found.learning_steps} steps"
    )
    ours_s = median(found.turns["ours"])
    even = (case.task.global_batch // len(case.shares),) * len(case.shares)
    rows = []
    for name, seconds in found.turns.items():
        at_s, split = median(seconds), found.splits.get(name, even)
        rows.append(f"  {name:9} {at_s * 1e3:7.0f} ms {at_s / ours_s:7.3f}   {' '.join(map(str, split))}")
    best = f"  best {'':24}{' '.join(map(str, found.splits['best']))}"
    predicted = f"  predicted for ours: {found.predicted_s * 1e3:.0f} ms"
    return "\n".join([head, *rows, best, predicted])


if __name__ == "__main__":
    raise SystemExit(run_bench("unequal_dp", measure))
