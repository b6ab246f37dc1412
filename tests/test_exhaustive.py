"""The oracle against a plain enumeration of every plan of tiny problems, device by device."""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product
from math import inf

import msgspec
import pytest

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import NodeEntry
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from planner.cost import Estimate, price
from planner.exhaustive import Limits, best_plan, random_request, solve
from planner.exhaustive.pools import find_pools, packings, symmetries
from planner.request import Request

TINY = Limits(devices=3, blocks=3, global_batch=4, micro_batch=3)


def parts(total: int, count: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, total)))
        for cuts in combinations(range(1, total), count - 1)
    ]


def arrangements(devices: tuple[str, ...]) -> Iterator[list[list[list[str]]]]:
    """Pipelines of stages of devices, for every sequence of some devices and every way to break it."""
    for count in range(1, len(devices) + 1):
        for sequence in permutations(devices, count):
            for breaks in product((0, 1, 2), repeat=count - 1):
                found = [[[sequence[0]]]]
                for device, level in zip(sequence[1:], breaks, strict=True):
                    if level == 0:
                        found[-1][-1].append(device)
                    elif level == 1:
                        found[-1].append([device])
                    else:
                        found.append([[device]])
                yield found


def pipelines(stages: list[list[str]], num_blocks: int, batch: int, most: int) -> Iterator[Pipeline]:
    for micro_batch in range(1, most + 1):
        shares = [parts(micro_batch, len(stage)) for stage in stages]
        for micro_batches in range(1, batch // micro_batch + 1):
            for lengths in parts(num_blocks, len(stages)):
                for chosen in product(*shares):
                    for recompute in product((False, True), repeat=len(stages)):
                        ends = [sum(lengths[: i + 1]) for i in range(len(stages))]
                        yield Pipeline(
                            micro_batches=micro_batches,
                            micro_batch=micro_batch,
                            stages=tuple(
                                Stage(
                                    layers=(end - length, end),
                                    recompute=r,
                                    replicas=tuple(
                                        Replica(devices=(d,), share=n)
                                        for d, n in zip(stage, row, strict=True)
                                    ),
                                )
                                for end, length, r, stage, row in zip(
                                    ends, lengths, recompute, stages, chosen, strict=True
                                )
                            ),
                        )


def every_plan(request: Request) -> Iterator[Plan]:
    num_blocks, batch = len(request.model.blocks), request.global_batch
    for arrangement in arrangements(request.cluster.devices):
        if any(len(p) > num_blocks for p in arrangement):
            continue
        choices = [list(pipelines(p, num_blocks, batch, request.max_micro_batch)) for p in arrangement]
        for chosen in product(*choices):
            if sum(p.micro_batches * p.micro_batch for p in chosen) == batch:
                for kind in request.schedules:
                    yield Plan(
                        model="random", global_batch=batch, sequence=1, schedule=kind, pipelines=tuple(chosen)
                    )


def least_price(request: Request) -> float:
    found = (price(plan, request) for plan in every_plan(request))
    return min((e.iteration_s for e in found if isinstance(e, Estimate)), default=inf)


HARD = (60, 95, 126, 230, 305, 435)
"""Recomputation in the optimum (three); alike nodes whose unlike links keep them apart (three)."""


@pytest.mark.parametrize("seed", [*range(25), *HARD])
def test_the_oracle_finds_what_trying_every_plan_finds(seed):
    request = random_request(seed, TINY)
    best = solve(request)
    found = best.estimate.iteration_s if best else inf
    assert found == pytest.approx(least_price(request), rel=1e-12)


@pytest.mark.parametrize("seed", range(100, 112))
def test_one_device_more_never_makes_the_best_plan_slower(seed):
    request = random_request(seed, TINY)
    more = Request(
        cluster=msgspec.structs.replace(
            request.cluster,
            node=(*request.cluster.node, NodeEntry(name="new", device="fast", gpus=1, memory_GiB=8.0)),
        ),
        model=request.model,
        profile=request.profile,
        global_batch=request.global_batch,
        schedules=request.schedules,
        max_micro_batch=request.max_micro_batch,
    )
    before, after = solve(request), solve(more)
    assert after is not None
    assert before is None or after.estimate.iteration_s <= before.estimate.iteration_s * (1 + 1e-12)


def test_the_plan_it_returns_has_the_price_it_says():
    request = random_request(7)
    best = solve(request)
    assert best.plan == best_plan(request)
    assert price(best.plan, request).iteration_s == best.estimate.iteration_s


def test_memory_that_nothing_fits_into_ends_without_a_plan():
    request = random_request(7, TINY)
    entries = [msgspec.structs.replace(entry, memory_GiB=1.0) for entry in request.cluster.node]
    tight = Request(
        cluster=msgspec.structs.replace(request.cluster, node=tuple(entries)),
        model=request.model,
        profile=request.profile,
        global_batch=request.global_batch,
        max_micro_batch=request.max_micro_batch,
    )
    assert best_plan(request) is not None
    assert best_plan(tight) is None


def test_both_schedules_are_never_worse_than_one():
    request = random_request(7)

    def least(*kinds: ScheduleKind) -> float:
        ask = Request(
            cluster=request.cluster,
            model=request.model,
            profile=request.profile,
            global_batch=request.global_batch,
            schedules=kinds,
            max_micro_batch=request.max_micro_batch,
        )
        return solve(ask).estimate.iteration_s

    one, other = least(ScheduleKind.ONE_F_ONE_B), least(ScheduleKind.GPIPE)
    assert least(ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE) == min(one, other)


def test_large_problems_are_refused():
    wide = Limits(devices=9, blocks=2, global_batch=2, micro_batch=2)
    large = next(r for r in (random_request(s, wide) for s in range(100)) if len(r.cluster.devices) == 9)
    with pytest.raises(UsageError, match="9 devices are too many"):
        best_plan(large)
    with pytest.raises(UsageError, match="max_micro_batch"):
        best_plan(random_request(1, Limits(micro_batch=5)))


def test_every_packing_stands_for_its_images_once():
    request = next(r for r in map(random_request, range(200)) if _two_alike_nodes(r))
    pools, orders = find_pools(request.cluster), symmetries(request.cluster, find_pools(request.cluster))
    room = tuple(len(pool.devices) for pool in pools)
    identity = (tuple(range(len(pools))),)
    kept, whole = list(packings(room, orders)), list(packings(room, identity))
    assert len(orders) > 1
    images = {
        tuple(sorted((tuple(v[i] for i in order) for v in packing), reverse=True))
        for packing in kept
        for order in orders
    }
    assert images == set(whole)
    assert len(kept) < len(whole)


def _two_alike_nodes(request: Request) -> bool:
    return len(symmetries(request.cluster, find_pools(request.cluster))) > 1
