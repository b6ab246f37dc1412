"""The plan: which devices hold which blocks and how many samples each takes. One form covers them all."""

from enum import StrEnum
from typing import Literal

from ..units import Bytes, Seconds
from .document import Document

PLAN_FORMAT: Literal["arachne.plan/1"] = "arachne.plan/1"


class ScheduleKind(StrEnum):
    """How a pipeline orders its forward and backward actions."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved_1f1b"
    ZERO_BUBBLE = "zero_bubble"


class Replica(Document, frozen=True, kw_only=True):
    """One copy of a stage: a tensor-parallel group of devices in one node."""

    devices: tuple[str, ...]
    share: int
    """Samples of each micro-batch that it takes, ≥ 1."""


class Stage(Document, frozen=True, kw_only=True):
    """A contiguous run of blocks and the replicas that hold it."""

    layers: tuple[int, int]
    """Half-open block ids."""
    recompute: bool = False
    zero: int = 0
    """ZeRO stage, 0 to 3."""
    expert_parallel: int = 1
    expert_tensor: int = 1
    replicas: tuple[Replica, ...]

    @property
    def blocks(self) -> range:
        """The block ids that this stage owns."""
        return range(*self.layers)

    @property
    def devices(self) -> tuple[str, ...]:
        """All its devices, replica by replica."""
        return tuple(device for replica in self.replicas for device in replica.devices)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a micro-batch, replica by replica."""
        return tuple(replica.share for replica in self.replicas)


class Pipeline(Document, frozen=True, kw_only=True):
    """An ordered list of stages that covers all blocks once."""

    micro_batches: int
    micro_batch: int
    """Samples of a micro-batch: the sum of the shares of each stage."""
    stages: tuple[Stage, ...]


class Predicted(Document, frozen=True, kw_only=True):
    """What the planner expects of one iteration."""

    iteration_s: Seconds
    samples_per_s: float
    peak_bytes: dict[str, Bytes] = {}  # noqa: RUF012 - msgspec copies mutable defaults
    """Peak memory by device."""


class MadeBy(Document, frozen=True, kw_only=True):
    """Where a plan comes from; digests are ``sha256:...`` of the canonical JSON of the inputs."""

    solver: str
    seed: int = 0
    version: str
    cluster: str
    model: str
    profile: str
    device_types: dict[str, str] = {}  # noqa: RUF012 - msgspec copies mutable defaults
    """Device type by node, as the planner knew them."""


class Plan(Document, frozen=True, kw_only=True):
    """A list of pipelines; they may differ in depth, cuts, device types, TP, widths and micro-batches."""

    format: Literal["arachne.plan/1"] = PLAN_FORMAT
    model: str
    global_batch: int
    sequence: int
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    pipelines: tuple[Pipeline, ...]
    predicted: Predicted | None = None
    made_by: MadeBy | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the model, as the first pipeline covers them."""
        return self.pipelines[0].stages[-1].layers[1]

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device used, in order of first appearance."""
        return tuple(dict.fromkeys(d for p in self.pipelines for s in p.stages for d in s.devices))
