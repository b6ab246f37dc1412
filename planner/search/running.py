"""The running plan as a source: its shapes on the devices that there are now, and what is one move away."""

from collections import Counter
from collections.abc import Iterator, Sequence

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan, Stage
from arachne_runtime.plan.schedule import num_rows

from .batch import StagePlan, Templates
from .columns import Completion
from .moves import Line, neighbours
from .shapes import Shapes, StageShape, expanded, possible
from .supply import Supply, use_of

MOST_SHAPES = 6
"""Unlike pipelines of the running plan that are looked at, those with most devices first."""


class Running:
    """Templates from ``Request.running``; none without one."""

    name = "running"

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """As many of its own pipelines as there can be, those with other numbers, those that a move makes."""
        running = completion.request.running
        if running is None:
            return
        lines = lines_on(running, completion.supply)[:MOST_SHAPES]
        if not lines:
            return
        own = Shapes.of([[stage[:3] for stage in stages] for stages, _, _ in lines])
        shapes = Shapes.joined([own, own.primitive()]).distinct()
        yield possible(completion, Templates.of([*lines, *_as_many(lines, completion)]).distinct())
        yield _near(expanded(completion, shapes)[0], lines)
        moved = Shapes.of(list(dict.fromkeys(_moved(shapes, completion))))
        yield _near(expanded(completion, moved)[0], lines)


def _as_many(lines: Sequence[Line], completion: Completion) -> Iterator[Line]:
    """Each pipeline with its own micro-batch, as often as the devices hold it and the batch fills it."""
    limits = completion.supply.limits
    t = Templates.of(lines)
    for (stages, _, size), use in zip(lines, use_of(limits, t.pool, t.tp, t.width), strict=True):
        most = min(limit.places // int(n) for limit, n in zip(limits, use, strict=True) if n)
        yield stages, min(most, completion.request.global_batch // size), size


def _near(templates: Templates, lines: Sequence[Line]) -> Templates:
    """Those whose widest stage takes half to twice the samples that it takes in the running pipelines."""
    running = [size / max(width for _, _, width, _ in stages) for stages, _, size in lines]
    share = templates.micro_batch / templates.width.max(axis=1, initial=1)
    return templates.take((2 * share >= min(running)) & (share <= 2 * max(running)))


def _moved(shapes: Shapes, completion: Completion) -> Iterator[tuple[StageShape, ...]]:
    """Shapes that one move makes."""
    supply = completion.supply
    for k in range(len(shapes)):
        line = tuple((*stage, 1) for stage in shapes.stages(k)), 1, 1
        for moved, _, _ in neighbours(line, supply.degrees, len(supply.pools)):
            if moved:
                yield tuple(stage[:3] for stage in moved)


def lines_on(plan: Plan, supply: Supply) -> list[Line]:
    """Each unlike pipeline of a plan, as often as it is there, those that use most devices first.

    Left out is a pipeline of which the pool of any stage is not known.
    """
    pools = _pools_of_nodes(plan, supply)
    found: Counter[Line] = Counter()
    for pipeline in plan.pipelines:
        own = pipeline.stages[: num_rows(plan.schedule, pipeline)]
        stages = tuple(stage for s in own if (stage := _stage(s, pools)))
        if len(stages) == len(own):
            found[stages, 1, pipeline.micro_batch] += 1
    lines = [(stages, count, size) for (stages, _, size), count in found.items()]
    return sorted(lines, key=lambda line: -line[1] * sum(t * w for _, t, w, _ in line[0]))


def _pools_of_nodes(plan: Plan, supply: Supply) -> dict[str, int]:
    """The pool of each node of a plan; a node that is gone is like a pool of its type, if that is known."""
    found = {name: p for p, pool in enumerate(supply.pools) for name, _ in pool.nodes}
    types = plan.made_by.device_types if plan.made_by else {}
    first = {pool.device: p for p, pool in reversed(list(enumerate(supply.pools)))}
    for name, device in types.items():
        if device in first:
            found.setdefault(name, first[device])
    return found


def _stage(stage: Stage, pools: dict[str, int]) -> StagePlan | None:
    """As a template has it: all replicas as most of them are; None where no pool is known."""
    kinds = Counter(
        (pools[node], len(replica.devices))
        for replica in stage.replicas
        if (node := node_of(replica.devices[0])) in pools
    )
    if not kinds:
        return None
    pool, tp = max(kinds, key=lambda kind: kinds[kind])
    width = len(stage.replicas)
    tile = stage.expert_parallel * stage.expert_tensor
    return pool, tp, width, tile if tp * width % tile == 0 else 1
