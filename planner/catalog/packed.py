"""The form of the catalog's data files: equal blocks and the points of a curve written once, in arrays."""

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.model import BlockSpec, ModelSpec, ParameterBytes
from arachne_runtime.plan.profile import (
    BlockTiming,
    LinkPoint,
    LinkScope,
    LinkTiming,
    Profile,
    Source,
    TpCommunication,
    UpdateTiming,
)
from arachne_runtime.units import Bytes, Seconds


class BlockRun(Document, frozen=True, kw_only=True):
    """Equal blocks, one after the other."""

    count: int = 1
    block: BlockSpec


class PackedModel(Document, frozen=True, kw_only=True):
    """A model spec, equal blocks in runs."""

    name: str
    sequence: int
    dtype: str
    bytes_per_parameter: ParameterBytes = ParameterBytes()
    runs: tuple[BlockRun, ...]

    def unpack(self) -> ModelSpec:
        """The spec, block by block."""
        return ModelSpec(
            name=self.name,
            sequence=self.sequence,
            dtype=self.dtype,
            bytes_per_parameter=self.bytes_per_parameter,
            blocks=tuple(run.block for run in self.runs for _ in range(run.count)),
        )


class Timings(Document, frozen=True, kw_only=True):
    """One kind of block on one device type at one TP degree, by samples."""

    kind: str
    device: str
    tp: int = 1
    source: Source = Source.MEASURED
    samples: tuple[int, ...]
    forward_s: tuple[Seconds, ...]
    backward_s: tuple[Seconds, ...]
    activation_bytes: tuple[Bytes, ...] = ()
    """Empty: the model's figure."""

    def unpack(self) -> tuple[BlockTiming, ...]:
        """One row for each number of samples."""
        kept: tuple[Bytes | None, ...] = self.activation_bytes or (None,) * len(self.samples)
        return tuple(
            BlockTiming(
                kind=self.kind,
                device=self.device,
                tp=self.tp,
                samples=n,
                forward_s=forward,
                backward_s=backward,
                activation_bytes=size,
                source=self.source,
            )
            for n, forward, backward, size in zip(
                self.samples, self.forward_s, self.backward_s, kept, strict=True
            )
        )


class Curve(Document, frozen=True, kw_only=True):
    """A link's seconds by message size."""

    between: tuple[str, str]
    scope: LinkScope
    senders: int = 1
    source: Source = Source.MEASURED
    bytes: tuple[Bytes, ...]
    seconds: tuple[Seconds, ...]

    def unpack(self) -> LinkTiming:
        """The link, point by point."""
        points = zip(self.bytes, self.seconds, strict=True)
        return LinkTiming(
            between=self.between,
            scope=self.scope,
            senders=self.senders,
            source=self.source,
            points=tuple(LinkPoint(bytes=size, seconds=seconds) for size, seconds in points),
        )


class PackedProfile(Document, frozen=True, kw_only=True):
    """What was measured of a model at one sequence and dtype."""

    sequence: int
    dtype: str
    arithmetic: str | None = None
    """Dtype of the matrix products where it is not ``dtype``: tfloat32 beside float32."""
    tp_communication: TpCommunication
    timings: tuple[Timings, ...]
    updates: tuple[UpdateTiming, ...] = ()
    links: tuple[Curve, ...] = ()

    def unpack(self, model: str) -> Profile:
        """The profile of ``model``."""
        return Profile(
            model=model,
            sequence=self.sequence,
            dtype=self.dtype,
            tp_communication=self.tp_communication,
            timings=tuple(row for timings in self.timings for row in timings.unpack()),
            updates=self.updates,
            links=tuple(curve.unpack() for curve in self.links),
        )


class Entry(Document, frozen=True, kw_only=True):
    """One data file of the catalog: what was measured of one model."""

    name: str
    source: str
    """Repository, commit and files that the figures come from."""
    licence: str
    notes: str
    """What was done to the figures, and what is known to be wrong with them."""
    missing: str
    """What was not measured."""
    model: PackedModel | None = None
    """The model as the source built it; None: the published one, by counting."""
    profiles: tuple[PackedProfile, ...]
    """By sequence and dtype; the first is meant where neither is given."""
