"""bench.unequal_dp: its search, how it judges drifts and pairs of splits; the ranks' work on real ranks."""

import math

import pytest
from msgspec.structs import replace

from arachne_runtime.errors import UnsupportedEnvironmentError
from arachne_runtime.testing import run_ranks
from bench import unequal_dp
from bench.unequal_dp import gain, off_the_best
from bench.unequal_drift import answer
from bench.unequal_labs import CASES, EIGHT, FOUR, cores_of
from bench.unequal_peers import even
from bench.unequal_records import Drift, Found, Task
from bench.unequal_search import climb, moves
from bench.unequal_simulation import model_of
from bench.unequal_train import compete

TOTAL = 64


def search(speeds, comm_s, trials=60):
    """Step time of what a search without noise finds, over that of the optimum."""
    model, bounds = model_of(speeds, comm_s=comm_s), ([1] * len(speeds), [TOTAL] * len(speeds))

    def race(one, other):
        return model.step_s(one) / model.step_s(other)

    def busy(split):
        pairs = zip(model.replicas, split, strict=True)
        return [one.outside.at(b) + one.backward.at(b) for one, b in pairs]

    found = climb(even(model, TOTAL, *bounds), race, busy, trials)
    assert sum(found) == TOTAL
    return model.step_s(found) / model.step_s(model.best(TOTAL, *bounds))


@pytest.mark.parametrize("speeds", [(1, 8), (1, 2, 4, 4), (1, 1, 2, 2, 4, 4, 8, 8)])
@pytest.mark.parametrize("comm_s", [0.0, 0.06])
def test_a_search_reaches_the_best_split(speeds, comm_s):
    assert search(speeds, comm_s) < 1.02


def test_a_search_ends_with_its_trials():
    assert search((1, 8), 0.0, trials=1) > 1.2


def test_the_busiest_give_to_the_idlest_first_and_each_keeps_a_sample():
    first, second, *_ = moves((4, 8, 4, 4), (1.0, 2.0, 0.5, 1.9), 3)
    assert first == (4, 5, 7, 4)
    assert second == (4, 5, 10, 1)
    assert set(moves((1, 2), (9.0, 1.0), 1)) == {(2, 1)}


def drifting(slow=range(20, 40), *, delay=3, low=8, high=16, steps=60):
    """Rank 0 takes three times as long in ``slow``, and its share follows ``delay`` steps later."""
    slowed = [step in slow for step in range(steps)]
    shares = [low if step >= delay and slowed[step - delay] else high for step in range(steps)]
    return Drift(
        shares=[(share, 24 - share) for share in shares],
        readings=[(step, 0.03 if one else 0.01) for step, one in enumerate(slowed)],
        slowed=(20, 40),
    )


def test_steps_of_a_drift_count_from_the_first_slow_one():
    drift = drifting(range(22, 42), delay=4)
    slower = answer(drift, (0, 20), (20, 40), slower=True)
    assert (slower.waited_steps, slower.before, slower.after) == (4, 16, 8)
    back = answer(drift, (20, 40), (40, 60), slower=False)
    assert (back.waited_steps, back.after) == (4, 16)


@pytest.mark.parametrize("drift", [drifting(range(0)), drifting(delay=0, low=16)], ids=["evidence", "answer"])
def test_without_evidence_or_without_an_answer_nothing_has_followed(drift):
    assert answer(drift, (0, 20), (20, 40), slower=True).waited_steps == math.inf


def pairs_of(*ratios):
    nothing = {
        "splits": {},
        "turns": {},
        "evens_s": [],
        "learning_steps": 0,
        "rebalances": 0,
        "predicted_s": 0.0,
    }
    return Found(pairs=[(ratio, 1.0) for ratio in ratios], **nothing)


def test_a_split_is_off_the_best_where_the_interval_of_its_pairs_does_not_reach_the_bound(capsys):
    assert off_the_best("x", pairs_of(*[1.01] * 15)).holds
    assert off_the_best("x", pairs_of(*[1.0] * 5, *[1.05] * 10)).holds
    assert not off_the_best("x", pairs_of(*[1.0] * 3, *[1.05] * 12)).holds
    assert "in 15 pairs" in capsys.readouterr().out


def test_a_lab_that_is_not_to_be_had_falls_short_and_the_others_are_judged(monkeypatch, capsys):
    def train_on(case, folder):
        if case.network is not None:
            raise UnsupportedEnvironmentError("no tunnel")
        return Found(
            splits={"ours": (2, 1), "best": (2, 1)},
            turns={"even DDP": [2.0], "ours": [1.0]},
            pairs=[(1.0, 1.0)] * 15,
            evens_s=[2.0] * 15 if case.task.is_beside_even else [],
            learning_steps=9,
            rebalances=3,
            predicted_s=1.0,
        )

    monkeypatch.setattr(unequal_dp, "train_on", train_on)
    found = {result.name: result.holds for result in unequal_dp.lab_results(quick=False)}
    assert {name for name, holds in found.items() if not holds} == {
        f"{n}-linked-off-the-best" for n in (2, 4, 8)
    }
    assert len(found) == len(CASES) + 1
    assert "4-linked: no tunnel" in capsys.readouterr().out


def test_a_gain_is_the_median_of_turns_beside_each_other():
    """Slow minutes count for both."""
    found = pairs_of(1.0, 1.0, 4.0)
    assert gain("x", replace(found, evens_s=[1.7, 1.7, 8.0])).figure == 1.7
    assert not gain("x", replace(found, evens_s=[1.5, 1.5, 8.0])).holds


def test_devices_are_slices_of_cores_that_take_them_all():
    assert cores_of(FOUR, 2) == (0, 1, 1, 1)
    for shares in [case.shares for case in CASES]:
        cores = cores_of(shares, 2)
        assert all(sum(s for s, core in zip(shares, cores, strict=True) if core == k) <= 1 for k in (0, 1))
    assert len(set(cores_of(EIGHT, 8))) == 8


def race_on_ranks():
    """A whole lab's work, on two equal ranks of little to do."""
    task = Task(
        width=16,
        layers=1,
        sequence=8,
        global_batch=16,
        steps=1,
        rounds=1,
        trials=2,
        num_pairs=2,
        is_beside_even=True,
        drift_steps=3,
    )
    return compete(task)


def test_ranks_agree_on_what_they_found():
    first, second = run_ranks(2, race_on_ranks, timeout_s=100)
    assert (first.splits, first.turns, first.pairs) == (second.splits, second.turns, second.pairs)
    assert set(first.turns) == {"even DDP", "lb-bsp", "cannikin", "ours"}
    assert all(sum(split) == 16 for split in first.splits.values())
    assert len(first.evens_s) == 2
    assert first.drift.slowed == (3, 6)
    assert len(first.drift.shares) == 9
