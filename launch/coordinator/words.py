"""A plan in a few words, for a status line."""

from arachne_runtime.plan.plan import Plan

_MOST_DEPTHS = 3
"""Different depths of pipelines that are named one by one."""


def in_words(plan: Plan) -> str:
    """Such as ``2 pipelines of 2 and 3 stages, 9 devices``."""
    depths = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    named = [str(depth) for depth in depths]
    if len(depths) > _MOST_DEPTHS:
        of = f"{named[0]} to {named[-1]}"
    else:
        of = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    pipelines = _count(len(plan.pipelines), "pipeline")
    stages = "stage" if depths == [1] else "stages"
    return f"{pipelines} of {of} {stages}, {_count(len(plan.devices), 'device')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
