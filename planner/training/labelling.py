"""The long search that labels a problem: every template of a tiny one, else a wide climb; and packings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Seconds

from ..search.assemble import alike, part_of, plan_of
from ..search.batch import Templates
from ..search.columns import Columns, Completion
from ..search.judge import Judge
from ..search.moves import Line, lines_of, neighbours
from ..search.pack import pack
from ..search.propose import Enumeration
from ..search.score import WORST
from ..search.shapes import Shapes, StageShape, expanded, shapes_of
from ..search.supply import use_of
from .draw import Drawn, lean_templates
from .every import every_shape
from .labels import VERSION, Labels, TemplateSequence
from .sequences import Form, which_can_be_said

Ints = NDArray[np.int64]
Key = tuple[StageShape, ...]

MOST_SEQUENCES = 8
"""Of one problem, that are kept and that imitation learns from."""
NEAR = 1.03
"""Seconds over those of the best plan, up to which a plan is a label too."""
FAR = 1.3
"""The same up to which a template is climbed from,"""
FAR_PRICED = 1.1
"""and, by corrected closed forms, priced."""
MOST_LOOKED_AT = 400
"""Columns among which those to price are chosen."""
FAR_PACKED = 1.05
"""The same for mixtures, by closed forms."""
MOST_OF_DEPTH = 2
"""Plans of one depth that are priced at once: closed forms err alike at one depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a problem is searched: counts instead of seconds, so that a label is the same everywhere."""

    enumerated: int = 1600
    """Templates of the enumeration."""
    rounds: int = 10
    """Of climbing."""
    patience: int = 4
    """Rounds without a better plan after which climbing ends."""
    beam: int = 4
    """Shapes that a round climbs from."""
    priced: int = 5
    """Plans that are priced after a round; twice as many at the start and at the end."""
    numbered: int = 8
    """Best shapes that get every promising number in the end."""
    kept: int = 2400
    """Best columns, from which mixtures are made."""
    every: int = 600
    """Up to so many shapes that there are, all of them are tried instead."""
    mixtures: int = 4


def label(drawn: Drawn, effort: Effort | None = None) -> Labels:
    """The best and near-best sequences of templates that a long search finds."""
    search = _Search(drawn, effort or Effort())
    search.run()
    kept = search.judge.kept
    if not kept:
        return _labels(drawn, search, [])
    best_s = kept[0].estimate.iteration_s
    near = [k for k in kept if k.estimate.iteration_s <= NEAR * best_s]
    form = Form(drawn.request, drawn.supply)
    found = [(form.sequence(k.plan), k.estimate.iteration_s / best_s) for k in near]
    return _labels(drawn, search, found)


def _labels(
    drawn: Drawn, search: "_Search", found: Sequence[tuple[TemplateSequence | None, float]]
) -> Labels:
    distinct: dict[TemplateSequence, float] = {}
    for sequence, relative in found:
        if sequence is not None:
            distinct.setdefault(sequence, round(relative, 5))
    some = list(distinct.items())[:MOST_SEQUENCES]
    return Labels(
        version=VERSION,
        problems=drawn.problems,
        seed=drawn.seed,
        space=drawn.space,
        sequences=tuple(sequence for sequence, _ in some),
        relative=tuple(relative for _, relative in some),
        best_s=float(f"{search.judge.best_s:.6g}") if found else None,
        every_template=search.all_tried,
        dropped=sum(sequence is None for sequence, _ in found),
        evaluations=search.judge.evaluations,
    )


@dataclass(slots=True)
class _Search:
    """All columns that were completed, as long as they are among the best, and prices of some of them.

    The closed form of a column may be far too low where links bind, and a climb finds where it is. So one
    climbs from shapes whose plans were priced, and forms are corrected by what was priced at their depth.
    """

    drawn: Drawn
    effort: Effort
    completion: Completion = field(init=False)
    judge: Judge = field(init=False)
    columns: Columns | None = None
    all_tried: bool = False
    _tried: set[Line] = field(default_factory=set)
    _climbed: set[Key] = field(default_factory=set)
    _priced: dict[Key, Seconds] = field(default_factory=dict)
    """Iteration of the plan of each shape that was priced; ``inf`` where it does not fit."""
    _lines: dict[Key, Line] = field(default_factory=dict)
    """Of the same: the line that was priced."""
    _seen: set[float] = field(default_factory=set)
    """Closed forms that were priced: equal ones are copies of one plan for another's width."""
    _lowest: dict[int, float] = field(default_factory=dict)
    """By depth, the lowest price over its closed form."""

    def __post_init__(self) -> None:
        self.completion = Completion(self.drawn.request, self.drawn.supply, ScheduleKind.ONE_F_ONE_B)
        self.judge = Judge(self.drawn.request, None, None)

    def run(self) -> None:
        """Propose, price, climb, number, pack."""
        every = every_shape(self.drawn.supply, self.completion.rows.num_blocks, self.effort.every)
        self.all_tried = every is not None
        if every is not None:
            self._complete(expanded(self.completion, Shapes.of(every))[0])
        else:
            self._complete(Enumeration().templates(self.completion, self.effort.enumerated))
            self._complete(lean_templates(self.drawn.request, self.drawn.supply))
        if self.columns is None:
            return
        self._price(2 * self.effort.priced)
        if every is None:
            self._climb()
            best = sorted(self._priced, key=self._priced.__getitem__)[: self.effort.numbered]
            self._complete(expanded(self.completion, Shapes.of(best))[0])
        self._price(2 * self.effort.priced)
        self._pack()

    def _climb(self) -> None:
        """From the best priced shapes that were not climbed from, until the best stays for a while."""
        idle, best_s = 0, self.judge.best_s
        for _ in range(self.effort.rounds):
            lines = self._starts()
            if not lines or idle == self.effort.patience:
                return
            self._complete(self._moved(lines))
            self._price(self.effort.priced)
            idle = 0 if self.judge.best_s < best_s else idle + 1
            best_s = self.judge.best_s

    def _starts(self) -> list[Line]:
        best = sorted(self._priced, key=self._priced.__getitem__)
        near = [k for k in best if k not in self._climbed and self._priced[k] <= FAR * self.judge.best_s]
        self._climbed.update(near[: self.effort.beam])
        return [self._lines[key] for key in near[: self.effort.beam]]

    def _moved(self, lines: Sequence[Line]) -> Templates:
        """Neighbours, with fewer copies or a larger micro-batch where they need it."""
        supply, request = self.drawn.supply, self.drawn.request
        experts = any(block.experts for block in request.model.blocks)
        moved = [
            (stages, max(1, copies), max(size, *(width for _, _, width, _ in stages)))
            for line in lines
            for stages, copies, size in neighbours(line, supply.degrees, len(supply.pools), experts=experts)
            if stages and size >= 1 and len(stages) <= self.completion.rows.num_blocks
        ]
        new = [line for line in dict.fromkeys(moved) if line not in self._tried]
        self._tried.update(new)
        t = Templates.of(new)
        use = use_of(supply.limits, t.pool, t.tp, t.width)
        places = np.array([limit.places for limit in supply.limits])
        most = np.where(use > 0, places // np.maximum(use, 1), places.max()).min(axis=1, initial=places.max())
        copies = np.minimum(np.minimum(t.copies, most), request.global_batch // t.micro_batch)
        good = (copies > 0) & (t.micro_batch <= request.most_micro_batch)
        return replace(t, copies=copies).take(good)

    def _complete(self, templates: Templates) -> None:
        """Those that can be said; the best columns are kept."""
        found = self.completion.columns(templates.take(which_can_be_said(shapes_of(templates))))
        if found is not None and len(found):
            joined = found if self.columns is None else Columns.joined([self.columns, found])
            order = np.argsort(self._corrected(joined), kind="stable")[: self.effort.kept]
            self.columns = joined.take(order)

    def _corrected(self, columns: Columns) -> NDArray[np.float64]:
        """Closed forms times the lowest correction that was met at their depth, or at any."""
        usual = min(self._lowest.values(), default=1.0)
        depth = columns.templates.depth
        factors = np.array([self._lowest.get(d, usual) for d in range(int(depth.max(initial=0)) + 1)])
        return np.asarray(columns.seconds * factors[depth])

    def _price(self, most: int) -> None:
        """Plans of the best shapes that were not priced, few of each depth, until so many fit."""
        columns = self._all()
        values = self._corrected(columns)
        order = np.argsort(values, kind="stable")
        if self._lowest:
            order = order[values[order] <= FAR_PRICED * values[order[0]]]
        order = order[:MOST_LOOKED_AT]
        of_depth: dict[int, int] = {}
        for k, key in zip(order.tolist(), _keys(shapes_of(columns.templates.take(order))), strict=True):
            if sum(of_depth.values()) == most:
                return
            if of_depth.get(len(key), 0) < MOST_OF_DEPTH and self._is_new(k, key):
                of_depth[len(key)] = of_depth.get(len(key), 0) + self._price_column(k, key)

    def _all(self) -> Columns:
        assert self.columns is not None
        return self.columns

    def _is_new(self, k: int, key: Key) -> bool:
        """Whether neither these numbers of its shape were priced nor an equal closed form."""
        templates = self._all().templates
        numbers = int(templates.copies[k]), int(templates.micro_batch[k])
        known = self._lines.get(key)
        return float(self._all().seconds[k]) not in self._seen and (known is None or known[1:] != numbers)

    def _price_column(self, k: int, key: Key) -> bool:
        """Whether its plan fits."""
        columns = self._all()
        seconds = float(columns.seconds[k])
        self._seen.add(seconds)
        part = alike(columns, k, self.drawn.request.global_batch)
        plan = plan_of(self.completion, [part], by_stage=bool(columns.by_stage[k])) if part else None
        score = self.judge.price(plan) if plan is not None else WORST
        if score.value < self._priced.get(key, inf) or key not in self._priced:
            self._priced[key] = score.value
            self._lines[key] = lines_of(columns.templates.take(np.array([k])))[0]
        if score.value == inf:
            return False
        self._lowest[len(key)] = min(self._lowest.get(len(key), inf), score.value / seconds)
        return True

    def _pack(self) -> None:
        """Mixtures that may be as fast as the best shape."""
        columns = self._all()
        most_s = FAR_PACKED * float(columns.seconds.min())
        single, packings = pack(self.completion, columns, most_s)
        for packing in packings[: self.effort.mixtures]:
            parts = [part_of(single, k, takes) for k, takes in packing.columns]
            for by_stage in (False, True):
                plan = plan_of(self.completion, parts, by_stage=by_stage)
                if plan is not None:
                    self.judge.price(plan)


def _keys(shapes: Shapes) -> list[Key]:
    return [shapes.stages(k) for k in range(len(shapes))]
