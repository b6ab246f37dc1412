"""Reads what the ranks of a run wrote down; a line that cannot be read is counted and named, never fatal."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachne_runtime.errors import InvalidFileError, Problem, UsageError
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import Record, RecordKind
from arachne_runtime.plan.schedule import Action

_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The records of the last run of one plan."""

    records: tuple[Record, ...]
    faults: tuple[str, ...]
    """``rank-1.jsonl:17: reason`` for every line that is no record."""
    other_plans: tuple[str, ...]
    """Digests of other plans that ran in the same folder; their records are left out."""
    earlier_runs: int
    """Runs of the plan in the same folder before the last one; their records are left out too."""


def read_recorded(folder: Path, plan: Plan) -> Recorded:
    """The records of ``plan`` below ``folder``.

    Raises UsageError where the folder holds no records, InvalidFileError where none is of this plan.
    """
    files = sorted((path for path in folder.glob("rank-*.jsonl") if _FILE.fullmatch(path.name)), key=_rank)
    if not files:
        raise UsageError(
            f"{folder} holds no records (rank-*.jsonl); run with a trace: arachne run PLAN --trace DIR"
        )
    wanted = digest(plan)
    records: list[Record] = []
    faults: list[str] = []
    others: dict[str, None] = {}
    earlier = 0
    for path in files:
        runs: list[list[Record]] = [[]]
        for line in _lines(path):
            if isinstance(line, str):
                faults.append(line)
            elif line.plan != wanted:
                others[line.plan] = None
            else:
                if runs[-1] and line.step < runs[-1][-1].step:  # a run counts its steps from 0
                    runs.append([])
                runs[-1].append(line)
        records += runs[-1]
        earlier = max(earlier, len(runs) - 1)
    if not records:
        ran = ", ".join(others) or "no plan that can be read"
        message = f"records of {ran}, none of this plan ({wanted}); give the plan file that ran"
        raise InvalidFileError(str(folder), [Problem("$.plan", message)])
    return Recorded(tuple(records), tuple(faults), tuple(others), earlier)


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _lines(path: Path) -> Iterator[Record | str]:
    """Records, and for what is none where it is and why."""
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
            if record.kind is RecordKind.ACTION:
                Action.parse(record.name)
        except (msgspec.MsgspecError, UnicodeDecodeError, UsageError) as error:
            yield f"{path.name}:{number}: {error}"
        else:
            yield record
