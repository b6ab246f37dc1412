"""Arithmetic of unequal batches: exact shares, what learning them loses, how sure the noise scale is.

The part of ``bench.unequal_dp`` that needs no training: solver, regret in simulation, gradient noise scale.
"""

import itertools
import random
import time
from collections.abc import Iterator
from statistics import fmean

from arachne_runtime.batch import Balancer, Phase, ReplicaTime, TimeModel
from arachne_runtime.plan.shares import Line, water_fill

from .report import Options, Result, at_least, at_most, run_bench
from .unequal_noise import noise_results
from .unequal_peers import cannikin, even, lb_bsp
from .unequal_simulation import Cluster, model_of, play, slowed


def measure(options: Options) -> Iterator[Result]:
    yield from solver_results(options.quick)
    yield from share_results(options.quick)
    yield from regret_results(options.quick)
    yield from equal_results(options.quick)
    yield from drift_results(options.quick)
    yield from noise_results(options.quick)


def solver_results(quick: bool) -> Iterator[Result]:
    """Against brute force, and with 4,096 replicas of 4 lines."""
    rng, cases = random.Random(0), 400 if quick else 2000
    wrong = sum(not _equals_brute_force(rng) for _ in range(cases))
    yield at_most("solver-brute-force", wrong, "cases that differ", bound=0, cases=cases)
    lines = [
        [Line(rng.uniform(0, 1) + 2 * k, rng.uniform(0.5, 4) / (k + 1)) for k in range(2)]
        for _ in range(4096)
    ]
    caps, seconds = [rng.randint(4, 40) for _ in range(4096)], []
    for _ in range(9):
        started = time.process_time()
        water_fill(40_000, lines, [1] * 4096, caps)
        seconds.append(time.process_time() - started)
    yield at_most("solver-4096-replicas", 1e3 * min(seconds), "ms of CPU time", bound=50)


def _equals_brute_force(rng: random.Random) -> bool:
    count = rng.randint(1, 4)
    lines = [
        [Line(rng.uniform(0, 5), rng.choice((0.0, rng.uniform(0.01, 4)))) for _ in range(rng.randint(1, 4))]
        for _ in range(count)
    ]
    minima = [rng.randint(0, 3) for _ in range(count)]
    caps = [low + rng.randint(0, 6) for low in minima]
    total = rng.randint(sum(minima), sum(caps))

    def slowest(shares: tuple[int, ...]) -> float:
        return max(
            (max(x.at(b) for x in mine) for mine, b in zip(lines, shares, strict=True) if b), default=0.0
        )

    ranges = [range(low, high + 1) for low, high in zip(minima, caps, strict=True)]
    best = min(slowest(b) for b in itertools.product(*ranges) if sum(b) == total)
    shares = water_fill(total, lines, minima, caps)
    inside = all(low <= b <= high for low, b, high in zip(minima, shares, caps, strict=True))
    return inside and sum(shares) == total and slowest(shares) == best


def share_results(quick: bool) -> Iterator[Result]:
    """Time saved by the exact optimum on random mixes, against peers that know the same model."""
    rng, saved = random.Random(1), {peer.__name__: [] for peer in (even, lb_bsp, cannikin)}
    for _ in range(100 if quick else 1000):
        model, total = random_mix(rng, num_replicas=16), 512
        bounds = [1] * 16, [total] * 16
        ours = model.step_s(model.best(total, *bounds))
        for peer in (even, lb_bsp, cannikin):
            saved[peer.__name__].append(1 - ours / model.step_s(peer(model, total, *bounds)))
    for name, figures in saved.items():
        yield at_least(f"saved-{name}", min(figures), "of a step, least", bound=0.0,
                       mean=fmean(figures), most=max(figures))  # fmt: skip


def random_mix(rng: random.Random, num_replicas: int) -> TimeModel:
    """Speeds of 1:1 to 1:8, five buckets of unlike sizes, compute-bound or communication-bound or between."""
    speeds = [rng.choice((1.0, 1.5, 2.0, 4.0, 8.0)) for _ in range(num_replicas)]
    fixed = [rng.uniform(1e-3, 10e-3) for _ in range(num_replicas)]
    replicas = (
        ReplicaTime(outside=Line(f, 0.3e-3 * s * rng.uniform(0.7, 1.4)), backward=Line(f / 2, 0.7e-3 * s))
        for f, s in zip(fixed, speeds, strict=True)
    )
    ready = (*sorted(rng.uniform(0.1, 1.0) for _ in range(4)), 1.0)
    sizes = [rng.uniform(0.2, 1.0) for _ in range(5)]
    comm_s = rng.choice((0.0, 0.01, 0.03, 0.1))
    return TimeModel(
        replicas=tuple(replicas), ready=ready, reduce_s=tuple(comm_s * x / sum(sizes) for x in sizes)
    )


CASES = {
    "2": ((1, 4), 0.0, 32),
    "4": ((1, 2, 4, 4), 0.0, 64),
    "4-communication": ((1, 2, 4, 4), 0.06, 64),
    "8-equal": ((1,) * 8, 0.0, 256),
    "8": ((1, 1, 1, 2, 2, 4, 4, 8), 0.0, 256),
    "16": ((1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8), 0.0, 512),
    "16-communication": ((1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8), 0.1, 512),
}
"""Milliseconds a sample of each replica, seconds of all reductions, batch."""


def regret_results(quick: bool) -> Iterator[Result]:
    """Time lost against the best shares of the true model with 5 % noise, and how steady shares are."""
    for name, (speeds, comm_s, batch) in CASES.items():
        runs = [_run(speeds, comm_s, batch, seed) for seed in range(5 if quick else 30)]
        late = fmean(fmean(lost.regret for lost in run[40:]) for run in runs)
        moves = fmean(sum(a.shares != b.shares for a, b in itertools.pairwise(run[40:])) for run in runs)
        yield at_most(
            f"regret-{name}", 100 * late, "% after 40 steps", bound=1.0,
            first_step=100 * fmean(run[0].regret for run in runs),
            steps_7_to_40=100 * fmean(fmean(lost.regret for lost in run[6:40]) for run in runs),
            worst_run=100 * max(fmean(lost.regret for lost in run[40:]) for run in runs),
            moves_a_100_steps=moves,
        )  # fmt: skip


EQUAL_NOISE = 0.1
"""Deviation of a reading on equal replicas: a busy machine's."""


def equal_results(quick: bool) -> Iterator[Result]:
    """How often equal replicas have uneven shares once they have been learnt."""
    for count, batch in ((2, 128), (4, 64), (8, 256)):
        even, uneven = (batch // count,) * count, []
        for seed in range(5 if quick else 30):
            cluster = Cluster(model_of((1,) * count), noise=EQUAL_NOISE, rng=random.Random(seed))
            late = list(play(Balancer(num_replicas=count), cluster, 300, batch))[24:]
            uneven.append(100 * fmean(lost.shares != even for lost in late))
        yield at_most(f"equal-uneven-{count}", fmean(uneven), "% of steps", bound=1.0, most=max(uneven))


def _run(speeds: tuple[float, ...], comm_s: float, batch: int, seed: int) -> list:
    cluster = Cluster(model_of(speeds, comm_s=comm_s), rng=random.Random(seed))
    return list(play(Balancer(num_replicas=len(speeds)), cluster, 140, batch))


def drift_results(quick: bool) -> Iterator[Result]:
    """One replica takes three times as long, then recovers: steps until a step loses less than 5 %."""
    for what, factor in (("slower", 3.0), ("recovery", 1 / 3.0)):
        waits, after = zip(*(_follow(factor, seed) for seed in range(5 if quick else 30)), strict=True)
        yield at_most(f"drift-{what}", max(waits), "steps until a step loses less than 5 %", bound=10,
                      mean=fmean(waits), regret_in_percent_after=100 * fmean(after))  # fmt: skip


def _follow(factor: float, seed: int) -> tuple[int, float]:
    speeds, comm_s, batch = CASES["4"]
    model = model_of(speeds, comm_s=comm_s)
    cluster = Cluster(slowed(model, 0, max(1 / factor, 1.0)), rng=random.Random(seed))
    balancer = Balancer(num_replicas=len(speeds))
    list(play(balancer, cluster, 60, batch))
    assert balancer.phase is Phase.BALANCED
    cluster.model = slowed(model, 0, max(factor, 1.0))
    lost = [one.regret for one in play(balancer, cluster, 60, batch)]
    first = next(step for step, regret in enumerate(lost) if regret < 0.05)
    return first, fmean(lost[20:])


if __name__ == "__main__":
    raise SystemExit(run_bench("unequal_dp_numbers", measure))
