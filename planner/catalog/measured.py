"""What the catalog measured that bears on a model: rows for this very model, ratios from its relatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log

from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import BlockTiming, Source, TpCommunication, UpdateTiming

from .configs import architecture
from .counting import count
from .devices import DeviceType
from .entries import entry, measured_names
from .estimate import estimate
from .models import config
from .packed import Curve, Entry, PackedProfile, Timings

_WHOLE = {"attention": "layer", "mlp": "layer"}
"""Half a layer is corrected as the whole one was."""
_ALIKE = ({"float16", "bfloat16"},)
"""Dtypes that the same units compute at the same rate."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Measured seconds over estimated ones."""

    forward: float = 1.0
    backward: float = 1.0
    source: Source = Source.ANALYTIC


@dataclass(frozen=True)
class _Reference:
    """One measured profile, and the spec of the model that it measured."""

    packed: PackedProfile
    spec: ModelSpec

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The first block of each kind."""
        found: dict[str, int] = {}
        for i, block in enumerate(self.spec.blocks):
            found.setdefault(block.kind, i)
        return found

    @cached_property
    def table(self) -> dict[tuple[str, str], list[Timings]]:
        """By kind and device type, one for each TP degree."""
        found: dict[tuple[str, str], list[Timings]] = {}
        for timings in self.packed.timings:
            found.setdefault((timings.kind, timings.device), []).append(timings)
        return found

    def nearest(self, kind: str, device: str, tp: int) -> Timings | None:
        """At this TP degree, or the one next to it."""
        known = self.table.get((kind, device), ())
        return min(known, key=lambda t: (abs(log(t.tp / tp)), t.tp), default=None)

    def ratio(self, timings: Timings, on: DeviceType, tokens: int, arithmetic: str) -> tuple[float, float]:
        """At the number of samples whose tokens come nearest to ``tokens``."""
        at = min(
            range(len(timings.samples)),
            key=lambda i: abs(log(timings.samples[i] * self.spec.sequence / tokens)),
        )
        forward, backward = estimate(
            self.spec,
            self.blocks[timings.kind],
            on,
            timings.tp,
            timings.samples[at],
            arithmetic=arithmetic,
            communication=self.packed.tp_communication,
        )
        return timings.forward_s[at] / forward, timings.backward_s[at] / backward


@dataclass(frozen=True)
class Measured:
    """Everything measured under a model's name in dtypes that compute alike."""

    model: ModelSpec
    references: tuple[_Reference, ...]

    @property
    def communication(self) -> TpCommunication:
        """Whether its seconds hold tensor-parallel communication."""
        return self.references[0].packed.tp_communication

    @property
    def arithmetic(self) -> str:
        """Dtype of the matrix products, where a device has it."""
        return self.references[0].packed.arithmetic or self.model.dtype

    @cached_property
    def _exact(self) -> _Reference | None:
        return next((r for r in self.references if r.spec == self.model), None)

    @property
    def updates(self) -> tuple[UpdateTiming, ...]:
        """Optimizer steps of this very model."""
        return self._exact.packed.updates if self._exact else ()

    @property
    def links(self) -> tuple[Curve, ...]:
        """Links, which do not depend on the model but on where it was measured."""
        return self._exact.packed.links if self._exact else ()

    def exact(self, kind: str, device: str, tp: int) -> tuple[BlockTiming, ...]:
        """Rows of this very model, sequence and dtype."""
        rows: Sequence[Timings] = self._exact.table.get((kind, device), ()) if self._exact else ()
        return next((t.unpack() for t in rows if t.tp == tp), ())

    def ratio(self, kind: str, on: DeviceType, tp: int, samples: int) -> Ratio:
        """What an estimate is to be multiplied with: interpolated by sequence, or the nearest one's."""
        if kind == "embedding":
            return Ratio()  # sailor's backwards of an embedding are a few microseconds: they hold no work
        kind = _WHOLE.get(kind, kind)
        tokens = samples * self.model.sequence
        found: list[tuple[_Reference, Timings]] = []
        for reference in self.references:
            timings = reference.nearest(kind, on.name, tp)
            if timings is not None:
                found.append((reference, timings))
        below = max(
            (f for f in found if f[0].spec.sequence <= self.model.sequence), key=_sequence, default=None
        )
        above = min(
            (f for f in found if f[0].spec.sequence >= self.model.sequence), key=_sequence, default=None
        )
        near = [f for f in (below, above) if f is not None]
        if not near:
            return Ratio()
        ratios = [r.ratio(t, on, tokens, r.packed.arithmetic or r.spec.dtype) for r, t in near]
        between = len(near) == 2 and near[0][0] is not near[1][0]
        if not between:
            return Ratio(*ratios[0])
        low, high = (log(_sequence(f)) for f in near)
        part = (log(self.model.sequence) - low) / (high - low)
        forward, backward = (a + part * (b - a) for a, b in zip(*ratios, strict=True))
        same = all(t.tp == tp and r.spec.dtype == self.model.dtype for r, t in near)
        return Ratio(forward, backward, Source.INTERPOLATED if same else Source.ANALYTIC)


def measured_of(model: ModelSpec) -> Measured | None:
    """What was measured under the model's name, or None."""
    if model.name not in measured_names():
        return None
    found = entry(model.name)
    references = tuple(
        _Reference(packed, _spec(found, packed))
        for packed in found.profiles
        if packed.dtype == model.dtype or any({packed.dtype, model.dtype} <= alike for alike in _ALIKE)
    )
    return Measured(model, references) if references else None


def _sequence(found: tuple[_Reference, Timings]) -> int:
    return found[0].spec.sequence


def _spec(found: Entry, packed: PackedProfile) -> ModelSpec:
    """The model as the source built it, or the published one."""
    built = found.model
    if built is not None and (built.sequence, built.dtype) == (packed.sequence, packed.dtype):
        return built.unpack()
    return count(architecture(found.name, config(found.name)), sequence=packed.sequence, dtype=packed.dtype)
