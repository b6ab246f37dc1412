"""What bench.unequal_target tells the ranks of a lab, and what they write down."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec


class Workload(StrEnum):
    """What is trained."""

    TEXT = "text"
    """The example's GPT on the source of the standard library, by AdamW."""
    PICTURES = "pictures"
    """Convolutions on the example's shapes, by SGD with momentum."""


class Contestant(StrEnum):
    """How the batch is chosen and shared."""

    EVEN = "even"
    """The base batch, even shares."""
    UNEQUAL = "unequal"
    """The base batch, shares that follow the devices."""
    ADAPTIVE = "adaptive"
    """A batch that follows the noise too."""


class TargetTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one lab do."""

    workload: Workload
    width: int
    """Of the model."""
    base_batch: int
    target: float
    """Held-out loss at which a contestant is done."""
    seed: int = 0
    """Of the model and of the order of samples."""
    turn_s: float = 3.0
    """A contestant trains for so long before the next one has its turn."""
    most_s: float = 100.0
    """Of training, after which a contestant is out."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A contestant after a turn."""

    seconds: float
    """It trained so far."""
    steps: int
    progress: float
    """Steps of the base batch that they were worth."""
    batch: int
    loss: float
    """Held-out."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant in one race."""

    points: Sequence[Point]
    decisions: Sequence[str] = ()
    """Changes of the batch, and why."""


Race = Mapping[Contestant, Run]


def write(record: TargetTask | Race, path: Path) -> None:
    """As JSON."""
    path.write_bytes(msgspec.json.encode(record))


def read_target_task(path: Path) -> TargetTask:
    """As ``write`` left it."""
    return msgspec.json.decode(path.read_bytes(), type=TargetTask)


def read_race(path: Path) -> Race:
    """As ``write`` left it."""
    return msgspec.json.decode(path.read_bytes(), type=dict[Contestant, Run])
