"""Cuts and counts against brute force."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cuts import min_max_cut, min_sum_cut, trade_off_cuts
from planner.search.deal import pack_samples


@st.composite
def stage_tables(draw):
    """Tables of stages that need not be sums of blocks, with runs that do not fit."""
    depth = draw(st.integers(1, 4))
    num_blocks = draw(st.integers(depth, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = []
    for _ in range(depth):
        table = np.full((num_blocks + 1, num_blocks + 1), np.inf)
        for i, j in combinations(range(num_blocks + 1), 2):
            if rng.random() < 0.8:
                table[i, j] = rng.integers(1, 9) * (j - i) ** rng.random()
        tables.append(table)
    return tables


def all_cuts(tables):
    num_blocks, depth = tables[0].shape[0] - 1, len(tables)
    for inner in combinations(range(1, num_blocks), depth - 1):
        bounds = (0, *inner, num_blocks)
        times = [float(t[a, b]) for t, a, b in zip(tables, bounds, bounds[1:], strict=False)]
        if np.isfinite(times).all():
            yield bounds, times


@given(stage_tables())
def test_min_max_is_the_least_slowest_stage(tables):
    cut = min_max_cut(tables)
    brute = [max(times) for _, times in all_cuts(tables)]
    assert (cut is None) == (not brute)
    if cut is not None:
        assert cut.slowest_s == min(brute)
        assert (cut.bounds, cut.slowest_s) in [(bounds, max(times)) for bounds, times in all_cuts(tables)]


@given(stage_tables(), st.integers(1, 40))
def test_the_least_closed_form_is_among_the_trade_offs(tables, micro_batches):
    seconds = [cut.pipeline_s(micro_batches) for cut in trade_off_cuts(tables)]
    brute = [(micro_batches - 1) * max(times) + sum(times) for _, times in all_cuts(tables)]
    assert bool(seconds) == bool(brute)
    if brute:
        assert min(seconds) == pytest.approx(min(brute), rel=1e-12)


@given(stage_tables(), st.floats(1, 40))
def test_min_sum_keeps_the_bound(tables, bound_s):
    cut = min_sum_cut(tables, bound_s)
    brute = [sum(times) for _, times in all_cuts(tables) if max(times) <= bound_s]
    assert (cut is None) == (not brute)
    if cut is not None:
        assert cut.slowest_s <= bound_s
        assert cut.total_s == pytest.approx(min(brute), rel=1e-12)


def test_trade_offs_ascend_in_total_and_descend_in_slowest():
    table = np.full((5, 5), np.inf)
    for i, j in combinations(range(5), 2):
        table[i, j] = [1, 9, 2, 4][i:j][0] + 3 * (j - i - 1) ** 2
    cuts = list(trade_off_cuts([table, table]))
    assert cuts
    assert [c.slowest_s for c in cuts] == sorted({c.slowest_s for c in cuts}, reverse=True)
    assert [c.total_s for c in cuts] == sorted(c.total_s for c in cuts)


@given(st.data())
def test_pack_samples_is_exact(data):
    num_pipelines, total = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    time = st.one_of(st.just(np.inf), st.integers(1, 20).map(float))
    times = [
        [np.inf, *data.draw(st.lists(time, min_size=total, max_size=total))] for _ in range(num_pipelines)
    ]
    brute = [
        max(row[n] for row, n in zip(times, counts, strict=True))
        for counts in product(range(1, total + 1), repeat=num_pipelines)
        if sum(counts) == total
    ]
    best = min(brute, default=np.inf)
    counts = pack_samples(times, total)
    if counts is None:
        assert best == np.inf
    else:
        assert sum(counts) == total
        assert max(row[n] for row, n in zip(times, counts, strict=True)) == best < np.inf
