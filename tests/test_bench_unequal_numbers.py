"""Peers share as they are known to, and the benchmark's own arithmetic is right."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from bench.unequal_dp_numbers import random_mix, solver_results
from bench.unequal_noise import MIXES, Source, run_trials, sources, tail_weights
from bench.unequal_peers import cannikin, even, lb_bsp, published_weights
from bench.unequal_simulation import Cluster, model_of

BOUNDS = (1,) * 4, (64,) * 4


def test_even_shares_are_even():
    assert even(model_of((1, 1, 2, 4)), 66, *BOUNDS) == (17, 17, 16, 16)


def test_equal_compute_is_best_without_reductions_and_not_with_them():
    rng = random.Random(0)
    for _ in range(20):
        model = random_mix(rng, 4)
        alone = replace(model, reduce_s=(0.0,) * 5)
        assert alone.step_s(lb_bsp(alone, 64, *BOUNDS)) == alone.step_s(alone.best(64, *BOUNDS))
        assert model.step_s(lb_bsp(model, 64, *BOUNDS)) >= model.step_s(model.best(64, *BOUNDS))


def test_two_lines_are_exact_for_two_buckets_and_not_for_more():
    rng, lost = random.Random(1), 0.0
    for _ in range(60):
        many = random_mix(rng, 4)
        two = replace(many, ready=(many.ready[0], 1.0), reduce_s=many.reduce_s[:2])
        assert two.step_s(cannikin(two, 64, *BOUNDS)) == two.step_s(two.best(64, *BOUNDS))
        lost = max(lost, many.step_s(cannikin(many, 64, *BOUNDS)) / many.step_s(many.best(64, *BOUNDS)) - 1)
    assert lost > 0.001


def test_published_weights_are_unbiased_and_even_for_equal_batches():
    for weights in published_weights((2, 4, 10, 48)):
        assert sum(weights) == pytest.approx(1)
    for weights in published_weights((4, 4, 4)):
        assert weights == pytest.approx([1 / 3] * 3)


def covariance(b, tails):
    """Of the replicas' own estimates of the trace, where tr Σ² = 1 and the signal is 0.

    They are linear in the squares |e_j|² of the replicas' noise and in the products of two.
    """
    b, total, n = np.array(b, float), float(sum(b)), len(b)
    unit, pairs = 1 / b - 1 / total, list(itertools.combinations(range(n), 2))
    squares = (np.eye(n) - (b / total) ** 2) / unit[:, None]
    products = np.array([[-2 * b[k] * b[m] / total**2 / one for k, m in pairs] for one in unit])
    of_products = np.array([1 / (b[k] * b[m]) for k, m in pairs])
    return squares * (2 / b**2 + tails / b**3) @ squares.T + products * of_products @ products.T


@pytest.mark.parametrize("mix", MIXES)
def test_weights_for_tails_have_least_variance_and_are_ours_without_tails(mix):
    ours = [(sum(mix) - b) / ((len(mix) - 1) * sum(mix)) for b in mix]
    assert tail_weights(mix, 0.0) == pytest.approx(ours)
    for tails in (0.3, 5.0, 200.0):
        found, matrix = tail_weights(mix, tails), covariance(mix, tails)
        least = 1 / np.linalg.pinv(matrix).sum()
        assert found.sum() == pytest.approx(1)
        assert found @ matrix @ found == pytest.approx(least, rel=1e-6)


def test_a_simulated_step_without_noise_takes_what_the_model_says():
    model = model_of((1, 2, 4), comm_s=0.02)
    shares = (20, 10, 5)
    readings = Cluster(model, noise=0.0).step(shares)
    ends = []
    for one in readings:
        end = 0.0
        for fraction, seconds in zip(one.ready, one.reduce_s, strict=True):
            end = max(end, one.outside_s + fraction * one.backward_s) + seconds
        ends.append(end)
    assert ends == pytest.approx([model.step_s(shares)] * 3)


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_sources_know_their_truth(source: Source):
    trials = run_trials(source, (32, 96), 400)
    for part, truth in enumerate((source.signal, source.trace)):
        ours = trials.ours[part]
        assert abs(ours.mean() - truth) < 4 * ours.std() / 20


def test_the_solver_is_judged():
    brute_force, replicas = solver_results(quick=True)
    assert brute_force.holds
    assert replicas.figure > 0
