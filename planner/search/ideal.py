"""The ideal: all compute split in proportion to speed, each device at its best share, nothing else."""

from arachne_runtime.units import Seconds

from ..request import Request
from .supply import Pool, Supply


def ideal_seconds(request: Request, supply: Supply) -> Seconds:
    """No plan's iteration is shorter: every device computes all the time at its best samples a second."""
    speed = sum(pool.num_devices * _best_samples_per_s(request, pool) for pool in supply.pools)
    return request.global_batch / speed + request.profile.step_s


def _best_samples_per_s(request: Request, pool: Pool) -> float:
    """Of one device, over TP degrees and shares; tensor-parallel groups divide theirs."""
    best = 0.0
    for tp in pool.degrees:
        low, high = request.tables.samples_range(pool.device, tp) or (1, 0)
        for share in range(low, min(high, request.global_batch) + 1):
            costs = request.tables.costs(pool.device, tp, share)
            best = max(best, share / ((costs.forward_s[-1] + costs.backward_s[-1]) * tp))
    return best
