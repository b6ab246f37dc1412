"""bench.unequal_target: how it reads curves and judges races; a short race on real ranks."""

import math
from itertools import pairwise

import msgspec
import pytest

from arachne_runtime.testing import run_ranks
from bench.unequal_target import judged
from bench.unequal_target_curves import Reached, apart, loss_at, reached
from bench.unequal_target_records import Contestant, Point, Run, TargetTask, Workload
from bench.unequal_target_train import FIRST_STEPS, race


def curve(*losses, step_s=1.0, worth=1.0):
    """A look at every tenth step."""
    return [
        Point(seconds=10 * i * step_s, steps=10 * i, progress=10 * i * worth, batch=16, loss=loss)
        for i, loss in enumerate(losses)
    ]


def test_a_target_is_reached_between_two_looks():
    assert reached(curve(4, 2, 1), 3) == Reached(seconds=5, progress=5)
    assert reached(curve(4, 2, 1, step_s=3.0, worth=2.0), 1.5) == Reached(seconds=45, progress=30)


def test_one_lucky_look_is_no_end():
    assert reached(curve(4, 2, 4, 2, 2), 3).seconds == 25
    assert reached(curve(4, 2), 3).seconds == 5
    assert reached(curve(4, 4), 3) == Reached(seconds=math.inf, progress=math.inf)


def test_curves_are_compared_at_the_same_progress():
    assert loss_at(curve(4, 2), 5) == 3
    assert apart(curve(4, 2, 1), curve(4, 3, 2, 1.5, 1, worth=0.5)) == pytest.approx(0)
    assert apart(curve(4, 2.2, 1), curve(4, 2, 1)) == pytest.approx(0.05)
    assert math.isnan(apart(curve(4), curve(4)))


def results(adaptive, *, unequal=1.0, even=1.5, loss=2.0):
    """By name; a race for each of ``adaptive``, in seconds a step."""
    races = [
        {
            Contestant.EVEN: Run(points=curve(4, 2, 1, step_s=even)),
            Contestant.UNEQUAL: Run(points=curve(4, 2, 1, step_s=unequal)),
            Contestant.ADAPTIVE: Run(points=curve(4, loss, 1, step_s=one)),
        }
        for one in adaptive
    ]
    return {one.name: one for one in judged("lab", 1.0, races)}


def test_a_slower_batch_falls_short_but_not_one_whose_races_disagree():
    assert results([0.5])["lab-adaptive"].figure == pytest.approx(0.5)
    assert not results([1.1, 1.2, 1.1])["lab-adaptive"].holds
    assert results([1.1, 0.9, 1.1])["lab-adaptive"].holds
    assert results([0.5])["lab-gain"].figure == pytest.approx(3)
    assert not results([2.0])["lab-gain"].holds


def test_losses_that_progress_does_not_tell_fall_short():
    assert results([1.0], loss=2.1)["lab-curve"].holds
    assert not results([1.0], loss=2.4)["lab-curve"].holds


def test_a_contestant_that_never_arrives_falls_short():
    found = list(judged("lab", 0.5, [dict.fromkeys(Contestant, Run(points=curve(4, 2, 1)))]))
    assert not any(one.holds for one in found[:2])


TASK = TargetTask(workload=Workload.PICTURES, width=4, base_batch=8, target=0.1, turn_s=0.2, most_s=0.5)


@pytest.mark.parametrize("workload", Workload)
def test_all_start_alike_and_train_in_turns(workload):
    task = msgspec.structs.replace(TASK, workload=workload)
    found, other = run_ranks(2, race, task)
    starts = {run.points[0].loss for run in found.values()}
    assert len(starts) == 1
    for contestant, run in found.items():
        start, first, *_ = run.points
        assert (first.steps, first.batch) == (FIRST_STEPS, task.base_batch)
        assert first.loss != start.loss
        assert all(after.steps > before.steps for before, after in pairwise(run.points))
        assert run.points[-1].seconds >= task.most_s
        assert run.points == other[contestant].points
    assert found[Contestant.EVEN].points[1].loss == pytest.approx(found[Contestant.UNEQUAL].points[1].loss)
