"""Which rank keeps a second copy of whose state: one of another node, where there is memory for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import UnsupportedEnvironmentError
from ..units import Bytes

COPIES = 2
"""Of each state on a rank: the newest that counts, and the one that is being written."""


class Room(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank has to keep, and what its host has room for."""

    node: str
    nbytes: Bytes
    """Of its state."""
    free_bytes: Bytes
    """Of its host's memory, which other ranks of the node see too."""


@dataclass(frozen=True, slots=True)
class Buddies:
    """By rank, the one that keeps its copy; equal on every rank."""

    of_rank: tuple[int, ...]

    @classmethod
    def of(cls, rooms: Sequence[Room]) -> "Buddies | None":
        """The largest states first, each to the rank of another node that then has most memory left.

        In a job of one node that is another rank; a lone rank has none. None where the hosts lack the memory.
        """
        left: dict[str, Bytes] = {}
        for room in rooms:  # what the ranks of a node read differs by what they did meanwhile
            left[room.node] = min(room.free_bytes, left.get(room.node, room.free_bytes))
        for room in rooms:
            left[room.node] -= COPIES * room.nbytes
        kept = [0] * len(rooms)
        found = [0] * len(rooms)
        for rank in sorted(range(len(rooms)), key=lambda rank: (-rooms[rank].nbytes, rank)):
            buddy = _buddy(rank, rooms, left, kept)
            found[rank] = buddy
            if buddy != rank:
                kept[buddy] += rooms[rank].nbytes
                left[rooms[buddy].node] -= COPIES * rooms[rank].nbytes
        return cls(tuple(found)) if min(left.values()) >= 0 else None

    def wards(self, rank: int) -> tuple[int, ...]:
        """The ranks whose copies a rank keeps."""
        return tuple(ward for ward, buddy in enumerate(self.of_rank) if buddy == rank != ward)


def _buddy(rank: int, rooms: Sequence[Room], left: dict[str, Bytes], kept: Sequence[Bytes]) -> int:
    """Of another node if there is one; of the ranks of a node, the one that keeps least for others."""
    others = [other for other in range(len(rooms)) if other != rank]
    apart = [other for other in others if rooms[other].node != rooms[rank].node]
    return max(apart or others or [rank], key=lambda other: (left[rooms[other].node], -kept[other], -other))


def free_bytes() -> Bytes:
    """What this host can give without swapping, as Linux says; limits of a container are not seen."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, told = line.partition(":")
        if name == "MemAvailable":
            return int(told.split()[0]) * 1024
    raise UnsupportedEnvironmentError("/proc/meminfo has no MemAvailable: snapshots need Linux 3.14 or newer")
