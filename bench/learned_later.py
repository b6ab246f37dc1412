"""What the policy adds to a search of five seconds: it is asked once moves from other plans bring no more.

``python -m bench.learned_later --out DIR``: problems that no training saw, each planned with the policy and
without. Budgets are CPU time of one core, so that other programs take nothing from either.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import fmean, median

from bench.learned_problems import Composition
from bench.learned_search import throughput_within
from bench.report import Options, Result, at_least, run_bench
from planner.sources import policy_alone

BUDGET_S, QUICK_BUDGET_S = 5.0, 2.0
VALIDATION, HELD_OUT = 30, 10
"""Problems of each kind; the second have device types and models that training never has."""
NUM_PROCESSES = 2
NOTICED = 0.01
"""From this difference on a problem counts as better or worse with the policy."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One problem, planned both ways: samples a second."""

    name: str
    num_devices: int
    without: float
    learned: float

    @property
    def ratio(self) -> float:
        """With the policy over without."""
        return self.learned / self.without


def paired(problem: Composition, budget_s: float) -> Pair | None:
    """None where nothing is found in time without the policy, which then is not asked either."""
    policy, _ = policy_alone()
    without, learned = (
        throughput_within(problem.request(), budget_s, later=later, clock=time.process_time)
        for later in ((), policy)
    )
    if not without:
        return None
    return Pair(problem.name, len(problem.request().cluster.devices), without, learned)


def measure(options: Options) -> Iterator[Result]:
    """Every problem, then what all of them say."""
    budget_s = QUICK_BUDGET_S if options.quick else BUDGET_S
    counts = ((4, False), (2, True)) if options.quick else ((VALIDATION, False), (HELD_OUT, True))
    problems = [
        Composition(number=k, unseen=unseen, most_devices=1024) for n, unseen in counts for k in range(n)
    ]
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        pairs = list[Pair]()
        for pair in pool.map(partial(paired, budget_s=budget_s), problems):
            if pair is not None:
                print(f"{pair.name}, {pair.num_devices} devices: {pair.ratio:.4f}", flush=True)
                pairs.append(pair)
    ratios = [pair.ratio for pair in pairs]
    better, worse = (sum(sign * (r - 1) > NOTICED for r in ratios) for sign in (1, -1))
    print(f"{better} of {len(ratios)} better by more than {NOTICED:.0%}, {worse} worse")
    yield at_least("later-mean-gain", fmean(ratios), "times the search without", bound=1.0, all=ratios)
    yield at_least("later-median-gain", median(ratios), "times the search without", bound=1.0)
    yield at_least("later-worst", min(ratios), "times the search without", bound=0.98)
    yield at_least("later-best", max(ratios), "times the search without", bound=1.0)


if __name__ == "__main__":
    raise SystemExit(run_bench("learned_later", measure))
