"""Seconds of a message between two devices: measured points where there are any, a line where there are not.

A link is as slow as the slower of what was measured and what the cluster file states; the catalog's figure
counts only where neither is there. Bandwidth of a NIC is shared by the devices of a node that send at once.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from arachne_runtime.plan.profile import LinkPoint, LinkScope, LinkTiming
from arachne_runtime.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured seconds by message size, for a number of senders."""

    senders: int
    sizes: tuple[Bytes, ...]
    seconds: tuple[Seconds, ...]

    @classmethod
    def of(cls, senders: int, points: Sequence[LinkPoint]) -> "Curve":
        """From the points of a profile; where noise made a larger message faster, the slower one counts."""
        seconds = accumulate((p.seconds for p in points), max)
        return cls(senders, tuple(p.bytes for p in points), tuple(seconds))

    def at(self, size: float) -> Seconds:
        """Seconds of ``size`` bytes: linear between points, the last point's bandwidth beyond them.

        Below the first point the line of the first two goes on, but never below zero latency.
        """
        sizes, seconds = self.sizes, self.seconds
        i = bisect_left(sizes, size)
        if i == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if sizes[i] == size:
            return seconds[i]
        if i == 0:
            return self._below(size)
        part = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + part * (seconds[i] - seconds[i - 1])

    def _below(self, size: float) -> Seconds:
        proportional = self.seconds[0] * size / self.sizes[0]
        if len(self.sizes) == 1:
            return proportional
        slope = (self.seconds[1] - self.seconds[0]) / (self.sizes[1] - self.sizes[0])
        return max(proportional, self.seconds[0] - slope * (self.sizes[0] - size))


@dataclass(frozen=True, slots=True)
class Link:
    """One direction from a device of one node to a device of another, or of the same."""

    scope: LinkScope
    latency_s: Seconds
    seconds_per_byte: Seconds
    """Of the whole link; a NIC divides it among its senders."""
    curves: tuple[Curve, ...]
    """Ascending by senders; empty where nothing was measured."""
    _known: dict[tuple[Bytes, int], Seconds] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shared(self) -> bool:
        """Whether the devices of a node share it: they have one NIC."""
        return self.scope is LinkScope.INTER

    def seconds(self, size: Bytes, senders: int = 1) -> Seconds:
        """Seconds of ``size`` bytes from each of ``senders`` devices of the node at once."""
        key = (size, senders)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = max(self._stated(size, senders), self._measured(size, senders))
        return found

    @property
    def least_per_byte(self) -> Seconds:
        """No message of x bytes takes less than x times this, whoever else sends.

        A curve is linear between its points, so seconds over bytes is least at one of them.
        """
        if not self.curves:
            return self.seconds_per_byte
        first = self.curves[0]
        measured = min(t / x for x, t in zip(first.sizes, first.seconds, strict=True))
        return max(self.seconds_per_byte, measured)

    def _stated(self, size: Bytes, senders: int) -> Seconds:
        shared = senders if self.shared else 1
        return self.latency_s + size * shared * self.seconds_per_byte

    def _measured(self, size: Bytes, senders: int) -> Seconds:
        """The curve of at least as many senders; beyond the last, the NIC serves them one after the other.

        More senders are never faster: the slowest curve of fewer counts where noise says otherwise.
        """
        slowest = 0.0
        for curve in self.curves:
            slowest = max(slowest, curve.at(size))
            if curve.senders >= senders:
                return slowest
        if self.curves and self.shared:
            last = self.curves[-1]
            return max(slowest, last.at(size * senders / last.senders))
        return slowest


def curves_of(links: Sequence[LinkTiming], a: str, b: str, scope: LinkScope) -> tuple[Curve, ...]:
    """What a profile measured between device types ``a`` and ``b``, ascending by senders."""
    found = [
        Curve.of(link.senders, link.points)
        for link in links
        if link.scope == scope and link.between in ((a, b), (b, a))
    ]
    return tuple(sorted(found, key=lambda c: c.senders))
