"""The balancer in simulation: what learning costs, outliers, drifts, bounds, the same answer on all ranks."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from arachne_runtime.batch import Balancer, BalancerState, BalanceSettings, Phase, Reading
from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError, UsageError
from bench.unequal_simulation import Cluster, model_of, play, slowed


def regrets(balancer: Balancer, cluster: Cluster, steps: int, batch: int = 64) -> list[float]:
    """Time lost in each step against the best shares of the true model, as a fraction."""
    return [lost.regret for lost in play(balancer, cluster, steps, batch)]


@pytest.mark.parametrize("comm_s", [0.0, 0.05, 0.2])
def test_regret_is_small_once_lines_are_known(comm_s):
    late = []
    for seed in range(5):
        cluster = Cluster(model_of((1, 1, 2, 5), comm_s=comm_s), rng=random.Random(seed))
        late += regrets(Balancer(num_replicas=4), cluster, steps=80)[30:]
    assert sum(late) / len(late) < 0.015


def test_it_starts_even_and_ends_balanced():
    balancer, cluster = Balancer(num_replicas=4), Cluster(model_of((1, 1, 2, 4)))
    assert balancer.shares(64) == (16, 16, 16, 16)
    assert balancer.phase is Phase.EVEN
    regrets(balancer, cluster, steps=40)
    assert balancer.phase is Phase.BALANCED
    shares = balancer.shares(64)
    assert shares[0] > shares[2] > shares[3]
    assert balancer.predicted_s(shares) == pytest.approx(cluster.model.step_s(shares), rel=0.05)
    assert len(balancer.lines()) == 4


def test_without_noise_the_lines_are_exact():
    balancer, cluster = Balancer(num_replicas=3), Cluster(model_of((1, 2, 4), comm_s=0.02), noise=0.0)
    regrets(balancer, cluster, steps=60)
    for shares in ((60, 2, 2), (20, 22, 22)):
        assert balancer.predicted_s(shares) == pytest.approx(cluster.model.step_s(shares), rel=2e-3)


def test_noise_does_not_move_shares_each_step():
    speeds = (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
    balancer, cluster = Balancer(num_replicas=16), Cluster(model_of(speeds), noise=0.1)
    regrets(balancer, cluster, steps=40, batch=1024)
    seen = [lost.shares for lost in play(balancer, cluster, 100, 1024)]
    assert sum(a != b for a, b in pairwise(seen)) <= 4


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_replica_slows_down_three_times_and_recovers(noise):
    balancer, cluster = Balancer(num_replicas=4), Cluster(model_of((1, 1, 2, 4)), noise=noise)
    regrets(balancer, cluster, steps=50)
    well = cluster.model
    for truth in (slowed(well, 0, 3.0), well):
        cluster.model = truth
        lost = regrets(balancer, cluster, steps=40)
        assert lost[0] > 0.1
        assert max(lost[10:]) < 0.08


def test_an_outlier_moves_nothing():
    balancer, cluster = Balancer(num_replicas=2), Cluster(model_of((1, 2)), noise=0.02)
    regrets(balancer, cluster, steps=40)
    before = balancer.shares(64)
    for _ in range(6):
        first, second = cluster.step(before)
        balancer.observe([replace(first, outside_s=first.outside_s * 50), second])
        for _ in range(9):
            balancer.observe(cluster.step(before))
            assert balancer.shares(64) == before


def test_the_same_readings_give_the_same_shares_and_asking_changes_nothing():
    ours, theirs = Balancer(num_replicas=4), Balancer(num_replicas=4)
    cluster = Cluster(model_of((1, 1, 2, 4)))
    for step in range(60):
        batch = 40 if step % 10 == 9 else 64
        shares = ours.shares(batch)
        assert theirs.shares(batch) == shares
        theirs.shares(64 + step)
        readings = cluster.step(shares)
        ours.observe(readings)
        theirs.observe(readings)


def test_a_learnt_cap_holds_from_the_next_step_on():
    balancer, cluster = Balancer(num_replicas=2), Cluster(model_of((1, 4)))
    for step in range(40):
        if step == 10:
            balancer.limit(0, 35)
        shares = balancer.shares(64)
        assert step < 10 or shares == (35, 29)
        balancer.observe(cluster.step(shares))
    balancer.limit(0, 60)
    assert balancer.caps == (35, None)
    balancer.limit(1, 20)
    with pytest.raises(NoFeasiblePlanError, match="64 samples are too many: the replicas take at most 55"):
        balancer.shares(64)


def test_minima_hold_and_are_let_go_for_a_tiny_last_batch():
    balancer = Balancer(num_replicas=3, minima=(4, 4, 4), caps=(20, None, None))
    assert min(balancer.shares(13)) >= 4
    assert sum(balancer.shares(2)) == 2
    assert sum(balancer.shares(0)) == 0


@pytest.mark.parametrize(("num_replicas", "batch"), [(2, 128), (4, 64), (8, 256)])
def test_equal_replicas_keep_even_shares_in_noise(num_replicas, batch):
    even = (batch // num_replicas,) * num_replicas
    for seed in range(4):
        cluster = Cluster(model_of((1,) * num_replicas), noise=0.1, rng=random.Random(seed))
        balancer = Balancer(num_replicas=num_replicas)
        seen = [lost.shares for lost in play(balancer, cluster, 120, batch)]
        assert sum(shares != even for shares in seen[24:]) <= 5


def test_equal_replicas_are_even_again_after_one_was_slowed():
    cluster = Cluster(model_of((1, 1, 1, 1)), noise=0.05)
    balancer = Balancer(num_replicas=4)
    regrets(balancer, cluster, steps=40)
    cluster.model = slowed(cluster.model, 2, 2.0)
    regrets(balancer, cluster, steps=30)
    assert balancer.shares(64)[2] < 12
    cluster.model = model_of((1, 1, 1, 1))
    regrets(balancer, cluster, steps=60)
    assert balancer.shares(64) == (16, 16, 16, 16)
    assert balancer.shares(60) == (15, 15, 15, 15)


def test_a_gain_larger_than_its_doubt_is_taken():
    cluster = Cluster(model_of((1, 1.2, 1, 1)), noise=0.05)
    balancer = Balancer(num_replicas=4)
    late = regrets(balancer, cluster, steps=80, batch=256)[40:]
    assert sum(late) / len(late) < 0.02


def test_a_recovery_is_followed_as_soon_as_a_slowdown_in_heavy_noise():
    waits = {0: [], 1: []}
    for seed in range(8):
        balancer = Balancer(num_replicas=4)
        cluster = Cluster(model_of((1, 2, 4, 4)), noise=0.2, rng=random.Random(seed))
        regrets(balancer, cluster, steps=60)
        well = cluster.model
        for turn, truth in enumerate((slowed(well, 0, 3.0), well)):
            cluster.model = truth
            lost = regrets(balancer, cluster, steps=40)
            waits[turn].append(next(step for step, regret in enumerate(lost) if regret < 0.2))
    slower, back = (sum(found) / len(found) for found in waits.values())
    assert slower < 5
    assert back < 5


def test_a_replica_left_out_is_tried_again():
    settings = BalanceSettings(revisit_steps=30)
    cluster = Cluster(model_of((1, 1, 1000)), noise=0.0)
    balancer = Balancer(num_replicas=3, minima=(0, 0, 0), settings=settings)
    seen = []
    for step in range(200):
        if step == 60:
            cluster.model = model_of((1, 1, 1))
        seen.append(balancer.shares(30))
        balancer.observe(cluster.step(seen[-1]))
    assert 0 in (shares[2] for shares in seen[:60])
    assert seen[-1][2] >= 8


def test_a_change_of_buckets_is_warmed_up_again():
    balancer = Balancer(num_replicas=2)
    one = Reading(samples=4, outside_s=1.0, backward_s=2.0, ready=(1.0,), reduce_s=(0.1,))
    two = replace(one, ready=(0.5, 1.0), reduce_s=(0.1, 0.1))
    cold = replace(two, ready=(0.0, 0.0))
    for reading in [one] * 8 + [cold] * 2 + [two] * 8:
        balancer.observe([reading] * 2)
    assert balancer.model().ready == pytest.approx((0.5, 1.0))


def test_without_buckets_only_compute_counts():
    balancer = Balancer(num_replicas=2)
    quick = Reading(samples=4, outside_s=1.0, backward_s=2.0, ready=(), reduce_s=())
    for _ in range(8):
        balancer.observe([quick, replace(quick, outside_s=3.0, backward_s=3.0)])
    assert balancer.predicted_s((4, 4)) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outside_s": float("nan")}, "replica 1 has the reading"),
        ({"samples": -1}, "finite and at least 0"),
        ({"ready": (1.0, 1.0)}, "replica 1 has 2 ready fractions"),
    ],
)
def test_readings_that_cannot_be_are_refused(change, words):
    good = Reading(samples=4, outside_s=1.0, backward_s=2.0, ready=(1.0,), reduce_s=(0.1,))
    with pytest.raises(UsageError, match=words):
        Balancer(num_replicas=2).observe([good, replace(good, **change)])


def test_what_is_not_known_yet_is_not_zero():
    balancer = Balancer(num_replicas=2)
    with pytest.raises(NotMeasuredError):
        balancer.predicted_s((1, 1))
    with pytest.raises(UsageError, match="1 readings for 2 replicas"):
        balancer.observe([Reading(samples=1, outside_s=1, backward_s=1, ready=(), reduce_s=())])
    with pytest.raises(UsageError, match="replica 2 of 2"):
        balancer.limit(2, 5)
    with pytest.raises(UsageError, match="3 minima"):
        Balancer(num_replicas=2, minima=(1, 1, 1))


@pytest.mark.parametrize("stop_at", [0, 1, 4, 9, 17, 40, 63])
def test_a_resumed_one_answers_as_if_it_had_gone_on(stop_at):
    ours, cluster = Balancer(num_replicas=4), Cluster(model_of((1, 1, 2, 4)), rng=random.Random(5))
    ours.limit(1, 30)
    regrets(ours, cluster, steps=stop_at)
    plain = json.loads(json.dumps(msgspec.to_builtins(ours.state)))
    theirs = Balancer(num_replicas=4)
    theirs.resume(msgspec.convert(plain, BalancerState))
    assert theirs.state == ours.state
    for step in range(40):
        batch = 64 if step % 5 else 30
        assert theirs.shares(batch) == ours.shares(batch)
        readings = cluster.step(ours.shares(batch))
        ours.observe(readings)
        theirs.observe(readings)
    assert theirs.state == ours.state


def test_a_state_of_other_replicas_is_refused():
    with pytest.raises(UsageError, match="of 4 replicas, these are 3"):
        Balancer(num_replicas=3).resume(Balancer(num_replicas=4).state)
