"""The controller: bounds, hysteresis, capped jumps, a log of why, and the same decisions everywhere."""

import math
import random
from itertools import pairwise

import pytest

from arachne_runtime.batch import (
    Controller,
    ControllerSettings,
    Decision,
    NoiseReading,
    ReplicaTime,
    ScalingRule,
    TimeModel,
)
from arachne_runtime.errors import UsageError
from arachne_runtime.plan.shares import Line

MODEL = TimeModel(
    replicas=tuple(
        ReplicaTime(outside=Line(5e-3, 3e-4 * f), backward=Line(1e-3, 7e-4 * f)) for f in (1, 2, 4)
    ),
    ready=(0.5, 1.0),
    reduce_s=(0.01, 0.01),
)


def reading(samples: int, noise_scale: float, rng: random.Random | None = None) -> NoiseReading:
    trace = noise_scale * (rng.uniform(0.5, 1.5) if rng else 1.0)
    signal = rng.uniform(-0.5, 2.5) if rng else 1.0
    return NoiseReading(samples=samples, noise=trace / samples, signal=signal, trace=trace)


def train(controller: Controller, steps: int, noise_scale: float, rng=None, **bounds) -> list[Decision]:
    made = []
    for _ in range(steps):
        controller.advance(controller.batch)
        decision = controller.observe(reading(controller.batch, noise_scale, rng), MODEL, **bounds)
        made += [decision] if decision else []
    return made


def test_the_batch_grows_with_the_noise_in_capped_jumps():
    controller = Controller(base_batch=32)
    made = train(controller, 300, noise_scale=3000.0)
    assert len(made) >= 2
    assert controller.log == made
    assert all(one.batch <= 2 * one.before for one in made)
    assert all(one.gain > 1.05 for one in made)
    assert [one.before for one in made[1:]] == [one.batch for one in made[:-1]]
    assert controller.batch == made[-1].batch > 64
    assert all(b.step - a.step >= 20 for a, b in pairwise(made))


def test_it_shrinks_again_but_not_below_its_bound():
    settings = ControllerSettings(memory_steps=1.0, max_jump=1.5)
    controller = Controller(base_batch=64, least=48, most=128, settings=settings)
    train(controller, 200, noise_scale=5000.0)
    assert 120 <= controller.batch <= 128
    train(controller, 1200, noise_scale=2.0)
    assert 48 <= controller.batch <= 50
    assert len(controller.log) >= 4
    assert all(1 / 1.5 <= one.batch / one.before <= 1.5 for one in controller.log)


def test_little_noise_changes_nothing():
    controller = Controller(base_batch=256)
    assert train(controller, 200, noise_scale=20.0) == []
    assert controller.batch == 256
    assert controller.progress.steps == 200


def test_noisy_readings_do_not_make_it_swing():
    controller = Controller(base_batch=32)
    rng = random.Random(0)
    train(controller, 400, noise_scale=1000.0, rng=rng)
    assert len(train(controller, 1000, noise_scale=1000.0, rng=rng)) <= 3


def test_the_same_observations_give_the_same_decisions():
    logs = []
    for _ in range(2):
        controller = Controller(base_batch=32)
        train(controller, 300, noise_scale=2000.0, rng=random.Random(1))
        logs.append(controller.log)
    assert logs[0] == logs[1] != []


def test_without_a_signal_nothing_is_decided():
    controller = Controller(base_batch=32)
    for _ in range(100):
        controller.advance(32)
        assert (
            controller.observe(NoiseReading(samples=32, noise=9.0, signal=-1.0, trace=288.0), MODEL) is None
        )
    assert controller.noise_scale == math.inf
    assert controller.progress.steps == 100


def test_a_batch_that_no_longer_fits_is_changed_whatever_the_gain():
    controller = Controller(base_batch=64, max_accumulation=4)
    (decision,) = train(controller, 39, noise_scale=50.0, caps=(10, 10, 10))
    assert decision.forced
    assert decision.accumulation >= 3 or decision.batch <= 30 * decision.accumulation
    assert "no longer fits" in str(decision)


def test_the_log_says_why():
    controller = Controller(base_batch=32, rule=ScalingRule.SQUARE_ROOT)
    decision = train(controller, 60, noise_scale=4000.0)[0]
    assert decision.lr_factor == pytest.approx(math.sqrt(decision.batch / 32))
    assert controller.lr_factor == pytest.approx(math.sqrt(controller.batch / 32))
    assert str(decision).startswith(f"step 20: batch 32 → {decision.batch} in 1 micro-batches, goodput × 1.")
    assert "noise scale 4000" in str(decision)


def test_progress_counts_larger_steps_for_more_but_not_for_all_they_cost():
    controller = Controller(base_batch=32)
    train(controller, 20, noise_scale=1000.0)
    before, batch = controller.progress.steps, controller.batch
    train(controller, 1, noise_scale=1000.0)
    assert 1 < controller.progress.steps - before < batch / 32


def test_without_a_time_model_it_learns_and_decides_nothing():
    controller = Controller(base_batch=32)
    for _ in range(40):
        assert controller.observe(reading(32, 3000.0), None) is None
    assert controller.noise_scale == pytest.approx(3000.0)


def test_where_memory_takes_no_batch_within_bounds_it_stays():
    controller = Controller(base_batch=64)
    assert train(controller, 60, noise_scale=3000.0, caps=(4, 4, 4)) == []
    assert controller.batch == 64


@pytest.mark.parametrize("bounds", [{"least": 64}, {"most": 16}, {"least": 0}, {"max_accumulation": 0}])
def test_bounds_that_leave_out_the_base_batch_are_refused(bounds):
    with pytest.raises(UsageError, match="least ≤ base_batch ≤ most"):
        Controller(base_batch=32, **bounds)


def test_a_resumed_one_decides_the_same():
    whole, rng = Controller(base_batch=32), random.Random(2)
    train(whole, 110, noise_scale=2000.0, rng=rng)
    resumed, later = Controller(base_batch=32), random.Random()
    resumed.resume(whole.state)
    later.setstate(rng.getstate())
    assert train(whole, 150, noise_scale=9000.0, rng=rng) == train(resumed, 150, 9000.0, rng=later) != []
    assert whole.state == resumed.state
    with pytest.raises(UsageError, match="now it is from 32 to 40"):
        Controller(base_batch=32, most=40).resume(whole.state)
    with pytest.raises(UsageError, match="in steps of 32 samples, here of 16"):
        Controller(base_batch=16).resume(whole.state)


def test_settings_are_kept():
    controller = Controller(base_batch=32, settings=ControllerSettings(hysteresis=10.0))
    assert train(controller, 100, noise_scale=3000.0) == []
