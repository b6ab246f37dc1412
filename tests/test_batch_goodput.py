"""Goodput: the curve of best times against bisection, its peak against a search, rules and progress."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachne_runtime.batch import (
    BatchProblem,
    Corner,
    Progress,
    ReplicaTime,
    ScalingRule,
    TimeModel,
    best_batch,
    best_times,
    gain,
    lr_factor,
)
from arachne_runtime.batch.goodput import peak
from arachne_runtime.errors import NoFeasiblePlanError, UsageError
from arachne_runtime.plan.shares import Line

Bounds = tuple[list[list[Line]], list[int], list[int]]


def random_bounds(rng: random.Random) -> Bounds:
    count = rng.randint(1, 5)
    lines = [
        [
            Line(rng.choice((0.0, rng.uniform(0, 5))), rng.choice((0.0, rng.uniform(0.01, 4))))
            for _ in range(k)
        ]
        for k in (rng.randint(1, 4) for _ in range(count))
    ]
    minima = [rng.randint(0, 4) for _ in range(count)]
    return lines, minima, [low + rng.randint(0, 9) for low in minima]


def samples_within(seconds: float, bounds: Bounds) -> float:
    """Samples that all replicas do in ``seconds``, minima included."""
    done = 0.0
    for lines, low, high in zip(*bounds, strict=True):
        room = float(high)
        for line in lines:
            if line.slope > 0:
                room = min(room, (seconds - line.intercept) / line.slope)
            elif line.intercept > seconds:
                room = low
        done += max(low, room)
    return done


def by_bisection(batch: float, bounds: Bounds) -> float:
    lines, minima, _ = bounds
    floor = max(
        (max(x.at(low) for x in mine) for mine, low in zip(lines, minima, strict=True) if low), default=0.0
    )
    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if samples_within(middle, bounds) >= batch else (middle, high)
    return max(high, floor)


def along(corners: tuple[Corner, ...], batch: float) -> float:
    for a, b in pairwise(corners):
        if a.samples <= batch <= b.samples and a.samples < b.samples:
            return a.seconds + (b.seconds - a.seconds) * (batch - a.samples) / (b.samples - a.samples)
    return corners[-1].seconds


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 0.999))
def test_the_curve_equals_bisection(seed, where):
    bounds = random_bounds(random.Random(seed))
    corners = best_times(*bounds)
    low, high = sum(bounds[1]), sum(bounds[2])
    assert corners[0].samples == low
    assert corners[-1].samples == pytest.approx(high)
    if high > low:
        batch = low + where * (high - low)
        assert along(corners, batch) == pytest.approx(by_bisection(batch, bounds), rel=1e-6, abs=1e-6)


def test_a_binding_minimum_makes_the_curve_start_flat():
    corners = best_times([[Line(10.0, 1.0)], [Line(0.0, 1.0)]], [2, 0], [5, 20])
    assert corners[:2] == (Corner(2.0, 12.0), Corner(14.0, 12.0))


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1000.0))
def test_the_peak_is_where_no_batch_is_better(seed, noise_scale):
    bounds = random_bounds(random.Random(seed))
    corners = best_times(*bounds)
    low, high = max(1e-3, corners[0].samples), corners[-1].samples

    def worth(batch: float) -> float:
        return batch / max(along(corners, batch), 1e-12) / (noise_scale + batch)

    if high > low and along(corners, low) > 0:
        found = peak(corners, noise_scale, low, high)
        best = found.samples / max(found.seconds, 1e-12) / (noise_scale + found.samples)
        assert all(worth(low + i * (high - low) / 200) <= best * (1 + 1e-9) for i in range(201))


def model_of(*ms_a_sample: float, comm_s: float = 0.01) -> TimeModel:
    replicas = (
        ReplicaTime(outside=Line(2e-3, ms * 3e-4), backward=Line(1e-3, ms * 7e-4)) for ms in ms_a_sample
    )
    return TimeModel(replicas=tuple(replicas), ready=(0.5, 1.0), reduce_s=(comm_s / 2,) * 2)


def problem_of(**changes) -> BatchProblem:
    given_values = {
        "model": model_of(1, 2, 4),
        "base_batch": 32,
        "noise_scale": 400.0,
        "minima": (1, 1, 1),
        "caps": (200, 200, 40),
        "least": 16,
        "most": 400,
    }
    return BatchProblem(**(given_values | changes))


@pytest.mark.parametrize("noise_scale", [1.0, 50.0, 400.0, 5000.0, math.inf])
@pytest.mark.parametrize("comm_s", [0.0, 0.01, 0.3])
def test_the_best_batch_is_within_half_a_percent_of_all_batches(noise_scale, comm_s):
    problem = problem_of(noise_scale=noise_scale, model=model_of(1, 2, 4, comm_s=comm_s))
    every = [problem.choice(batch, 1).goodput for batch in range(problem.least, problem.most + 1)]
    found = best_batch(problem)
    assert found == problem.choice(found.batch, 1)
    assert found.goodput >= max(every) * 0.995


def test_noisier_gradients_want_larger_batches():
    batches = [best_batch(problem_of(noise_scale=phi)).batch for phi in (1.0, 50.0, 400.0, 5000.0)]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1]


def test_micro_batches_let_a_batch_grow_past_the_caps():
    small = {"caps": (20, 20, 20), "noise_scale": 5000.0, "model": model_of(1, 1, 1, comm_s=0.1)}
    assert best_batch(problem_of(**small)).batch == 60
    found = best_batch(problem_of(**small, max_accumulation=4))
    assert found.batch > 60
    assert 1 < found.accumulation <= 4
    assert max(found.shares) <= 20 * found.accumulation


def test_a_micro_batch_without_reduction_costs_its_compute_only():
    model = model_of(1, 2, comm_s=0.2)
    alone = max(one.outside.at(8) + one.backward.at(8) for one in model.replicas)
    assert model.step_s((16, 16), 2) == pytest.approx(model.step_s((8, 8)) + alone)


def test_what_does_not_fit_is_refused():
    with pytest.raises(NoFeasiblePlanError, match="no batch of 300 to 400 samples fits"):
        best_batch(problem_of(least=300, caps=(20, 20, 20)))
    with pytest.raises(UsageError, match="least 0"):
        problem_of(least=0)
    with pytest.raises(UsageError, match="noise_scale is nan"):
        problem_of(noise_scale=math.nan)


@given(st.integers(1, 10**5), st.integers(1, 10**4), st.floats(0, 1e7))
def test_the_gain_lies_between_one_and_the_ratio(batch, base, noise_scale):
    worth = gain(batch, base_batch=base, noise_scale=noise_scale)
    low, high = sorted((1.0, batch / base))
    assert low * (1 - 1e-12) <= worth <= high * (1 + 1e-12)


def test_rules_agree_at_the_base_batch_and_differ_beyond():
    for rule in ScalingRule:
        assert lr_factor(rule, 32, base_batch=32, noise_scale=70.0) == 1.0
    factors = [lr_factor(rule, 128, base_batch=32, noise_scale=64.0) for rule in ScalingRule]
    assert factors == pytest.approx([2.0, math.sqrt(2), 2.0, 4.0, 1.0])
    assert gain(128, base_batch=32, noise_scale=math.inf) == 4.0


def test_progress_counts_steps_of_the_base_batch():
    progress = Progress(32)
    progress.add(32, noise_scale=math.inf)
    progress.add(128, noise_scale=64.0)
    assert progress.steps == pytest.approx(3.0)
    with pytest.raises(UsageError, match="batch 0"):
        progress.add(0, noise_scale=1.0)
