"""Templates for clusters too large to try everything: a pipeline, replicated, and others for what is left.

Ranked by a closed form that balances work as if blocks could be split; the exact cut and the price decide.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.units import Bytes, Seconds

from ..request import Request
from .counts import vectors_below
from .stage_tables import Hardware, StageTables
from .template import (
    PipelineTemplate,
    StageTemplate,
    Template,
    leftover,
    mixed_stage,
)

MOST_SIZES = 12
"""Micro-batch sizes that the ranking tries."""


_Members = tuple[tuple[str, int], ...]
"""Replicas of a stage by device type."""

_Sketch = tuple[Seconds, int, int, tuple[tuple[_Members, int], ...]]
"""A proposal as plain numbers: seconds, micro-batch, copies, and runs of alike stages with their lengths."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A pipeline, how often it stands side by side, and the closed form's time."""

    seconds: Seconds
    micro_batch: int
    copies: int
    stages: tuple[StageTemplate, ...]

    @property
    def template(self) -> Template:
        """All copies."""
        return Template((PipelineTemplate(self.stages),) * self.copies)


class Proposer:
    """Ranks templates over device types of one request."""

    def __init__(self, request: Request, stage_tables: StageTables) -> None:
        self.request = request
        self.stage_tables = stage_tables
        self.pools: dict[str, int] = {}
        self.hardware: dict[str, Hardware] = {}
        for device in request.cluster.devices:
            kind = request.cluster.device_type(device)
            self.pools[kind] = self.pools.get(kind, 0) + 1
            here = stage_tables.hardware(device)
            self.hardware[kind] = min(here, self.hardware.get(kind, here), key=lambda h: h.room_bytes)
        self.pools = {
            kind: n for kind, n in self.pools.items() if stage_tables.most_samples(self.hardware[kind])
        }
        self.max_depth = len(request.model.blocks)
        sizes = request.model.bytes_per_parameter
        parameters = request.tables.parameters(0, self.max_depth)
        self.state_bytes: Bytes = parameters * (sizes.weight + sizes.gradient + sizes.optimizer)
        self.sync_s = self._sync_seconds(parameters * sizes.gradient)

    def best(self, pools: Mapping[str, int], most: int, share: float = 1.0) -> list[Proposal]:
        """The ``most`` best proposals on some devices for a ``share`` of the global batch, best first."""
        batch = max(1, round(self.request.global_batch * share))
        found: list[_Sketch] = []
        for size in self._sizes(batch):
            for number in range(1, len(pools) + 1):
                for types in combinations(sorted(pools), number):
                    found += self._runs_of_types(types, pools, size, batch, most)
            found += self._mixed(pools, size, batch, most)
        return [Proposal(s, b, n, _stages(runs)) for s, b, n, runs in sorted(found)[:most]]

    def with_leftover(self, proposal: Proposal, most: int) -> Iterator[Template]:
        """The proposal, or fewer copies of it, beside the best pipelines on devices that it leaves idle."""
        one = PipelineTemplate(proposal.stages).devices()
        for copies in sorted(
            {proposal.copies, proposal.copies - 1, (proposal.copies + 1) // 2} - {0}, reverse=True
        ):
            used = {kind: n * copies for kind, n in one.items()}
            rest = leftover(self.pools, used)
            if rest:
                weight = 1 - self._speed(used) / self._speed(self.pools)
                for other in self.best(rest, most, weight):
                    yield Template((PipelineTemplate(proposal.stages),) * copies + other.template.pipelines)

    def _speed(self, devices: Mapping[str, int]) -> float:
        return sum(n / self._whole_seconds(kind, 1) for kind, n in devices.items())

    def _sizes(self, batch: int) -> list[int]:
        most = min(batch, self.request.max_micro_batch or batch)
        sizes = [n for n in range(1, most + 1) if batch % n == 0 or n & (n - 1) == 0]
        return sizes[:MOST_SIZES]

    def _whole_seconds(self, kind: str, samples: int) -> Seconds:
        """Seconds of the whole model for a share; ``inf`` where it was not measured."""
        return self.stage_tables.whole_model_s(self.hardware[kind], samples)

    def _sync_seconds(self, gradient_bytes: Bytes) -> Seconds:
        """Reduction of all gradients by all devices of a node through its NIC; a stage has its part of it."""
        network = self.request.cluster.network
        widest = max(entry.gpus for entry in self.request.cluster.node)
        return 2 * gradient_bytes * widest / (network.inter_GBps * 1e9)

    def _runs_of_types(
        self, types: tuple[str, ...], pools: Mapping[str, int], size: int, batch: int, most: int
    ) -> Iterator[_Sketch]:
        """Types in contiguous runs of stages, each run of equal widths, in every order of the types."""
        shapes = [self._shapes(pools[kind], size) for kind in types]
        speed = _outer(
            np.add, [d / self._stage_seconds(k, w, size) for k, (d, w) in zip(types, shapes, strict=True)]
        )
        depth = _outer(np.add, [d for d, _ in shapes])
        room = _outer(
            np.add, [d * self.hardware[k].room_bytes for k, (d, _) in zip(types, shapes, strict=True)]
        )
        copies = _outer(np.minimum, [pools[k] // (d * w) for k, (d, w) in zip(types, shapes, strict=True)])
        copies = np.minimum(copies, max(1, batch // size))
        width = _outer(np.minimum, [w for _, w in shapes])
        seconds = self._closed_form(speed, depth, copies, width, size, batch)
        seconds[(depth > self.max_depth) | (room < self.state_bytes)] = np.inf
        flat = seconds.ravel()
        for at in np.argsort(flat, kind="stable")[:most]:
            if not np.isfinite(flat[at]):
                return
            index = np.unravel_index(at, seconds.shape)
            chosen = [(k, int(d[i]), int(w[i])) for k, (d, w), i in zip(types, shapes, index, strict=True)]
            for order in permutations(chosen):
                runs = tuple((((k, w),), d) for k, d, w in order)
                yield float(flat[at]), size, int(copies[index]), runs

    def _mixed(self, pools: Mapping[str, int], size: int, batch: int, most: int) -> Iterator[_Sketch]:
        """Stages that all hold the same mix of two or more types, their shares in proportion to speed."""
        types = sorted(pools)
        found: list[_Sketch] = []
        for mix in vectors_below(tuple(pools[kind] for kind in types)):
            members = tuple((k, n) for k, n in zip(types, mix, strict=True) if n)
            if len(members) < 2 or sum(mix) > size:
                continue
            pace = self._mixed_seconds(members, size)
            once = min(pools[k] // n for k, n in members)
            room = min(self.hardware[k].room_bytes for k, _ in members)
            for depth in range(1, min(once, self.max_depth) + 1):
                if depth * room >= self.state_bytes and pace < float("inf"):
                    copies = min(once // depth, max(1, batch // size))
                    seconds = (-(-batch // (copies * size)) + depth - 1) * pace / depth + self.sync_s / depth
                    found.append((seconds, size, copies, ((members, depth),)))
        yield from sorted(found)[:most]

    def _mixed_seconds(self, members: _Members, size: int) -> Seconds:
        """Seconds of the whole model on one such stage if shares could be any number."""
        mean = max(1, size // sum(n for _, n in members))
        speed = sum(n * mean / self._whole_seconds(k, mean) for k, n in members)
        return size / speed if speed else float("inf")

    def _shapes(self, count: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every (stages, width) that ``count`` devices can form, the width at most the micro-batch."""
        pairs = [
            (d, w)
            for d in range(1, min(count, self.max_depth) + 1)
            for w in range(1, min(count // d, size) + 1)
        ]
        return np.array([d for d, _ in pairs]), np.array([w for _, w in pairs])

    def _stage_seconds(self, kind: str, widths: NDArray[np.int64], size: int) -> NDArray[np.float64]:
        return np.array([self._whole_seconds(kind, -(-size // int(w))) for w in widths])

    def _closed_form(
        self,
        speed: NDArray[np.float64],
        depth: NDArray[np.int64],
        copies: NDArray[np.int64],
        width: NDArray[np.int64],
        size: int,
        batch: int,
    ) -> NDArray[np.float64]:
        """(M + depth − 1) · stage time, and a stage's part of the reduction where there is one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            counts = -(-batch // (np.maximum(copies, 1) * size))
            seconds = np.asarray((counts + depth - 1) / speed, float)
            seconds = seconds + np.where(copies * width > 1, self.sync_s / depth, 0.0)
        return np.where((copies > 0) & np.isfinite(seconds), seconds, np.inf)


def _stages(runs: tuple[tuple[_Members, int], ...]) -> tuple[StageTemplate, ...]:
    return tuple(stage for members, depth in runs for stage in (mixed_stage(dict(members)),) * depth)


def _outer(combine: np.ufunc, rows: list[NDArray[Any]]) -> NDArray[Any]:
    """``combine`` over every choice of one element of each row."""
    found = rows[0]
    for row in rows[1:]:
        found = combine.outer(found, row)
    return found
