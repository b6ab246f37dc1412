"""What a price is: an estimate with its timeline, or the reason why the plan does not fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import RecordKind
from arachne_runtime.units import Bytes, Seconds, format_bytes

from ..catalog.devices import CURRENCY


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of a step on one device, named as the engine's records name it."""

    kind: RecordKind
    name: str
    start_s: Seconds
    end_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the seconds of one device go; they add up to the iteration."""

    compute_s: Seconds
    bubble_s: Seconds
    """Idle among its actions, even if messages took no time."""
    hop_s: Seconds
    """Idle or busy on account of messages between stages."""
    sync_s: Seconds
    """From its last action to the optimizer: reductions and waiting for those of others."""
    update_s: Seconds
    """The optimizer, waiting for the slowest one, and the fixed seconds of a step."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The price of a plan that fits."""

    iteration_s: Seconds
    samples_per_s: float
    peak_bytes: Mapping[str, Bytes]
    """By device, the reserve included."""
    price_per_hour: float | None = None
    """Of the devices in use and of traffic, as price limits count; None where a device has no price."""
    traffic_per_hour: float = 0.0
    """What bytes over links with a price have of it."""
    cost_per_sample: float | None = None
    """Devices and traffic; None where a device has no price."""
    currency: str = CURRENCY
    """Of all prices: the cluster file's."""
    not_measured: tuple[str, ...] = ()
    """What had to be estimated, one sentence each."""
    _trace: "Callable[[], Detail]" = field(repr=False, compare=False)

    @cached_property
    def _detail(self) -> "Detail":
        return self._trace()

    @property
    def timeline(self) -> Mapping[str, tuple[Span, ...]]:
        """Spans by device in ascending time; worked out when first asked for."""
        return self._detail.timeline

    @property
    def breakdown(self) -> Mapping[str, Breakdown]:
        """Where the time goes, by device."""
        return self._detail.breakdown

    @property
    def limits(self) -> str:
        """One sentence: what binds."""
        return self._detail.limits


@dataclass(frozen=True, slots=True)
class Detail:
    """What only a reader needs, and no search."""

    timeline: Mapping[str, tuple[Span, ...]]
    breakdown: Mapping[str, Breakdown]
    limits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """A plan that does not fit: the device that lacks most, and by how much."""

    pipeline: int
    stage: int
    device: str
    needed_bytes: Bytes
    available_bytes: Bytes

    @property
    def over_bytes(self) -> Bytes:
        """What is missing."""
        return self.needed_bytes - self.available_bytes

    @property
    def reason(self) -> str:
        """For a person, with the way out."""
        return (
            f"device {self.device} (pipeline {self.pipeline}, stage {self.stage}) would need "
            f"{format_bytes(self.needed_bytes)} of {format_bytes(self.available_bytes)}, "
            f"{format_bytes(self.over_bytes)} too much; give it fewer blocks or samples, or recompute"
        )


Price = Estimate | Infeasible


def samples_per_s(plan: Plan, iteration_s: Seconds) -> float:
    """Throughput of a plan."""
    return plan.global_batch / iteration_s
