"""The iteration that no plan can beat: all compute split in proportion to speed, everything else free."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from arachne_runtime.plan.profile import BlockTiming
from arachne_runtime.units import Seconds

if TYPE_CHECKING:  # a request makes its tables, so it imports this package
    from ..request import Request


@dataclass(frozen=True, eq=False)
class Ideal:
    """Speeds of the device types of a cluster, each at the best measured micro-batch and TP degree.

    Communication, the optimizer, bubbles, integer shares and memory are free in it.
    """

    request: "Request"

    @cached_property
    def iteration_s(self) -> Seconds:
        """Global batch over the samples a second of all devices of the cluster."""
        return self.request.global_batch / self.total_speed

    @cached_property
    def total_speed(self) -> float:
        """Samples a second of all devices together."""
        entries = self.request.cluster.node
        return sum(entry.gpus * entry.count * self.speeds[entry.device] for entry in entries)

    @cached_property
    def speeds(self) -> dict[str, float]:
        """Samples of the whole model that one device of a type trains in a second."""
        types = dict.fromkeys(entry.device for entry in self.request.cluster.node)
        return {device: 1 / self.sample_s(0, len(self.request.model.blocks), device) for device in types}

    def sample_s(self, start: int, stop: int, device: str) -> Seconds:
        """Least device-seconds of one sample in blocks ``start..stop-1`` on a device type."""
        sums = self._sample_s[device]
        return sums[stop] - sums[start]

    def replica_s(self, start: int, stop: int, device: str, tp: int, samples: int) -> Seconds:
        """Least seconds of ``samples`` on ``tp`` devices that needed no tensor parallelism for them.

        As many samples at once as the plan takes; a TP degree whose shares were not measured there is left
        out, except the plan's own.
        """
        profile = self.request.profile
        kinds = [block.kind for block in self.request.model.blocks[start:stop]]
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        degrees = sorted({t.tp for t in profile.timings if t.device == device and t.tp <= tp})
        found = []
        for degree in degrees:
            ranges = [profile.samples_range(kind, device, degree) for kind in counts]
            if degree == tp or all(r is not None and r[0] <= samples <= r[1] for r in ranges):
                rows = [(n, profile.block(kind, device, degree, samples)) for kind, n in counts.items()]
                found.append(sum(n * (row.forward_s + row.backward_s) for n, row in rows) * degree / tp)
        return min(found)

    @cached_property
    def _sample_s(self) -> dict[str, list[Seconds]]:
        """Prefix sums over blocks, by device type."""
        best: dict[tuple[str, str], Seconds] = {}
        for timing in self.request.profile.timings:
            key = timing.device, timing.kind
            best[key] = min(best.get(key, float("inf")), _device_seconds(timing))
        found = {}
        for device in dict.fromkeys(entry.device for entry in self.request.cluster.node):
            sums = [0.0]
            for block in self.request.model.blocks:
                sums.append(sums[-1] + best[device, block.kind])
            found[device] = sums
        return found


def _device_seconds(timing: BlockTiming) -> Seconds:
    """Of one sample: a TP group spends the time of all its devices."""
    return timing.tp * (timing.forward_s + timing.backward_s) / timing.samples
