"""What is asked of the planner: devices, a model, its measurements, a global batch, checked together."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from arachne_runtime.errors import InvalidFileError, NotMeasuredError, Problem, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.profile import Profile
from arachne_runtime.plan.schedule import PLAYABLE

from .cost.fleet import Fleet
from .cost.tables import Tables


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

    def __post_init__(self) -> None:
        _check_arguments(self)
        problems = list(_mismatches(self))
        if problems:
            raise InvalidFileError(f"the profile of {self.profile.model}", problems)
        _check_measured(self)
        self.fleet  # noqa: B018 - an unknown device type ends here, not in the middle of a search

    @cached_property
    def fleet(self) -> Fleet:
        """Devices with memory, bandwidth and price: the cluster's own figures, else the catalog's."""
        return Fleet(self.cluster, self.profile)

    @cached_property
    def tables(self) -> Tables:
        """Costs of any run of blocks in constant time."""
        return Tables(self.model, self.profile, self.fleet)


def _check_arguments(request: Request) -> None:
    if request.global_batch < 1:
        raise UsageError(f"global batch {request.global_batch} is below 1")
    if request.max_micro_batch is not None and request.max_micro_batch < 1:
        raise UsageError(f"largest micro-batch {request.max_micro_batch} is below 1")
    unknown = [kind for kind in request.schedules if kind not in PLAYABLE]
    if unknown or not request.schedules:
        raise UsageError(
            f"schedules {', '.join(unknown) or '(none)'} cannot be planned in this version; "
            f"choose from {', '.join(PLAYABLE)}"
        )


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
