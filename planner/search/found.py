"""The answer of a search: the plan, what it was compared with, and why the others lose."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.plan import MadeBy, Plan, Predicted
from arachne_runtime.units import Seconds, format_seconds

from ..cost import Breakdown, Estimate
from ..request import Request
from .judge import Priced

MOST_RUNNERS = 5


@dataclass(frozen=True, slots=True)
class Rival:
    """What a peer strategy proposed."""

    name: str
    plan: Plan | None
    estimate: Estimate | None
    reason: str = ""
    """Why it has no plan."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A plan that came after the best one."""

    plan: Plan
    estimate: Estimate
    _best: Priced = field(repr=False)

    @property
    def why(self) -> str:
        """What it spends its longer iteration on, or why it loses in spite of a shorter one."""
        longer = self.estimate.iteration_s - self._best.estimate.iteration_s
        if longer <= 0:
            return "not slower, but no better under the objective"
        most = max(_differences(self._best, self.plan, self.estimate), key=lambda part: part[1])
        return f"{format_seconds(longer)} longer: {format_seconds(most[1])} more {most[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of a search."""

    plan: Plan
    estimate: Estimate
    evaluations: int
    seconds: Seconds
    runners_up: tuple[Runner, ...]
    """The next best plans that were priced and differ in more than numbers of samples, best first."""
    rivals: tuple[Rival, ...]
    proven: bool
    """Whether no plan of the space is faster (no ZeRO): branch and bound came to its end."""
    idle: tuple[str, ...] = ()
    """Devices that the plan leaves out, since it was faster or cheaper than all that were tried with them."""
    ideal_s: Seconds = 0.0
    """All compute in proportion to speed, nothing else taking time (``planner.explain.Ideal``)."""
    is_running: bool = False
    """Whether it is the plan that was running: no change pays."""
    change_s: Seconds = 0.0
    """Standstill of the change from the running plan; 0 without one."""
    price_per_hour: float | None = None
    """Devices and traffic, where the request counts money."""

    @property
    def share_of_ideal(self) -> float:
        """Part of the ideal throughput that the plan reaches; of the best plan's it reaches more."""
        return self.ideal_s / self.estimate.iteration_s


def runners(kept: Sequence[Priced]) -> tuple[Runner, ...]:
    """The best plan of each other structure, best first."""
    best = kept[0]
    seen = {_structure(best.plan)}
    found: list[Runner] = []
    for other in kept[1:]:
        if _structure(other.plan) not in seen and len(found) < MOST_RUNNERS:
            seen.add(_structure(other.plan))
            found.append(Runner(other.plan, other.estimate, best))
    return tuple(found)


def _structure(plan: Plan) -> object:
    """What a reader tells plans apart by: cuts, widths and TP degrees of every pipeline, and the schedule."""
    return plan.schedule, tuple(
        (p.micro_batch, tuple((s.layers, len(s.replicas), len(s.replicas[0].devices)) for s in p.stages))
        for p in plan.pipelines
    )


def _differences(best: Priced, plan: Plan, estimate: Estimate) -> Iterator[tuple[str, Seconds]]:
    """By what the busiest device of each does, how much more the other takes."""
    ours, theirs = _busiest(best.plan, best.estimate), _busiest(plan, estimate)
    yield "computing", theirs.compute_s - ours.compute_s
    yield "in bubbles", theirs.bubble_s - ours.bubble_s
    yield "for messages", theirs.hop_s - ours.hop_s
    yield "for reductions and waiting for them", theirs.sync_s - ours.sync_s
    yield "in the optimizer", theirs.update_s - ours.update_s


def _busiest(plan: Plan, estimate: Estimate) -> Breakdown:
    return max((estimate.breakdown[d] for d in plan.devices), key=lambda parts: parts.compute_s)


def signed(found: Found, request: Request, *, version: str, seed: int = 0) -> Plan:
    """The plan of a search with what is predicted of it and where it comes from, as it goes into a file.

    ``version`` of this project, ``seed`` of the search.
    """
    estimate = found.estimate
    predicted = Predicted(
        iteration_s=estimate.iteration_s,
        samples_per_s=estimate.samples_per_s,
        peak_bytes=dict(estimate.peak_bytes),
    )
    made_by = MadeBy(
        solver="arachne",
        seed=seed,
        version=version,
        cluster=digest(request.cluster),
        model=digest(request.model),
        profile=digest(request.profile),
        device_types={n: request.cluster.nodes_by_name[n].entry.device for n in _nodes(found.plan)},
    )
    return replace(found.plan, predicted=predicted, made_by=made_by)


def _nodes(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(node_of, plan.devices)))
