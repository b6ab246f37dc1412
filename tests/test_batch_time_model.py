"""The time of a step against a play of its buckets, with unlike buckets and replicas that take nothing."""

import random

import pytest

from arachne_runtime.batch import ReplicaTime, TimeModel
from arachne_runtime.errors import UsageError
from arachne_runtime.plan.shares import Line
from bench.unequal_dp_numbers import random_mix


def played(model: TimeModel, shares: tuple[int, ...]) -> float:
    """Bucket by bucket: reduced once all have it and the one before is done."""
    end = 0.0
    for fraction, reduce_s in zip(model.ready, model.reduce_s, strict=True):
        ready = [
            one.outside.at(b) + fraction * one.backward.at(b)
            for one, b in zip(model.replicas, shares, strict=True)
            if b
        ]
        end = max([end, *ready]) + reduce_s
    return end


@pytest.mark.parametrize("seed", range(30))
def test_the_formula_equals_the_play(seed):
    rng = random.Random(seed)
    model = random_mix(rng, 5)
    for _ in range(20):
        shares = tuple(rng.choice((0, rng.randint(1, 60))) for _ in range(5))
        assert model.step_s(shares) == pytest.approx(played(model, shares))


@pytest.mark.parametrize("seed", range(30))
def test_no_move_of_a_sample_makes_the_best_shares_better(seed):
    rng = random.Random(seed)
    model = random_mix(rng, 5)
    best = model.best(100, [1] * 5, [60] * 5)
    for a in range(5):
        for b in range(5):
            moved = [share - (i == a) + (i == b) for i, share in enumerate(best)]
            assert (
                min(moved) < 1 or max(moved) > 60 or model.step_s(moved) >= model.step_s(best) * (1 - 1e-12)
            )


def test_who_takes_nothing_is_ready_at_once():
    replicas = tuple(ReplicaTime(outside=Line(s, 1.0), backward=Line(0.0, 1.0)) for s in (1.0, 100.0))
    model = TimeModel(replicas=replicas, ready=(1.0,), reduce_s=(0.5,))
    assert model.step_s((3, 0)) == 7.5
    assert model.step_s((3, 1)) == 102.5
    assert model.step_s((0, 0)) == 0.5


def test_a_model_without_buckets_or_of_another_group_is_refused():
    one = ReplicaTime(outside=Line(0.0, 1.0), backward=Line(0.0, 1.0))
    with pytest.raises(UsageError, match="1 replicas, 0 ready fractions"):
        TimeModel(replicas=(one,), ready=(), reduce_s=())
    with pytest.raises(UsageError, match="2 shares for 1 replicas"):
        TimeModel(replicas=(one,), ready=(1.0,), reduce_s=(0.0,)).step_s((1, 1))
