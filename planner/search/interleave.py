"""Interleaved pipelines out of plain ones: every set of devices holds several runs of blocks, in turns.

Sets keep their devices, TP degree, width and about the blocks that they had; what changes is where those
stand, and that a bubble is as long as one run.
"""

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Plan, ScheduleKind, Stage
from arachne_runtime.plan.schedule import num_rows

from ..cost.closed import pipeline_seconds
from ..cost.price import peaks_of
from ..cost.seats import seats_of
from ..request import Request

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_RUNS = 4
"""Runs of blocks of each set of devices that are tried at most; more never won in trials."""

MOST_CUT_ROUNDS = 64
"""Moves of a boundary by one block, each the best of all; 5 to 20 are usual."""

UNEVEN = 0.01
"""Weight of the root mean square of all sets' seconds beside the pipeline's: it breaks ties."""


def interleaved(plan: Plan, runs: int, request: Request) -> Plan | None:
    """The plan with so many runs of blocks in each set of devices; None where it cannot have or hold them."""
    depths = [len(pipeline.stages) for pipeline in plan.pipelines]
    if min(depths) < 2 or max(depths) * runs > len(request.model.blocks):
        return None
    known: dict[object, tuple[int, ...]] = {}
    pipelines = []
    for pipeline in plan.pipelines:
        key = _what_a_cut_depends_on(pipeline, request)
        if key not in known:
            known[key] = _Cut(pipeline, runs, request).best()
        pipelines.append(_dealt(pipeline, known[key]))
    found = replace(plan, schedule=ScheduleKind.INTERLEAVED, pipelines=tuple(pipelines))
    return _fitted(found, request)


def _what_a_cut_depends_on(pipeline: Pipeline, request: Request) -> object:
    stages = (
        (
            s.layers,
            s.recompute,
            *((_device(r.devices[0], request), len(r.devices), r.share) for r in s.replicas),
        )
        for s in pipeline.stages
    )
    return pipeline.micro_batches, tuple(stages)


def _device(name: str, request: Request) -> str:
    return request.fleet.node(node_of(name)).device.name


def _dealt(pipeline: Pipeline, bounds: tuple[int, ...]) -> Pipeline:
    """The stages' devices and options in turns over the runs between ``bounds``."""
    rows = len(pipeline.stages)
    stages = (
        replace(pipeline.stages[s % rows], layers=(bounds[s], bounds[s + 1])) for s in range(len(bounds) - 1)
    )
    return replace(pipeline, stages=tuple(stages))


class _Cut:
    """The cut of one pipeline into runs."""

    def __init__(self, pipeline: Pipeline, runs: int, request: Request) -> None:
        self.pipeline = pipeline
        self.runs = runs
        self.rows = len(pipeline.stages)
        seconds = [self._slowest(stage, request) for stage in pipeline.stages]
        self.forward = np.stack([forward for forward, _ in seconds])
        self.backward = np.stack([backward for _, backward in seconds])

    def best(self) -> tuple[int, ...]:
        """From equal parts of what each set had, the best move of one boundary until none helps."""
        bounds = self._first()
        value = self._values(bounds[None])[0]
        for _ in range(MOST_CUT_ROUNDS):
            moved = self._moved(bounds)
            if not len(moved):
                break
            values = self._values(moved)
            at = int(np.argmin(values))
            if values[at] >= value * (1 - 1e-9):
                break
            bounds, value = moved[at], values[at]
        return tuple(int(b) for b in bounds)

    def _slowest(self, stage: Stage, request: Request) -> tuple[Floats, Floats]:
        """``[blocks + 1]`` each: prefix sums of the replica that takes longest."""
        costs = [
            request.tables.costs(_device(r.devices[0], request), len(r.devices), r.share)
            for r in stage.replicas
        ]
        slowest = max(costs, key=lambda c: c.forward_s[-1] + c.backward_s[-1])
        forward, backward = np.asarray(slowest.forward_s), np.asarray(slowest.backward_s)
        return forward, backward + forward if stage.recompute else backward

    def _first(self) -> Ints:
        """Each set's blocks in equal parts, rounded to boundaries that leave a block to every run."""
        each = (self.forward + self.backward).mean(axis=0)
        had = np.array([each[s.layers[1]] - each[s.layers[0]] for s in self.pipeline.stages])
        ends = np.cumsum(np.tile(had / self.runs, self.runs))[:-1]
        near = np.searchsorted((each[1:] + each[:-1]) / 2, ends)
        step = np.arange(1, len(ends) + 1)
        near = np.maximum.accumulate(np.maximum(near, step) - step) + step
        last = len(each) - 1
        near = np.minimum(near, last - (len(ends) + 1 - step))
        return np.asarray(np.concatenate([[0], near, [last]]), np.int64)

    def _moved(self, bounds: Ints) -> Ints:
        """``[moves, runs + 1]``: every inner boundary one block earlier or later."""
        inner = np.arange(1, len(bounds) - 1)
        moved = np.repeat(bounds[None], 2 * len(inner), axis=0)
        moved[np.arange(len(moved)), np.tile(inner, 2)] += np.repeat([-1, 1], len(inner))
        return np.asarray(moved[(np.diff(moved, axis=1) > 0).all(axis=1)], np.int64)

    def _values(self, bounds: Ints) -> Floats:
        """Of each cut: the closed form without messages, and how uneven it is."""
        row = np.arange(bounds.shape[1] - 1) % self.rows
        forward, backward = (
            prefix[row, bounds[:, 1:]] - prefix[row, bounds[:, :-1]]
            for prefix in (self.forward, self.backward)
        )
        number = len(bounds)
        seconds = pipeline_seconds(
            ScheduleKind.INTERLEAVED,
            forward,
            backward,
            np.zeros((number, len(row) - 1)),
            np.full(number, self.pipeline.micro_batches),
            num_rows=self.rows,
        )
        busy = (forward + backward).reshape(number, self.runs, self.rows).sum(axis=1)
        found: Floats = seconds + UNEVEN * self.pipeline.micro_batches * np.sqrt((busy**2).mean(axis=1))
        return found


def _fitted(plan: Plan, request: Request) -> Plan | None:
    """The plan with as much ZeRO and recomputation as its memory asks for; None where all is not enough."""
    seats = seats_of(plan, request.tables)
    while True:
        _, worst = peaks_of(plan, seats, request.tables)
        if worst is None:
            return plan
        saved = _saved(plan.pipelines[worst.pipeline].stages[worst.stage], request.max_zero)
        if saved is None:
            return None
        plan = _with_savings(plan, worst.pipeline, worst.stage, saved)


def _saved(stage: Stage, max_zero: int) -> Stage | None:
    """The stage with the next thing that saves memory, the cheaper one first; None where it does all."""
    if stage.zero < max_zero and len(stage.replicas) > 1:
        return replace(stage, zero=max_zero)
    return None if stage.recompute else replace(stage, recompute=True)


def _with_savings(plan: Plan, p: int, row: int, saved: Stage) -> Plan:
    """All runs of that set of devices as ``saved``, and those of sets like it, so that they stay alike."""
    like = plan.pipelines[p]
    rows = num_rows(plan.schedule, like)

    def changed(pipeline: Pipeline) -> Pipeline:
        if _layers(pipeline) != _layers(like) or pipeline.micro_batch != like.micro_batch:
            return pipeline
        stages = (
            replace(stage, recompute=saved.recompute, zero=saved.zero) if s % rows == row else stage
            for s, stage in enumerate(pipeline.stages)
        )
        return replace(pipeline, stages=tuple(stages))

    return replace(plan, pipelines=tuple(changed(pipeline) for pipeline in plan.pipelines))


def _layers(pipeline: Pipeline) -> list[tuple[int, int]]:
    return [stage.layers for stage in pipeline.stages]
