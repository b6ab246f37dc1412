"""Shares: exact integers, against brute force, within bounds, in time."""

import itertools
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import arachne_runtime.plan.shares as shares_module
from arachne_runtime.errors import NoFeasiblePlanError, UsageError
from arachne_runtime.plan.shares import Line, largest_remainder, water_fill, water_fill_table

TimeOf = Callable[[int, int], float]


def line_times(lines: list[list[Line]]) -> TimeOf:
    return lambda i, b: max(line.intercept + line.slope * b for line in lines[i])


def slowest(time_of: TimeOf, shares: tuple[int, ...]) -> float:
    return max((time_of(i, b) for i, b in enumerate(shares) if b), default=0.0)


def brute_force(total: int, time_of: TimeOf, minima: list[int], caps: list[int]) -> float:
    ranges = [range(low, high + 1) for low, high in zip(minima, caps, strict=True)]
    return min(slowest(time_of, b) for b in itertools.product(*ranges) if sum(b) == total)


def random_case(rng: random.Random) -> tuple[int, list[list[Line]], list[int], list[int]]:
    count = rng.randint(1, 4)
    lines = [
        [
            Line(rng.choice((0.0, rng.uniform(-1, 5))), rng.choice((0.0, 1.0, rng.uniform(0.01, 4))))
            for _ in range(k)
        ]
        for k in (rng.randint(1, 4) for _ in range(count))
    ]
    minima = [rng.randint(0, 4) for _ in range(count)]
    caps = [low + rng.randint(0, 7) for low in minima]
    return rng.randint(sum(minima), sum(caps)), lines, minima, caps


def assert_within(shares: tuple[int, ...], total: int, minima: list[int], caps: list[int]) -> None:
    assert sum(shares) == total
    assert all(low <= b <= high for low, b, high in zip(minima, shares, caps, strict=True))


@pytest.mark.parametrize("seed", range(600))
def test_water_filling_equals_brute_force(seed):
    total, lines, minima, caps = random_case(random.Random(seed))
    shares = water_fill(total, lines, minima, caps)
    assert_within(shares, total, minima, caps)
    assert slowest(line_times(lines), shares) == brute_force(total, line_times(lines), minima, caps)


@pytest.mark.parametrize("seed", range(200))
def test_tables_equal_brute_force(seed):
    rng = random.Random(seed)
    total, _, minima, caps = random_case(rng)
    tables = [
        list(itertools.accumulate(rng.choice((0.0, rng.uniform(0, 3))) for _ in range(12))) for _ in minima
    ]
    shares = water_fill_table(total, lambda i, b: tables[i][b], minima, caps)
    assert_within(shares, total, minima, caps)
    assert slowest(lambda i, b: tables[i][b], shares) == brute_force(
        total, lambda i, b: tables[i][b], minima, caps
    )


@pytest.mark.parametrize("error", [0.0, 0.5, 0.99, 1.01, 2.0, 100.0])
def test_a_wrong_water_level_costs_moves_never_exactness(error, monkeypatch):
    right = shares_module._water_level
    monkeypatch.setattr(shares_module, "_water_level", lambda *case: right(*case) * error)
    for seed in range(100):
        total, lines, minima, caps = random_case(random.Random(seed))
        shares = water_fill(total, lines, minima, caps)
        assert_within(shares, total, minima, caps)
        assert slowest(line_times(lines), shares) == brute_force(total, line_times(lines), minima, caps)


@given(st.integers(0, 2**32 - 1))
def test_lines_and_tables_agree(seed):
    total, lines, minima, caps = random_case(random.Random(seed))
    by_lines = water_fill(total, lines, minima, caps)
    by_table = water_fill_table(total, line_times(lines), minima, caps)
    assert slowest(line_times(lines), by_lines) == slowest(line_times(lines), by_table)


def test_equal_replicas_share_evenly_and_ties_go_to_the_lower_index():
    assert water_fill(10, [[Line(0.0, 1.0)]] * 4, [1] * 4, [10] * 4) == (3, 3, 2, 2)
    assert water_fill_table(10, lambda i, b: b, [1] * 4, [10] * 4) == (3, 3, 2, 2)


def test_twice_as_fast_takes_twice_as_much():
    assert water_fill(9, [[Line(0.0, 1.0)], [Line(0.0, 0.5)]], [1, 1], [9, 9]) == (3, 6)


def test_a_cap_pushes_the_rest_to_the_others():
    assert water_fill(9, [[Line(0.0, 1.0)], [Line(0.0, 0.5)]], [1, 1], [9, 4]) == (5, 4)


def test_a_binding_minimum_is_slower_than_the_water_level():
    lines = [[Line(10.0, 1.0)], [Line(0.0, 1.0)]]
    assert water_fill(5, lines, [2, 0], [5, 5]) == (2, 3)


def test_the_second_line_bends_the_share():
    """Communication-bound until 4 samples, then compute-bound (uneven-data-parallel: two branches of t_i)."""
    bent = [Line(4.0, 0.0), Line(0.0, 1.0)]
    assert water_fill(12, [bent, bent, [Line(0.0, 2.0)]], [1] * 3, [12] * 3) == (5, 5, 2)


def test_flat_lines_are_filled_at_once():
    """A replica whose time does not grow must not be filled sample by sample."""
    started = time.process_time()
    shares = water_fill(
        10**12, [[Line(1.0, 0.0)], [Line(1.0, 1e-30)], [Line(0.0, 1.0)]], [0] * 3, [10**12] * 3
    )
    assert sum(shares) == 10**12
    assert time.process_time() - started < 0.1


def test_nothing_to_share():
    assert water_fill(0, [], [], []) == ()
    assert water_fill(0, [[Line(1.0, 1.0)]], [0], [5]) == (0,)
    assert water_fill_table(3, lambda i, b: b, [1, 2], [1, 2]) == (1, 2)


@pytest.mark.parametrize(
    ("total", "minima", "caps", "words"),
    [
        (3, [2, 2], [5, 5], "3 samples are too few: the replicas take at least 4"),
        (11, [2, 2], [5, 5], "11 samples are too many: the replicas take at most 10"),
        (5, [2, 6], [5, 5], "replica 1 must take 6 samples or more and can take at most 5"),
        (5, [-1, 2], [5, 5], "replica 0 must take -1"),
    ],
)
def test_impossible_totals_say_what_binds(total, minima, caps, words):
    for fill in (
        lambda: water_fill(total, [[Line(0.0, 1.0)]] * 2, minima, caps),
        lambda: water_fill_table(total, lambda i, b: b, minima, caps),
    ):
        with pytest.raises(NoFeasiblePlanError, match=words):
            fill()


@pytest.mark.parametrize(
    "lines", [[[Line(0.0, -1.0)]], [[Line(float("nan"), 1.0)]], [[]], [[Line(0.0, 1.0)]] * 2]
)
def test_lines_that_make_no_sense_are_refused(lines):
    with pytest.raises(UsageError):
        water_fill(3, lines, [1], [5])


def test_4096_replicas_within_50_ms():
    rng = random.Random(0)
    lines = [
        [Line(rng.uniform(0, 1), rng.uniform(0.5, 4)), Line(rng.uniform(1, 9), 0.4)] for _ in range(4096)
    ]
    minima, caps = [1] * 4096, [rng.randint(4, 40) for _ in range(4096)]
    seconds = []
    for _ in range(7):
        started = time.process_time()
        shares = water_fill(40_000, lines, minima, caps)
        seconds.append(time.process_time() - started)
    assert_within(shares, 40_000, minima, caps)
    assert min(seconds) <= 0.05


@given(st.integers(0, 10**6), st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_largest_remainder_is_fair(total, weights):
    parts = largest_remainder(total, weights)
    whole = sum(weights)
    assert sum(parts) == total
    assert all(
        total * w // whole <= part <= -(-total * w // whole) for part, w in zip(parts, weights, strict=True)
    )


def test_largest_remainder_ties_go_to_the_lower_index():
    assert largest_remainder(5, [1, 1]) == (3, 2)
    assert largest_remainder(1, [2, 2, 2]) == (1, 0, 0)
    assert largest_remainder(2, [1, 2, 1]) == (1, 1, 0)
    assert largest_remainder(0, [3, 1]) == (0, 0)


def test_the_full_total_gives_the_weights_themselves():
    assert largest_remainder(12, [5, 4, 3]) == (5, 4, 3)
