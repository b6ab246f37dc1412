"""The search: templates for clusters of any size, peers, local moves; small problems until proven."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import accumulate

from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from ..cost import Estimate, Ideal, price
from ..peers import DEFAULT_BUDGET_S, PEERS, Strategy
from ..request import Objective, Request
from .broad import LONG_PATIENCE, Broad
from .complete import Completer
from .exact import Exact, Pools, num_shapes, seatings
from .found import Found, Rival, runners
from .interleave import MOST_RUNS
from .judge import Judge, Progress, SearchOverError
from .migrate import change_seconds, same_layout, still_there
from .missing import what_is_missing
from .propose import Source
from .refine import Refiner
from .score import missed
from .sources import usual_sources
from .supply import Supply

MOST_EXACT_DEVICES = 10
MOST_EXACT_COLUMNS = 8_000_000
"""Up to this many columns the branch and bound comes to its end within five seconds of one core."""

EXACT_COLUMNS_PER_S = MOST_EXACT_COLUMNS / 5
"""With more time it is tried on more."""

PROVEN_KINDS = frozenset({ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B})
"""Schedules of which the branch and bound sees every plan: not those of several chunks on a device, nor those
that need recomputation only for the gradients of weights that are still owed."""

MOST_MOVED_DEVICES = 24
"""Devices up to which refinement moves single ones; a larger cluster is refined by templates and numbers."""

MOST_ASKED_DEVICES = 16
"""Devices up to which peers end by themselves, so that they may be asked without a clock."""

PEERS_PART = 0.4
"""Part of a time budget that all peers may take together, while it is too short for all of them."""

ALL_PEERS_S: Seconds = 60.0
"""From this budget on every peer has all the time it asks for (docs: invariant 6)."""

AGAIN_PATIENCE = 4
"""Rounds of new proposals without anything better after which a search with time left gives up; a guess."""

LEAST_PEER_S: Seconds = 0.05
"""A peer is not asked for less."""

ORDER = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE, ScheduleKind.GPIPE)
"""Schedules by what they are likely to gain in a short time; the first of equal plans is kept."""


class Step(StrEnum):
    """A step after proposing and completing, which may be left out to see what it is worth."""

    PACK = "pack"
    """Mixtures of unlike pipelines."""
    REFINE = "refine"
    """Moves on templates and plans, and the proof of small problems, which starts from them."""


def find_plan(
    request: Request,
    *,
    seed: int = 0,
    time_budget_s: Seconds = 5.0,
    evaluations: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    peers: Sequence[Strategy] = PEERS,
    sources: Sequence[Source] | None = None,
    later: Sequence[Source] = (),
    notes: tuple[str, ...] = (),
    clock: Callable[[], Seconds] = time.monotonic,
    steps: Collection[Step] = tuple(Step),
) -> Found:
    """The best plan under the request's objective that the budget finds, never worse than a peer's proposal.

    With ``evaluations`` the number of plans that are priced for each schedule is limited instead of the time:
    the same inputs give the same plan everywhere, and more schedules never a slower one. ``sources``: by
    default those of ``planner.search.sources``; ``later``: what is asked, from new seeds, once moves bring no
    more and time is left; ``notes``: what ``Found.notes`` says of them. ``clock``: what the time budget is
    counted in. Raises NoFeasiblePlanError, saying what binds, and NotMeasuredError.
    """
    asked = usual_sources(request) if sources is None else sources
    kinds = tuple(kind for kind in ORDER if kind in request.schedules)
    judge = Judge(request, None if evaluations else time_budget_s, evaluations, on_progress, clock)
    search = _Search(request, judge, kinds[:1] if evaluations else kinds, seed, peers, asked, steps, later)
    proven = False
    with suppress(SearchOverError):
        proven = search.run()
    for kind in kinds[1:] if evaluations else ():
        with suppress(SearchOverError), judge.another():
            _Search(request, judge, (kind,), seed, (), asked, steps).run()
    _refuse_nothing(request, judge)
    return _found(request, judge, tuple(search.rivals), notes, proven=proven)


def _refuse_nothing(request: Request, judge: Judge) -> None:
    """NoFeasiblePlanError or NotMeasuredError where no plan was found, or none that keeps the limits."""
    if not judge.kept:
        missing = what_is_missing(request)
        if missing.over_bytes <= 0:
            _refuse_not_measured(request, judge)
        raise NoFeasiblePlanError(missing.text)
    best = judge.kept[0]
    if best.score.excess > 0:
        raise NoFeasiblePlanError(missed(best.estimate, request))


def _refuse_not_measured(request: Request, judge: Judge) -> None:
    """NotMeasuredError where a search reached beyond the profile, or could not start within it."""
    if judge.not_measured is not None:
        raise judge.not_measured
    types = {entry.device: None for entry in request.cluster.node}
    ranges = [
        r for d in types for tp in request.tables.tp_degrees(d) if (r := request.tables.samples_range(d, tp))
    ]
    if all(low > request.global_batch for low, _ in ranges):
        first = next(iter(types))
        request.tables.costs(first, request.tables.tp_degrees(first)[0], 1)


def _found(
    request: Request, judge: Judge, rivals: tuple[Rival, ...], notes: tuple[str, ...], *, proven: bool
) -> Found:
    best = judge.kept[0]
    used = set(best.plan.devices)
    is_running = request.running is not None and same_layout(best.plan, request.running)
    change = 0.0
    if request.running is not None and not is_running:
        change = change_seconds(request.running, best.plan, request)
    return Found(
        plan=best.plan,
        estimate=best.estimate,
        evaluations=judge.evaluations,
        seconds=judge.seconds,
        runners_up=runners(judge.kept),
        rivals=rivals,
        proven=proven,
        notes=notes,
        idle=tuple(device for device in request.cluster.devices if device not in used),
        ideal_s=Ideal(request).iteration_s,
        is_running=is_running,
        change_s=change,
    )


class _Search:
    """One search: its parts share the judge."""

    def __init__(
        self,
        request: Request,
        judge: Judge,
        kinds: Sequence[ScheduleKind],
        seed: int,
        peers: Sequence[Strategy],
        sources: Sequence[Source],
        steps: Collection[Step],
        later: Sequence[Source] = (),
    ) -> None:
        self.request = request
        self.judge = judge
        self.kinds = kinds
        self.seed = seed
        self.peers = peers
        self.sources = sources
        self.steps = steps
        self.later = later
        self.rivals: list[Rival] = []

    def run(self) -> bool:
        """Whether the best plan is proven to be the best."""
        request, judge = self.request, self.judge
        supply = Supply.of(request)
        first, *others = self._broad(supply, self.sources, self.seed)
        if request.running is not None and still_there(request.running, request):
            judge.keep(request.running)
        sketches = self._sketched(supply, first)
        with suppress(SearchOverError):
            first.start()
        self.rivals += self._ask_peers()
        self._improve(first)
        for each in others:
            each.start(first)
            self._improve(each)
        if Step.REFINE not in self.steps:
            return False
        proven = judge.time_budget_s is not None and self._prove(judge.time_budget_s)
        if not proven:
            self._climb_on()
        if not proven and self.judge.time_budget_s is not None:
            self._start_again(supply)
            self._go_on([*sketches, first, *others])
        return proven and PROVEN_KINDS.issuperset(self.kinds)

    def _sketched(self, supply: Supply, first: Broad) -> list[Broad]:
        """Under a clock a search of its own from few proposals, so that moves come soon.

        Not with a running plan, whose neighbours are tried before all else.
        """
        clocked = self.judge.time_budget_s is not None and Step.REFINE in self.steps
        if not clocked or self.request.running is not None:
            return []
        sketch = next(self._broad(supply, self.sources, self.seed))
        sketch.completion.rows = first.completion.rows
        with suppress(SearchOverError):
            sketch.sketch()
        return [sketch]

    def _go_on(self, every: Sequence[Broad]) -> None:
        """With time left: moves from more templates, and what they bring in mixtures and refined."""
        for broad in every:
            broad.climb(LONG_PATIENCE)
            if Step.PACK in self.steps:
                broad.pack()
        self._climb_on()

    def _start_again(self, supply: Supply) -> None:
        """With time still left: searches of their own from other proposals, until they bring nothing more.

        Moves go from the best columns, so that new proposals among the old columns would not be moved.
        """
        seed, left = self.seed, AGAIN_PATIENCE
        while self.later and left and self.judge.kept:
            seed, before = seed + 1, self.judge.kept[0].score
            for broad in self._broad(supply, self.later, seed):
                broad.start()
                self._improve(broad)
            self._climb_on()
            left = AGAIN_PATIENCE if self.judge.kept[0].score != before else left - 1

    def _improve(self, broad: Broad) -> None:
        if Step.REFINE in self.steps:
            broad.climb()
        if Step.PACK in self.steps:
            broad.pack()

    def _broad(self, supply: Supply, sources: Sequence[Source], seed: int) -> Iterator[Broad]:
        """Each schedule, interleaved with each number of runs; with one run it is 1F1B, and comes last."""
        for kind in self.kinds:
            several = range(2, MOST_RUNS + 1) if kind is ScheduleKind.INTERLEAVED else ()
            alone = ScheduleKind.ONE_F_ONE_B not in self.kinds
            for runs in (*several, *((1,) if alone or not several else ())):
                yield Broad(self.judge, supply, kind, sources, seed=seed, runs=runs)

    def _prove(self, budget_s: Seconds) -> bool:
        """Local moves first: the better the plan to start from, the sooner the proof.

        Where there is no time for all seatings, those that are soon done are searched, and nothing is proven.
        """
        most = max(MOST_EXACT_COLUMNS, int(budget_s * EXACT_COLUMNS_PER_S))
        chosen, whole = _seatings_within(self.request, most)
        for plan in [k.plan for k in self.judge.kept][: 2 if chosen else 0]:
            self._refiner(plan).climb(plan, 60)
        proofs = [
            Exact(self.request, pools, self.judge.offer, self.judge.check).run(self.judge.limit_s)
            for pools in chosen
        ]
        return whole and all(proofs)

    def _refiner(self, plan: Plan) -> Refiner:
        moved = len(self.request.cluster.devices) <= MOST_MOVED_DEVICES
        return Refiner(self.judge, Completer(self.request, plan.schedule), self.seed, structural=moved)

    def _climb_on(self) -> None:
        """Climb from the best plans until none of them gets better or the budget ends."""
        before = None
        while self.judge.kept and self.judge.kept[0].score != before:
            before = self.judge.kept[0].score
            for plan in [k.plan for k in self.judge.kept][:4]:
                self._refiner(plan).climb(plan, 2000)

    def _ask_peers(self) -> Iterator[Rival]:
        for peer in self.peers:
            budget_s = self._peer_budget_s()
            if budget_s < LEAST_PEER_S:
                yield Rival(peer.name, None, None, "no time for it in this budget")
                continue
            try:
                plan = peer.propose(self.request, budget_s=budget_s)
            except NotMeasuredError as error:  # what it would try reaches beyond the profile
                self.judge.not_measured = error
                yield Rival(peer.name, None, None, str(error))
                continue
            if plan is None:
                yield Rival(peer.name, None, None, "no plan of it fits")
                continue
            self.judge.keep(plan)
            outcome = price(plan, self.request)
            assert isinstance(outcome, Estimate)
            yield Rival(peer.name, plan, outcome)

    def _peer_budget_s(self) -> Seconds:
        """Of each: all it asks for where there is time, or no clock and a small cluster."""
        whole = DEFAULT_BUDGET_S
        total = self.judge.time_budget_s
        if total is None:
            return whole if len(self.request.cluster.devices) <= MOST_ASKED_DEVICES else 0.0
        if total >= ALL_PEERS_S:
            return whole
        return min(whole, PEERS_PART * total / max(1, len(self.peers)))


def _seatings_within(request: Request, most_columns: int) -> tuple[list[Pools], bool]:
    """Seatings with at most so many columns together, those with few first; whether they are all."""
    if len(request.cluster.devices) > MOST_EXACT_DEVICES or request.objective is Objective.COST:
        return [], False
    batch = request.global_batch
    counts = sum(batch // n for n in range(1, request.most_micro_batch + 1))
    every = list(_seatings(request))
    columns = [counts * num_shapes(pools.counts, len(request.model.blocks)) for pools in every]
    order = sorted(range(len(every)), key=lambda i: columns[i])
    totals = accumulate(columns[i] for i in order)
    within = [i for i, total in zip(order, totals, strict=True) if total <= most_columns]
    return [every[i] for i in within], len(within) == len(every)


def _seatings(request: Request) -> Iterator[Pools]:
    types = dict.fromkeys(entry.device for entry in request.cluster.node)
    return seatings(request.cluster, {name: request.tables.tp_degrees(name) for name in types})
