"""The closed forms of the inner search against the event simulation: their error is stated, and held."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachne_runtime.plan.plan import ScheduleKind
from planner.cost.closed import pipeline_seconds
from planner.cost.simulate import Actor, play

BOUNDS = {
    (ScheduleKind.GPIPE, 0.0): (1e-9, 1e-9),
    (ScheduleKind.GPIPE, 0.3): (1e-9, 1e-9),
    (ScheduleKind.ONE_F_ONE_B, 0.0): (0.003, 0.06),
    (ScheduleKind.ONE_F_ONE_B, 0.3): (0.007, 0.09),
}
"""(kind, longest message in seconds; forwards take 0.2 to 1) → mean and largest relative error."""


def _played(kind, forward, backward, hops, micro_batches):
    depth = len(forward)
    stages = tuple(
        (
            Actor(
                forward[s],
                backward[s],
                ((0, hops[s - 1]),) if s else (),
                ((0, hops[s]),) if s + 1 < depth else (),
            ),
        )
        for s in range(depth)
    )
    return play(kind, int(micro_batches), stages).seconds


def _random(rng, depth, longest, count=60):
    forward = rng.uniform(0.2, 1.0, (count, depth))
    return (
        forward,
        forward * rng.uniform(1.5, 2.5, (count, depth)),
        rng.uniform(0, longest, (count, depth - 1)),
        rng.integers(1, 65, count),
    )


@pytest.mark.parametrize(("kind", "longest"), BOUNDS)
def test_error_of_the_closed_form(kind, longest):
    rng = np.random.default_rng(3)
    errors = []
    for depth in range(1, 9):
        drawn = _random(rng, depth, longest)
        played = np.array([_played(kind, *row) for row in zip(*drawn, strict=True)])
        errors.append(np.abs(pipeline_seconds(kind, *drawn) / played - 1))
    mean, worst = BOUNDS[kind, longest]
    assert np.mean(errors) <= mean
    assert np.max(errors) <= worst


@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 6),
    kind=st.sampled_from(list(dict.fromkeys(k for k, _ in BOUNDS))),
)
def test_closed_form_never_falls_when_something_gets_slower(seed, depth, kind):
    rng = np.random.default_rng(seed)
    forward, backward, hops, count = _random(rng, depth, 0.5, count=8)
    slower = [
        part + rng.uniform(0, 0.5, part.shape) * rng.integers(0, 2, part.shape)
        for part in (forward, backward, hops)
    ]
    before = pipeline_seconds(kind, forward, backward, hops, count)
    assert (pipeline_seconds(kind, *slower, count) >= before).all()
