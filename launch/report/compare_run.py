"""``arachne compare PLAN --run DIR``: a measured run beside the price of its plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arachne_runtime.errors import UsageError
from arachne_runtime.plan import files
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Profile

from ..inputs import model_from, profile_from
from ..pricing import price_alone
from .recorded import read_recorded
from .runs import RunReport, report_run

if TYPE_CHECKING:  # loads NumPy
    from planner.cost import Span


def tell_run(
    plans: Sequence[Path],
    run: Path,
    cluster: Path | None,
    model: str | None,
    profile: str | None,
    *,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Print the report of a run, priced anew where cluster and model are given.

    Raises UsageError unless there is one plan; what ``report_run`` and the price raise.
    """
    if len(plans) != 1:
        raise UsageError(f"a run is of one plan, and --run {run} was given with {len(plans)} plans")
    report = _report(plans[0], run, cluster, model, profile, trace)
    if as_json:
        print(files.encode(report).decode(), end="")
        return
    from rich.console import Console

    from .run_table import told

    Console(highlight=False, soft_wrap=True).print(told(report))


def _report(
    path: Path, run: Path, cluster: Path | None, model: str | None, profile: str | None, trace: Path | None
) -> RunReport:
    if cluster is None or model is None:
        plan = files.read_plan(path)
        _draw(plan, run, {}, trace)
        return report_run(plan, run)
    places, spec = files.read_cluster(cluster), model_from(model, files.read_plan(path).sequence)
    plan = files.read_plan(path, cluster=places, model=spec)
    return _priced(plan, run, places, spec, profile_from(profile, model, spec, places), trace)


def _priced(
    plan: Plan, run: Path, places: Cluster, spec: ModelSpec, profile: Profile, trace: Path | None
) -> RunReport:
    from planner.cost import Infeasible

    found = price_alone(plan, places, spec, profile)
    _draw(plan, run, {} if isinstance(found, Infeasible) else found.timeline, trace)
    if isinstance(found, Infeasible):
        return report_run(plan, run, unpriced=f"its price says that it does not fit: {found.reason}")
    return report_run(plan, run, timeline=found.timeline, predicted_s=found.iteration_s)


def _draw(plan: Plan, run: Path, timeline: "Mapping[str, Sequence[Span]]", trace: Path | None) -> None:
    """Write the trace of measured under predicted, where one is asked for."""
    if trace is not None:
        from .run_trace import run_trace

        files.write_whole(trace, run_trace(plan, read_recorded(run, plan).records, timeline))
