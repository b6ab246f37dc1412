"""Lower bounds on what follows a stage's last backward: its reductions and its optimizer."""

from dataclasses import dataclass

import numpy as np

from .lines import Array, Grid, Line, Lines


@dataclass(frozen=True, slots=True)
class Beside:
    """The pipelines beside one, as far as its reductions have to do with them."""

    others: int
    """How many; each has at least one replica of every segment."""
    per_byte: float
    """Seconds a byte, by bandwidth, of the slowest link between it and any of them, at the least."""


class Tails:
    """Seconds by first block and end, for any line.

    Every segment of a stage of width w is summed over n >= w + others replicas, in 2 (n - 1) messages of at
    least P / n bytes; a message of x bytes takes at least x times the seconds a byte of the slowest link in
    the ring. A rank does its own sums one after the other after its last action, so it needs at least ``2 (n
    - 1) / n * P * seconds a byte``, which grows with n. The optimizer's step comes after the sums of all.
    """

    def __init__(self, lines: Lines, beside: Beside) -> None:
        self.lines = lines
        self.beside = beside
        own = np.asarray(lines.tables.own_parameters, float)
        held = np.triu(own[None, :] - own[:, None])
        self._bytes = held * lines.tables.model.bytes_per_parameter.gradient
        self._known: dict[tuple[int, float, int, int], tuple[Array, Grid]] = {}

    def array(self, line: Line) -> Array:
        """As an array."""
        return self._of(line)[0]

    def grid(self, line: Line) -> Grid:
        """As lists."""
        return self._of(line)[1]

    def least(self, lines: list[Line]) -> Array:
        """The least of any of some lines."""
        every = {self._key(line): line for line in lines}
        found: Array = np.minimum.reduce([self.array(line) for line in every.values()])
        return found

    def _of(self, line: Line) -> tuple[Array, Grid]:
        key = self._key(line)
        found = self._known.get(key)
        if found is None:
            total = self.lines.update(line.look) + self._reduction(line)
            found = self._known[key] = total, total.tolist()
        return found

    def _key(self, line: Line) -> tuple[int, float, int, int]:
        return line.look, line.per_byte, line.width, line.least_tp

    def _reduction(self, line: Line) -> Array:
        members = line.width + self.beside.others
        per_byte = max(line.per_byte, self.beside.per_byte)
        found: Array = 2 * (members - 1) / members / line.least_tp * per_byte * self._bytes
        return found
