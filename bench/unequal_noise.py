"""The noise scale by Monte Carlo: its bias, and its deviation beside published and best weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.batch.noise import Group, NoiseSums, SegmentNorms, measure_noise
from arachne_runtime.batch.tails import Tails, by_tails, tail_sums

from .report import Result, at_least, at_most
from .unequal_peers import published_weights

Floats: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[np.random.Generator, int], Floats]
"""(generator, samples) → gradients of that many samples (samples, parameters)."""

MIXES = ((3, 13), (1, 2, 4, 8), (2, 4, 10, 48), (4, 4, 4, 4), (1, 1, 2, 2, 4, 8, 16, 30))
"""Samples of each replica."""
LARGE_MIXES = ((24, 104), (8, 16, 32, 64), (16, 32, 80, 384), (32, 32, 32, 32), (8, 8, 16, 16, 32, 64, 128))
LARGEST_MIXES = ((96, 416), (32, 64, 128, 256), (64, 64, 64, 64), (32, 32, 64, 64, 128))
"""Sums of so many samples are nearly Gaussian: from 8 on for Student-t with 5 degrees of freedom, from 32 on
for gradients of the network."""
DRAWN_AT_ONCE = 50_000
"""Samples whose gradients are held at once: 32 MB of the network's."""
SAMPLING = 0.01
"""Error of the ratio of two deviations estimated from the same trials; equal ones differ by less."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where gradients come from, with their truth."""

    name: str
    draw: Draw
    signal: float
    trace: float
    tails: float
    """(E|ξ|⁴ − (tr Σ)² − 2 tr Σ²) / tr Σ² of a sample's noise ξ; 0 for Gaussian noise."""


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Estimates of |G|² and the trace: each replica's own are (trials, replicas), the others (trials,)."""

    ours: tuple[Floats, Floats]
    own: tuple[Floats, Floats]
    adaptdl: tuple[Floats, Floats]


Found: TypeAlias = dict[str, tuple[Source, tuple[int, ...], Trials]]


def noise_results(quick: bool) -> Iterator[Result]:
    """Bias, deviation against three others in every mix, what tails cost, what micro-batches are worth."""
    gaussian, student, net = sources()
    num_trials = 5000 if quick else 20_000
    sums = (gaussian, MIXES), (student, LARGE_MIXES), (net, LARGEST_MIXES)
    few = (student, MIXES), (net, MIXES + LARGE_MIXES)
    sure, tails = (
        _find([(source, mix) for source, mixes in cases for mix in mixes], num_trials)
        for cases in (sums, few)
    )
    biases = {name: _bias(source, trials) for name, (source, _, trials) in (sure | tails).items()}
    yield at_most("noise-bias", max(biases.values()), "standard errors, at worst", bound=4.0, **biases)
    yield from _deviations(sure, "", plain=1 + SAMPLING, oracle=1.03)
    yield from _deviations(tails, "-few-samples-with-tails", plain=1 + SAMPLING, oracle=1.03)
    source, _, trials = sure["gaussian [2, 4, 10, 48]"]
    high = float(trials.adaptdl[1].mean()) / source.trace
    yield at_least("noise-adaptdl-trace", high, "times the truth, b=[2, 4, 10, 48]", bound=2.0)
    informed = {
        case: _informed(source, mix, trials) for case, (source, mix, trials) in (sure | tails).items()
    }
    worst = max(informed.values())
    yield at_most(
        "noise-trace-informed", worst, "of the oracle's deviation, at worst", bound=1.06, **informed
    )
    micro = _micro(gaussian, num_trials // 5)
    yield at_most("noise-micro-batches", micro, "of the deviation by ranks", bound=0.7)


def _find(cases: Sequence[tuple[Source, tuple[int, ...]]], num_trials: int) -> Found:
    return {f"{s.name} {list(mix)}": (s, mix, run_trials(s, mix, num_trials)) for s, mix in cases}


def _deviations(found: Found, suffix: str, *, plain: float, oracle: float) -> Iterator[Result]:
    """Our deviation over that of other weights, at worst, for both parts."""
    for part, name in enumerate(("signal", "trace")):
        for other, bound in (("published", 1 + SAMPLING), ("plain", plain), ("oracle", oracle)):
            ratios = {
                case: _ratio(trials, part, _weights(other, mix, trials.own[part])[part])
                for case, (_, mix, trials) in found.items()
            }
            yield at_most(f"noise-{name}-{other}{suffix}", max(ratios.values()), "of its deviation, at worst",
                          bound=bound, **ratios)  # fmt: skip


def _weights(other: str, mix: Sequence[int], own: Floats) -> tuple[Sequence[float], Sequence[float]]:
    """Of the replicas' own estimates of the signal and of the trace."""
    if other == "published":
        return published_weights(mix)
    same = [1 / len(mix)] * len(mix) if other == "plain" else _oracle(own)
    return same, same


def _informed(source: Source, mix: Sequence[int], trials: Trials) -> float:
    """Were the tails known: deviation of the trace over that by weights fitted to the trials."""
    own = trials.own[1]
    return float((own @ tail_weights(mix, source.tails)).std() / (own @ np.array(_oracle(own))).std())


def tail_weights(mix: Sequence[int], tails: float) -> Floats:
    """Of the replicas' own estimates of the trace, with least variance; see docs/unequal-batches.md."""
    b = np.array(mix, float)
    part, size = b / b.sum(), b.sum()
    sure = 1 / (2 / b**2 + tails / b**3)
    apart = 1 - (part**2).sum()
    between = 2 * apart / size**2  # of the products of two replicas' noise
    s0, s1 = sure.sum(), (sure / b).sum()
    by_slope = (apart**2 / s0 + between) * s0 / (apart * s1)
    squares = sure * (by_slope / b + (apart - by_slope * s1) / s0) + part**2
    weights = squares * (1 / b - 1 / size)
    return weights / weights.sum()


def sources() -> tuple[Source, ...]:
    """Gaussian, heavy-tailed, and per-sample gradients of a small network with one hidden layer."""
    center, spread = np.linspace(-0.5, 0.5, 12), np.linspace(0.3, 2.0, 12)

    def gaussian(rng: np.random.Generator, n: int) -> Floats:
        return center + spread * rng.normal(size=(n, 12))

    def student(rng: np.random.Generator, n: int) -> Floats:
        return center + spread * rng.standard_t(5, size=(n, 12)) / np.sqrt(5 / 3)

    truth = {"signal": float(center @ center), "trace": float(spread @ spread)}
    return (
        Source(name="gaussian", draw=gaussian, **truth, tails=0.0),
        Source(name="student", draw=student, **truth, tails=6.0),
        network(),
    )


def network() -> Source:
    """Gradients of a regression with 16 hidden units on 2,000 samples, drawn with replacement."""
    rng = np.random.default_rng(5)
    x, w, v = rng.normal(size=(2000, 4)), 0.5 * rng.normal(size=(4, 16)), 0.5 * rng.normal(size=16)
    y = np.sin(x @ np.array([1.0, -2.0, 0.5, 1.5])) + 0.1 * rng.normal(size=2000)
    hidden = np.tanh(x @ w)
    error = hidden @ v - y
    inner = (error[:, None] * v * (1 - hidden**2))[:, None, :] * x[:, :, None]
    gradients = np.concatenate([inner.reshape(2000, -1), error[:, None] * hidden], axis=1)
    mean = gradients.mean(0)

    def draw(rng: np.random.Generator, n: int) -> Floats:
        return gradients[rng.integers(0, len(gradients), n)]

    squares, covariance = ((gradients - mean) ** 2).sum(1), np.cov(gradients.T, bias=True)
    trace, square = float(squares.mean()), float((covariance**2).sum())
    tails = (float((squares**2).mean()) - trace**2) / square - 2
    return Source(name="network", draw=draw, signal=float(mean @ mean), trace=trace, tails=tails)


def run_trials(source: Source, mix: Sequence[int], num_trials: int) -> Trials:
    """Draw batches, and estimate as the runtime does from step to step: tails are learnt on the way."""
    b, size = np.array(mix, float), sum(mix)
    squares, square, means = (
        np.concatenate(parts) for parts in zip(*_drawn(source, mix, num_trials), strict=True)
    )
    own = squares / b**2
    whole = square[:, None] / size**2
    return Trials(
        ours=_in_turn(squares, square, mix),
        own=((size * whole - b * own) / (size - b), (own - whole) / (1 / b - 1 / size)),
        adaptdl=_equal_batches(own, means, size),
    )


def _drawn(source: Source, mix: Sequence[int], num_trials: int) -> Iterator[tuple[Floats, Floats, Floats]]:
    """In parts: |h_j|² (trials, replicas), |h|² and |plain mean of the replicas' means|² (trials,)."""
    rng, edges = np.random.default_rng(11), np.concatenate([[0], np.cumsum(mix)[:-1]])
    b, at_once = np.array(mix, float), max(1, DRAWN_AT_ONCE // sum(mix))
    for start in range(0, num_trials, at_once):
        count = min(at_once, num_trials - start)
        samples = source.draw(rng, count * sum(mix)).reshape(count, sum(mix), -1)
        h = np.add.reduceat(samples, edges, axis=1)
        means = (h / b[:, None]).mean(1)
        yield (h**2).sum(2), (h.sum(1) ** 2).sum(1), (means**2).sum(1)


def _in_turn(squares: Floats, square: Floats, mix: Sequence[int]) -> tuple[Floats, Floats]:
    """Signal and trace by the runtime's weights, in each trial those chosen by the trials before it."""
    b, size = [float(one) for one in mix], float(sum(mix))
    apart = [squares[:, j] / one for j, one in enumerate(b)]
    tails = [tail_sums(one, one, [row]) for one, row in zip(b, apart, strict=True)]
    sums = NoiseSums(
        num_groups=len(mix), samples=size, weight=size, variance=size, ratio=float(len(mix)),
        apart=(sum(apart),), tails=tuple(map(sum, zip(*tails, strict=True))),
    )  # fmt: skip
    found = [readings[0] for readings in (sums.readings([square]), *by_tails(sums, [square]))]
    signals, traces = np.stack([one.signal for one in found], 1), np.stack([one.trace for one in found], 1)
    watch, chosen = Tails(), []
    for row in traces.tolist():
        chosen.append(watch.chosen)
        watch.observe(row)
    rows = np.arange(len(square))
    return signals[rows, chosen], traces[rows, chosen]


def _estimate(sums: Floats, mix: Sequence[int]) -> tuple[float, float]:
    h = sums.sum(0)
    groups = [Group(weight=n, squared_norm=float(one @ one)) for n, one in zip(mix, sums, strict=True)]
    reading = measure_noise([SegmentNorms(groups=groups, squared_norm=float(h @ h))], samples=sum(mix))
    return reading.signal, reading.trace


def _equal_batches(own: Floats, whole: Floats, size: int) -> tuple[Floats, Floats]:
    """AdaptDL's formula (Qiao et al., OSDI 2021), for replicas of as many samples: a plain average.

    Args:
        own: Squared norms of the replicas' mean gradients (trials, replicas).
        whole: Those of the plain mean of these gradients (trials,).
        size: Samples of the batch.

    """
    n, mean = own.shape[1], own.mean(1)
    return (n * whole - mean) / (n - 1), (mean - whole) / (n - 1) * size


def _bias(source: Source, trials: Trials) -> float:
    """Worst of both, in standard errors."""
    pairs = zip(trials.ours, (source.signal, source.trace), strict=True)
    return max(abs(float(x.mean()) - truth) / (float(x.std(ddof=1)) / len(x) ** 0.5) for x, truth in pairs)


def _ratio(trials: Trials, part: int, weights: Sequence[float]) -> float:
    return float(trials.ours[part].std() / (trials.own[part] @ np.array(weights)).std())


def _oracle(own: Floats) -> list[float]:
    """Unbiased weights of least variance in these very trials: no estimate can know them beforehand."""
    solved = np.linalg.lstsq(np.cov(own.T), np.ones(own.shape[1]), rcond=None)[0]
    weights: list[float] = (solved / solved.sum()).tolist()
    return weights


def _micro(source: Source, num_trials: int) -> float:
    """Deviation of the trace by 8 micro-batches of 2 samples over that by ranks of 4 and 12 samples."""
    rng, fine, coarse = np.random.default_rng(3), [], []
    for _ in range(num_trials):
        sums = source.draw(rng, 16).reshape(8, 2, -1).sum(1)
        fine.append(_estimate(sums, (2,) * 8)[1])
        coarse.append(_estimate(np.stack([sums[:2].sum(0), sums[2:].sum(0)]), (4, 12))[1])
    return float(np.std(fine) / np.std(coarse))
