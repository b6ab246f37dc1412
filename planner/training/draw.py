"""Random planning problems: clusters, models and behaviour drawn together, such that a plan exists.

Three sets, each with seeds of its own, so that no problem of one is in another:

*training*   device types of the catalog without ``HELD_OUT_TYPES``, and made-up ones that are not like those;
             model families without ``HELD_OUT_FAMILY``.
*validation* drawn alike; never trained on.
*held-out*   a model of the held-out family on a cluster with at least one held-out type.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.plan import ScheduleKind

from ..policy import MOST_STAGES
from ..request import Request
from ..search.batch import StagePlan, Templates
from ..search.columns import Completion
from ..search.supply import Pool, Supply
from .behaviour import draw_profile
from .clusters import draw_cluster
from .labels import ProblemSet, Space
from .models import draw_model, log_uniform, num_parameters

COMMON, COMMON_PART = (8, 256), 0.6
"""Devices of that part of the problems; of the others from the fewest to the most."""
BATCHES = (32, 4096)
"""Samples of a global batch."""
MOST_POOLS = 12
"""Of the supply, as the planner sees the cluster; one with more is drawn again."""

FULLEST = 0.6
"""States of the largest model drawn for a cluster, as a part of its memory: activations need the rest."""
EMPTIEST = 1 / 400
"""Parameters of the smallest model drawn for a cluster, as a part of those of the largest."""
STATE_BYTES = 16
"""Weight, gradient and optimizer states of a parameter, as the catalog counts them."""
SETS = (ProblemSet.TRAINING, ProblemSet.VALIDATION, ProblemSet.HELD_OUT)
"""What ``drawn`` draws."""
SHARDED = 0.2
"""Part of the problems that may use ZeRO-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One random problem."""

    request: Request
    problems: ProblemSet
    seed: int
    space: Space
    tries: int
    """Drawings that it took until one had a plan."""
    supply: Supply = field(repr=False)


def draw(seed: int, space: Space | None = None) -> Drawn:
    """A training problem; the same seed and space give the same one everywhere."""
    return drawn(ProblemSet.TRAINING, seed, space)


def validation(seed: int, space: Space | None = None) -> Drawn:
    """A problem like those of training that is none of them, whatever the seed."""
    return drawn(ProblemSet.VALIDATION, seed, space)


def held_out(seed: int, space: Space | None = None) -> Drawn:
    """A problem with a device type and a model family that training never has."""
    return drawn(ProblemSet.HELD_OUT, seed, space)


def drawn(problems: ProblemSet, seed: int, space: Space | None = None) -> Drawn:
    """The problem of such a set; drawn again, from a seed that counts up, until one has a plan.

    UsageError for the sets of tuning: a seed does not say of which runs their problems are.
    """
    if problems not in SETS:
        raise UsageError(
            f"{problems} problems are of the runs that a policy was tuned to and can't be drawn from a seed; "
            f"use labels of {', '.join(SETS)} problems"
        )
    space = space or Space()
    tries = 0
    while True:
        rng = random.Random(f"{problems} {seed} {tries}")
        tries += 1
        request = _request(rng, space, held_out=problems is ProblemSet.HELD_OUT)
        if request is not None and has_plan(request, supply := Supply.of(request)):
            return Drawn(
                request=request, problems=problems, seed=seed, space=space, tries=tries, supply=supply
            )


def _request(rng: random.Random, space: Space, *, held_out: bool) -> Request | None:
    """None where the model came out of another size than the space has."""
    hardware = draw_cluster(rng, _devices(rng, space.devices), held_out=held_out)
    most = FULLEST * _memory(hardware.cluster) / STATE_BYTES
    low, high = space.parameters
    high = min(high, most)
    if high <= low:
        return None
    low = max(low, high * EMPTIEST)
    model = draw_model(rng, max(log_uniform(rng, low, high) for _ in range(2)), held_out=held_out)
    if not space.parameters[0] <= num_parameters(model) <= space.parameters[1]:
        return None
    largest = {
        known.name: max(e.gpus for e in hardware.cluster.node if e.device == known.name)
        for known in hardware.types
    }
    return Request(
        cluster=hardware.cluster,
        model=model,
        profile=draw_profile(rng, model, hardware.types, largest),
        global_batch=_batch(rng),
        max_zero=int(rng.random() < SHARDED),
    )


def _devices(rng: random.Random, limits: tuple[int, int]) -> int:
    """Every factor as likely as every other, within ``COMMON`` more often."""
    low, high = max(limits[0], COMMON[0]), min(limits[1], COMMON[1])
    common = rng.random() < COMMON_PART and low < high
    return round(log_uniform(rng, *((low, high) if common else limits)))


def _memory(cluster: Cluster) -> float:
    """Bytes of all devices."""
    return sum((entry.memory_GiB or 0.0) * 2**30 * entry.gpus * entry.count for entry in cluster.node)


def _batch(rng: random.Random) -> int:
    """Mostly powers of two, and three times those; sometimes any number."""
    wanted = log_uniform(rng, *BATCHES)
    if rng.random() < 0.1:
        return round(wanted)
    return min((k << i for k in (1, 1, 3) for i in range(13)), key=lambda n: abs(n - wanted))


def has_plan(request: Request, supply: Supply) -> bool:
    """Whether one of some lean pipelines over all pools fits; it may say no where a plan exists."""
    if not 0 < len(supply.pools) <= MOST_POOLS:
        return False
    completion = Completion(request, supply, ScheduleKind.ONE_F_ONE_B)
    fits = completion.columns(lean_templates(request, supply))
    return fits is not None and len(fits) > 0


def lean_templates(request: Request, supply: Supply) -> Templates:
    """Few that need little memory, one pipeline each."""
    lines = [(stages, 1, max(s[2] for s in stages)) for stages in _lean(request, supply)]
    return Templates.of([line for line in lines if line[2] <= request.global_batch])


def _lean(request: Request, supply: Supply) -> Iterator[list[StagePlan]]:
    """All pools, and the largest alone, in one pipeline: at each TP degree, as deep as it goes or less."""
    deepest = min(MOST_STAGES, len(request.model.blocks))
    wide = bool(request.max_zero) or any(block.experts for block in request.model.blocks)
    for tp in reversed(supply.degrees):
        for depth in (deepest, deepest // 2, deepest // 4):
            for pools in dict.fromkeys((len(supply.pools), 1)):
                stages = [*_stages(supply.pools[:pools], tp, depth, wide=wide)]
                if stages:
                    yield stages


def _stages(pools: tuple[Pool, ...], most_tp: int, depth: int, *, wide: bool) -> Iterator[StagePlan]:
    """Stages in proportion to the groups that each pool holds; ``wide``: with all of them, else one each."""
    degrees = [max((tp for tp in pool.degrees if tp <= most_tp), default=pool.degrees[0]) for pool in pools]
    groups = [pool.groups(tp) for pool, tp in zip(pools, degrees, strict=True)]
    part = min(1.0, depth / max(1, sum(groups)))
    for p, (tp, held) in enumerate(zip(degrees, groups, strict=True)):
        number = int(held * part)
        width = held // number if wide and number else 1
        for _ in range(number):
            yield p, tp, width, tp * width if wide else 1
