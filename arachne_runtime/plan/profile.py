"""What was measured: seconds and bytes by (block kind, device type, TP degree, samples), and links by size.

A lookup ends in a ``Cost`` that says whether it was measured, interpolated or analytic, or in a
``NotMeasuredError``. Nothing here is ever zero, or infeasible, because it is missing.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import ceil
from typing import Any, Literal

from ..errors import NotMeasuredError
from ..units import Bytes, Seconds
from .document import Document

PROFILE_FORMAT: Literal["arachne.profile/1"] = "arachne.profile/1"


class Source(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ANALYTIC = "analytic"


class TpCommunication(StrEnum):
    """Whether the seconds of a tensor-parallel block hold its collectives."""

    INCLUDED = "included"
    EXCLUDED = "excluded"


class LinkScope(StrEnum):
    """Where the two ends of a link are."""

    INTRA = "intra"
    """In one node."""
    INTER = "inter"
    """In two nodes."""


class WorkingBytes(Document, frozen=True, kw_only=True):
    """What one block needs beside what it keeps from forward to backward, by all samples together."""

    backward: Bytes
    """Most that its backward holds at once: gradients of its output and of what it kept, temporaries."""
    first_backward: Bytes
    """The same where its parameters have no gradients yet: those that autograd makes are counted too."""
    forward: Bytes
    """Most that its forward holds at once where nothing is kept, its output included."""
    loss: Bytes = 0
    """Of what the last block keeps: that of the loss, which recomputation does not free."""
    recomputed: Bytes = 0
    """Of the last block: most that recomputation and backward hold at once beside its input and ``loss``."""
    behind_loss: Bytes = 0
    """Of the last block: most that its backward holds at once which is given the gradient of its output, that
    gradient and all but the loss counted, beside what it keeps without ``loss``; 0: not measured."""
    first_behind_loss: Bytes = 0
    """The same where its parameters have no gradients yet: those that autograd makes are counted too."""
    owing_backward: Bytes | None = None
    """Most that a backward holds at once which leaves out gradients of weights (zero-bubble), where all have
    gradients; None: not measured, as are the four below."""
    owed: Bytes = 0
    """What such a backward leaves behind for them: inputs of products, gradients of their results."""
    owed_gradients: Bytes = 0
    """Of the weights whose gradients it leaves out."""
    paying: Bytes = 0
    """Most that computing them holds at once beside ``owed``, where all have gradients."""
    first_paying: Bytes = 0
    """The same where these weights have none yet: those that are made are counted too."""


class BlockTiming(Document, frozen=True, kw_only=True):
    """One block of a kind, on one device type, for one number of samples."""

    kind: str
    device: str
    """Device type."""
    tp: int = 1
    samples: int
    """Samples that one replica takes of a micro-batch (its share)."""
    forward_s: Seconds
    backward_s: Seconds
    activation_bytes: Bytes | None = None
    """Measured bytes kept from forward to backward by all ``samples`` together; None: the model's figure."""
    working: WorkingBytes | None = None
    """Measured too; None: estimated from ``activation_bytes``."""
    source: Source = Source.MEASURED


class UpdateTiming(Document, frozen=True, kw_only=True):
    """One optimizer step over the parameters of one block."""

    kind: str
    device: str
    tp: int = 1
    update_s: Seconds
    temporary_bytes: Bytes | None = None
    """Most that the step allocates at once; None: as many bytes as the weights."""
    parameters: int | None = None
    """That a device holds of the block at this TP degree, those of routed experts left out; None: an even
    part of all."""
    source: Source = Source.MEASURED


class StepTiming(Document, frozen=True, kw_only=True):
    """What a step costs a device of one type beside its blocks, their update and the messages."""

    device: str
    step_s: Seconds
    """Reading rows, the engine's bookkeeping, the commit word."""
    source: Source = Source.MEASURED


class LinkPoint(Document, frozen=True, kw_only=True):
    """One message size."""

    bytes: Bytes
    seconds: Seconds
    """From the post of the send to the end of the receive."""


class LinkTiming(Document, frozen=True, kw_only=True):
    """Messages from a device of one type to a device of another."""

    between: tuple[str, str]
    """Device types, either order."""
    scope: LinkScope
    senders: int = 1
    """Devices of the sending node that send at once."""
    points: tuple[LinkPoint, ...]
    """Ascending by bytes."""
    source: Source = Source.MEASURED


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and bytes of one block on one replica for one micro-batch."""

    forward_s: Seconds
    backward_s: Seconds
    activation_bytes: Bytes | None
    working: WorkingBytes | None
    source: Source


class Profile(Document, frozen=True, kw_only=True, dict=True):
    """All measurements for one model."""

    format: Literal["arachne.profile/1"] = PROFILE_FORMAT
    model: str
    """Name of the model spec that the block kinds belong to."""
    sequence: int
    dtype: str = "float32"
    tp_communication: TpCommunication = TpCommunication.INCLUDED
    timings: tuple[BlockTiming, ...]
    updates: tuple[UpdateTiming, ...] = ()
    links: tuple[LinkTiming, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    step_s: Seconds = 0.0
    """Fixed seconds of a step on any device, beside those of ``steps``."""

    @cached_property
    def _blocks(self) -> dict[tuple[str, str, int], tuple[BlockTiming, ...]]:
        table: dict[tuple[str, str, int], list[BlockTiming]] = {}
        for timing in self.timings:
            table.setdefault((timing.kind, timing.device, timing.tp), []).append(timing)
        return {key: tuple(sorted(rows, key=lambda r: r.samples)) for key, rows in table.items()}

    @cached_property
    def _updates(self) -> dict[tuple[str, str, int], UpdateTiming]:
        return {(u.kind, u.device, u.tp): u for u in self.updates}

    @cached_property
    def _steps(self) -> dict[str, Seconds]:
        return {timing.device: timing.step_s for timing in self.steps}

    def samples_range(self, kind: str, device: str, tp: int) -> tuple[int, int] | None:
        """Smallest and largest number of samples measured, or None where nothing was."""
        rows = self._blocks.get((kind, device, tp))
        return (rows[0].samples, rows[-1].samples) if rows else None

    def block(self, kind: str, device: str, tp: int, samples: int) -> Cost:
        """Cost of a block of ``kind`` for ``samples`` samples: measured, or linear between two neighbours.

        Raises NotMeasuredError outside the measured range.
        """
        rows = self._blocks.get((kind, device, tp), ())
        at = bisect_left(rows, samples, key=lambda r: r.samples)
        if at < len(rows) and rows[at].samples == samples:
            row = rows[at]
            return Cost(row.forward_s, row.backward_s, row.activation_bytes, row.working, row.source)
        if at == 0 or at == len(rows):
            have = ", ".join(str(r.samples) for r in rows) or "nothing"
            asked = f"{samples} sample{'s' if samples > 1 else ''}"
            largest = max([samples, *(r.samples for r in rows)])
            raise NotMeasuredError(
                f"profile of {self.model}: block kind {kind!r} on {device} with TP {tp} was not measured for "
                f"{asked} (measured: {have}); run `arachne profile` with --samples from 1 to {largest}"
            )
        return _between(rows[at - 1], rows[at], samples)

    def update(self, kind: str, device: str, tp: int) -> Seconds | None:
        """Seconds of the optimizer step of one block, or None where it was not measured."""
        row = self._updates.get((kind, device, tp))
        return row.update_s if row else None

    def temporary_bytes(self, kind: str, device: str, tp: int) -> Bytes | None:
        """Bytes that the optimizer step of one block allocates, or None where that was not measured."""
        row = self._updates.get((kind, device, tp))
        return row.temporary_bytes if row else None

    def held_parameters(self, kind: str, device: str, tp: int) -> int | None:
        """Parameters of one block that a device holds, without experts, or None where that is not told."""
        row = self._updates.get((kind, device, tp))
        return row.parameters if row else None

    def step(self, device: str) -> Seconds:
        """What a step costs a device of that type beside its blocks; 0 where nobody has measured it."""
        return self._steps.get(device, 0.0)

    def estimated(self, devices: Iterable[str]) -> tuple[str, ...]:
        """What of the seconds on some device types was not measured there, a sentence each; links too."""
        names = tuple(dict.fromkeys(devices))
        return tuple(said for name in names if (said := self._estimated_on(name))) + tuple(
            f"link {a} to {b}: {source}"
            for a, b, source in dict.fromkeys((*x.between, x.source) for x in self.links)
            if source is not Source.MEASURED and a in names and b in names
        )

    def _estimated_on(self, device: str) -> str:
        degrees: dict[str, set[int]] = {}
        guessed: dict[tuple[str, Source], set[int]] = {}
        measured_to = 0
        beyond: set[Source] = set()
        for (kind, where, tp), rows in self._blocks.items():
            if where != device:
                continue
            degrees.setdefault(kind, set()).add(tp)
            measured = [r.samples for r in rows if r.source is Source.MEASURED]
            if measured:
                measured_to = max(measured_to, *measured)
                beyond |= {r.source for r in rows} - {Source.MEASURED}
            else:
                guessed.setdefault((kind, _worst(r.source for r in rows)), set()).add(tp)
        if degrees and guessed == {(kind, Source.ANALYTIC): tps for kind, tps in degrees.items()}:
            return f"seconds on {device}: {Source.ANALYTIC}"
        said = [
            f"{kind}{'' if tps == degrees[kind] else f' at TP {_listed(tps)}'} {source}"
            for (kind, source), tps in guessed.items()
        ]
        if beyond:
            said.append(f"outside the measured samples (up to {measured_to}) {_worst(beyond)}")
        return f"seconds on {device}: {'; '.join(said)}" if said else ""


def _worst(sources: Iterable[Source]) -> Source:
    """The one furthest from a measurement."""
    return max(sources, key=list(Source).index)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _between(low: BlockTiming, high: BlockTiming, samples: int) -> Cost:
    part = (samples - low.samples) / (high.samples - low.samples)

    def mix(a: float, b: float) -> float:
        return a + part * (b - a)

    kept: Bytes | None = None
    if low.activation_bytes is not None and high.activation_bytes is not None:
        kept = round(mix(low.activation_bytes, high.activation_bytes))
    working: WorkingBytes | None = None
    if low.working is not None and high.working is not None:
        both = low.working, high.working
        pairs = {name: [getattr(w, name) for w in both] for name in WorkingBytes.__struct_fields__}
        mixed: dict[str, Any] = {n: None if None in of else ceil(mix(*of)) for n, of in pairs.items()}
        working = WorkingBytes(**mixed)
    source = _worst((low.source, high.source, Source.INTERPOLATED))
    forward_s, backward_s = mix(low.forward_s, high.forward_s), mix(low.backward_s, high.backward_s)
    return Cost(forward_s, backward_s, kept, working, source)
