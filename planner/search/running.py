"""The running plan as a source: its shapes on the devices that there are now, and what is one move away."""

from collections import Counter
from collections.abc import Iterator, Sequence

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan, Stage
from arachne_runtime.plan.schedule import num_rows

from .batch import StagePlan, Templates
from .columns import Completion
from .moves import Line, neighbours
from .shapes import Shapes, StageShape, expanded, possible, shapes_of
from .supply import Supply

MOST_SHAPES = 6
"""Unlike pipelines of the running plan that are looked at, those with most devices first."""


class Running:
    """Templates from ``Request.running``; none without one."""

    name = "running"

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """Its pipelines with every number, then those that one move makes of them; without chance."""
        running = completion.request.running
        if running is None:
            return
        lines = lines_on(running, completion.supply)[:MOST_SHAPES]
        shapes = shapes_of(Templates.of(lines)).distinct()
        own, first = Templates.of(lines), expanded(completion, shapes)[0]
        yield possible(completion, Templates.joined([own, first]).distinct())
        moved, _ = expanded(completion, Shapes.of(list(dict.fromkeys(_moved(lines, shapes, completion)))))
        share = [size // max(w for _, _, w, _ in stages) for stages, _, size in lines]
        near = -(-moved.micro_batch // moved.width.max(axis=1, initial=1))
        yield moved.take((2 * near >= min(share, default=0)) & (near <= 2 * max(share, default=0)))


def _moved(lines: Sequence[Line], shapes: Shapes, completion: Completion) -> Iterator[tuple[StageShape, ...]]:
    """Shapes that one move makes of the pipelines as they were, and of the smallest in their proportions."""
    supply = completion.supply
    primitive = [shapes.stages(k) for k in range(len(shapes))]
    for stages in (*(stages for stages, _, _ in lines), *primitive):
        line = tuple((pool, tp, width, 1) for pool, tp, width, *_ in stages), 1, 1
        for moved, _, _ in neighbours(line, supply.degrees, len(supply.pools)):
            if moved:
                yield tuple(stage[:3] for stage in moved)


def lines_on(plan: Plan, supply: Supply) -> list[Line]:
    """Each unlike pipeline of a plan, those that use most devices first; none whose pools are all gone."""
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
    """As a template has it: all replicas as most of them are; None where no node is known."""
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
