"""The noise scale: unbiased by Monte Carlo in every mix and form, and what cannot be measured is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachne_runtime.batch.noise import (
    Group,
    NoiseAverage,
    NoiseReading,
    NoiseSums,
    SegmentNorms,
    measure_noise,
    total,
)
from arachne_runtime.errors import UsageError

TRIALS, DIM = 3000, 20
TRUE_G = np.linspace(-1, 1, DIM)
SIGNAL = float(TRUE_G @ TRUE_G)
SPREAD = np.linspace(0.5, 3, DIM)
"""Standard deviation of a sample's gradient in each parameter."""
TRACE = float(SPREAD @ SPREAD)


def segment(h_JD, weights, units=None) -> SegmentNorms:
    units = [None] * len(weights) if units is None else units
    groups = [
        Group(weight=c, squared_norm=float(h @ h), variance_units=nu)
        for h, c, nu in zip(h_JD, weights, units, strict=True)
    ]
    h = np.sum(h_JD, axis=0)
    return SegmentNorms(groups=groups, squared_norm=float(h @ h))


def assert_mean(values, expected: float) -> None:
    """Within four standard errors."""
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    assert abs(np.mean(values) - expected) < 4 * error


def draw_sums(rng, counts, dim=DIM, deviation=SPREAD):
    """Summed gradients of groups of ``counts`` Gaussian samples, of shape (groups, dim)."""
    return np.stack([n * TRUE_G[:dim] + math.sqrt(n) * deviation * rng.normal(size=dim) for n in counts])


@pytest.mark.parametrize("counts", [(3, 13), (2, 4, 10, 48), (1, 1, 1), (5, 5, 0, 20)])
def test_samples_of_unequal_groups(counts):
    rng, found = np.random.default_rng(0), []
    for _ in range(TRIALS):
        found.append(measure_noise([segment(draw_sums(rng, counts), counts)], samples=sum(counts)))
    assert_mean([one.trace for one in found], TRACE)
    assert_mean([one.signal for one in found], SIGNAL)
    assert_mean([one.noise for one in found], TRACE / sum(counts))


def test_tokens_of_a_sample_that_move_together():
    """The weight is tokens, the noise of a sample's summed gradient grows with the square of its tokens."""
    tokens = ((3, 5), (10, 2, 2), (1,))
    rng, found = np.random.default_rng(1), []
    for _ in range(TRIALS):
        sums = [sum(x * (TRUE_G + SPREAD * rng.normal(size=DIM)) for x in one) for one in tokens]
        units = [float(sum(x * x for x in one)) for one in tokens]
        found.append(measure_noise([segment(sums, [sum(one) for one in tokens], units)], samples=6))
    noise = TRACE * sum(x * x for one in tokens for x in one) / 23**2
    assert_mean([one.noise for one in found], noise)
    assert_mean([one.signal for one in found], SIGNAL)
    assert_mean([one.trace for one in found], 6 * noise)


def test_segments_with_groups_of_their_own():
    """The first half of the parameters is seen by replica, the second by pipeline."""
    rng, found, half = np.random.default_rng(2), [], DIM // 2
    for _ in range(TRIALS):
        fine = draw_sums(rng, (4, 2, 6, 12))
        coarse = np.stack([fine[0] + fine[1], fine[2] + fine[3]])
        segments = [segment(fine[:, :half], (4, 2, 6, 12)), segment(coarse[:, half:], (6, 18))]
        found.append(measure_noise(segments, samples=24))
    assert_mean([one.trace for one in found], TRACE)
    assert_mean([one.signal for one in found], SIGNAL)


def test_heavy_tails_do_no_harm_to_the_mean():
    rng, found, counts = np.random.default_rng(3), [], (3, 9)
    for _ in range(TRIALS):
        noise = rng.standard_t(5, size=(12, DIM)) / math.sqrt(5 / 3)  # variance 1
        h = TRUE_G + SPREAD * noise
        found.append(measure_noise([segment(np.stack([h[:3].sum(0), h[3:].sum(0)]), counts)], samples=12))
    assert_mean([one.trace for one in found], TRACE)
    assert_mean([one.signal for one in found], SIGNAL)


def test_a_batch_drawn_without_replacement():
    rng, found = np.random.default_rng(4), []
    data = TRUE_G + SPREAD * rng.normal(size=(40, DIM))
    center = data.mean(0)
    spread = float(((data - center) ** 2).sum() / 39)
    for _ in range(TRIALS):
        h = data[rng.permutation(40)[:30]]
        one = segment(np.stack([h[:5].sum(0), h[5:].sum(0)]), (5, 25))
        found.append(measure_noise([one], samples=30, population=40))
    assert_mean([one.trace for one in found], spread)
    assert_mean([one.noise for one in found], spread * (1 / 30 - 1 / 40))
    assert_mean([one.signal for one in found], float(center @ center))


def test_micro_batches_as_groups_are_surer_than_ranks():
    rng, ranks, micro = np.random.default_rng(5), [], []
    for _ in range(500):
        h = draw_sums(rng, (2,) * 8)
        pairs = np.stack([h[:2].sum(0), h[2:].sum(0)])
        ranks.append(measure_noise([segment(pairs, (4, 12))], samples=16).trace)
        micro.append(measure_noise([segment(h, (2,) * 8)], samples=16).trace)
    assert np.std(micro) < 0.6 * np.std(ranks)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.floats(0.01, 100), st.integers(0, 99))
def test_equals_the_weighted_sum_of_each_groups_own_estimate(counts, scale, seed):
    """w_i = (B − b_i)/((n−1)B) on G_i and S_i collapses to the closed form; scaled gradients scale both."""
    h = scale * draw_sums(np.random.default_rng(seed), counts)
    b, size = np.array(counts, float), sum(counts)
    squares, square = (h**2).sum(1) / b**2, float((h.sum(0) ** 2).sum()) / size**2
    w = (size - b) / ((len(b) - 1) * size)
    signal = float(w @ ((size * square - b * squares) / (size - b)))
    trace = float(w @ ((squares - square) / (1 / b - 1 / size)))
    found = measure_noise([segment(h, counts)], samples=size)
    assert found.signal == pytest.approx(signal, rel=1e-9, abs=1e-9 * square)
    assert found.trace == pytest.approx(trace, rel=1e-9, abs=1e-9 * square)


def test_parameter_groups_add_up():
    h = draw_sums(np.random.default_rng(6), (3, 5))
    parts = [measure_noise([segment(h[:, part], (3, 5))], samples=8) for part in (slice(7), slice(7, None))]
    whole = measure_noise([segment(h, (3, 5))], samples=8)
    added = total(parts)
    assert added.trace == pytest.approx(whole.trace)
    assert added.signal == pytest.approx(whole.signal)
    with pytest.raises(UsageError, match=r"\[8, 9\] samples"):
        total([parts[0], replace(parts[1], samples=9)])


def test_the_average_smooths_both_parts():
    average, rng = NoiseAverage(memory_steps=400, least_steps=5), np.random.default_rng(7)
    for step in range(1000):
        assert (average.noise_scale is None) == (step < 5)
        counts = (8, 8) if step % 2 else (40, 24)
        h = draw_sums(rng, counts)
        average.add(measure_noise([segment(h, counts)], samples=sum(counts)))
    assert average.noise_scale == pytest.approx(TRACE / SIGNAL, rel=0.15)
    assert average.trace == pytest.approx(TRACE, rel=0.1)


def test_the_average_follows_and_ignores_overflows():
    average = NoiseAverage(memory_steps=10, least_steps=1)
    for trace in (5.0, math.inf, math.nan, 5.0):
        average.add(NoiseReading(samples=4, noise=1.0, signal=1.0, trace=trace))
    assert average.noise_scale == pytest.approx(5.0)
    for _ in range(100):
        average.add(NoiseReading(samples=4, noise=1.0, signal=2.0, trace=20.0))
    assert average.noise_scale == pytest.approx(10.0, rel=1e-3)


def test_no_signal_is_no_number():
    reading = NoiseReading(samples=4, noise=2.0, signal=-1.0, trace=8.0)
    assert reading.noise_scale == math.inf
    average = NoiseAverage(least_steps=1)
    average.add(reading)
    assert average.noise_scale is None


@pytest.mark.parametrize(
    ("segments", "samples", "population", "words"),
    [
        ([((4, 0), (1.0, 0.0))], 4, None, "segment 0 has 1 groups with weight"),
        ([], 4, None, "0 segments of 4 samples"),
        ([((2, 2), (1.0, 1.0))], 4, 3, "4 samples out of 3"),
        ([((2, 2), (1.0, 1.0)), ((2, 3), (1.0, 1.0))], 4, None, "both cut the same batch"),
        ([((5, 5, -1), (1.0, 1.0, 1.0))], 4, None, "positive numbers"),
        ([((5, 5), (1.0, math.nan))], 4, None, "positive numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused(segments, samples, population, words):
    made = [
        SegmentNorms(
            groups=[Group(weight=c, squared_norm=q) for c, q in zip(*one, strict=True)], squared_norm=1.0
        )
        for one in segments
    ]
    with pytest.raises(UsageError, match=words):
        measure_noise(made, samples=samples, population=population)


def test_an_average_needs_a_memory():
    with pytest.raises(UsageError, match="memory_steps is 0"):
        NoiseAverage(memory_steps=0)


@pytest.mark.parametrize("split", [((3, 13),), ((3, 13), (2, 0, 6)), ((1, 1), (5, 5, 20), (7,))])
def test_sums_over_ranks_tell_what_all_groups_together_tell(split):
    """Each rank's gradients are weighed by their part of the batch already, as they are in its buckets."""
    rng, counts = np.random.default_rng(3), [n for ranks in split for n in ranks]
    whole, h_JD, parts = sum(counts), draw_sums(rng, counts), []
    wanted = measure_noise([segment(h_JD, counts)], samples=whole)
    rows = iter(h_JD / whole)
    for rank in split:
        groups = [(n, h) for n, h in zip(rank, rows, strict=False) if n]
        parts.append(
            NoiseSums(
                num_groups=len(groups),
                samples=sum(rank),
                weight=sum(n / whole for n, _ in groups),
                variance=sum(n / whole**2 for n, _ in groups),
                ratio=sum(1 / whole for _ in groups),
                apart=(sum(float(h @ h) * whole / n for n, h in groups),),
            )
        )
    h = h_JD.sum(axis=0) / whole
    (found,) = NoiseSums.of(parts).readings([float(h @ h)])
    assert found.samples == whole
    assert (found.noise, found.signal, found.trace) == pytest.approx(
        (wanted.noise, wanted.signal, wanted.trace), rel=1e-9
    )


def test_one_group_has_no_noise_and_an_overflow_is_told():
    one = NoiseSums(num_groups=1, samples=4, weight=1.0, variance=0.25, ratio=0.25, apart=(3.0,))
    assert one.readings([3.0]) == ()
    (found,) = NoiseSums.of([one, one]).readings([math.nan])
    assert math.isnan(found.noise)
    average = NoiseAverage()
    average.add(found)
    assert average.state.num_steps == 0
