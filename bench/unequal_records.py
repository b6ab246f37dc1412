"""What bench.unequal_dp tells the ranks of a lab, and what they write down."""

from pathlib import Path
from typing import TypeAlias

import msgspec

Shares: TypeAlias = tuple[int, ...]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one lab do; sizes are those of the example's GPT."""

    width: int
    layers: int
    sequence: int
    global_batch: int
    steps: int = 3
    """Of a turn, which one more precedes."""
    rounds: int = 4
    """Turns of every contestant."""
    trials: int = 14
    """Splits that the search may time."""
    num_pairs: int = 15
    """Of our split and the best one found."""
    is_beside_even: bool = False
    """Whether even DDP takes turns beside these pairs too."""
    cores: tuple[int, ...] = ()
    """By rank the core of which its device is a slice, counted among those there are; none: any core."""
    drift_steps: int = 0
    """Before a rank is slowed, while it is, and afterwards; 0: it is not."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A training in which other processes took two thirds of rank 0's core for some steps."""

    shares: list[Shares]
    """By step."""
    readings: list[tuple[int, float]]
    """A step, and the seconds a sample that rank 0 computed in it."""
    slowed: tuple[int, int]
    """The first step in which it was slowed, and the first one behind."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What one lab showed."""

    splits: dict[str, Shares]
    """By contestant; without torch's own DDP."""
    turns: dict[str, list[float]]
    """Seconds of a step, by contestant and turn."""
    pairs: list[tuple[float, float]]
    """Seconds of a step with our split, and with the best one found."""
    evens_s: list[float]
    """Of even DDP beside each of the pairs, where it was timed."""
    learning_steps: int
    rebalances: int
    predicted_s: float
    """Of our split."""
    drift: Drift | None = None


def read_task(path: Path) -> Task:
    """As ``write`` left it."""
    return msgspec.json.decode(path.read_bytes(), type=Task)


def read_found(path: Path) -> Found:
    """As ``write`` left it."""
    return msgspec.json.decode(path.read_bytes(), type=Found)


def write(record: Task | Found, path: Path) -> None:
    """As JSON."""
    path.write_bytes(msgspec.json.encode(record))
