"""The closed forms of the inner search against the event simulation: their error is stated, and held."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachne_runtime.plan.plan import ScheduleKind
from planner.cost.closed import pipeline_seconds
from planner.cost.simulate import Actor, play

ONE = 1
BOUNDS = {
    (ScheduleKind.GPIPE, ONE, 0.0): (1e-9, 1e-9),
    (ScheduleKind.GPIPE, ONE, 0.3): (1e-9, 1e-9),
    (ScheduleKind.ONE_F_ONE_B, ONE, 0.0): (0.003, 0.06),
    (ScheduleKind.ONE_F_ONE_B, ONE, 0.3): (0.007, 0.09),
    (ScheduleKind.ZERO_BUBBLE, ONE, 0.0): (0.003, 0.13),
    (ScheduleKind.ZERO_BUBBLE, ONE, 0.3): (0.005, 0.13),
    (ScheduleKind.INTERLEAVED, 2, 0.0): (0.03, 0.25),
    (ScheduleKind.INTERLEAVED, 2, 0.3): (0.035, 0.25),
    (ScheduleKind.INTERLEAVED, 3, 0.3): (0.035, 0.25),
}
"""(kind, chunks, longest message in seconds; forwards take 0.2 to 1) → mean and largest relative error."""


def _played(kind, rows, forward, backward, hops, micro_batches):
    depth = len(forward)
    stages = tuple(
        (
            Actor(
                forward[s],
                backward[s],
                ((0, hops[s - 1]),) if s else (),
                ((0, hops[s]),) if s + 1 < depth else (),
                weight_s=backward[s] / 2,
            ),
        )
        for s in range(depth)
    )
    return play(kind, int(micro_batches), stages, rows).seconds


def _random(rng, depth, longest, count=40):
    forward = rng.uniform(0.2, 1.0, (count, depth))
    return (
        forward,
        forward * rng.uniform(1.5, 2.5, (count, depth)),
        rng.uniform(0, longest, (count, depth - 1)),
        rng.integers(1, 65, count),
    )


def _errors(kind, rows, drawn):
    played = np.array([_played(kind, rows, *row) for row in zip(*drawn, strict=True)])
    return np.abs(pipeline_seconds(kind, *drawn, num_rows=rows) / played - 1)


@pytest.mark.parametrize(("kind", "chunks", "longest"), BOUNDS)
def test_error_of_the_closed_form(kind, chunks, longest):
    rng = np.random.default_rng(3)
    deepest = 8 if chunks == 1 else 5
    errors = [
        _errors(kind, rows, _random(rng, rows * chunks, longest))
        for rows in range(min(2, chunks), deepest + 1)
    ]
    mean, worst = BOUNDS[kind, chunks, longest]
    assert np.mean(errors) <= mean
    assert np.max(errors) <= worst


def test_an_interleaved_pipeline_whose_chunks_are_alike_is_told_within_1_2_percent():
    rng = np.random.default_rng(5)
    errors = []
    for rows in (2, 3, 4):
        forward, _, hops, count = _random(rng, 2 * rows, 0.1)
        alike = np.tile(forward[:, :rows], 2) * rng.uniform(0.9, 1.1, forward.shape)
        errors.append(_errors(ScheduleKind.INTERLEAVED, rows, (alike, 2 * alike, hops, count)))
    assert np.mean(errors) <= 0.012


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 6),
    kind=st.sampled_from(ScheduleKind),
    chunks=st.integers(1, 3),
)
def test_closed_form_never_falls_when_something_gets_slower(seed, rows, kind, chunks):
    rng = np.random.default_rng(seed)
    depth = rows * chunks if kind is ScheduleKind.INTERLEAVED else rows
    forward, backward, hops, count = _random(rng, depth, 0.5, count=8)
    slower = [
        part + rng.uniform(0, 0.5, part.shape) * rng.integers(0, 2, part.shape)
        for part in (forward, backward, hops)
    ]
    before = pipeline_seconds(kind, forward, backward, hops, count, num_rows=rows)
    assert (pipeline_seconds(kind, *slower, count, num_rows=rows) >= before * (1 - 1e-12)).all()
