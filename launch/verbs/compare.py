"""``arachne compare``: several plans and the rivals' under one price, side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from arachne_runtime.errors import ExitCode, NotMeasuredError, UsageError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import read_cluster, read_plan
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds, format_bytes, format_seconds, significant

from ..folders import check_writable
from ..inputs import model_from, profile_from
from ..options import MODEL, AsJson, ProfileOfModel

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner import Request
    from planner.cost import Estimate


@dataclass(frozen=True, slots=True)
class Row:
    """One plan and its price."""

    name: str
    """The plan's file, or the name of the strategy that proposed it."""
    plan: Plan | None
    """None where a strategy has no plan that fits."""
    estimate: "Estimate | None"
    """None where the plan does not fit."""
    remark: str
    """What limits it, or why it does not fit."""

    @property
    def samples_per_s(self) -> float:
        """Throughput; 0 where the plan does not fit."""
        return self.estimate.samples_per_s if self.estimate else 0.0


def command(
    plans: Annotated[list[Path], typer.Argument(help="Plans to compare (plan.json).")],
    cluster: Annotated[Path | None, typer.Option(help="The devices: a cluster.toml.")] = None,
    model: Annotated[str | None, typer.Option(help=MODEL)] = None,
    profile: ProfileOfModel = None,
    run: Annotated[
        Path | None, typer.Option(help="Lay these records (arachne run --trace DIR) beside the plan's price.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Draw that run under its price, for chrome://tracing or Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> int | None:
    """Price plans beside what rival strategies propose.

    All for the same problem; exit code 4 where none fits. With --run: measured beside predicted.
    """
    check_writable(trace, "--trace")
    if run is None and trace is not None:
        raise UsageError(f"--trace {trace} draws a run: give its records, --run DIR")
    if run is not None:
        from ..report.compare_run import tell_run

        tell_run(plans, run, cluster, model, profile, trace=trace, as_json=as_json)
        return None
    if cluster is None or model is None:
        raise UsageError("plans are priced for devices and a model: give --cluster and --model")
    read, request = _problem(plans, cluster, model, profile)
    rows = sorted(_rows(read, request), key=lambda row: -row.samples_per_s)
    print(_as_json(rows) if as_json else _as_text(rows))
    return None if any(row.samples_per_s for row in rows) else ExitCode.NO_FEASIBLE_PLAN


def _problem(
    plans: Sequence[Path], cluster: Path, model: str, profile: str | None
) -> "tuple[list[tuple[str, Plan]], Request]":
    """The plans by file name, and the one planning problem that all of them answer."""
    from planner import Request

    places, spec = read_cluster(cluster), model_from(model, read_plan(plans[0]).sequence)
    read = [(str(path), read_plan(path, cluster=places, model=spec)) for path in plans]
    batches = {plan.global_batch for _, plan in read}
    if len(batches) > 1:
        raise UsageError(
            f"the plans have global batches {', '.join(map(str, sorted(batches)))}, which train "
            f"differently; compare plans of one global batch"
        )
    return read, Request(
        cluster=places,
        model=spec,
        profile=profile_from(profile, model, spec, places),
        global_batch=batches.pop(),
        schedules=tuple(dict.fromkeys(plan.schedule for _, plan in read)),
    )


def _rows(read: Sequence[tuple[str, Plan]], request: "Request") -> Iterator[Row]:
    from planner.peers import PEERS

    for name, plan in read:
        yield _row(name, plan, request)
    for peer in PEERS:
        try:
            proposed = peer.propose(request)
        except NotMeasuredError as error:
            yield Row(peer.name, None, None, str(error))
            continue
        if proposed is None:
            yield Row(peer.name, None, None, "has no plan that fits")
        else:
            yield _row(peer.name, proposed, request)


def _row(name: str, plan: Plan, request: "Request") -> Row:
    from planner.cost import Infeasible, price

    found = price(plan, request)
    if isinstance(found, Infeasible):
        return Row(name, plan, None, f"does not fit: {found.reason}")
    return Row(name, plan, found, f"limited by: {found.limits}")


def _as_text(rows: Sequence[Row]) -> str:
    """One line a plan, the fastest first, then what limits each."""
    best = rows[0].samples_per_s
    heads = ("plan", "iteration", "samples/s", "ratio", "devices", "memory")
    table = [heads, *(_cells(row, best) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    lines.append("")
    return "\n".join(lines + [f"{row.name}: {row.remark}" for row in rows])


def _cells(row: Row, best: float) -> tuple[str, ...]:
    devices = str(len(row.plan.devices)) if row.plan else "-"
    if row.estimate is None:
        return row.name, "does not fit" if row.plan else "no plan", "-", "-", devices, "-"
    memory = format_bytes(max(row.estimate.peak_bytes.values()))
    seconds, rate = format_seconds(row.estimate.iteration_s), significant(row.samples_per_s, 4)
    return row.name, seconds, rate, f"{best / row.samples_per_s:.3f}x", devices, memory


def _as_json(rows: Sequence[Row]) -> str:
    best = rows[0].samples_per_s
    return msgspec.json.format(msgspec.json.encode([_compared(row, best) for row in rows])).decode()


class Compared(Document, frozen=True, kw_only=True):
    """A row as JSON."""

    plan: str
    iteration_s: Seconds | None
    samples_per_s: float | None
    ratio: float | None
    """How many times as fast the fastest is."""
    devices: int | None
    remark: str


def _compared(row: Row, best: float) -> Compared:
    fits = row.samples_per_s > 0
    return Compared(
        plan=row.name,
        iteration_s=row.estimate.iteration_s if row.estimate else None,
        samples_per_s=row.samples_per_s if fits else None,
        ratio=best / row.samples_per_s if fits else None,
        devices=len(row.plan.devices) if row.plan else None,
        remark=row.remark,
    )
