"""Complete many templates at once: exact cuts within memory, recomputation where it must be, and a time.

A completed template is a *column*, in the word of column generation: what ``planner.search.pack`` chooses
from. Its time is a closed form; every plan that the search answers with is simulated.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import ScheduleKind

from ..cost import in_flight
from ..request import Request
from .batch import Templates
from .closed_form import Messages, closed_form, zero_bubble_s
from .min_max import Stages, min_max_cuts
from .network import Network
from .rows import Rows
from .supply import Supply

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """K completed templates."""

    templates: Templates
    bounds: Ints
    """``[K, S + 1]``"""
    again: Bools
    """``[K, S]``: whether the stage recomputes."""
    slowest_s: Floats
    """``[K]``: seconds that one micro-batch more takes."""
    pipeline_s: Floats
    """``[K]``: from the first forward to the last backward."""
    after_s: Floats
    """``[K]``: what follows: reductions that nothing hides, the optimizer, fixed seconds."""
    by_stage: Bools
    """``[K]``: whether replicas of a stage share nodes, rather than stages of a pipeline."""
    price_per_hour: Floats
    """``[K]``: of all devices of all copies."""

    def __len__(self) -> int:
        return len(self.slowest_s)

    @property
    def seconds(self) -> Floats:
        """Of an iteration."""
        return self.pipeline_s + self.after_s

    def take(self, index: Ints | Bools) -> "Columns":
        """Some of them, in that order."""
        rest = (getattr(self, field.name)[index] for field in fields(self)[1:])
        return Columns(self.templates.take(index), *rest)

    @classmethod
    def joined(cls, parts: list["Columns"]) -> "Columns":
        """All of them, one behind the other."""
        templates = Templates.joined([part.templates for part in parts])
        size = templates.pool.shape[1]
        bounds = [np.pad(p.bounds, ((0, 0), (0, size + 1 - p.bounds.shape[1])), mode="edge") for p in parts]
        again = [np.pad(p.again, ((0, 0), (0, size - p.again.shape[1]))) for p in parts]
        rest = (np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)[3:])
        return cls(templates, np.concatenate(bounds), np.concatenate(again), *rest)


class Completion:
    """Completes templates of one request under one schedule."""

    def __init__(self, request: Request, supply: Supply, kind: ScheduleKind, runs: int = 1) -> None:
        self.runs = runs
        """Runs of blocks that ``interleave`` will make of each stage; their sum is cut here."""
        self.request = request
        self.supply = supply
        self.kind = kind
        self.network = Network(request, supply)
        self.rows = Rows(request, supply, self.network)
        self._updates: dict[tuple[int, int], Floats] = {}

    def columns(self, templates: Templates) -> Columns | None:
        """Those templates that fit, with their cuts and times, order kept; None where none was measured."""
        templates, row = self._measured(templates)
        if not len(templates):
            return None
        counts = self.counts(templates)
        held = self._held(templates.depth, counts, row.shape[1])
        reach, stops, stops_again = self._reaches(np.maximum(row, 0), held)
        forward, backward = self.rows.seconds
        cuts = min_max_cuts(
            Stages(
                row=np.maximum(row, 0),
                reach=reach,
                depth=templates.depth,
                times=forward + backward,
                again=2 * forward + backward,
                stops=stops,
                stops_again=stops_again,
            )
        )
        good = np.isfinite(cuts.slowest_s)
        again = np.take_along_axis(stops[reach[good]], cuts.bounds[good][:, :-1, None], axis=2)[:, :, 0]
        return self._timed(
            templates.take(good),
            np.maximum(row[good], 0),
            cuts.bounds[good],
            again < cuts.bounds[good][:, 1:],
            counts[good],
        )

    def counts(self, templates: Templates) -> Ints:
        """Micro-batches of the pipeline that takes most."""
        samples = templates.copies * templates.micro_batch
        return np.asarray(-(-self.request.global_batch // samples), np.int64)

    def _measured(self, templates: Templates) -> tuple[Templates, Ints]:
        """Those whose shares were measured, and the row of each stage."""
        t = templates
        row = self.rows.of(t.pool, t.tp, largest_shares(t), t.width, t.tile)
        good = ((row >= 0) == (t.width > 0)).all(axis=1)
        return t.take(good), row[good]

    def _held(self, depth: Ints, counts: Ints, size: int) -> Ints:
        """``[K, S]``: micro-batches in flight; 1 where no stage is."""
        stage = np.broadcast_to(np.arange(size), (len(depth), size))
        code = (depth[:, None] * 4096 + stage) * 2**20 + np.minimum(counts, 2**20 - 1)[:, None]
        code = np.where(stage < depth[:, None], code, -1)
        known, inverse = np.unique(code, return_inverse=True)
        found = np.array([self._in_flight(int(c)) for c in known], np.int64)
        return np.asarray(found[inverse.ravel()].reshape(code.shape), np.int64)

    def _in_flight(self, code: int) -> int:
        if code < 0:
            return 1
        rest, count = divmod(code, 2**20)
        depth, stage = divmod(rest, 4096)
        return self.in_flight(stage, depth, count)

    def in_flight(self, stage: int, depth: int, count: int) -> int:
        """Micro-batches whose activations a stage holds; of several runs, as much as all of them hold.

        Several runs: ``schedule.row_actions``, a round of micro-batches for all runs but one ahead.
        """
        if self.runs == 1:
            return in_flight(self.kind, stage, depth, count)
        longest = -(-count // max(1, count // depth))
        ahead = (self.runs - 1) * longest + 2 * (depth - 1 - stage) + 1
        return -(-min(count * self.runs, ahead) // self.runs)

    def _reaches(self, row: Ints, held: Ints) -> tuple[Ints, Ints, Ints]:
        known, inverse = np.unique(row * 2**20 + held, return_inverse=True)
        rows, flights = np.divmod(known, 2**20)
        different, first = np.unique(rows, return_index=True)
        parts = zip(different.tolist(), np.split(flights, first[1:]), strict=True)
        pairs = [self.rows.reach(r, part) for r, part in parts]
        plain, again = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        return np.asarray(inverse.reshape(row.shape), np.int64), plain, again

    def _timed(self, templates: Templates, row: Ints, bounds: Ints, again: Bools, counts: Ints) -> Columns:
        forward, backward = (_between(prefix, row, bounds) for prefix in self.rows.seconds)
        backward = backward + np.where(again, forward, 0)
        after = self._update(templates, bounds) + self._ties(templates, bounds)
        after = after + self.request.profile.step_s
        best: tuple[Floats, ...] | None = None
        for by_stage in (True, False):
            messages = self._messages(templates, bounds, by_stage).times(self.runs)
            sync = self._sync(templates, bounds, by_stage)
            found = closed_form(forward, backward, messages, sync, counts)
            if self.kind is ScheduleKind.ZERO_BUBBLE:
                found = (
                    found[0],
                    zero_bubble_s(forward, backward, messages, counts, templates.depth),
                    found[2],
                )
            if self.runs > 1:
                busy = counts * found[0]
                found = found[0], busy + (found[1] - busy) / self.runs, found[2]
            chosen = np.full(len(templates), by_stage)
            if best is None:
                best = *found, chosen
            else:
                better = found[1] + found[2] < best[1] + best[2]
                best = tuple(
                    np.where(better, new, old) for new, old in zip((*found, chosen), best, strict=True)
                )
        assert best is not None
        prices = np.array([pool.price_per_hour for pool in self.supply.pools])
        per_hour = (prices[templates.pool] * templates.tp * templates.width).sum(axis=1) * templates.copies
        return Columns(
            templates, bounds, again, best[0], best[1], best[2] + after, best[3].astype(bool), per_hour
        )

    def _update(self, templates: Templates, bounds: Ints) -> Floats:
        """The slowest optimizer step."""
        slowest = np.zeros(len(templates))
        for pool, tp in sorted(
            set(zip(templates.pool.ravel().tolist(), templates.tp.ravel().tolist(), strict=True))
        ):
            prefix = self._update_prefix(pool, tp)
            here = (templates.pool == pool) & (templates.tp == tp) & (templates.width > 0)
            took = np.where(here, prefix[bounds[:, 1:]] - prefix[bounds[:, :-1]], 0)
            slowest = np.maximum(slowest, took.max(axis=1))
        return slowest

    def _update_prefix(self, pool: int, tp: int) -> Floats:
        key = pool, tp
        if key not in self._updates:
            device, ends = self.supply.pools[pool].device, range(self.rows.num_blocks + 1)
            known = tp in self.supply.pools[pool].degrees
            tables = self.request.tables
            self._updates[key] = np.array(
                [tables.update_seconds(0, j, device, tp) if known else 0.0 for j in ends]
            )
        return self._updates[key]

    def _messages(self, t: Templates, bounds: Ints, by_stage: bool) -> Messages:
        """What crosses the boundaries, as ``planner.cost.actors`` counts it."""
        a, b = slice(None, -1), slice(1, None)
        share, there = largest_shares(t), t.width[:, b] > 0
        outputs = self.request.tables.output_bytes
        size = self.request.tables.at(outputs, np.maximum(bounds[:, 1:-1] - 1, 0))
        size = np.where(there, size * np.maximum(share[:, a], share[:, b]), 0.0)
        inside, seats_a, seats_b = self._neighbours(t, by_stage)
        streams = np.minimum(t.tp[:, a], t.tp[:, b])
        down, up = (
            fixed + each * size / streams + self._gather(t.pool[:, end], t.tp[:, end], size)
            for (fixed, each), end in (
                (self.network.lines(t.pool[:, a], t.pool[:, b], inside, seats_a * streams), b),
                (self.network.lines(t.pool[:, a], t.pool[:, b], inside, seats_b * streams), a),
            )
        )
        down, up = np.where(there, down, 0.0), np.where(there, up, 0.0)
        first, last = (
            [np.where(there, busy, 0.0) for busy in self._busy(t.pool[:, end], size, down, up)]
            for end in (a, b)
        )
        return Messages(
            down=np.maximum(0.0, down - last[0]),
            up=np.maximum(0.0, up - first[1]),
            forward=np.pad(last[0], ((0, 0), (1, 0))),
            backward=np.pad(first[1], ((0, 0), (0, 1))),
            tail=np.pad(first[0], ((0, 0), (0, 1))) + np.pad(last[1], ((0, 0), (1, 0))),
        )

    def _gather(self, pool: Ints, tp: Ints, size: Floats) -> Floats:
        """Ranks of a receiving group hand each other their parts."""
        fixed, each = self.network.lines(pool, pool, np.ones_like(pool, bool), np.ones_like(pool))
        return (tp - 1) * (fixed + each * size / tp)

    def _busy(self, pool: Ints, size: Floats, down: Floats, up: Floats) -> tuple[Floats, Floats]:
        """Computing that a message down and one up cost a device of these pools."""
        types = [self.request.fleet.node(p.nodes[0][0]).device for p in self.supply.pools]
        fixed = np.array([d.hop_busy_s for d in types])[pool]
        each = np.array([d.hop_busy_s_per_byte for d in types])[pool]
        waits = np.array([not d.hop_overlaps for d in types])[pool]
        own = fixed + each * size
        return own + np.where(waits, down, 0.0), own + np.where(waits, up, 0.0)

    def _neighbours(self, t: Templates, by_stage: bool) -> tuple[Bools, Ints, Ints]:
        """Whether two neighbour stages share a node, and replicas of either's node that send at once."""
        node = np.array([pool.node_size for pool in self.supply.pools])[t.pool]
        room = np.maximum(1, node // t.tp)
        side_by_side = t.copies[:, None] if by_stage else np.ones_like(t.copies[:, None])
        devices = t.tp * t.width * side_by_side
        start = np.zeros_like(devices)
        for pool in range(len(self.supply.pools)):
            own = np.where(t.pool == pool, devices, 0)
            start = np.where(t.pool == pool, np.cumsum(own, axis=1) - own, start)
        inside = t.pool[:, :-1] == t.pool[:, 1:]
        inside &= start[:, :-1] // node[:, :-1] == (start + devices - 1)[:, 1:] // node[:, 1:]
        if by_stage:
            seats = np.minimum(room, t.width * t.copies[:, None])
            return inside, seats[:, :-1], seats[:, 1:]
        each = np.maximum(1, _devices_of_own_pool(t))
        inside &= ((each % node == 0) | (node % each == 0))[:, :-1]
        seats = np.minimum(room, t.width * np.minimum(np.maximum(1, node // each), t.copies[:, None]))
        return inside, seats[:, :-1], seats[:, 1:]

    def _ties(self, t: Templates, bounds: Ints) -> Floats:
        """``[K]``: seconds to sum what stages share, behind all else: embedding and head, usually."""
        found = np.zeros(len(t))
        for tie in self.request.tables.ties:
            holds = [(bounds[:, :-1] <= block) & (block < bounds[:, 1:]) for block in tie.blocks]
            holder = np.logical_or.reduce(holds) & (t.width > 0)
            members = (np.where(holder, t.width, 0).sum(axis=1) * t.copies)[:, None]
            most_tp = np.where(holder, t.tp, 1).max(axis=1, keepdims=True)
            node = np.array([pool.node_size for pool in self.supply.pools])[t.pool]
            inside = (holder.sum(axis=1, keepdims=True) == 1) & (members * t.tp <= node)
            members, most_tp = (np.broadcast_to(a, t.pool.shape) for a in (members, most_tp))
            each = np.where(holder, self.network.rings(t.pool, members, inside, most_tp), 0.0).max(axis=1)
            size = tie.parameters * self.request.model.bytes_per_parameter.gradient
            found += each * size / np.where(holder, t.tp, t.tp.max(initial=1)).min(axis=1)
        return found

    def _sync(self, templates: Templates, bounds: Ints, by_stage: bool) -> Floats:
        """``[K, S]``: seconds of the reduction of each stage's gradients."""
        t = templates
        own = np.asarray(self.request.tables.own_parameters, float)
        size = (own[bounds[:, 1:]] - own[bounds[:, :-1]]) * self.request.model.bytes_per_parameter.gradient
        members = t.width * t.copies[:, None]
        node = np.array([pool.node_size for pool in self.supply.pools])[t.pool]
        room = np.maximum(1, node // t.tp)
        if by_stage:
            inside = members <= room
            rings = np.ones_like(members)
        else:
            stages = _stages_of_own_pool(t)
            inside = (t.copies[:, None] == 1) & (members <= room)
            rings = np.minimum(stages, np.maximum(1, room // np.maximum(1, t.width)))
        each = self.network.rings(t.pool, np.maximum(members, 1), inside, rings * t.tp)
        return np.where(t.width > 0, each * size / t.tp, 0.0)


def largest_shares(t: Templates) -> Ints:
    """``[K, S]``: samples of the replica of each stage that takes most."""
    return np.asarray(-(-t.micro_batch[:, None] // np.maximum(t.width, 1)), np.int64)


def _between(prefix: Floats, row: Ints, bounds: Ints) -> Floats:
    return prefix[row, bounds[:, 1:]] - prefix[row, bounds[:, :-1]]


def _stages_of_own_pool(t: Templates) -> Ints:
    found = np.zeros_like(t.pool)
    for pool in np.unique(t.pool):
        here = (t.pool == pool) & (t.width > 0)
        found = np.where(here, here.sum(axis=1, keepdims=True), found)
    return found


def _devices_of_own_pool(t: Templates) -> Ints:
    """Devices of one copy in the pool of each stage."""
    found = np.zeros_like(t.pool)
    for pool in np.unique(t.pool):
        here = (t.pool == pool) & (t.width > 0)
        found = np.where(here, np.where(here, t.width * t.tp, 0).sum(axis=1, keepdims=True), found)
    return found
