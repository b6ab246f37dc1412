"""ZeRO in a plan: which stages split what, and over which ranks. No torch."""

from collections.abc import Iterator

from .placement import places
from .plan import Plan, Stage


def is_split(stage: Stage) -> bool:
    """Whether a stage splits its optimizer states; a stage of one replica has nobody to split them with."""
    return stage.zero > 0 and len(stage.replicas) > 1


def splits_gradients(stage: Stage) -> bool:
    """Whether its gradients are summed and split within each backward, by DeepSpeed (ZeRO-2 and 3)."""
    return stage.zero > 1 and is_split(stage)


def is_data_parallel(plan: Plan) -> bool:
    """Whether the plan is one stage of replicas and nothing else."""
    return len(plan.pipelines) == len(plan.pipelines[0].stages) == 1


def zero_groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Ranks that split optimizer states among them, ascending by rank, each group once.

    Equal places in the replicas of a stage hold equal parts of its parameters: one group for each rank of a
    tensor-parallel group.
    """
    return tuple(dict.fromkeys(_groups(plan)))


def zero_group_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The group of one rank; empty where its optimizer states are whole."""
    return next((group for group in zero_groups(plan) if rank in group), ())


def _groups(plan: Plan) -> Iterator[tuple[int, ...]]:
    members: dict[tuple[int, int, int], list[int]] = {}
    for place in places(plan):
        if is_split(plan.pipelines[place.pipeline].stages[place.stage]):
            members.setdefault((place.pipeline, place.stage, place.tp_rank), []).append(place.rank)
    for key in sorted(members):
        yield tuple(sorted(members[key]))
