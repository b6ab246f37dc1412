"""Reads what the ranks of a run wrote down; a line that cannot be read is counted and named, never fatal."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachne_runtime.errors import InvalidFileError, Problem, UsageError
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import Record

_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Recorded:
    """All records of a run that belong to one plan."""

    records: tuple[Record, ...]
    faults: tuple[str, ...]
    """``rank-1.jsonl:17: reason`` for every line that is no record."""
    other_plans: tuple[str, ...]
    """Digests of other plans that ran in the same folder; their records are left out."""


def read_recorded(folder: Path, plan: Plan) -> Recorded:
    """The records of ``plan`` below ``folder``.

    Raises UsageError where the folder holds no records, InvalidFileError where none is of this plan.
    """
    files = sorted(
        (path for path in folder.glob("rank-*.jsonl") if _FILE.fullmatch(path.name)),
        key=lambda path: int(path.stem.removeprefix("rank-")),
    )
    if not files:
        raise UsageError(
            f"{folder} holds no records (rank-*.jsonl); run with a trace: arachne run PLAN --trace DIR"
        )
    found: list[Record] = []
    faults: list[str] = []
    for path in files:
        for line in _lines(path):
            found.append(line) if isinstance(line, Record) else faults.append(line)
    wanted = digest(plan)
    others = tuple(dict.fromkeys(record.plan for record in found if record.plan != wanted))
    ours = tuple(record for record in found if record.plan == wanted)
    if not ours:
        ran = ", ".join(others) or "no plan that can be read"
        message = f"records of {ran}, none of this plan ({wanted}); give the plan file that ran"
        raise InvalidFileError(str(folder), [Problem("$.plan", message)])
    return Recorded(ours, tuple(faults), others)


def _lines(path: Path) -> Iterator[Record | str]:
    """Records, and for what is none where it is and why."""
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            yield f"{path.name}:{number}: {error}"
