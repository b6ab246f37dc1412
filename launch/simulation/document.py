"""The project's own form of a trace, as a person writes it (TOML) or a program does (JSON)."""

from collections.abc import Iterator
from typing import Literal

from arachne_runtime.errors import Problem
from arachne_runtime.plan.document import Document
from arachne_runtime.units import Seconds

from .costs import Costs

TRACE_FORMAT: Literal["arachne.trace/1"] = "arachne.trace/1"


class StatedEvent(Document, frozen=True, kw_only=True):
    """One ``[[event]]``."""

    at_s: Seconds
    goes: tuple[str, ...] = ()
    """Names of nodes, as the cluster expands them."""
    comes: tuple[str, ...] = ()
    notice_s: Seconds = 0.0
    """So long before, those that go are told."""


class Counted(Document, frozen=True, kw_only=True):
    """``[counted]``: a published trace of counts, which says how many are there and not which."""

    file: str
    """Beside the trace file: Parcae's csv or Sailor's json."""
    seed: int = 0
    """Draws which node goes, of those that are there."""
    notice_s: Seconds = 0.0


class Drawn(Document, frozen=True, kw_only=True):
    """``[drawn]``: every node of the cluster fails and is preempted by itself, as Poisson processes."""

    seed: int
    mean_to_loss_s: Seconds | None = None
    """Of one node; None: never."""
    mean_repair_s: Seconds | None = None
    """Until a lost node is back; stated with ``mean_to_loss_s``."""
    mean_to_preemption_s: Seconds | None = None
    """Of one node; None: never."""
    mean_absence_s: Seconds | None = None
    """Until a preempted node is back; stated with ``mean_to_preemption_s``."""
    notice_s: Seconds = 0.0
    """Of a preemption; a loss has none."""


class TraceFile(Document, frozen=True, kw_only=True):
    """Events that are stated, drawn, or counted in another file: one of the three."""

    format: Literal["arachne.trace/1"] = TRACE_FORMAT
    duration_s: Seconds | None = None
    """A trace of counts has its own."""
    here: tuple[str, ...] | None = None
    """Nodes that are there at the start; None: all of the cluster."""
    event: tuple[StatedEvent, ...] = ()
    counted: Counted | None = None
    drawn: Drawn | None = None
    costs: Costs = Costs()


def check_trace(file: TraceFile) -> Iterator[Problem]:
    """Rules that need no cluster."""
    yield from one_source_states_the_events(file)
    yield from times_are_in_order(file)
    yield from drawn_processes_have_both_means(file)
    yield from costs_are_not_below_zero(file)


def one_source_states_the_events(file: TraceFile) -> Iterator[Problem]:
    """Not both stated and drawn, and a duration where no other file has it."""
    sources = [name for name in ("event", "counted", "drawn") if getattr(file, name)]
    if len(sources) > 1:
        yield Problem(f"$.{sources[1]}", f"stands beside $.{sources[0]}; a trace has one of them")
    if file.counted is not None and file.here is not None:
        yield Problem("$.here", "is said by $.counted.file already; leave it out")
    if file.counted is None and file.duration_s is None:
        yield Problem("$.duration_s", "missing; say how many seconds the trace lasts")
    if file.duration_s is not None and not file.duration_s > 0:
        yield Problem("$.duration_s", f"{file.duration_s:g} s is not above 0")


def times_are_in_order(file: TraceFile) -> Iterator[Problem]:
    """Each event at or behind the one before, within the duration."""
    before_s = 0.0
    for number, event in enumerate(file.event):
        path = f"$.event[{number}]"
        if event.at_s < before_s:
            yield Problem(
                f"{path}.at_s", f"{event.at_s:g} s lies before {before_s:g} s, where a trace is by then"
            )
        if file.duration_s is not None and event.at_s > file.duration_s:
            yield Problem(f"{path}.at_s", f"{event.at_s:g} s lies behind the end, {file.duration_s:g} s")
        if event.notice_s < 0:
            yield Problem(f"{path}.notice_s", f"{event.notice_s:g} s is below 0")
        if not event.goes and not event.comes:
            yield Problem(path, "nobody goes and nobody comes; name nodes in goes or comes")
        before_s = max(before_s, event.at_s)


def drawn_processes_have_both_means(file: TraceFile) -> Iterator[Problem]:
    """A mean time to go and a mean time until it is back, both above 0."""
    if file.drawn is None:
        return
    pairs = (("mean_to_loss_s", "mean_repair_s"), ("mean_to_preemption_s", "mean_absence_s"))
    stated = {name: getattr(file.drawn, name) for pair in pairs for name in pair}
    for pair in pairs:
        for name, other in (pair, pair[::-1]):
            if stated[name] is None and stated[other] is not None:
                yield Problem(f"$.drawn.{name}", f"missing beside {other}")
    for name, value in stated.items():
        if value is not None and not value > 0:
            yield Problem(f"$.drawn.{name}", f"{value:g} s is not above 0")
    if file.drawn.notice_s < 0:
        yield Problem("$.drawn.notice_s", f"{file.drawn.notice_s:g} s is below 0")


def costs_are_not_below_zero(file: TraceFile) -> Iterator[Problem]:
    """Nothing is done before it begins."""
    for name in Costs.__struct_fields__:
        if (value := getattr(file.costs, name)) < 0:
            yield Problem(f"$.costs.{name}", f"{value:g} is below 0")
