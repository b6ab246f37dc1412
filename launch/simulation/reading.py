"""A trace from a file in any of three forms: the project's own, Parcae's csv, Sailor's json."""

import json
from collections.abc import Iterator
from pathlib import Path

from arachne_runtime.errors import InvalidFileError, Problem
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import read
from arachne_runtime.units import Seconds

from .costs import Costs
from .counts import parcae_counts, sailor_counts, trace_of_counts
from .document import TraceFile, check_trace
from .drawn import all_nodes, drawn_trace
from .trace import Event, Trace


def read_trace(path: Path, cluster: Cluster) -> tuple[Trace, Costs]:
    """What happens to the nodes of the cluster, and what changes cost; InvalidFileError."""
    if path.suffix == ".csv" or _is_list(path):
        return counted_trace(path, cluster), Costs()
    file = read(path, TraceFile, check_trace)
    if file.counted is not None:
        beside = path.parent / file.counted.file
        if not beside.is_file():
            raise InvalidFileError(str(path), [Problem("$.counted.file", f"{beside} is not a file")])
        trace = counted_trace(beside, cluster, file.counted.seed, file.counted.notice_s)
        return trace, file.costs
    _refuse(path, _unlike_the_cluster(file, cluster))
    here = all_nodes(cluster) if file.here is None else file.here
    assert file.duration_s is not None
    if file.drawn is not None:
        return drawn_trace(path.name, file.drawn, file.duration_s, here), file.costs
    events = tuple(
        Event(at_s=e.at_s, goes=e.goes, comes=e.comes, notice_s=min(e.notice_s, e.at_s)) for e in file.event
    )
    return Trace(name=path.name, duration_s=file.duration_s, here=here, events=events), file.costs


def counted_trace(path: Path, cluster: Cluster, seed: int = 0, notice_s: Seconds = 0.0) -> Trace:
    """A published trace of counts; ``seed`` draws who goes, and ``notice_s`` before that it is told."""
    devices = path.suffix != ".csv"
    counts = sailor_counts(path) if devices else parcae_counts(path)
    return trace_of_counts(path, counts, cluster, devices=devices, seed=seed, notice_s=notice_s)


def _is_list(path: Path) -> bool:
    """Whether a file is a JSON list, which no document of this project is."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        return isinstance(json.loads(path.read_bytes()), list)
    except (ValueError, RecursionError):
        return False  # the reader of documents says what is wrong with it


def _refuse(path: Path, problems: Iterator[Problem]) -> None:
    if found := tuple(problems):
        raise InvalidFileError(str(path), found)


def _unlike_the_cluster(file: TraceFile, cluster: Cluster) -> Iterator[Problem]:
    """Names that the cluster does not have, nodes that go without being there, and come while they are."""
    known = cluster.nodes_by_name
    here = set(all_nodes(cluster) if file.here is None else file.here)
    for name in sorted(here - set(known)):
        yield Problem("$.here", f"the cluster has no node {name!r}")
    for number, event in enumerate(file.event):
        for field, names in (("goes", event.goes), ("comes", event.comes)):
            for place, name in enumerate(names):
                path, goes = f"$.event[{number}].{field}[{place}]", field == "goes"
                if name not in known:
                    yield Problem(path, f"the cluster has no node {name!r}")
                elif (name in here) is not goes:
                    yield Problem(path, f"{name} is not there" if goes else f"{name} is there already")
                here = here - {name} if goes else here | {name}
