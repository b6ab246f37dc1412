"""Weights for the noise of heavy tails: of least variance, chosen by earlier steps, without bias."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arachne_runtime.batch.noise import NoiseSums
from arachne_runtime.batch.tails import TAILS, Tails, by_tails, num_tail_sums, tail_sums
from arachne_runtime.data_parallel.noise import NoiseMeter
from bench.unequal_noise import tail_weights

MIX = (1, 2, 4, 8)
DIM = 12


def sums_of(h_JD, mix=MIX):
    """As ranks tell them: weights are parts of the batch, gradients are weighed."""
    size = sum(mix)
    parts = []
    for n, h in zip(mix, np.asarray(h_JD) / size, strict=True):
        apart = (float(h @ h) * size / n,)
        parts.append(
            NoiseSums(
                num_groups=1,
                samples=n,
                weight=n / size,
                variance=n / size**2,
                ratio=1 / size,
                apart=apart,
                tails=tuple(tail_sums(n / size, n, apart)),
            )
        )
    whole = np.sum(h_JD, axis=0) / size
    return NoiseSums.of(parts), [float(whole @ whole)]


def drawn(rng, draw, mix=MIX):
    """Summed gradients of the replicas, (replicas, parameters), of mean 0 and variance 1."""
    edges = np.concatenate([[0], np.cumsum(mix)[:-1]])
    return np.add.reduceat(draw(rng, (sum(mix), DIM)), edges, axis=0)


def gaussian(rng, shape):
    return rng.normal(size=shape)


def heavy(rng, shape):
    """Kurtosis 25: one element in ten is √10 times as large as a Gaussian one, the others are zero."""
    return rng.normal(size=shape) * math.sqrt(10) * (rng.random((shape[0], 1)) < 0.1)


@pytest.mark.parametrize("mix", [MIX, (3, 13), (4, 4, 4), (1, 1, 2, 2, 4, 8, 16, 30)])
def test_estimates_are_those_of_the_weights_of_least_variance(mix):
    h_JD, b, size = drawn(np.random.default_rng(0), heavy, mix), np.array(mix, float), sum(mix)
    sums, square = sums_of(h_JD, mix)
    own = ((h_JD**2).sum(1) / b**2 - square[0]) / (1 / b - 1 / size)
    for tails, (found,) in zip(TAILS, by_tails(sums, square), strict=True):
        assert found.trace == pytest.approx(own @ tail_weights(mix, tails), rel=1e-9)
        assert found.signal == pytest.approx(square[0] - found.trace / size, rel=1e-9)
        assert found.samples == size


def play(draw, num_steps, mix=MIX):
    """Traces that are read and those by Gaussian weights, and the weights that were chosen, by step."""
    rng, tails, found = np.random.default_rng(1), Tails(), []
    for _ in range(num_steps):
        sums, square = sums_of(drawn(rng, draw, mix), mix)
        chosen = tails.chosen
        (reading,), (usual,) = tails.readings(sums, square), sums.readings(square)
        found.append((reading.trace, usual.trace, chosen))
    return np.array(found).T


def test_heavy_tails_are_found_and_the_trace_is_surer_and_not_biased():
    ours, usual, chosen = play(heavy, 3000)
    assert not chosen[:20].any()
    assert (chosen[500:] > 0).mean() > 0.95
    assert ours[500:].std() < 0.85 * usual[500:].std()
    assert abs(ours.mean() - DIM) < 4 * ours.std() / math.sqrt(len(ours))


def test_gaussian_noise_keeps_its_weights():
    ours, usual, chosen = play(gaussian, 1500)
    assert (chosen == 0).mean() > 0.8
    assert ours.std() < 1.01 * usual.std()


def test_replicas_alike_have_the_same_estimate_by_all_weights():
    _, _, chosen = play(heavy, 60, (4, 4, 4, 4))
    assert not chosen.any()


def test_a_loss_scale_that_jumps_brings_back_the_gaussian_weights():
    """Its one large step hides what the others have told."""
    tails = Tails()
    rng = np.random.default_rng(2)
    for _ in range(400):
        tails.readings(*sums_of(drawn(rng, heavy)))
    assert tails.chosen
    tails.readings(*sums_of(1e4 * drawn(rng, heavy)))
    tails.readings(*sums_of(1e4 * drawn(rng, heavy)))
    assert not tails.chosen


def test_what_ranks_tell_adds_up_over_rounds():
    """One rank with two micro-batches, one with a single one, as their meters tell it."""
    mix, groups = (1, 2, 5), ((0, 1), (2,))
    h_JD, size = drawn(np.random.default_rng(3), heavy, mix), sum(mix)
    wanted, square = sums_of(h_JD, mix)
    told = []
    for places in groups:
        meter = NoiseMeter(1)
        for place in places:
            weight = SimpleNamespace(mine=float(mix[place]))
            meter.open(SimpleNamespace(rows=mix[place], weight=weight), mix[place] / size, is_weighed=True)
            h = h_JD[place] / size
            meter.add([(0, torch.tensor(float(h @ h), dtype=torch.float64))])
        meter.summed.append((0, torch.tensor(square[0], dtype=torch.float64)))
        told.append(meter.told())
    assert {len(row) for row in told} == {5 + 1 + num_tail_sums(1) + 1}
    seen = []

    class Watch(Tails):
        def readings(self, sums, squared_norms):
            seen.append((sums, squared_norms))
            return super().readings(sums, squared_norms)

    (reading,) = NoiseMeter(1).readings(told, Watch())
    sums, squares = seen[0]
    assert sums.tails == pytest.approx(wanted.tails, rel=1e-12)
    assert squares == square
    assert reading.trace == pytest.approx(wanted.readings(square)[0].trace, rel=1e-12)


def test_one_group_tells_nothing():
    sums, square = sums_of(drawn(np.random.default_rng(4), gaussian))
    alone = replace(sums, num_groups=1)
    assert by_tails(alone, square) == []
    assert Tails().readings(alone, square) == ()
