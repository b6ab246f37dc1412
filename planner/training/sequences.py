"""From plans to what the policy would have had to propose: templates, each a few runs of stages."""

from collections.abc import Iterator, Sequence
from itertools import groupby, permutations
from math import gcd

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Stage

from ..policy import MOST_STAGES, MOST_TEMPLATES, WIDTHS, Site, forced, roll
from ..request import Request
from ..search.shapes import Shapes, StageShape
from ..search.supply import Supply
from .labels import Run, TemplateRuns, TemplateSequence

Template = tuple[StageShape, ...]


class Form:
    """What the policy can say of one problem."""

    def __init__(self, request: Request, supply: Supply) -> None:
        self.site = Site.of(request, supply)
        self.pools = {name: p for p, pool in enumerate(supply.pools) for name, _ in pool.nodes}

    def sequence(self, plan: Plan) -> TemplateSequence | None:
        """The plan's unlike templates, that with most devices first; None where the policy can't say them.

        It can't where a stage mixes replicas, a pipeline is too deep or a width none of ``WIDTHS``; where
        more than ``MOST_TEMPLATES`` differ, or their copies are not what taking the most there are leaves.
        """
        counts: dict[Template, int] = {}
        for pipeline in plan.pipelines:
            stages = self._stages(pipeline)
            if stages is None:
                return None
            common = gcd(*(width for _, _, width in stages))
            primitive = tuple((pool, tp, width // common) for pool, tp, width in stages)
            counts[primitive] = counts.get(primitive, 0) + common
        if len(counts) > MOST_TEMPLATES or not all(can_be_said(stages) for stages in counts):
            return None
        return self._ordered(counts)

    def _stages(self, pipeline: Pipeline) -> Template | None:
        found = []
        for stage in pipeline.stages:
            kinds = set(self._replicas(stage))
            if len(kinds) > 1:
                return None
            found.append((*kinds.pop(), len(stage.replicas)))
        return tuple(found)

    def _replicas(self, stage: Stage) -> Iterator[tuple[int, int]]:
        """Pool and TP degree of each."""
        for replica in stage.replicas:
            yield self.pools[node_of(replica.devices[0])], len(replica.devices)

    def _ordered(self, counts: dict[Template, int]) -> TemplateSequence | None:
        """The first order in which unlike templates stand as often as the plan has them.

        Of one template alone there may be more: how many is a number, and computed.
        """
        largest = sorted(counts, key=lambda stages: (-_devices(stages) * counts[stages], stages))
        for order in permutations(largest):
            sequence = tuple(map(runs_of, order))
            copies = copies_of(self.site, sequence)
            if copies is not None and (len(order) == 1 or copies == [counts[stages] for stages in order]):
                return sequence
        return None


def copies_of(site: Site, sequence: TemplateSequence) -> list[int] | None:
    """How often each template stands, the first ones first; None where masks don't allow them."""
    try:
        rolled = roll(site, 1, forced(site, [sequence]))
    except UsageError:
        return None
    return [int(copies) for copies in rolled.copies]


def can_be_said(stages: Sequence[StageShape]) -> bool:
    """Whether a template is within depth and widths."""
    return 0 < len(stages) <= MOST_STAGES and all(width in _WIDTHS for _, _, width in stages)


def which_can_be_said(shapes: Shapes) -> NDArray[np.bool_]:
    """``[K]``: the same for many."""
    said = np.isin(shapes.width, (0, *WIDTHS)).all(axis=1)
    return np.asarray(said & (shapes.depth > 0) & (shapes.depth <= MOST_STAGES))


def runs_of(stages: Sequence[StageShape]) -> TemplateRuns:
    """Alike neighbours together."""
    return tuple(Run(*stage, len(list(alike))) for stage, alike in groupby(stages))


def _devices(stages: Sequence[StageShape]) -> int:
    return sum(tp * width for _, tp, width in stages)


_WIDTHS = frozenset(WIDTHS)
