"""Every pipeline that some devices can form for some samples, without those that provably cost too much.

What is left out, each with a proof:

1. *A lower bound reaches the cutoff.* The bounds of ``exhaustive.floors`` and ``exhaustive.tails`` are lower
   bounds of the iteration time of every plan that holds the pipeline, and so is its simulation alone:
   messages are priced there as if no other pipeline sent at once, more senders are never faster
   (``cost.links``), and clocks grow with durations. What an end does itself to receive counts as part of its
   action instead of the message, which makes no chain shorter.
2. *Recomputation where the stage fits without it.* It lengthens backwards, changes nothing else, and clocks
   grow with durations.
3. *Images*: plans that differ by a swap of interchangeable devices have one price (``exhaustive.pools``),
   and so have those that differ by orders of rows that no message notices (``exhaustive.grow``).
"""

from collections.abc import Callable
from dataclasses import dataclass

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, ScheduleKind, Stage
from arachne_runtime.units import Seconds

from ..cost.actors import Seat, actors_of, crossings, crowd_of
from ..cost.simulate import Stages, play
from ..cost.sync import commit_seconds
from .ends import EarlyEnds, Part
from .floors import Floors
from .grow import Hops, Search, Spans
from .lines import Lines
from .pools import Vector
from .tails import Tails


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline on pools: blocks, replicas, recomputation and micro-batches, and its bound."""

    micro_batch: int
    micro_batches: int
    stages: Spans
    ready_s: tuple[Seconds, ...]
    """When each stage is done if the pipeline has every link to itself."""
    bound_s: Seconds

    def pipeline(self, lines: Lines, used: list[int]) -> Pipeline:
        """On concrete devices: the next free ones of each pool; ``used`` is moved on."""
        return Pipeline(
            micro_batches=self.micro_batches,
            micro_batch=self.micro_batch,
            stages=tuple(
                Stage(layers=(start, stop), recompute=recompute, replicas=lines.replicas(line, used))
                for start, stop, recompute, line in self.stages
            ),
        )

    @property
    def frame(self) -> tuple[object, ...]:
        """What its reductions depend on: cuts and devices."""
        return tuple(
            (start, stop, tuple(sorted((p, tp) for p, tp, _ in line.units)))
            for start, stop, _, line in self.stages
        )


@dataclass(frozen=True, slots=True)
class Family:
    """Shapes of the same cuts and devices."""

    frame: int
    """Equal for families of the same cuts and devices."""
    shapes: tuple[Shape, ...]
    """Cheapest bound first."""
    ready_s: tuple[Seconds, ...]
    """The least of any of them, by stage."""
    parts: tuple[Part, ...]
    """Its stages, as far as rings have to do with them."""
    update_s: Seconds
    """The slowest optimizer step."""

    @property
    def bound_s(self) -> Seconds:
        """The least of any."""
        return self.shapes[0].bound_s


class Space:
    """All pipelines of one request under one schedule."""

    def __init__(
        self, lines: Lines, kind: ScheduleKind, most_micro_batch: int, check: Callable[[], None]
    ) -> None:
        self.lines = lines
        self.tables = lines.tables
        self.kind = kind
        self.most_micro_batch = most_micro_batch
        self.num_blocks = lines.num_blocks
        self.check = check
        self.hops = Hops(lines)
        self.early = EarlyEnds(lines)
        self.considered = 0
        self._frames: dict[tuple[object, ...], int] = {}
        self._actors: dict[Spans, tuple[Stages, Seconds]] = {}

    def families(
        self, vector: Vector, samples: int, cutoff_s: Seconds, floors: Floors, tails: Tails
    ) -> list[Family]:
        """Pipelines of exactly ``vector`` for ``samples`` with bounds below ``cutoff_s``, cheapest first."""
        members: dict[int, list[Shape]] = {}
        for shape in self._shapes(vector, samples, cutoff_s, floors, tails):
            frame = self._frames.setdefault(shape.frame, len(self._frames))
            members.setdefault(frame, []).append(shape)
        return [
            Family(
                frame=frame,
                shapes=tuple(shapes),
                ready_s=tuple(map(min, zip(*(s.ready_s for s in shapes), strict=True))),
                parts=self.early.parts(shapes[0].stages),
                update_s=self.early.update_s(shapes[0].stages),
            )
            for frame, shapes in members.items()
        ]

    def _shapes(
        self, vector: Vector, samples: int, cutoff_s: Seconds, floors: Floors, tails: Tails
    ) -> list[Shape]:
        found: list[Shape] = []
        for micro_batch in range(1, self.most_micro_batch + 1):
            if samples % micro_batch == 0:
                count = samples // micro_batch
                for depth in range(1, min(sum(vector), self.num_blocks) + 1):
                    search = Search(self.hops, floors, tails, depth, micro_batch, count, cutoff_s)
                    shapes = (self._shape(stages, micro_batch, count, tails) for stages in search.all(vector))
                    found += (shape for shape in shapes if shape.bound_s < cutoff_s)
        return sorted(found, key=lambda shape: shape.bound_s)

    def _shape(self, stages: Spans, micro_batch: int, micro_batches: int, tails: Tails) -> Shape:
        """The pipeline alone, played."""
        self.check()
        self.considered += 1
        actors, commit = self._alone(stages)
        ready = tuple(map(max, play(self.kind, micro_batches, actors).ready_s))
        done = max(
            at + tails.grid(line)[start][stop]
            for at, (start, stop, _, line) in zip(ready, stages, strict=True)
        )
        return Shape(micro_batch, micro_batches, stages, ready, done + commit + self.tables.profile.step_s)

    def _alone(self, stages: Spans) -> tuple[Stages, Seconds]:
        """What is played, and the world's all-reduce: the same for every number of micro-batches."""
        found = self._actors.get(stages)
        if found is None:
            micro_batch = sum(share for _, _, share in stages[0][3].units)
            bare = Shape(micro_batch, 1, stages, (), 0.0)
            pipeline = bare.pipeline(self.lines, [0] * len(self.lines.pools))
            seats = tuple(
                tuple(Seat(r, self.tables.fleet.node(node_of(r.devices[0]))) for r in stage.replicas)
                for stage in pipeline.stages
            )
            crossed = crossings(pipeline, seats, self.tables)
            actors = actors_of(pipeline, seats, crossed, crowd_of([crossed]), self.tables)
            found = self._actors[stages] = actors, commit_seconds((seats,), self.tables)
        return found
