"""Squared norms of each rank's gradients before they are summed, for the gradient noise scale."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add

from torch import Tensor

from ..batch import NoiseReading, NoiseSums, Tails, num_tail_sums, tail_sums
from .link import Turn


@dataclass(slots=True)
class MicroBatch:
    """One backward of this rank: a group of samples, whose gradient is times ``weight`` in the sum."""

    weight: float
    amount: float
    """Samples or items."""
    is_weighed: bool
    """Whether the norms are of the gradient times ``weight``."""
    norms: list[tuple[int, Tensor]] = field(default_factory=list)
    """(Parameter group, squared norm)."""

    def apart(self, num_groups: int) -> list[float]:
        """|h|² / c by parameter group."""
        factor = 1 / self.weight if self.is_weighed else self.weight
        return [factor * square for square in _by_group(self.norms, num_groups)]


@dataclass(slots=True)
class NoiseMeter:
    """The norms of one sum; they are told with the next one, so that no device is waited for."""

    num_groups: int
    """Of parameters."""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    num_rows: int = 0
    """Samples of this rank."""
    summed: list[tuple[int, Tensor]] = field(default_factory=list)
    """(Parameter group, squared norm) of the sum over ranks."""

    def open(self, turn: Turn | None, weight: float, *, is_weighed: bool) -> None:
        """A backward begins; without a loader (no ``turn``) its samples are not known, and not counted."""
        self.num_rows += turn.rows if turn is not None else 0
        amount = turn.weight.mine if turn is not None else 0.0
        self.micro_batches.append(MicroBatch(weight, amount, is_weighed))

    def add(self, norms: Iterable[tuple[int, Tensor]]) -> None:
        """Of the gradient of the last backward."""
        self.micro_batches[-1].norms.extend(norms)

    def told(self) -> list[float]:
        """What the other ranks need: sums over this rank's backwards, and the norms of the sum over ranks."""
        used = [one for one in self.micro_batches if one.weight > 0 and one.amount > 0]
        apart = [one.apart(self.num_groups) for one in used]
        return [
            float(len(used)),
            float(self.num_rows),
            sum(one.weight for one in used),
            sum(one.weight**2 / one.amount for one in used),
            sum(one.weight / one.amount for one in used),
            *(sum(row[g] for row in apart) for g in range(self.num_groups)),
            *self._tail_sums(used, apart),
            *_by_group(self.summed, self.num_groups),
        ]

    def _tail_sums(self, used: Sequence[MicroBatch], apart: Sequence[Sequence[float]]) -> list[float]:
        found = [0.0] * (num_tail_sums(self.num_groups) if self.num_groups else 0)
        for one, row in zip(used, apart, strict=True) if self.num_groups else ():
            found = list(map(add, found, tail_sums(one.weight, one.amount, row)))
        return found

    def readings(self, told: Sequence[Sequence[float]], tails: Tails) -> tuple[NoiseReading, ...]:
        """By parameter group, from what all ranks have told; none where they had fewer than two backwards.

        None too where a gradient overflowed, and where nothing was measured yet: Adam has no state before its
        first update. Norms of the sum are those of the first rank: unlike devices round them differently, and
        all must decide alike.
        """
        squares = told[0][len(told[0]) - self.num_groups :]
        if not any(squares) or not all(map(math.isfinite, chain.from_iterable(told))):
            return ()
        sums = NoiseSums.of([_sums(row[: len(row) - self.num_groups], self.num_groups) for row in told])
        return tails.readings(sums, squares)


def _sums(numbers: Sequence[float], num_parameter_groups: int) -> NoiseSums:
    """A rank's micro-batches: c is the weight, ν = c²/n is the variance in those of one sample's gradient."""
    num_groups, samples, weight, variance, ratio, *rest = numbers
    return NoiseSums(
        num_groups=round(num_groups),
        samples=samples,
        weight=weight,
        variance=variance,
        ratio=ratio,
        apart=tuple(rest[:num_parameter_groups]),
        tails=tuple(rest[num_parameter_groups:]),
    )


def _by_group(norms: Iterable[tuple[int, Tensor]], num_groups: int) -> list[float]:
    found = [0.0] * num_groups
    for group, square in norms:
        found[group] += float(square)
    return found
