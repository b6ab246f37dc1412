"""Published traces of counts: Parcae's csv of instances, Sailor's json of GPUs; which node goes is drawn."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from arachne_runtime.errors import InvalidFileError, Problem
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.units import Seconds

from .trace import Event, Trace

MS_A_SECOND = 1000.0
"""Parcae's times are whole milliseconds in steps of a minute (JF-D/Parcae, commit efedee7)."""


@dataclass(frozen=True, slots=True)
class Count:
    """So many are there from now on."""

    at_s: Seconds
    number: int
    path: str
    """Where the file says so."""


def parcae_counts(path: Path) -> list[Count]:
    """Rows ``milliseconds,instances``, a row for each instance that goes or comes; InvalidFileError."""
    found, problems = [], []
    for number, line in enumerate(path.read_text("utf-8-sig", errors="replace").splitlines(), start=1):
        row, at = line.split(","), f"line {number}"
        if not line.strip():
            continue
        if len(row) != 2 or not all(_is_count(text) for text in row):
            fault = f"expected 'milliseconds,instances' in whole numbers, got {line[:60]!r}"
            problems.append(Problem(at, fault))
            continue
        found.append(Count(int(row[0]) / MS_A_SECOND, int(row[1]), at))
    return _checked(path, found, problems)


def sailor_counts(path: Path) -> list[Count]:
    """A list of ``{"Time": seconds, "GPUs": number}``; InvalidFileError."""
    try:
        raw = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(str(path), [Problem("$", f"is not JSON: {error}")]) from None
    if not isinstance(raw, list):
        raise InvalidFileError(str(path), [Problem("$", "is no list of times and GPUs")])
    found, problems = [], []
    for number, row in enumerate(raw):
        at = f"$[{number}]"
        if not _is_sample(row):
            problems.append(Problem(at, 'expected {"Time": seconds, "GPUs": number}, neither below 0'))
            continue
        found.append(Count(float(row["Time"]), row["GPUs"], at))
    return _checked(path, found, problems)


def _is_count(text: str) -> bool:
    return text.strip().isascii() and text.strip().isdigit() and len(text) < 16


def _is_sample(row: Any) -> bool:
    if not isinstance(row, dict) or set(row) != {"Time", "GPUs"}:
        return False
    seconds, number = row["Time"], row["GPUs"]
    if any(isinstance(value, bool) for value in (seconds, number)):
        return False
    return (
        isinstance(seconds, int | float) and 0 <= seconds < 1e12 and isinstance(number, int) and number >= 0
    )


def _checked(path: Path, found: list[Count], problems: list[Problem]) -> list[Count]:
    problems += _out_of_order(found)
    if not found and not problems:
        problems.append(Problem("$", "says of no moment how many are there"))
    if not problems and found[-1].at_s <= found[0].at_s:
        problems.append(Problem(found[-1].path, "is the only moment; a trace lasts until its last row"))
    if problems:
        raise InvalidFileError(str(path), problems)
    return found


def _out_of_order(found: list[Count]) -> Iterator[Problem]:
    for before, count in pairwise(found):
        if count.at_s < before.at_s:
            yield Problem(count.path, f"{count.at_s:g} s lies before {before.at_s:g} s of the row above")


def trace_of_counts(
    path: Path,
    counts: list[Count],
    cluster: Cluster,
    *,
    devices: bool,
    seed: int = 0,
    notice_s: Seconds = 0.0,
) -> Trace:
    """Nodes by drawing: of those that are there any may go, and the first of the others come.

    ``devices``: counts are of devices, so that nodes must all have as many. Raises InvalidFileError where
    the cluster has too few nodes, or a count is not one of whole nodes.
    """
    size = cluster.nodes[0].entry.gpus if devices else 1
    _refuse_counts(path, counts, cluster, size, devices=devices)
    rng = random.Random(f"counts {seed}")
    names = [node.name for node in cluster.nodes]
    steps = list(_by_moment(counts, size))
    here = names[: steps[0][1]]
    first, events = tuple(here), []
    for at_s, number in steps[1:]:
        goes = tuple(rng.sample(here, max(0, len(here) - number)))
        absent = [name for name in names if name not in set(here)]
        comes = tuple(absent[: max(0, number - len(here))])
        here = [name for name in here if name not in goes] + list(comes)
        if goes or comes:
            notice = min(notice_s, at_s - steps[0][0]) if goes else 0.0
            events.append(Event(at_s=at_s - steps[0][0], goes=goes, comes=comes, notice_s=notice))
    duration_s = counts[-1].at_s - counts[0].at_s
    return Trace(name=path.name, duration_s=duration_s, here=first, events=tuple(events))


def _by_moment(counts: list[Count], size: int) -> Iterator[tuple[Seconds, int]]:
    """The last count of each moment."""
    for count, following in zip(counts, [*counts[1:], None], strict=True):
        if following is None or following.at_s > count.at_s:
            yield count.at_s, count.number // size


def _refuse_counts(path: Path, counts: list[Count], cluster: Cluster, size: int, *, devices: bool) -> None:
    problems = []
    if devices and any(node.entry.gpus != size for node in cluster.nodes):
        problems.append(Problem("$", "counts devices, so that all nodes of the cluster must have as many"))
    most = max(counts, key=lambda count: count.number)
    if most.number > size * len(cluster.nodes):
        fault = (
            f"{most.number} are there, but the cluster has {size * len(cluster.nodes)}; give it more nodes"
        )
        problems.append(Problem(most.path, fault))
    odd = next((count for count in counts if count.number % size), None)
    if odd is not None:
        fault = f"{odd.number} devices are no whole number of nodes of {size}; let each node have one device"
        problems.append(Problem(odd.path, fault))
    if problems:
        raise InvalidFileError(str(path), problems)
