"""From devices in stages to whole plans: micro-batch sizes, cuts, shares, recomputation and exact counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.shares import largest_remainder, water_fill_table
from arachne_runtime.units import Seconds

from ..cost.memory import in_flight
from ..cuts import Cut, trade_off_cuts
from ..request import Request
from .deal import pack_samples
from .place import PipelineSeats, Placement
from .stage_tables import Hardware, Mix, StageTables

Line = tuple[tuple[Hardware, ...], ...]
"""The hardware of every replica of every stage of a pipeline: all that its cut and shares depend on."""

MOST_TRADE_OFFS = 4
"""Cuts kept for a pipeline and micro-batch, from the fastest slowest stage on; more never won in trials."""


@dataclass(frozen=True, slots=True)
class Filling:
    """Everything that a pipeline needs beside devices and a count."""

    micro_batch: int
    bounds: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]
    """By stage and replica."""
    recompute: tuple[bool, ...]

    def pipeline(self, seats: PipelineSeats, micro_batches: int) -> Pipeline:
        """The pipeline on concrete devices."""
        return Pipeline(
            micro_batches=micro_batches,
            micro_batch=self.micro_batch,
            stages=tuple(
                Stage(
                    layers=(self.bounds[s], self.bounds[s + 1]),
                    recompute=self.recompute[s],
                    replicas=tuple(
                        Replica(devices=seat, share=n) for seat, n in zip(stage, self.shares[s], strict=True)
                    ),
                )
                for s, stage in enumerate(seats)
            ),
        )


@dataclass(frozen=True, slots=True)
class Offerings:
    """Best closed-form time of one kind of pipeline for every number of samples, and how it is reached."""

    seconds: NDArray[np.float64]
    """By samples, 0 to the global batch; ``inf`` where no micro-batch divides."""
    micro_batch: NDArray[np.int64]
    cuts: dict[int, tuple[Cut, ...]]
    """By micro-batch."""


class Completer:
    """Completes placements of one request; what pipelines have in common is worked out once."""

    def __init__(self, request: Request, kind: ScheduleKind) -> None:
        self.request = request
        self.kind = kind
        self.stage_tables = StageTables(request, floors=False)
        self._cuts: dict[tuple[Line, int, int], tuple[Cut, ...]] = {}
        self._fillings: dict[tuple[Line, int, tuple[int, ...], int], Filling | None] = {}
        self._offerings: dict[tuple[Line, tuple[int, ...], int], Offerings] = {}

    def line(self, seats: PipelineSeats) -> Line:
        """The hardware of a pipeline."""
        return tuple(
            tuple(self.stage_tables.hardware(seat[0], len(seat)) for seat in stage) for stage in seats
        )

    def micro_batches(self, line: Line) -> list[int]:
        """Sizes worth a try: powers of two, multiples of widths, sums of shares that suit unlike replicas."""
        widest = max(map(len, line))
        most = min(
            self.request.most_micro_batch,
            *(sum(self.stage_tables.most_samples(h) for h in stage) for stage in line),
        )
        sizes = {n << k for n in (1, *map(len, line)) for k in range(12)}
        for stage in {tuple(sorted(stage)) for stage in line if len(set(stage)) > 1}:
            sizes |= {
                sum(max(1, round(m * r)) for r in self._relative_speeds(stage)) for m in (1, 2, 3, 4, 6, 8)
            }
        return sorted(n for n in sizes if widest <= n <= most)

    def _relative_speeds(self, stage: Sequence[Hardware]) -> list[float]:
        """How many times as fast as the slowest; nothing where a share of any was not measured."""
        tables = self.stage_tables
        paces = [tables.whole_model_s(h, tables.least_samples(h)) for h in stage]
        return [max(paces) / pace for pace in paces] if max(paces) < float("inf") else []

    def cuts(self, line: Line, micro_batch: int, micro_batches: int) -> tuple[Cut, ...]:
        """Useful cuts, the fastest slowest stage first, for a pipeline of so many micro-batches."""
        if micro_batch < max(map(len, line)):
            return ()
        held = tuple(in_flight(self.kind, s, len(line), micro_batches) for s in range(len(line)))
        key = line, micro_batch, held[0]
        found = self._cuts.get(key)
        if found is None:
            mixes = [_mix(stage) for stage in line]
            tables = [
                self.stage_tables.stage(mix, micro_batch, n) for mix, n in zip(mixes, held, strict=True)
            ]
            found = self._cuts[key] = tuple(trade_off_cuts(tables))[::-1][:MOST_TRADE_OFFS]
        return found

    def filling(
        self, line: Line, micro_batch: int, bounds: tuple[int, ...], micro_batches: int
    ) -> Filling | None:
        """Shares and recomputation of every stage for a given cut; None where a stage does not fit."""
        key = line, micro_batch, bounds, micro_batches
        if key not in self._fillings:
            self._fillings[key] = self._fill(line, micro_batch, bounds, micro_batches)
        return self._fillings[key]

    def _fill(
        self, line: Line, micro_batch: int, bounds: tuple[int, ...], micro_batches: int
    ) -> Filling | None:
        shares, recompute = [], []
        for s, stage in enumerate(line):
            held = in_flight(self.kind, s, len(line), micro_batches)
            options = [
                (slowest, again, found)
                for again in (False, True)
                for slowest, found in self._deal(stage, micro_batch, bounds[s], bounds[s + 1], held, again)
            ]
            if not options:
                return None
            _, again, found = min(options)
            shares.append(found)
            recompute.append(again)
        return Filling(micro_batch, bounds, tuple(shares), tuple(recompute))

    def _deal(
        self, stage: Sequence[Hardware], micro_batch: int, start: int, stop: int, held: int, again: bool
    ) -> Iterator[tuple[Seconds, tuple[int, ...]]]:
        """The shares of least slowest time, if any fit."""

        def seconds(replica: int, samples: int) -> Seconds:
            return float(self.stage_tables.times(stage[replica], samples, held, again)[start, stop])

        least = [self.stage_tables.least_samples(h) for h in stage]
        caps = [self._cap(h, micro_batch, start, stop, held, again) for h in stage]
        if any(a > b for a, b in zip(least, caps, strict=True)) or not sum(least) <= micro_batch <= sum(caps):
            return
        if len(set(stage)) == 1:
            shares = largest_remainder(micro_batch, [1] * len(stage))
        else:
            shares = water_fill_table(micro_batch, seconds, least, caps)
        yield max(seconds(r, n) for r, n in enumerate(shares)), shares

    def _cap(self, hardware: Hardware, most: int, start: int, stop: int, held: int, again: bool) -> int:
        """Largest share that fits: memory grows with the share."""
        low, high = 0, min(most, self.stage_tables.most_samples(hardware))
        while low < high:
            middle = (low + high + 1) // 2
            if self.stage_tables.held(hardware, middle, again)[start, stop] >= held:
                low = middle
            else:
                high = middle - 1
        return low

    def offerings(self, line: Line, sizes: Sequence[int], most_samples: int) -> Offerings:
        """Closed-form times for every number of samples up to ``most_samples``, over ``sizes``."""
        key = line, tuple(sizes), most_samples
        found = self._offerings.get(key)
        if found is None:
            found = self._offerings[key] = self._offer(line, sizes, most_samples)
        return found

    def _offer(self, line: Line, sizes: Sequence[int], most_samples: int) -> Offerings:
        seconds = np.full(self.request.global_batch + 1, np.inf)
        chosen = np.zeros(self.request.global_batch + 1, np.int64)
        cuts: dict[int, tuple[Cut, ...]] = {}
        for size in sizes:
            counts = np.arange(1, most_samples // size + 1)
            cuts[size] = self.cuts(line, size, max(1, most_samples // size))
            for cut in cuts[size]:
                times = (counts - 1) * cut.slowest_s + cut.total_s
                better = times < seconds[counts * size]
                seconds[counts[better] * size] = times[better]
                chosen[counts[better] * size] = size
        return Offerings(seconds, chosen, cuts)

    def plan(self, placement: Placement, sizes: Sequence[int] | None = None) -> Plan | None:
        """The plan there whose counts end first in the closed form; ``sizes``: micro-batch by pipeline.

        None where a pipeline fits nowhere, or the counts cannot add up to the global batch.
        """
        lines = [self.line(seats) for seats in placement.pipelines]
        total = self.request.global_batch
        most = total - len(lines) + 1
        if not lines or most < 1:
            return None
        if self.kind is ScheduleKind.GPIPE:
            # its memory grows with the count: no pipeline takes twice its part
            most = min(most, -(-2 * total // len(lines)))
        offers = [
            self.offerings(line, [sizes[p]] if sizes else self.micro_batches(line), most)
            for p, line in enumerate(lines)
        ]
        samples = _deal_alike(offers, total) or pack_samples(_near(offers, total), total)
        if samples is None:
            return None
        chosen = [self._choose(*pick) for pick in zip(lines, offers, samples, strict=True)]
        return self.assemble(placement, chosen)

    def _choose(self, line: Line, offer: Offerings, samples: int) -> tuple[Filling, int] | None:
        size = int(offer.micro_batch[samples])
        count = samples // size
        best = min(offer.cuts[size], key=lambda cut: cut.pipeline_s(count))
        filling = self.filling(line, size, best.bounds, count)
        return (filling, count) if filling else None

    def assemble(self, placement: Placement, chosen: Sequence[tuple[Filling, int] | None]) -> Plan | None:
        """A plan from fillings and counts; None where one is missing."""
        pipelines = []
        for seats, pick in zip(placement.pipelines, chosen, strict=True):
            if pick is None:
                return None
            filling, count = pick
            pipelines.append(filling.pipeline(seats, count))
        return Plan(
            model=self.request.model.name,
            global_batch=self.request.global_batch,
            sequence=self.request.model.sequence,
            schedule=self.kind,
            pipelines=tuple(pipelines),
        )


def _mix(stage: Sequence[Hardware]) -> Mix:
    counts: dict[Hardware, int] = {}
    for hardware in stage:
        counts[hardware] = counts.get(hardware, 0) + 1
    return tuple(sorted(counts.items()))


def _deal_alike(offers: Sequence[Offerings], total: int) -> tuple[int, ...] | None:
    """Even counts for pipelines that are all alike, at the micro-batch whose longest pipeline ends first."""
    if any(offer is not offers[0] for offer in offers):
        return None
    best: tuple[Seconds, tuple[int, ...]] | None = None
    for size, cuts in offers[0].cuts.items():
        if total % size == 0 and total // size >= len(offers) and cuts:
            counts = largest_remainder(total // size, [1] * len(offers))
            seconds = float(offers[0].seconds[counts[0] * size])
            if np.isfinite(seconds) and (best is None or seconds < best[0]):
                best = seconds, tuple(n * size for n in counts)
    return best[1] if best else None


def _near(offers: Sequence[Offerings], total: int) -> list[list[Seconds]]:
    """Tables without what no good packing takes: far fewer samples than a pipeline's speed earns it."""
    speeds = []
    for offer in offers:
        samples = np.arange(len(offer.seconds))
        speeds.append(float((samples[1:] / offer.seconds[1:]).max(initial=0.0)))
    fair = [total * v / max(sum(speeds), 1e-300) for v in speeds]
    rows = []
    for offer, n in zip(offers, fair, strict=True):
        row = offer.seconds.copy()
        slack = max(0.25 * n, 2.0 * max(offer.cuts, default=1))
        row[: max(1, int(n - slack))] = np.inf
        row[int(n + slack) + 2 :] = np.inf
        rows.append(row.tolist())
    return rows
