"""Every rule of a document at once."""

from ...errors import Problem
from ..cluster import Cluster
from ..model import ModelSpec
from ..plan import Plan
from .plan import PLAN_RULES, pipelines_stop_at_the_same_block
from .plan_fit import PLAN_CLUSTER_RULES, PLAN_MODEL_RULES


def check_plan(
    plan: Plan, *, cluster: Cluster | None = None, model: ModelSpec | None = None
) -> tuple[Problem, ...]:
    """Every violation of every rule; those on devices and blocks need ``cluster`` and ``model``."""
    problems = [problem for rule in PLAN_RULES for problem in rule(plan)]
    if cluster is not None:
        problems += [problem for rule in PLAN_CLUSTER_RULES for problem in rule(plan, cluster)]
    if model is not None:
        problems += [problem for rule in PLAN_MODEL_RULES for problem in rule(plan, model)]
    else:
        problems += pipelines_stop_at_the_same_block(plan)
    return tuple(problems)
