"""The answer of a search: the plan, what it was compared with, and what came next."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.plan import MadeBy, Plan, Predicted
from arachne_runtime.units import Seconds

from ..cost import Estimate
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
    """All compute in proportion to speed, nothing else taking time (``planner.cost.Ideal``)."""
    is_running: bool = False
    """Whether it is the plan that was running: no change pays."""
    notes: tuple[str, ...] = ()
    """What the search had to do without, and the way out."""
    change_s: Seconds = 0.0
    """Standstill of the change from the running plan; 0 without one."""

    @property
    def share_of_ideal(self) -> float:
        """Part of the ideal throughput that the plan reaches; of the best plan's it reaches more."""
        return self.ideal_s / self.estimate.iteration_s


def runners(kept: Sequence[Priced]) -> tuple[Runner, ...]:
    """The best plan of each other structure, best first."""
    seen = {_structure(kept[0].plan)}
    found: list[Runner] = []
    for other in kept[1:]:
        if _structure(other.plan) not in seen and len(found) < MOST_RUNNERS:
            seen.add(_structure(other.plan))
            found.append(Runner(other.plan, other.estimate))
    return tuple(found)


def _structure(plan: Plan) -> object:
    """What a reader tells plans apart by: cuts, widths and TP degrees of every pipeline, and the schedule."""
    return plan.schedule, tuple(
        (p.micro_batch, tuple((s.layers, len(s.replicas), len(s.replicas[0].devices)) for s in p.stages))
        for p in plan.pipelines
    )


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
