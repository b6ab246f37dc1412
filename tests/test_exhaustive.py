"""The oracle against a plain enumeration of every plan of tiny problems, device by device."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from math import inf

import msgspec
import pytest

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import NodeEntry, node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from planner.cost import Estimate, price
from planner.exhaustive import Limits, NotProvenError, best_plan, random_request, solve
from planner.exhaustive.combine import Run
from planner.exhaustive.floors import Floors
from planner.exhaustive.lines import Line, Lines
from planner.exhaustive.pipelines import Space
from planner.exhaustive.pools import find_pools, packings, symmetries
from planner.exhaustive.tails import Beside, Tails
from planner.request import Objective, Request

TINY = Limits(devices=3, blocks=3, global_batch=4, micro_batch=3)
TINY_TP = Limits(devices=3, blocks=3, global_batch=3, micro_batch=2, tp=(1, 2))


def parts(total: int, count: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, total)))
        for cuts in combinations(range(1, total), count - 1)
    ]


Groups = list[list[tuple[str, ...]]]
"""Of one pipeline: stages of replicas of devices."""


def arrangements(devices: tuple[str, ...], degrees: tuple[int, ...]) -> Iterator[list[Groups]]:
    """Pipelines of stages of replicas, for every sequence of some devices and every way to break it."""
    for count in range(1, len(devices) + 1):
        for sequence in permutations(devices, count):
            for breaks in product(("replica", "stage", "pipeline", "group"), repeat=count - 1):
                found = [[[(sequence[0],)]]]
                for device, level in zip(sequence[1:], breaks, strict=True):
                    if level == "group":
                        found[-1][-1][-1] += (device,)
                    elif level == "replica":
                        found[-1][-1].append((device,))
                    elif level == "stage":
                        found[-1].append([(device,)])
                    else:
                        found.append([[(device,)]])
                if all(is_group(g, degrees) for p in found for stage in p for g in stage):
                    yield found


def is_group(devices: tuple[str, ...], degrees: tuple[int, ...]) -> bool:
    one_node = len({node_of(device) for device in devices}) == 1
    return len(devices) in degrees and one_node and list(devices) == sorted(devices)


def pipelines(stages: Groups, num_blocks: int, batch: int, most: int) -> Iterator[Pipeline]:
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
                                        Replica(devices=d, share=n) for d, n in zip(stage, row, strict=True)
                                    ),
                                )
                                for end, length, r, stage, row in zip(
                                    ends, lengths, recompute, stages, chosen, strict=True
                                )
                            ),
                        )


def every_plan(request: Request) -> Iterator[Plan]:
    num_blocks, batch = len(request.model.blocks), request.global_batch
    degrees = tuple(sorted({t.tp for t in request.profile.timings}))
    for arrangement in arrangements(request.cluster.devices, degrees):
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


WIDE = (13, 29, 64, 85, 86)
"""Tensor parallelism in the optimum: idle devices, two stages, recomputation, two pipelines."""

HARD = (60, 95, 126, 230, 305, 435)
"""Recomputation in the optimum (three); alike nodes whose unlike links keep them apart (three)."""


@pytest.mark.parametrize("seed", [*range(25), *HARD])
def test_the_oracle_finds_what_trying_every_plan_finds(seed):
    request = random_request(seed, TINY)
    best = solve(request)
    found = best.estimate.iteration_s if best else inf
    assert found == pytest.approx(least_price(request), rel=1e-12)


@pytest.mark.parametrize("seed", [*range(8), *WIDE])
def test_it_finds_what_trying_every_plan_with_tensor_parallelism_finds(seed):
    request = random_request(seed, TINY_TP)
    best = solve(request)
    found = best.estimate.iteration_s if best else inf
    assert found == pytest.approx(least_price(request), rel=1e-12)


def random_plan(request: Request, rng: random.Random) -> Plan | None:
    """Any plan of the oracle's space, or None where the draws do not fit together."""
    devices = list(request.cluster.devices)
    rng.shuffle(devices)
    devices = devices[: rng.randint(1, len(devices))]
    degrees = sorted({t.tp for t in request.profile.timings})
    groups: list[tuple[str, ...]] = []
    while devices:
        mates = sorted(d for d in devices if node_of(d) == node_of(devices[0]))
        tp = rng.choice([n for n in degrees if n <= len(mates)])
        groups.append(tuple(mates[:tp]))
        devices = [d for d in devices if d not in mates[:tp]]
    rng.shuffle(groups)
    parts = cut(groups, rng.randint(1, min(3, len(groups))), rng)
    chosen = [random_pipeline(part, request, rng) for part in parts]
    left = request.global_batch - sum(p.micro_batches * p.micro_batch for p in chosen[:-1])
    if left <= 0 or left % chosen[-1].micro_batch:
        return None
    chosen[-1] = msgspec.structs.replace(chosen[-1], micro_batches=left // chosen[-1].micro_batch)
    if any(max(map(len, (s.replicas for s in p.stages))) > p.micro_batch for p in chosen):
        return None
    return Plan(
        model="random",
        global_batch=request.global_batch,
        sequence=1,
        schedule=rng.choice(request.schedules),
        pipelines=tuple(chosen),
    )


def cut(items: list, count: int, rng: random.Random) -> list[list]:
    at = sorted(rng.sample(range(1, len(items)), count - 1))
    return [items[a:b] for a, b in pairwise([0, *at, len(items)])]


def random_pipeline(groups: list[tuple[str, ...]], request: Request, rng: random.Random) -> Pipeline:
    num_blocks = len(request.model.blocks)
    stages = cut(groups, rng.randint(1, min(len(groups), num_blocks)), rng)
    widest = max(map(len, stages))
    micro_batch = rng.randint(widest, max(widest, request.max_micro_batch))
    ends = sorted(rng.sample(range(1, num_blocks), len(stages) - 1))
    return Pipeline(
        micro_batches=rng.randint(1, max(1, request.global_batch // micro_batch)),
        micro_batch=micro_batch,
        stages=tuple(
            Stage(
                layers=layers,
                recompute=rng.random() < 0.2,
                replicas=tuple(
                    Replica(devices=g, share=n)
                    for g, n in zip(stage, rng.choice(parts(micro_batch, len(stage))), strict=True)
                ),
            )
            for layers, stage in zip(pairwise((0, *ends, num_blocks)), stages, strict=True)
        ),
    )


def priced_plans(request: Request, seed: int, count: int) -> Iterator[tuple[Plan, float]]:
    rng = random.Random(seed)
    for _ in range(count):
        plan = random_plan(request, rng)
        if plan is not None and max(p.micro_batch for p in plan.pipelines) <= request.max_micro_batch:
            found = price(plan, request)
            if isinstance(found, Estimate):
                yield plan, found.iteration_s


Spans = list[tuple[int, int, tuple[tuple[int, int, int], ...]]]
"""Stages of a pipeline: first block, end, replicas as (pool, TP degree, share)."""

LARGE_TP = Limits(devices=8, tp=(1, 2, 4))


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_drawn_at_random_is_cheaper(seed):
    request = random_request(seed, LARGE_TP)
    best = solve(request)
    prices = [seconds for _, seconds in priced_plans(request, seed, 300)]
    assert best is None or not prices or best.estimate.iteration_s <= min(prices) * (1 + 1e-12)
    assert best is not None or not prices


class LinesOf(Lines):
    """Only those of one pipeline, in any order of each stage's replicas: bounds over them are tight."""

    def keep(self, stages: Spans) -> None:
        self.kept = {tuple(sorted(units)) for _, _, units in stages}

    def lines(self, vector: tuple[int, ...], micro_batch: int) -> list[Line]:
        return [line for line in super().lines(vector, micro_batch) if tuple(sorted(line.units)) in self.kept]


def spans_of(pipeline: Pipeline, run: Run) -> Spans:
    return [
        (
            *stage.layers,
            tuple(
                (
                    next(i for i, p in enumerate(run.pools) if r.devices[0] in p.devices),
                    len(r.devices),
                    r.share,
                )
                for r in stage.replicas
            ),
        )
        for stage in pipeline.stages
    ]


@pytest.mark.parametrize("limits", [LARGE_TP, Limits()], ids=["tp", "one device"])
@pytest.mark.parametrize("seed", range(56, 80))
def test_a_pipeline_is_not_cut_off_below_the_price_of_a_plan_that_holds_it(seed, limits):
    request = random_request(seed, limits)
    for plan, seconds in priced_plans(request, seed, 60):
        run = Run(request, plan.schedule, lambda: None)
        spans = [spans_of(p, run) for p in plan.pipelines]
        vectors = [
            tuple(sum(tp for _, _, units in s for p, tp, _ in units if p == q) for q in range(len(run.pools)))
            for s in spans
        ]
        for pipeline, stages, (vector, beside) in zip(
            plan.pipelines, spans, run.placed(tuple(vectors)), strict=True
        ):
            assert is_kept(request, run, pipeline, stages, vector, beside, seconds * (1 + 1e-9))


def is_kept(
    request: Request,
    run: Run,
    pipeline: Pipeline,
    stages: Spans,
    vector: tuple[int, ...],
    beside: Beside,
    cutoff_s: float,
) -> bool:
    lines = LinesOf(request.tables, run.pools)
    lines.keep(stages)
    tails = Tails(lines, beside)
    floors = Floors(lines, run.kind, vector, tails, request.global_batch, run.most)
    space = Space(lines, run.kind, run.most, lambda: None)
    samples = pipeline.micro_batches * pipeline.micro_batch
    wanted = [(start, stop, sorted(units)) for start, stop, units in stages]
    return any(
        [(start, stop, sorted(line.units)) for start, stop, _, line in shape.stages] == wanted
        for family in space.families(vector, samples, cutoff_s, floors, tails)
        for shape in family.shapes
    )


def test_it_stops_when_its_time_is_over():
    with pytest.raises(NotProvenError, match=r"0.01 s of CPU time"):
        solve(random_request(68, LARGE_TP), limit_s=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_zero": 1}, "ZeRO is not tried"),
        ({"objective": Objective.COST}, "only the fastest"),
        ({"schedules": (ScheduleKind.ZERO_BUBBLE,)}, "no bounds are proven for"),
    ],
)
def test_questions_that_it_does_not_answer_are_refused(change, words):
    entries = [msgspec.structs.replace(e, price_per_hour=1.0) for e in random_request(7).cluster.node]
    request = random_request(7)
    asked = replace(request, cluster=msgspec.structs.replace(request.cluster, node=tuple(entries)), **change)
    with pytest.raises(UsageError, match=words):
        solve(asked)


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
