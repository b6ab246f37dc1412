"""Even data parallelism: every device holds the whole model and takes the same share, as with plain DDP.

Unlike DDP it needs no batch that divides: what is left over goes to the first devices, one sample each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.shares import largest_remainder
from arachne_runtime.units import Seconds

from ..request import Request
from .strategy import DEFAULT_BUDGET_S, Clock, best


@dataclass(frozen=True, slots=True)
class Even:
    """All devices, one stage, equal shares; accumulation and recomputation where memory asks for them."""

    name: str = "even"

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its plans; None where the model fits no device, or the batch has too few samples."""
        return best(
            request, Clock(budget_s), _plans(request, recompute=False), _plans(request, recompute=True)
        )


def _plans(request: Request, *, recompute: bool) -> Iterator[Plan]:
    devices = request.cluster.devices
    batch = request.global_batch
    for schedule in request.schedules:  # they take the same time here, but not the same memory
        for steps in range(1, batch // len(devices) + 1):
            if batch % steps == 0 and batch // steps <= request.most_micro_batch:
                pipeline = _pipeline(devices, steps, batch // steps, len(request.model.blocks), recompute)
                yield Plan(
                    model=request.model.name,
                    global_batch=batch,
                    sequence=request.model.sequence,
                    schedule=schedule,
                    pipelines=(pipeline,),
                )


def _pipeline(devices: Sequence[str], steps: int, size: int, num_blocks: int, recompute: bool) -> Pipeline:
    shares = largest_remainder(size, [1] * len(devices))
    replicas = tuple(Replica(devices=(d,), share=n) for d, n in zip(devices, shares, strict=True))
    stage = Stage(layers=(0, num_blocks), recompute=recompute, replicas=replicas)
    return Pipeline(micro_batches=steps, micro_batch=size, stages=(stage,))
