"""The step time that no plan can beat: all compute split in proportion to profiled speeds, nothing else."""

from arachne_runtime.plan.profile import Profile
from arachne_runtime.units import Seconds
from planner.request import Request


def ideal_step_s(request: Request) -> Seconds:
    """Global batch over the sum of every device's best samples a second for the whole model, TP 1.

    Communication, the optimizer, bubbles and integer shares are free in it; so a real plan stays below 100 %.
    """
    speeds = {kind: _samples_per_s(request, kind) for kind in {n.entry.device for n in request.cluster.nodes}}
    total = sum(speeds[node.entry.device] * node.entry.gpus for node in request.cluster.nodes)
    return request.global_batch / total


def _samples_per_s(request: Request, device: str) -> float:
    """Best over the numbers of samples at which every kind of block was timed on this device type."""
    kinds = [block.kind for block in request.model.blocks]
    sizes = _sizes(request.profile, device)
    return max(samples / _whole_model_s(request.profile, kinds, device, samples) for samples in sizes)


def _sizes(profile: Profile, device: str) -> list[int]:
    return sorted({t.samples for t in profile.timings if t.device == device and t.tp == 1})


def _whole_model_s(profile: Profile, kinds: list[str], device: str, samples: int) -> Seconds:
    costs = [profile.block(kind, device, 1, samples) for kind in kinds]
    return sum(cost.forward_s + cost.backward_s for cost in costs)
