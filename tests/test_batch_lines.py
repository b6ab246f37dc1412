"""Lines from readings: exact without noise, robust, never unlearnt, always finite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.batch.lines import LineFits


def feed(fits: LineFits, samples: float, seconds: float) -> bool:
    return bool(fits.observe(np.array([samples]), np.array([seconds]), np.array([True]))[0])


def test_one_share_gives_a_line_through_the_origin():
    fits = LineFits(1, memory=64)
    for _ in range(5):
        feed(fits, 10, 2.0)
    (line,) = fits.lines()
    assert (line.intercept, line.slope) == (0.0, pytest.approx(0.2))


def test_two_shares_give_both_figures():
    fits = LineFits(1, memory=64)
    for _ in range(30):
        feed(fits, 10, 3.0)
        feed(fits, 20, 5.0)
    (line,) = fits.lines()
    assert line.intercept == pytest.approx(1.0, rel=0.02)
    assert line.slope == pytest.approx(0.2, rel=0.01)


def test_a_constant_share_does_not_unlearn_the_slope():
    fits = LineFits(1, memory=16)
    for samples in [10, 20] * 20:
        feed(fits, samples, 1 + 0.2 * samples)
    doubt = fits.variance_of_slope()[0]
    for _ in range(3000):
        feed(fits, 20, 5.0)
    (line,) = fits.lines()
    assert line.at(10) == pytest.approx(3.0, rel=0.02)
    assert fits.variance_of_slope()[0] <= doubt


def test_no_more_is_known_than_memory_readings_tell():
    fits, rng = LineFits(1, memory=16), np.random.default_rng(1)
    for _ in range(400):
        feed(fits, 10, 2 + 0.1 * rng.normal())
    known = fits.variance_at(np.array([10.0]))[0] / (2 * fits.noise[0]) ** 2
    assert known == pytest.approx(1 / 16, rel=0.15)


def test_a_reading_far_off_is_no_drift_but_three_are():
    fits = LineFits(1, memory=64)
    rng = np.random.default_rng(0)
    for _ in range(60):
        feed(fits, 10, 2 + 0.02 * rng.normal())
    assert not feed(fits, 10, 60.0)
    assert fits.at(np.array([10.0]))[0] == pytest.approx(2.0, rel=0.01)
    drifts = [feed(fits, 10, 6.0) for _ in range(3)]
    assert any(drifts)
    assert fits.at(np.array([10.0]))[0] == pytest.approx(6.0, rel=0.01)


def test_an_unmeasured_line_says_so():
    fits = LineFits(2, memory=64)
    fits.observe(np.array([4.0, 0.0]), np.array([1.0, 0.0]), np.array([True, True]))
    assert fits.measured.tolist() == [True, False]
    assert np.isinf(fits.variance_of_slope()[1])


def test_lines_neither_fall_nor_start_below_zero():
    fits = LineFits(2, memory=64)
    for _ in range(20):
        for samples, falling, steep in ((10, 5.0, 1.0), (20, 4.0, 4.0)):
            fits.observe(np.array([samples] * 2, float), np.array([falling, steep]), np.array([True] * 2))
    flat, through = fits.lines()
    assert flat.slope == 0
    assert 4 < flat.intercept < 5
    assert through.intercept == 0
    assert 0.1 < through.slope < 0.2


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.floats(0, 1e4), st.integers(1, 40)), min_size=1, max_size=8)
)
def test_whatever_is_read_lines_stay_finite(runs):
    fits = LineFits(1, memory=64)
    for samples, seconds, times in runs:
        for _ in range(times):
            feed(fits, samples, seconds)
        if fits.measured[0]:
            (line,) = fits.lines()
            assert np.isfinite([line.intercept, line.slope]).all()
            assert line.intercept >= 0
            assert line.slope >= 0
