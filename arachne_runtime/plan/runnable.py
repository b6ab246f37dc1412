"""What of all that a plan can say this version's engine can run; the rest is planned and priced only.

It needs no torch, so that a launcher refuses a plan before any rank starts.
"""

from collections.abc import Iterator

from ..errors import UnsupportedPlanError
from .plan import Plan, Stage


def refuse_unrunnable(plan: Plan) -> None:
    """Refuse a valid plan that the engine cannot run exactly; UnsupportedPlanError lists every reason."""
    if found := obstacles(plan):
        raise UnsupportedPlanError("this runtime cannot run the plan exactly:\n  " + "\n  ".join(found))


def obstacles(plan: Plan) -> tuple[str, ...]:
    """Every reason, each with its address in the plan and the way out."""
    return tuple(_obstacles(plan))


def _obstacles(plan: Plan) -> Iterator[str]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for problem in _of_stage(stage):
                yield f"$.pipelines[{p}].stages[{s}]{problem}"


def _of_stage(stage: Stage) -> Iterator[str]:
    if stage.zero > 0:
        yield f".zero is {stage.zero}; this version keeps whole optimizer states: set it to 0"
