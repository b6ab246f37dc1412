"""What of all that a plan can say this version's engine can run; the rest is planned and priced only.

It needs no torch, so that a launcher refuses a plan before any rank starts.
"""

from collections.abc import Iterator

from ..errors import UnsupportedPlanError
from .plan import Plan, ScheduleKind, Stage
from .zero import is_data_parallel, is_split


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
            for problem in _of_zero(plan, stage):
                yield f"$.pipelines[{p}].stages[{s}]{problem}"


def _of_zero(plan: Plan, stage: Stage) -> Iterator[str]:
    """What DeepSpeed's ZeRO cannot split exactly."""
    if not is_split(stage):
        return
    what = f".zero is {stage.zero}"
    degrees = sorted({len(replica.devices) for replica in stage.replicas})
    if len(degrees) > 1:
        found = " and ".join(map(str, degrees))
        yield f"{what} over replicas of TP {found}, whose ranks hold unlike parts: set it to 0, or TP alike"
    if stage.expert_parallel * stage.expert_tensor > 1:
        yield f"{what} with experts shared out, whose copies are on other ranks: set it to 0"
    if stage.zero > 1:
        yield from _of_zero_2_and_3(plan, stage, what)
    if plan.schedule is ScheduleKind.INTERLEAVED and _differs_on_its_devices(plan, stage):
        yield f"{what}, but another stage of its devices has another: set all stages of a device to one"


def _of_zero_2_and_3(plan: Plan, stage: Stage, what: str) -> Iterator[str]:
    """DeepSpeed then sums within the backward, and knows the ranks of one stage only."""
    if not is_data_parallel(plan):
        yield f"{what}, which needs a plan of one pipeline with one stage: set it to 1"
    if len(stage.replicas[0].devices) > 1:
        yield f"{what}, which needs TP 1: set it to 1, or make each device a replica"
    if plan.schedule is not ScheduleKind.ONE_F_ONE_B:
        yield f"{what}, which needs schedule 1f1b, not {plan.schedule}: plan with it, or set zero to 1"
    if stage.zero > 2 and stage.recompute:
        yield f"{what} with recompute, which needs the parameters again within a backward: drop one of them"


def _differs_on_its_devices(plan: Plan, stage: Stage) -> bool:
    mine = set(stage.devices)
    return any(
        other.zero != stage.zero for p in plan.pipelines for other in p.stages if mine & set(other.devices)
    )
