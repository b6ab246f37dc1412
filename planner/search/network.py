"""Messages and rings between pools for arrays of stages: a line in the bytes, from the price's own links.

It ranks templates before they have devices; the price of a plan counts every message by itself.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.limits import BUCKET_BYTES
from arachne_runtime.units import Seconds

from ..cost.links import Link
from ..cost.tables import ring_seconds
from ..request import Request
from .supply import Supply

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SMALL_BYTES, LARGE_BYTES = 2**20, 2**26
"""The line of a link goes through these two sizes: boundaries of models have 1 to 100 MB."""


class Network:
    """Links of one request by pool."""

    def __init__(self, request: Request, supply: Supply) -> None:
        self.fleet = request.fleet
        self.supply = supply
        self._line = cache(self._make_line)
        self._ring = cache(self._make_ring)

    def link(self, a: int, b: int, inside: bool) -> Link:
        """The link between two pools, or ``inside`` a node of one."""
        first = self.supply.pools[a].nodes[0][0]
        if inside:
            return self.fleet.link(first, first)
        last = self.supply.pools[b].nodes[-1][0]
        return self.fleet.link(first, last)

    def lines(self, a: Ints, b: Ints, inside: NDArray[np.bool_], senders: Ints) -> tuple[Floats, Floats]:
        """Seconds of no byte and of each byte of a message; all arrays of one shape."""
        code = ((a * 256 + b) * 2 + inside) * 4096 + np.minimum(senders, 4095)
        known, inverse = np.unique(code, return_inverse=True)
        found = np.array([self._line(int(c)) for c in known]).reshape(-1, 2)[inverse.ravel()]
        return found[:, 0].reshape(code.shape), found[:, 1].reshape(code.shape)

    def _make_line(self, code: int) -> tuple[Seconds, float]:
        rest, senders = divmod(code, 4096)
        rest, inside = divmod(rest, 2)
        a, b = divmod(rest, 256)
        link = self.link(a, b, bool(inside))
        small, large = link.seconds(SMALL_BYTES, max(1, senders)), link.seconds(LARGE_BYTES, max(1, senders))
        slope = (large - small) / (LARGE_BYTES - SMALL_BYTES)
        return max(0.0, small - slope * SMALL_BYTES), slope

    def per_byte(self, pool: int, *, inside: bool, senders: int) -> float:
        """Seconds a byte of large messages within a pool."""
        return self._line(((pool * 256 + pool) * 2 + inside) * 4096 + senders)[1]

    def rings(self, pool: Ints, members: Ints, inside: NDArray[np.bool_], senders: Ints) -> Floats:
        """Seconds of each byte that a ring reduces; 0 for a ring of one."""
        code = ((pool * 2 + inside) * 2**20 + members) * 4096 + np.minimum(senders, 4095)
        known, inverse = np.unique(code, return_inverse=True)
        found: Floats = np.array([self._ring(int(c)) for c in known])[inverse.ravel()].reshape(code.shape)
        return found

    def _make_ring(self, code: int) -> float:
        rest, senders = divmod(code, 4096)
        rest, members = divmod(rest, 2**20)
        pool, inside = divmod(rest, 2)
        return (
            ring_seconds(self.link(pool, pool, bool(inside)), BUCKET_BYTES, members, max(1, senders))
            / BUCKET_BYTES
        )
