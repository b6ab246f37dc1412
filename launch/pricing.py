"""The price of a plan that a person gave, on the devices and with the measurements given with it."""

from typing import TYPE_CHECKING

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Profile

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner.cost import Estimate, Infeasible


def price_alone(plan: Plan, cluster: Cluster, model: ModelSpec, profile: Profile) -> "Estimate | Infeasible":
    """The plan under its own global batch and schedule; raises InvalidFileError and NotMeasuredError."""
    from planner import Request
    from planner.cost import price

    request = Request(
        cluster=cluster,
        model=model,
        profile=profile,
        global_batch=plan.global_batch,
        schedules=(plan.schedule,),
    )
    return price(plan, request)
