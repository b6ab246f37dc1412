"""A profile for any model on any device types: measured where the catalog can, else estimated and marked."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import BlockTiming, Profile, TpCommunication

from .devices import DeviceType, device
from .estimate import estimate
from .measured import Measured, Ratio, measured_of

TP_DEGREES = (1, 2, 4, 8)
MAX_SAMPLES = 64
"""Largest share that is estimated; a layer of that many samples fills a device long before."""


def profile_for(
    model: ModelSpec,
    device_types: Iterable[str],
    *,
    tp_degrees: Sequence[int] = TP_DEGREES,
    max_samples: int = MAX_SAMPLES,
) -> Profile:
    """Seconds of every kind of block of ``model`` on every device type, each with its source.

    Measured rows are taken as they are where the catalog measured this very model, sequence and dtype. A
    block that was measured at another sequence, or on one device only, is the estimate times measured over
    estimate there: interpolated between two measured sequences, else analytic. All the rest is analytic.
    Shares are powers of two as far as one layer of them fits the device, TP degrees reach to the size of a
    usual node. Raises UsageError for a device type that is not in the catalog, NotMeasuredError for one
    without a rate for the model's dtype.
    """
    known = measured_of(model)
    types = [device(name) for name in dict.fromkeys(device_types)]
    estimator = _Estimator(model, known)
    timings: list[BlockTiming] = []
    for found in types:
        for tp in (t for t in tp_degrees if t <= found.node_size):
            timings += estimator.rows(found, tp, max_samples)
    names = {found.name for found in types}
    return Profile(
        model=model.name,
        sequence=model.sequence,
        dtype=model.dtype,
        tp_communication=estimator.communication,
        timings=tuple(timings),
        updates=tuple(u for u in known.updates if u.device in names) if known else (),
        links=tuple(c.unpack() for c in known.links if names.issuperset(c.between)) if known else (),
    )


@dataclass(frozen=True)
class _Estimator:
    model: ModelSpec
    known: Measured | None

    @property
    def communication(self) -> TpCommunication:
        return self.known.communication if self.known else TpCommunication.EXCLUDED

    @cached_property
    def kinds(self) -> dict[str, int]:
        """The first block of each kind."""
        found: dict[str, int] = {}
        for i, block in enumerate(self.model.blocks):
            found.setdefault(block.kind, i)
        return found

    def rows(self, on: DeviceType, tp: int, max_samples: int) -> Iterator[BlockTiming]:
        """All kinds of blocks at one TP degree: measured, and estimated outside of what was measured."""
        exact = {kind: self.known.exact(kind, on.name, tp) if self.known else () for kind in self.kinds}
        shares = self._shares(on, tp, max_samples) | {row.samples for rows in exact.values() for row in rows}
        for kind, measured in exact.items():
            yield from measured
            known = [row.samples for row in measured]
            for samples in sorted(shares):
                if not known or not min(known) <= samples <= max(known):
                    yield self._estimate(kind, on, tp, samples)

    def _shares(self, on: DeviceType, tp: int, max_samples: int) -> set[int]:
        """Powers of two while a layer of them fits."""
        layer = max(self.model.blocks, key=lambda b: b.flops if b.output_bytes else -1.0)
        powers = (2**i for i in range(max_samples.bit_length()))
        fits = takewhile(lambda n: n == 1 or n * layer.activation_bytes <= tp * on.memory_bytes, powers)
        return set(fits)

    def _estimate(self, kind: str, on: DeviceType, tp: int, samples: int) -> BlockTiming:
        forward, backward = estimate(
            self.model,
            self.kinds[kind],
            on,
            tp,
            samples,
            arithmetic=self.arithmetic,
            communication=self.communication,
        )
        ratio = self.known.ratio(kind, on, tp, samples) if self.known else Ratio()
        return BlockTiming(
            kind=kind,
            device=on.name,
            tp=tp,
            samples=samples,
            forward_s=forward * ratio.forward,
            backward_s=backward * ratio.backward,
            source=ratio.source,
        )

    @property
    def arithmetic(self) -> str:
        return self.known.arithmetic if self.known else self.model.dtype
