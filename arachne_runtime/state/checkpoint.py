"""One checkpoint: a folder with a manifest and a file of tensors from each rank, which any plan can load.

A rank writes what it owns into a folder of its attempt, its index last. The first rank waits for all indices,
joins them into the manifest and gives the folder its name: before that no reader takes it for a checkpoint.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ..engine import Engine
from ..errors import UsageError
from ..plan.document import Document
from ..units import Seconds
from .disk import (
    TensorFile,
    checksum,
    damaged,
    opened,
    read_document,
    refuse_size,
    sync,
    write_document,
    write_tensors,
)
from .holdings import (
    VALUE,
    Holding,
    Scalar,
    States,
    dtype_called,
    dtype_name,
    forms_of,
    holdings,
    make_states,
    scalars,
    settle,
)
from .job import JobState, Positions, RandomState, job_state, restore_job, restore_random
from .ownership import parts_to_write
from .parts import Part, copy_part, covers, crossing, cut_out, numel_of, whole

MANIFEST = "manifest.json"
POLL_S: Seconds = 0.01
"""Between two looks for the other ranks' files."""
_Runs = tuple[tuple[int, int], ...]


class SavedPiece(Document, frozen=True, kw_only=True):
    """A part of a tensor, in one file."""

    part: tuple[_Runs, ...]
    """By dim: first index and the one behind the last, of each run."""
    rank: int
    """Whose file holds it."""
    entry: str
    """Its name there."""
    sha256: str

    @property
    def where(self) -> Part:
        """Its part of the whole."""
        return tuple(tuple(range(a, b) for a, b in runs) for runs in self.part)


class SavedTensor(Document, frozen=True, kw_only=True):
    """A tensor of the job."""

    name: str
    key: str
    """Of a state of the optimizer; empty: the parameter or buffer itself."""
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool = False
    pieces: tuple[SavedPiece, ...] = ()


class Index(Document, frozen=True, kw_only=True):
    """What one rank wrote."""

    rank: int
    file: TensorFile
    tensors: tuple[SavedTensor, ...]
    scalars: dict[str, dict[str, Scalar]]
    job: JobState


class Manifest(Document, frozen=True, kw_only=True):
    """What is in a checkpoint."""

    files: tuple[TensorFile, ...]
    """By rank of the job that wrote it."""
    tensors: tuple[SavedTensor, ...]
    scalars: dict[str, dict[str, Scalar]]
    job: JobState
    random: tuple[RandomState, ...]
    """Of each rank, or one where all are alike."""
    feeds: Positions = ()
    """Of each call of ``session.batches``."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a rank is to write, in the memory of the host: training may go on."""

    rank: int
    num_ranks: int
    tensors: tuple[SavedTensor, ...]
    """Without checksums yet."""
    values: Mapping[str, Tensor]
    """By entry."""
    scalars: dict[str, dict[str, Scalar]]
    job: JobState

    @classmethod
    def of(cls, engine: Engine, *, copies: bool, everything: bool = False) -> "Snapshot":
        """Of what this rank owns, between two steps; without ``copies`` good until the next one begins.

        ``everything``: of all that it holds.
        """
        found: dict[tuple[str, str], SavedTensor] = {}
        values: dict[str, Tensor] = {}
        rank = engine.places[0].rank
        parts = ((each, each.part) for each in holdings(engine)) if everything else parts_to_write(engine)
        for held, part in parts:
            entry = f"{len(values)} {held.name} {held.key}".rstrip()
            values[entry] = _on_host(cut_out(part, held.tensor, held.part), held.tensor, copies)
            known = found.setdefault((held.name, held.key), _saved(held))
            runs = tuple(tuple((run.start, run.stop) for run in each) for each in part)
            piece = SavedPiece(part=runs, rank=rank, entry=entry, sha256="")
            found[held.name, held.key] = msgspec.structs.replace(known, pieces=(*known.pieces, piece))
        for held in holdings(engine):  # those of no elements have no pieces, and must be known
            if math.prod(held.shape) == 0:
                found.setdefault((held.name, held.key), _saved(held))
        return cls(
            rank, len(engine.plan.devices), tuple(found.values()), values, scalars(engine), job_state(engine)
        )

    def write(self, attempt: Path) -> None:
        """Write this rank's tensors, then its index, into the folder of the attempt."""
        file = write_tensors(self.values, attempt / f"rank-{self.rank:05d}.safetensors")
        sums = {entry: checksum(value) for entry, value in self.values.items()}
        tensors = tuple(
            msgspec.structs.replace(
                saved, pieces=tuple(msgspec.structs.replace(p, sha256=sums[p.entry]) for p in saved.pieces)
            )
            for saved in self.tensors
        )
        index = Index(rank=self.rank, file=file, tensors=tensors, scalars=self.scalars, job=self.job)
        write_document(index, attempt / index_name(self.rank))


def commit(
    attempt: Path,
    final: Path,
    *,
    num_ranks: int,
    positions: Positions,
    timeout_s: Seconds,
    is_stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait for the files of all ranks, then make the attempt a checkpoint; False where it was stopped.

    Raises:
        UsageError: A rank's file did not come: the folder is not one that all ranks share, or it failed.

    """
    names = [attempt / index_name(rank) for rank in range(num_ranks)]
    end = time.monotonic() + timeout_s
    while missing := [path.name for path in names if not path.is_file()]:
        if is_stopped():
            return False
        if time.monotonic() > end:
            raise UsageError(
                f"{attempt} has no {missing[0]} after {timeout_s:g} s: its rank failed, or the ranks do not "
                "share this folder; give one on a file system that all nodes see"
            )
        time.sleep(POLL_S)
    write_document(joined([read_document(path, Index) for path in names], positions), attempt / MANIFEST)
    for path in names:
        path.unlink()
    sync(attempt)
    attempt.rename(final)
    sync(final.parent)
    return True


def read_manifest(folder: Path) -> Manifest:
    """InvalidFileError for a checkpoint with a file that is missing, cut short or altered."""
    manifest = read_document(folder / MANIFEST, Manifest)
    for file in manifest.files:
        refuse_size(folder, file)
    return manifest


def load(engine: Engine, folder: Path) -> Manifest:
    """Give a new engine, of any plan, the state of a job; no rank waits for another.

    Raises:
        InvalidFileError: A file is missing, cut short or altered.
        UsageError: The state of another model.
        UnsupportedPlanError: A state that this plan cannot have (see ``make_states``).

    """
    manifest = read_manifest(folder)
    saved = {(each.name, each.key): each for each in manifest.tensors}
    _refuse_other_model(engine, saved, folder)
    make_states(engine, _states(manifest))
    wanted: dict[int, list[tuple[SavedPiece, Holding, Part]]] = defaultdict(list)
    for held in holdings(engine):
        each = saved.get((held.name, held.key))
        if each is None or each.shape != held.shape or each.dtype != dtype_name(held.tensor.dtype):
            raise _unlike(held, each, folder)
        for piece, part in _needed(held, each, folder):
            wanted[piece.rank].append((piece, held, part))
    for rank, pieces in sorted(wanted.items()):
        _read(folder, manifest.files[rank], pieces)
    settle(engine)
    restore_job(engine, manifest.job)
    restore_random(engine, manifest.random)
    return manifest


def _on_host(value: Tensor, held: Tensor, copies: bool) -> Tensor:
    """In memory of its own: what is a part of another tensor safetensors would not write."""
    found = value.cpu()
    memory = found.untyped_storage()
    is_part = memory.nbytes() != found.nbytes
    if is_part or (copies and memory.data_ptr() == held.untyped_storage().data_ptr()):
        return found.clone(memory_format=torch.contiguous_format)
    return found.contiguous()


def _saved(held: Holding) -> SavedTensor:
    return SavedTensor(
        name=held.name, key=held.key, shape=held.shape, dtype=dtype_name(held.tensor.dtype),
        is_buffer=held.is_buffer,
    )  # fmt: skip


def index_name(rank: int) -> str:
    """Of the file that says what a rank wrote."""
    return f"rank-{rank:05d}.json"


def joined(indices: Sequence[Index], feeds: Positions) -> Manifest:
    """What is in the files of some ranks, by their number among the indices."""
    tensors: dict[tuple[str, str], SavedTensor] = {}
    numbers: dict[str, dict[str, Scalar]] = {}
    for index in indices:
        numbers |= index.scalars
        for saved in index.tensors:
            known = tensors.setdefault((saved.name, saved.key), msgspec.structs.replace(saved, pieces=()))
            pieces = (*known.pieces, *saved.pieces)
            tensors[saved.name, saved.key] = msgspec.structs.replace(known, pieces=pieces)
    for saved in tensors.values():
        covered = _cover([piece.where for piece in saved.pieces], whole(saved.shape))
        assert covered, f"{saved.name} {saved.key}: only {len(saved.pieces)} parts of it written"
    states = [index.job.random for index in indices]
    alike = all(state == states[0] for state in states)
    return Manifest(
        files=tuple(index.file for index in indices),
        tensors=tuple(tensors[key] for key in sorted(tensors)),
        scalars=numbers,
        job=_joined_jobs([index.job for index in indices]),
        random=tuple(states[:1] if alike else states),
        feeds=feeds,
    )


def _joined_jobs(jobs: Sequence[JobState]) -> JobState:
    """Of all ranks: a schedule from the first that has one, settings from whoever holds the parameter."""
    options: list[object] = []
    option_of: dict[str, int] = {}
    for job in jobs:
        for name, number in job.option_of.items():
            if job.options[number] not in options:
                options.append(job.options[number])
            option_of[name] = options.index(job.options[number])
    schedule = next((job.schedule for job in jobs if job.schedule is not None), None)
    return msgspec.structs.replace(jobs[0], schedule=schedule, options=tuple(options), option_of=option_of)


def _states(manifest: Manifest) -> dict[str, States]:
    dtypes: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
    for saved in manifest.tensors:
        if saved.key != VALUE:
            dtypes[saved.name][saved.key] = dtype_called(saved.dtype)
    names = {*dtypes, *manifest.scalars}
    return {
        name: States(dtypes=dtypes.get(name, {}), scalars=manifest.scalars.get(name, {})) for name in names
    }


def _refuse_other_model(engine: Engine, saved: Mapping[tuple[str, str], SavedTensor], folder: Path) -> None:
    theirs = {name for (name, _), each in saved.items() if not each.is_buffer}
    ours = set(forms_of(engine))
    if theirs != ours:
        unlike = sorted(theirs ^ ours)
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        where = "only the checkpoint has" if unlike[0] in theirs else "the checkpoint lacks"
        raise UsageError(
            f"{folder} is of another model: {where} {unlike[0]}{more}; give this job a folder of its own"
        )


def _unlike(held: Holding, saved: SavedTensor | None, folder: Path) -> UsageError:
    what = " ".join(filter(None, (held.name, held.key)))
    here = f"{held.shape} {dtype_name(held.tensor.dtype)}"
    there = "is not in it" if saved is None else f"is {saved.shape} {saved.dtype} there"
    return UsageError(
        f"{folder} is of another model: {what} is {here} here and {there}; make the engine with the model, "
        "dtype and optimizer of the checkpoint, or give this job a folder of its own"
    )


def _needed(held: Holding, saved: SavedTensor, folder: Path) -> Iterator[tuple[SavedPiece, Part]]:
    parts = []
    for piece in saved.pieces:
        part = crossing(held.part, piece.where)
        if part is not None:
            parts.append(part)
            yield piece, part
    if not _cover(parts, held.part):
        raise damaged(folder / MANIFEST, f"lacks a part of {held.name} {held.key}".rstrip())


def _cover(parts: Sequence[Part], part: Part) -> bool:
    """Whether they make up a part, in which all of them lie; most often they do not overlap."""
    found, wanted = sum(map(numel_of, parts)), numel_of(part)
    return found == wanted or (found > wanted and covers(parts, part))


def _read(folder: Path, file: TensorFile, wanted: Sequence[tuple[SavedPiece, Holding, Part]]) -> None:
    """Copy pieces of one file to where they are held, each read once."""
    by_entry: dict[str, list[tuple[SavedPiece, Holding, Part]]] = defaultdict(list)
    for each in wanted:
        by_entry[each[0].entry].append(each)
    with opened(folder, file) as handle:
        for entry, uses in by_entry.items():
            value = handle.get_tensor(entry)
            if checksum(value) != uses[0][0].sha256:
                raise damaged(folder / file.name, f"{entry!r} does not match its checksum: it was altered")
            for piece, held, part in uses:
                copy_part(part, value, piece.where, held.tensor, held.part)
