"""What ``arachne show`` tells of a plan, as a document and as text."""

from collections.abc import Iterator

import msgspec

from arachne_runtime.plan.alike import alike, numbers
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.schedule_grid import pipeline_rows, print_grid
from arachne_runtime.plan.text import describe

from .answers import Answer, MisfitAnswer, PriceAnswer, raw
from .tell_price import breakdown_lines, misfit_lines, price_lines, replicas_of


class ShowAnswer(Answer, frozen=True, kw_only=True):
    """Everything that ``arachne show --json`` prints."""

    file: str
    plan: msgspec.Raw
    device_types: dict[str, str] | None
    """By device; None where no cluster was given."""
    price: PriceAnswer | None
    infeasible: MisfitAnswer | None


def show_answer(
    file: str, plan: Plan, cluster: Cluster | None, price: PriceAnswer | None, misfit: MisfitAnswer | None
) -> ShowAnswer:
    """All of it."""
    types = {device: cluster.device_type(device) for device in plan.devices} if cluster else None
    return ShowAnswer(file=file, plan=raw(plan), device_types=types, price=price, infeasible=misfit)


def show_text(answer: ShowAnswer, plan: Plan, cluster: Cluster | None, *, grid: bool) -> str:
    """For a person; ``grid``: with the order of actions of each pipeline."""
    parts = [describe(plan, cluster)]
    if grid:
        parts += _grids(plan, cluster)
    if answer.price is not None:
        lines = [*price_lines(answer.price), *breakdown_lines(answer.price, replicas_of(plan, cluster))]
        parts.append("\n".join(lines))
    if answer.infeasible is not None:
        parts.append("\n".join(misfit_lines(answer.infeasible)))
    return "\n\n".join(parts)


def _grids(plan: Plan, cluster: Cluster | None) -> Iterator[str]:
    for group in alike(plan, cluster):
        plural = "s" if len(group.pipelines) > 1 else ""
        title = f"pipeline{plural} {numbers(group.pipelines)}"
        yield f"{title}\n{print_grid(pipeline_rows(plan, group.pipelines[0]))}"
