"""When all is done, given when each stage of some columns is: quickly told, and never later than it is."""

from collections.abc import Sequence

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.units import Seconds

from ...cost.rings import Ring
from ...request import Request
from ..counts import Counts
from .columns import Column
from .pools import Pools


class EarlyEnds:
    """Each ring as if no other was on its way at once, and without the world's all-reduce: no plan needed."""

    def __init__(self, request: Request, pools: Pools) -> None:
        self.tables = request.tables
        self.pools = pools.pools
        self.nodes = [[node_of(seat[0]) for seat in pool.seats] for pool in self.pools]
        gradient = self.tables.model.bytes_per_parameter.gradient
        every = zip(self.tables.own_parameters, self.tables.expert_parameters, strict=True)
        self._bytes = [(own - experts) * gradient for own, experts in every]
        self._known: dict[tuple[Counts, int, int], Seconds] = {}

    def of(self, columns: Sequence[Column]) -> Seconds:
        """Every reduction waits for the replica that sets the pace of each stage that takes part."""
        free = [list(column.ready_s) for column in columns]
        at = [len(row) - 1 for row in free]
        stop = len(self._bytes) - 1
        while stop:
            start = max([c.shape.bounds[s] for c, s in zip(columns, at, strict=True)])
            stages = [c.shape.stages[s] for c, s in zip(columns, at, strict=True)]
            members = stages[0] if len(stages) == 1 else tuple(map(sum, zip(*stages, strict=True)))
            seconds = self._seconds(members, start, stop)
            if seconds:
                end = seconds + max([row[s] for row, s in zip(free, at, strict=True)])
                for row, s in zip(free, at, strict=True):
                    row[s] = end
            at = [s - (c.shape.bounds[s] == start) for c, s in zip(columns, at, strict=True)]
            stop = start
        update_s = max([column.update_s for column in columns])
        return max(map(max, free)) + update_s + self.tables.profile.step_s

    def _seconds(self, members: Counts, start: int, stop: int) -> Seconds:
        key = members, start, stop
        found = self._known.get(key)
        if found is None:
            ring = self._ring(members)
            size = (self._bytes[stop] - self._bytes[start]) / ring.least_tp
            found = self._known[key] = ring.seconds(size, self.tables)
        return found

    def _ring(self, members: Counts) -> Ring:
        nodes: dict[str, int] = {}
        for n, names in zip(members, self.nodes, strict=True):
            for name in names[:n]:
                nodes[name] = nodes.get(name, 0) + 1
        degrees = [pool.tp for n, pool in zip(members, self.pools, strict=True) if n]
        return Ring(nodes, sum(members), min(degrees), max(degrees))
