"""The price of a plan that a person gave, on the devices and with the measurements given with it."""

from typing import TYPE_CHECKING

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Profile

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner import Request
    from planner.cost import Estimate, Infeasible


def request_alone(plan: Plan, cluster: Cluster, model: ModelSpec, profile: Profile) -> "Request":
    """The problem that a plan answers: its own global batch and schedule; raises InvalidFileError."""
    from planner import Request

    return Request(
        cluster=cluster,
        model=model,
        profile=profile,
        global_batch=plan.global_batch,
        schedules=(plan.schedule,),
    )


def price_alone(plan: Plan, cluster: Cluster, model: ModelSpec, profile: Profile) -> "Estimate | Infeasible":
    """The price of a plan as an answer to its own problem; raises InvalidFileError and NotMeasuredError."""
    from planner.cost import price

    return price(plan, request_alone(plan, cluster, model, profile))
