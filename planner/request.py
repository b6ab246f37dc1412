"""What is asked of the planner: devices, a model, its measurements, a global batch, checked together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from arachne_runtime.errors import InvalidFileError, NotMeasuredError, Problem, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.limits import MAX_MICRO_BATCHES
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.profile import Profile
from arachne_runtime.plan.schedule import PRICEABLE
from arachne_runtime.units import HOUR_S, Seconds

from .cost.fleet import Fleet
from .cost.tables import Tables

PAUSE_S: Seconds = 20.0
"""Training stands still for so long at a change of plan, moving state aside: 19 to 21 s in all are published
for Arachne (arXiv 2609.34244), which moves 5.2 GB a rank in 4.0 s of them. A default."""

CHANGE_EVERY_S: Seconds = HOUR_S
"""Expected time until the next change of the cluster, by which a change of plan must pay. A default."""

MOST_ZERO = 3

MOST_SAMPLES = MAX_MICRO_BATCHES
"""Largest global batch: in micro-batches of one sample it is still a plan that the rules allow."""


class Objective(StrEnum):
    """What makes one plan better than another."""

    THROUGHPUT = "throughput"
    """Least seconds of an iteration."""
    COST = "cost"
    """Least money for a sample: devices in use and traffic that is paid for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One planning problem. An object that exists is consistent: every device type has measurements."""

    cluster: Cluster
    model: ModelSpec
    profile: Profile
    global_batch: int
    schedules: tuple[ScheduleKind, ...] = (ScheduleKind.ONE_F_ONE_B,)
    max_micro_batch: int | None = None
    """Largest micro-batch of any pipeline, or None for no limit but the measurements."""
    max_zero: int = 0
    """Highest ZeRO stage that the search may use, 0 to 3."""
    objective: Objective = Objective.THROUGHPUT
    max_price_per_hour: float | None = None
    """No plan may cost more: devices in use and traffic (``Estimate.price_per_hour``), in their currency."""
    deadline_s: Seconds | None = None
    """``deadline_samples`` must be done by then; with the objective cost: by the cheapest such plan."""
    deadline_samples: int | None = None
    running: Plan | None = None
    """The plan now running: it is kept where a change does not pay within ``change_every_s``."""
    change_every_s: Seconds = CHANGE_EVERY_S
    """Expected time until the cluster changes again."""
    migration_pause_s: Seconds = PAUSE_S
    """Standstill at a change of plan beside the time for the bytes that move."""

    def __post_init__(self) -> None:
        _check_arguments(self)
        _check_running(self)
        problems = list(_mismatches(self))
        if problems:
            raise InvalidFileError(f"the profile of {self.profile.model}", problems)
        _check_measured(self)
        self.fleet  # noqa: B018 - an unknown device type ends here, not in the middle of a search
        _check_prices(self)

    @property
    def most_micro_batch(self) -> int:
        """Largest micro-batch that it allows, in samples."""
        return min(self.global_batch, self.max_micro_batch or self.global_batch)

    @property
    def counts_money(self) -> bool:
        """Whether prices decide which plan is best."""
        return self.objective is Objective.COST or self.max_price_per_hour is not None

    @cached_property
    def fleet(self) -> Fleet:
        """Devices with memory, bandwidth and price: the cluster's own figures, else the catalog's."""
        return Fleet(self.cluster, self.profile)

    @cached_property
    def tables(self) -> Tables:
        """Costs of any run of blocks in constant time."""
        return Tables(self.model, self.profile, self.fleet)


def with_cluster(request: Request, cluster: Cluster) -> Request:
    """The same question for other devices; a plan that runs on the old ones is left out."""
    return replace(request, cluster=cluster, running=None)


def _check_arguments(request: Request) -> None:
    if request.global_batch < 1:
        raise UsageError(f"global batch {request.global_batch} is below 1")
    if request.global_batch > MOST_SAMPLES:
        raise UsageError(
            f"global batch {request.global_batch} is above {MOST_SAMPLES}; plan for a part of it "
            f"and let each step of the optimizer be several of its steps"
        )
    if request.max_micro_batch is not None and request.max_micro_batch < 1:
        raise UsageError(f"largest micro-batch {request.max_micro_batch} is below 1")
    if not 0 <= request.max_zero <= MOST_ZERO:
        raise UsageError(f"highest ZeRO stage {request.max_zero} is not 0 to {MOST_ZERO}")
    _check_objective(request)
    unknown = [kind for kind in request.schedules if kind not in PRICEABLE]
    if unknown or not request.schedules:
        raise UsageError(
            f"schedules {', '.join(unknown) or '(none)'} cannot be planned in this version; "
            f"choose from {', '.join(PRICEABLE)}"
        )


def _check_running(request: Request) -> None:
    """The running plan trains the same model, in steps of as many samples."""
    running = request.running
    if running is None:
        return
    asked = request.model.name, len(request.model.blocks)
    if (running.model, running.num_blocks) != asked:
        raise UsageError(
            f"the running plan is one of {running.model} with {running.num_blocks} blocks, asked is a plan "
            f"of {asked[0]} with {asked[1]}; leave the running plan out, or ask for its model"
        )
    if running.global_batch != request.global_batch:
        raise UsageError(
            f"the running plan has a global batch of {running.global_batch}, asked is one of "
            f"{request.global_batch}; no plan changes it: leave the running plan out, or ask for its batch"
        )


def _check_objective(request: Request) -> None:
    positive = {
        "highest price an hour": request.max_price_per_hour,
        "deadline": request.deadline_s,
        "samples until the deadline": request.deadline_samples,
        "time until the next change": request.change_every_s,
    }
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise UsageError(f"{name} {value:g} is not above 0")
    if request.migration_pause_s < 0:
        raise UsageError(f"pause of a change of plan {request.migration_pause_s:g} s is below 0")
    if (request.deadline_s is None) != (request.deadline_samples is None):
        raise UsageError("a deadline needs both its seconds and its samples")


def _mismatches(request: Request) -> Iterator[Problem]:
    model, profile = request.model, request.profile
    if profile.model != model.name:
        yield Problem(
            "$.model", f"measures {profile.model!r}, but the model is {model.name!r}; measure that one"
        )
    if profile.sequence != model.sequence:
        yield Problem(
            "$.sequence",
            f"measured at {profile.sequence} tokens, but the model has {model.sequence}; measure again",
        )


def _check_measured(request: Request) -> None:
    """Every device type of the cluster has every kind of block, at one TP degree at least."""
    profile = request.profile
    kinds = list(dict.fromkeys(block.kind for block in request.model.blocks))
    for device in dict.fromkeys(entry.device for entry in request.cluster.node):
        degrees = {t.tp for t in profile.timings if t.device == device}
        if any(all(profile.samples_range(k, device, tp) for k in kinds) for tp in degrees):
            continue
        missing = [k for k in kinds if not any(profile.samples_range(k, device, tp) for tp in degrees)]
        known = ", ".join(dict.fromkeys(t.device for t in profile.timings)) or "nothing"
        raise NotMeasuredError(
            f"profile of {profile.model}: device type {device!r} of the cluster was not measured for block "
            f"kinds {', '.join(missing or kinds)} (measured types: {known}); run `arachne profile` on it, "
            f"or leave its nodes out of the cluster"
        )


def _check_prices(request: Request) -> None:
    """Where money counts, every node has a price."""
    if not request.counts_money:
        return
    free = [name for name, node in request.fleet.nodes.items() if node.price_per_hour is None]
    if free:
        raise UsageError(
            f"no price in {request.cluster.currency} is known for node {free[0]!r}; give price_per_hour of "
            f"its entry in the cluster file"
        )
