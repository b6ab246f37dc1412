"""All columns of one vector of devices in arrays: bounds first, records for the few that are still wanted."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Seconds

from ...cost.actors import WEIGHTS_OF_BACKWARD
from ...cost.memory import in_flight
from ...cuts import Table
from ..counts import Counts, compositions
from .columns import ALONE, Array, Beside, Column, Columns, Shape


def sheet_of(
    columns: Columns, vector: Counts, kind: ScheduleKind, limit_s: Seconds, *, alone: bool
) -> "Sheet":
    """Columns on all devices of ``vector`` that may end before ``limit_s``, soonest first.

    ``alone``: those that take the whole global batch, else those that stand beside at least one other.
    """
    by_depth: dict[int, list[tuple[Counts, ...]]] = defaultdict(list)
    for stages in compositions(vector, columns.stage_tables.num_blocks):
        by_depth[len(stages)].append(stages)
    beside = ALONE if alone else columns.beside_any(vector)
    found: list[_Rows] = []
    for depth, shapes in sorted(by_depth.items()):
        for micro_batch in range(1, columns.request.most_micro_batch + 1):
            fitting = [s for s in shapes if max(map(sum, s)) <= micro_batch]
            columns.check()
            if fitting:
                batch = _Batch(columns, kind, depth, fitting, micro_batch, beside)
                for count in columns.counts(micro_batch, alone):
                    columns.check()
                    rows = batch.rows(count, limit_s)
                    if not len(rows.samples):
                        break  # more micro-batches never end sooner
                    found.append(rows)
    return Sheet(found)


class _Batch:
    """All shapes of one depth at one micro-batch: arrays over (composition, cut, stage)."""

    def __init__(
        self,
        columns: Columns,
        kind: ScheduleKind,
        depth: int,
        shapes: list[tuple[Counts, ...]],
        micro_batch: int,
        beside: Beside,
    ) -> None:
        self.of = columns
        self.kind = kind
        self.depth = depth
        self.shapes = shapes
        self.micro_batch = micro_batch
        self.beside = beside
        num_blocks = columns.stage_tables.num_blocks
        self.cuts = np.array([(0, *c, num_blocks) for c in combinations(range(1, num_blocks), depth - 1)])
        numbers: dict[Counts, int] = {}
        self.stage_CS = np.array([[numbers.setdefault(s, len(numbers)) for s in shape] for shape in shapes])
        self.stages = list(numbers)
        mixes = [columns.mix(s) for s in self.stages]
        self.mixes = sorted(set(mixes))
        at = {mix: i for i, mix in enumerate(self.mixes)}
        self.mix_CS = np.array([at[mix] for mix in mixes])[self.stage_CS]
        fast = [columns.fastest(mix, micro_batch) for mix in self.mixes]
        self.forward = self._gather([f for f, _ in fast])
        self.backward = self._gather([b for _, b in fast])
        self.hop = self._gather_boundaries(columns.hops)
        self.ahead = self._gather_boundaries(columns.busy)
        self.back = self._gather_boundaries(lambda a, b, n: columns.busy(b, a, n))
        self.update = self._gather([columns.updates(mix) for mix in self.mixes]).max(axis=2)
        self.tail = self._tails()
        arrive = np.cumsum(self.forward[:, :, :-1] + self.hop, axis=2)
        self.fill = np.concatenate([np.zeros((*arrive.shape[:2], 1)), arrive], axis=2)

    def rows(self, micro_batches: int, limit_s: Seconds) -> "_Rows":
        """Those with so many micro-batches that may end before the limit."""
        ready, waits = self._ready(micro_batches)
        bound = (ready + self.tail).max(axis=2)
        c, k = np.nonzero(bound < limit_s)
        return _Rows(
            batch=self,
            micro_batches=micro_batches,
            composition=c,
            cut=k,
            samples=np.full(len(c), self.micro_batch * micro_batches),
            bound=bound[c, k],
            ready=ready[c, k],
            besides=self._besides(micro_batches)[c, k],
            waits=waits[c, k],
        )

    def _ready(self, count: int) -> tuple[Array, Array]:
        """When each stage is ready, and ``Column.waits_s``: the longest of some chains, last stage to first.

        The replica that sets the pace needs t for a micro-batch and has h in flight; a *trip* leads from the
        end of its forward through the stages behind it to the start of the same micro-batch's backward. The
        chains: all its actions; the first forward, its trip, all backwards and the forwards between them; the
        first forward, its trip, one backward and one forward by turns, the last one's trip and backward; one
        micro-batch more than the stage behind. Messages keep it busy in between, unless a trip has them.
        """
        ready, waits = np.empty_like(self.fill), np.empty_like(self.fill)
        trip = np.zeros(self.fill.shape[:2])
        split = self.kind is ScheduleKind.ZERO_BUBBLE  # gradients go on before those of the weights
        for s in range(self.depth - 1, -1, -1):
            held = in_flight(self.kind, s, self.depth, count)
            pace, fill, before, behind = (
                self._pace(s, held),
                self.fill[:, :, s],
                self.before(s),
                self.behind(s),
            )
            if s < self.depth - 1:
                back = self.backward[:, :, s + 1] * (1 - WEIGHTS_OF_BACKWARD if split else 1)
                trip = trip + self.forward[:, :, s + 1] + back + 2 * self.hop[:, :, s]
            work = count * pace + 2 * (count - 1) * before + 2 * count * behind
            once = trip + (held - 1) * self.backward[:, :, s] + (2 * count - held - 1) * (before + behind)
            if self.kind is ScheduleKind.ONE_F_ONE_B and count > held:
                turns = 2 * (count - held) * before + 2 * (count - held - 1) * behind
                once = np.maximum(once, 2 * trip + turns)
            waits[:, :, s] = fill + once + before
            ready[:, :, s] = fill + np.maximum(work, once + (count - held + 1) * pace)
            if s < self.depth - 1 and not split:
                more = ready[:, :, s + 1] + self.hop[:, :, s] + self.backward[:, :, s]
                ready[:, :, s] = np.maximum(ready[:, :, s], more)
        ready[:, :, 1:] += self.back  # the last gradient is sent
        return ready, waits

    def _besides(self, count: int) -> Array:
        found = self.fill.copy()
        found[:, :, 1:] += (2 * count - 1) * self.back
        found[:, :, :-1] += 2 * count * self.ahead
        return found

    def _pace(self, s: int, held: int) -> Array:
        times = np.stack([self.of.stage_tables.stage(mix, self.micro_batch, held) for mix in self.mixes])
        found: Array = times[self.mix_CS[:, s, None], self.cuts[None, :, s], self.cuts[None, :, s + 1]]
        return found

    def before(self, s: int) -> Array:
        """Least seconds that one way over the boundary before stage ``s`` keeps it busy."""
        found: Array = self.back[:, :, s - 1] if s else np.zeros(self.fill.shape[:2])
        return found

    def behind(self, s: int) -> Array:
        """The same over the boundary behind it."""
        found: Array = self.ahead[:, :, s] if s < self.depth - 1 else np.zeros(self.fill.shape[:2])
        return found

    def _gather(self, tables: Sequence[Table]) -> Array:
        stacked = np.stack(tables)
        found: Array = stacked[self.mix_CS[:, None, :], self.cuts[None, :, :-1], self.cuts[None, :, 1:]]
        return found

    def _gather_boundaries(self, of: Callable[[Counts, Counts, int], Array]) -> Array:
        """Each pair of neighbours is asked for once."""
        found = np.zeros((len(self.shapes), len(self.cuts), self.depth - 1))
        for s in range(self.depth - 1):
            pairs, which = np.unique(
                self.stage_CS[:, s] * len(self.stages) + self.stage_CS[:, s + 1], return_inverse=True
            )
            both = (divmod(pair, len(self.stages)) for pair in pairs.tolist())
            table = np.stack([of(self.stages[a], self.stages[b], self.micro_batch) for a, b in both])
            found[:, :, s] = table[which[:, None], self.cuts[None, :, s + 1]]
        return found

    def _tails(self) -> Array:
        """After a stage is done: its own reductions, the slowest update of the pipeline, fixed seconds."""
        columns = self.of
        model = columns.request.model
        own = np.asarray(columns.request.tables.own_parameters, float)
        self.size_KS = (own[self.cuts[:, 1:]] - own[self.cuts[:, :-1]]) * model.bytes_per_parameter.gradient
        rings = np.array([columns.ring(stage) for stage in self.stages])[self.stage_CS]
        self.width_CS, self.tp_CS, self.per_byte_CS = rings.transpose(2, 0, 1)
        width, tp, per_byte = rings.transpose(2, 0, 1)[:, :, None, :]
        reduced = columns.reduced(self.size_KS, width, tp, per_byte, self.beside)
        return np.asarray(reduced + self.update[:, :, None] + columns.request.profile.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Columns of one batch and one number of micro-batches, one in each row of the arrays."""

    batch: _Batch
    micro_batches: int
    composition: NDArray[np.intp]
    cut: NDArray[np.intp]
    samples: NDArray[np.int64]
    bound: Array
    ready: Array
    besides: Array
    waits: Array

    def reduced(self, beside: Beside) -> Array:
        """Bounds with just these pipelines beside them."""
        batch, c = self.batch, self.composition
        width, tp, per_byte = batch.width_CS[c], batch.tp_CS[c], batch.per_byte_CS[c]
        tails = batch.of.reduced(batch.size_KS[self.cut], width, tp, per_byte, beside)
        step_s = batch.of.request.profile.step_s
        found: Array = (self.ready + tails).max(axis=1) + batch.update[c, self.cut] + step_s
        return found

    def column(self, i: int) -> Column:
        """As a record."""
        batch, c, k = self.batch, self.composition[i], self.cut[i]
        return Column(
            Shape(batch.shapes[c], tuple(batch.cuts[k].tolist())),
            batch.micro_batch,
            self.micro_batches,
            tuple(self.ready[i].tolist()),
            tuple(self.besides[i].tolist()),
            tuple(self.waits[i].tolist()),
            float(batch.update[c, k]),
            float(self.bound[i]),
        )


class Sheet:
    """Columns of one vector of devices in arrays; few of them ever become records."""

    def __init__(self, rows: list[_Rows]) -> None:
        self.rows = rows
        self.samples = np.concatenate([r.samples for r in rows] or [np.zeros(0, np.int64)])
        self.bound = np.concatenate([r.bound for r in rows] or [np.zeros(0)])
        self._first = np.cumsum([0, *(len(r.samples) for r in rows)])
        self._known: dict[int, Column] = {}
        self._bounds: dict[Beside, Array] = {ALONE: self.bound}

    def bounds(self, beside: Beside) -> Array:
        """Of each column with just these pipelines beside it."""
        found = self._bounds.get(beside)
        if found is None:
            found = np.concatenate([r.reduced(beside) for r in self.rows] or [np.zeros(0)])
            self._bounds[beside] = found
        return found

    def column(self, i: int) -> Column:
        """As a record, always the same one."""
        found = self._known.get(i)
        if found is None:
            at = int(np.searchsorted(self._first, i, side="right")) - 1
            found = self._known[i] = self.rows[at].column(i - int(self._first[at]))
        return found
