"""A checkpoint by processes that cannot reach one another: each writes all that it holds, one makes it whole.

They share a folder and nothing else. Each adds its files to the same attempt, and looks whether those that
are there are the whole job by now; whoever takes the attempt's lock then joins them.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from ..engine import Engine
from ..errors import InvalidFileError
from ..plan.files import digest
from ..plan.placement import holding, places
from ..plan.plan import Plan
from ..plan.zero import zero_groups
from ..units import Seconds
from .checkpoint import (
    MANIFEST,
    POLL_S,
    Index,
    SavedPiece,
    SavedTensor,
    Snapshot,
    index_name,
    joined,
)
from .disk import ATTEMPT, read_document, sync, write_document
from .job import Positions
from .parts import covers, whole

_LOCK = "lock"
_DIGITS = 12
"""Of the plan's digest: ranks of another plan have other numbers."""


def save_alone(
    engine: Engine, final: Path, positions: Positions, timeout_s: Seconds, publish: Callable[[Path], None]
) -> bool:
    """Write this process's part, and wait for the others'; whether the checkpoint is there.

    Args:
        engine: Between two steps; its groups may be gone. All that call it have done the same steps.
        final: Folder of the checkpoint.
        positions: Of the job in its data.
        timeout_s: How long to wait for others.
        publish: Called with the folder by the one process that makes it a checkpoint.

    Raises:
        OSError: This process could not write.

    """
    attempt = final.with_name(f"{ATTEMPT}{final.name}-alone-{_short(engine.plan)}")
    if final.is_dir() or not _write(engine, attempt, final):
        return True
    end = time.monotonic() + timeout_s
    while not final.is_dir():
        indices = _indices(attempt, len(engine.plan.devices))
        chosen = whole_job(indices, engine.plan)
        if chosen is not None and _takes(attempt / _LOCK):
            write_document(joined(chosen, positions), attempt / MANIFEST)
            for index in indices:
                (attempt / index_name(index.rank)).unlink()
            sync(attempt)
            attempt.rename(final)
            (final / _LOCK).unlink()
            sync(final.parent)
            publish(final)
            return True
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _write(engine: Engine, attempt: Path, final: Path) -> bool:
    """False where the others had all without this process, and are done."""
    snapshot = Snapshot.of(engine, copies=False, everything=True)
    try:
        attempt.mkdir(parents=True, exist_ok=True)
        snapshot.write(attempt)
    except Exception:  # each library has its own for a folder that is gone
        if not final.is_dir():
            raise
    return not final.is_dir()


def _short(plan: Plan) -> str:
    return digest(plan).rpartition(":")[2][:_DIGITS]


def whole_job(indices: Sequence[Index], plan: Plan) -> tuple[Index, ...] | None:
    """The indices of some ranks with each part named once, files numbered anew; None where a part lacks."""
    here = {index.rank for index in indices}
    if any(here.isdisjoint(ranks) for ranks in _holders_of_blocks(plan)):
        return None
    if any(not here.issuperset(group) for group in zero_groups(plan)):
        return None
    pieces: dict[tuple[str, str], list[SavedPiece]] = {}
    chosen = tuple(_numbered(index, number, pieces) for number, index in enumerate(indices))
    shapes = {(saved.name, saved.key): saved.shape for index in indices for saved in index.tensors}
    if all(covers([p.where for p in pieces[key]], whole(shape)) for key, shape in shapes.items()):
        return chosen
    return None


def _numbered(index: Index, number: int, known: dict[tuple[str, str], list[SavedPiece]]) -> Index:
    """Without what is ``known``, to which the rest is added."""

    def rest(saved: SavedTensor) -> SavedTensor:
        before = known.setdefault((saved.name, saved.key), [])
        new = [
            msgspec.structs.replace(piece, rank=number)
            for piece in saved.pieces
            if not covers([other.where for other in before], piece.where)
        ]
        before.extend(new)
        return msgspec.structs.replace(saved, pieces=tuple(new))

    return msgspec.structs.replace(index, tensors=tuple(map(rest, index.tensors)))


def _holders_of_blocks(plan: Plan) -> Iterator[set[int]]:
    """Of each block the ranks that hold it, or of a tensor-parallel replica a part of it."""
    held = [(place.rank, holding(plan, place)[1].blocks) for place in places(plan)]
    for block in range(plan.num_blocks):
        yield {rank for rank, blocks in held if block in blocks}


def _indices(attempt: Path, num_ranks: int) -> list[Index]:
    """Those that are there; none where another process joins them at this moment."""
    try:
        return [
            read_document(path, Index)
            for rank in range(num_ranks)
            if (path := attempt / index_name(rank)).is_file()
        ]
    except InvalidFileError:
        return []


def _takes(lock: Path) -> bool:
    """Whether this process is the one that joins; the lock goes along with what another has joined."""
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except (FileExistsError, FileNotFoundError):
        return False
    return True
