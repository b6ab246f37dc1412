"""A model of ranks that train, fail, freeze, report and go on, for exhaustive exploration of the commit rule.

A failed rank may be dead, or only cut off and still acting in its old generation: a dead rank is one that
never acts again. Joiners come at any time, get their state from a holder, and hold it once their generation
is completed; a failure before that leaves a generation that never is. The ranks stop for a joiner wherever
they are, which is more than a planned change does. Ranks are alike, so a state is a sorted tuple of them.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

from arachne_runtime.membership.decision import Report, Verdict, decide

Rule = Callable[[list[Report]], "Told"]


class ViolationError(Exception):
    """The rule let something happen that must not."""


class Phase(IntEnum):
    IDLE = 0
    PART_1 = 1
    PART_2 = 2
    PART_3 = 3
    FROZEN = 4
    TOLD = 5  # has seen the new record, has not acted on it


class Told(NamedTuple):
    """A decision as the ranks follow it; ``step`` None: each its own open step."""

    apply: bool
    step: int | None


class Rank(NamedTuple):
    lost: bool = False
    phase: Phase = Phase.IDLE
    applied: int = 0
    entered: int = 0
    held: int = -1  # generation of the gradients of `entered`, -1: none
    generation: int = 0
    started: int = 0  # last step whose part 1 it began in its generation; 0: none
    member_until: int = 0  # the last generation it is in; -1: a joiner that waits for its first
    since: int = 0  # its first generation
    holds: bool = True  # state of the last completed generation
    got: bool = False  # a copy of it, in a generation that is not completed yet
    report: Report | None = None
    told: Told | None = None  # while TOLD: what it has seen, which may be older than the newest record

    @property
    def key(self) -> tuple[object, ...]:
        seen = self.report
        reported = (
            () if seen is None else (seen.applied, seen.entered, -1 if seen.held is None else seen.held)
        )
        told = (
            () if self.told is None else (self.told.apply, -1 if self.told.step is None else self.told.step)
        )
        return (*self[:11], reported, told)


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    generation: int
    told: Told | None
    committed: tuple[int, ...]  # by step: generation of the gradients that were applied, -1: none yet
    failures: int
    completed: int = 0  # the last generation whose members were all ready
    joins: int = 0


def real_rule(reports: list[Report]) -> Told:
    decision = decide(reports)
    return Told(decision.verdict is Verdict.APPLY, decision.step)


def yes_or_no(reports: list[Report]) -> Told:
    """Each only says whether it has a step open whose gradients it holds."""
    return Told(all(r.entered > r.applied and r.held is not None for r in reports), None)


def anyone_completed(reports: list[Report]) -> Told:
    step = min(report.entered for report in reports)
    return Told(any(report.applied >= step for report in reports), step)


def all_entered(reports: list[Report]) -> Told:
    """Without the generation of the gradients."""
    return Told(True, min(report.entered for report in reports))


class Model(NamedTuple):
    num_ranks: int
    num_steps: int
    num_failures: int
    rule: Rule = real_rule
    freezes_first: bool = True
    lost_may_act: bool = True
    num_joins: int = 0
    hears_joiners: bool = False  # a wrong rule: it decides over those too that hold nothing yet
    trains_at_once: bool = False  # another: before all members of the generation are ready

    def explore(self) -> int:
        """Number of states, all of them visited; raises ViolationError."""
        start = State((Rank(),) * self.num_ranks, 0, None, (-1,) * (self.num_steps + 1), 0)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            own, others = self.moves(state)
            goes_on = [rank for rank in state.ranks if not rank.lost and rank.holds]
            if not own and any(rank.applied < self.num_steps for rank in goes_on):
                raise ViolationError(f"nobody can go on: {state}")
            for following in own + others:
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return len(seen)

    def moves(self, state: State) -> tuple[list[State], list[State]]:
        """What survivors and the coordinator can do, and what failing and failed ranks can."""
        own = [*self.publish(state), *self.complete(state)]
        others = list(self.join(state))
        for rank in set(state.ranks):
            if rank.lost and not self.lost_may_act:
                continue
            moved = [self.put(state, rank, *after) for after in self.acts(state, rank)]
            (others if rank.lost else own).extend(moved)
            if not rank.lost and state.failures < self.num_failures:
                lost = self.put(state, rank, rank._replace(lost=True), state.committed)
                others.append(lost._replace(failures=state.failures + 1))
        return own, others

    @staticmethod
    def put(state: State, old: Rank, new: Rank, committed: tuple[int, ...]) -> State:
        ranks = list(state.ranks)
        ranks[ranks.index(old)] = new
        return state._replace(ranks=tuple(sorted(ranks, key=lambda rank: rank.key)), committed=committed)

    def acts(self, state: State, rank: Rank) -> Iterator[tuple[Rank, tuple[int, ...]]]:
        team = [peer for peer in state.ranks if peer.member_until >= rank.generation]
        yield from self.trains(state, rank, team)
        yield from self.recovers(state, rank, team)

    def trains(self, state: State, rank: Rank, team: list[Rank]) -> Iterator[tuple[Rank, tuple[int, ...]]]:
        here = [peer for peer in team if peer.generation == rank.generation]
        step = rank.applied + 1
        if (state.completed < rank.generation and not self.trains_at_once) or not rank.holds:
            return
        if rank.phase is Phase.IDLE and step <= self.num_steps:
            if rank.started == 0 and any(peer.started not in (0, step) for peer in here):
                raise ViolationError("ranks of one generation start different steps")
            yield rank._replace(phase=Phase.PART_1, started=step, held=-1), state.committed
        if rank.phase is Phase.PART_1 and len(here) == len(team) and all(p.started >= step for p in team):
            entered = rank._replace(phase=Phase.PART_2, entered=step, held=rank.generation)
            yield entered, state.committed
        if rank.phase is Phase.PART_2 and len(here) == len(team) and all(in_part_2(p, step) for p in team):
            yield rank._replace(phase=Phase.PART_3), state.committed
        if rank.phase is Phase.PART_3:
            yield applied(rank._replace(phase=Phase.IDLE), state.committed)

    def recovers(self, state: State, rank: Rank, team: list[Rank]) -> Iterator[tuple[Rank, tuple[int, ...]]]:
        here = [peer for peer in team if peer.generation == rank.generation]
        waits = any(peer.member_until < 0 and not peer.lost for peer in state.ranks)
        alarmed = waits or any(peer.lost for peer in team) or any(peer.report for peer in here)
        if rank.member_until < 0:
            return
        if not rank.holds:
            yield from self.copies(state, rank, here, alarmed)
            return
        if alarmed and rank.report is None:
            if 0 < rank.since == rank.generation and rank.started == 0:  # has not heard that it is completed
                yield rank._replace(report=NOTHING, holds=False, phase=Phase.FROZEN), state.committed
            if self.freezes_first:
                frozen, committed = freeze(rank, state.committed)
                yield frozen._replace(report=report_of(frozen)), committed
            else:
                yield rank._replace(report=report_of(rank)), state.committed
        if rank.report and rank.generation < state.generation <= rank.member_until:
            frozen, committed = freeze(rank, state.committed)
            told = frozen._replace(phase=Phase.TOLD, told=state.told, report=None)
            yield told._replace(generation=state.generation, started=0), committed
        if rank.phase is Phase.TOLD:
            yield act_on(rank, rank.told, state.committed)

    def copies(
        self, state: State, rank: Rank, here: list[Rank], alarmed: bool
    ) -> Iterator[tuple[Rank, tuple[int, ...]]]:
        """What a member without state does: a holder that has acted on the record gives it its own."""
        if rank.report is None:
            for peer in here:
                if peer.holds and peer.phase is Phase.IDLE and peer.report is None and not rank.got:
                    copy = rank._replace(got=True, applied=peer.applied, entered=peer.applied)
                    yield copy, state.committed
            if alarmed:
                yield rank._replace(report=NOTHING), state.committed
        elif rank.generation < state.generation <= rank.member_until:
            yield (
                rank._replace(generation=state.generation, report=None, got=False, applied=0, entered=0),
                state.committed,
            )

    def join(self, state: State) -> Iterator[State]:
        """A fresh process comes."""
        if state.joins < self.num_joins:
            joiner = Rank(phase=Phase.FROZEN, generation=-1, member_until=-1, holds=False)
            ranks = sorted((*state.ranks, joiner), key=lambda rank: rank.key)
            yield state._replace(ranks=tuple(ranks), joins=state.joins + 1)

    def complete(self, state: State) -> Iterator[State]:
        """All members have their parts, and those that got them hold them from now on."""
        members = [rank for rank in state.ranks if rank.member_until == state.generation]
        if state.completed == state.generation or not all(is_ready(rank, state) for rank in members):
            return
        ranks = [
            rank._replace(holds=True, got=False, phase=Phase.IDLE) if rank in members and rank.got else rank
            for rank in state.ranks
        ]
        ranks.sort(key=lambda rank: rank.key)
        yield state._replace(ranks=tuple(ranks), completed=state.generation)

    def publish(self, state: State) -> Iterator[State]:
        """Once each member has reported or is removed; who failed after its report may be kept or not."""
        members = [rank for rank in state.ranks if rank.member_until == state.generation]
        ready = {rank for rank in members if rank.report and rank.generation == state.generation}
        if not members or any(not rank.lost and rank not in ready for rank in members):
            return
        for keeps_lost in (True, False) if state.generation < self.num_failures else (False,):
            kept = [rank for rank in members if rank in ready and (keeps_lost or not rank.lost)]
            holders = [rank for rank in kept if rank.holds]
            if not holders or all(rank.lost for rank in kept):
                continue
            told = self.rule([rank.report for rank in (kept if self.hears_joiners else holders)])
            ranks = [in_next(state, rank, rank in kept) for rank in state.ranks]
            ranks.sort(key=lambda rank: rank.key)
            yield state._replace(ranks=tuple(ranks), generation=state.generation + 1, told=told)


NOTHING = Report(applied=0, entered=0)
"""Of one that holds no state; no rule sees it."""


def in_next(state: State, rank: Rank, kept: bool) -> Rank:
    """A rank as the next generation begins; whoever waits for one is in it."""
    following = state.generation + 1
    if rank.member_until < 0 and not rank.lost:
        return rank._replace(member_until=following, generation=following, since=following)
    return rank._replace(member_until=following) if kept else rank


def is_ready(rank: Rank, state: State) -> bool:
    """Whether a member has acted on the newest record, and has its copy if it needs one."""
    acted = rank.phase is Phase.IDLE if rank.holds else rank.got
    return acted and rank.generation == state.generation and rank.report is None


def in_part_2(rank: Rank, step: int) -> bool:
    """Whether it has entered (2) of a step in its generation."""
    return rank.started > step or (rank.started == step and rank.held == rank.generation)


def report_of(rank: Rank) -> Report:
    return Report(applied=rank.applied, entered=rank.entered, held=None if rank.held < 0 else rank.held)


def freeze(rank: Rank, committed: tuple[int, ...]) -> tuple[Rank, tuple[int, ...]]:
    """Leave the groups, but finish (3)."""
    if rank.phase is Phase.PART_3:
        rank, committed = applied(rank, committed)
    return rank._replace(phase=Phase.FROZEN, told=None), committed


def applied(rank: Rank, committed: tuple[int, ...]) -> tuple[Rank, tuple[int, ...]]:
    """(3) of the step it has entered: from here on its result may have left the rank."""
    step = rank.entered
    if rank.applied != step - 1 or rank.held < 0:
        raise ViolationError(
            f"step {step} is applied by a rank at step {rank.applied} with gradients {rank.held}"
        )
    if committed[step] not in (-1, rank.held):
        raise ViolationError(
            f"step {step} is applied from gradients of generations {committed[step]}, {rank.held}"
        )
    return rank._replace(applied=step), (*committed[:step], rank.held, *committed[step + 1 :])


def act_on(rank: Rank, told: Told, committed: tuple[int, ...]) -> tuple[Rank, tuple[int, ...]]:
    step = rank.entered if told.step is None else told.step
    if told.apply and rank.applied < step:
        if rank.entered != step:
            raise ViolationError(f"step {step} is to be applied by a rank that entered {rank.entered}")
        rank, committed = applied(rank, committed)
    following = rank.applied + 1 if told.step is None else step + told.apply
    if rank.applied != following - 1:
        raise ViolationError(f"a rank at step {rank.applied} is to compute step {following}")
    if rank.applied < rank.entered:
        rank = rank._replace(held=-1)
    return rank._replace(phase=Phase.IDLE, told=None), committed
