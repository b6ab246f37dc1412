"""The event-driven simulation of one job: training, stops, losses and changes under one policy."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds
from planner.request import CHANGE_EVERY_S

from ..coordinator.worth import HORIZON_S
from .availability import Moment, Presence, Turn, moments
from .calm import Calm
from .holders import Holdings, holdings, state_bytes
from .ledger import Ledger, Spent
from .options import MOST_PRICED, Option, Pricer, Source, Way
from .outcome import Change
from .pace import Pace, pace_of
from .places import in_short, moved_to, nodes_of
from .plans import Known
from .policies import Policy, Situation
from .trace import Trace

LEAST_LOOK_S: Seconds = 30.0
"""A change that does not pay is not weighed again sooner; a guess."""

GONE = " (gone)"
"""Behind the name of a node that took its state along: one of that name that comes is another."""


class Due(StrEnum):
    """What the job does next, if nothing happens before."""

    DECIDE = "decide"
    """A plan for the survivors, or for those that wait, is found."""
    WEIGH = "weigh"
    """A plan is found while another one runs."""
    STOP = "stop"
    """The step ends behind which a planned change begins."""
    BEGIN = "begin"
    """The change is done."""


@dataclass(frozen=True, slots=True)
class Running:
    """A plan that trains."""

    known: Known
    plan: Plan
    pace: Pace
    since_s: Seconds
    first_step: float
    """Done when it began."""

    @property
    def samples_per_s(self) -> float:
        """Copies counted."""
        return self.plan.global_batch / self.pace.whole_step_s

    def steps_until(self, now_s: Seconds) -> float:
        """Of it alone."""
        return (now_s - self.since_s) / self.pace.whole_step_s


class Job:
    """One policy on one trace."""

    def __init__(self, trace: Trace, pricer: Pricer, policy: Policy, first: Known | None) -> None:
        self.trace, self.pricer, self.policy = trace, pricer, policy
        self.table, self.costs = pricer.table, pricer.costs
        self.first = first
        """The plan of a policy that keeps its shape."""
        self.ledger = Ledger(self.table.request.global_batch)
        self.changes: list[Change] = []
        self.presence = Presence.at_start(trace)
        self.calm = Calm(HORIZON_S)
        self.running: Running | None = None
        self.source: Plan | None = None
        """Whose state is there; nodes that are gone have another name in it."""
        self.held: Holdings | None = None
        self.snapshot_step = self.checkpoint_step = 0.0
        self._chosen: Option | None = None
        self._idle, self._idle_since_s, self._stopped_s = Spent.WAITING, 0.0, 0.0
        self._again = False
        self._lost_nodes = self._reloads = 0
        self._redone = 0.0
        self._copies = False
        self._due: tuple[Seconds, Due] | None = None

    def run(self) -> None:
        """From the start, where the first plan runs at once, to the end."""
        candidates = self._candidates(self.presence.usable)
        if candidates:
            plan = self.table.on(candidates[0], self.presence.usable)
            self._train(candidates[0], plan, 0.0)
        for moment in moments(self.trace, self.costs.start_s):
            self._go_on(moment.at_s)
            self.presence.turn(moment)
            self._turn(moment)
        self._go_on(self.trace.duration_s)
        if self.running is not None:
            self._bank(self.trace.duration_s)
        else:
            self._stand(self.trace.duration_s, self._idle)
            self.ledger.mark(self.trace.duration_s)

    # --- what happens

    def _go_on(self, until_s: Seconds) -> None:
        while self._due is not None and self._due[0] < until_s:
            (at_s, due), self._due = self._due, None
            {Due.DECIDE: self._decide, Due.WEIGH: self._weigh, Due.STOP: self._stop, Due.BEGIN: self._begin}[
                due
            ](at_s)

    def _turn(self, moment: Moment) -> None:
        if moment.turn in (Turn.GOES, Turn.READY):
            self.calm.see(moment.at_s)
        if moment.turn is Turn.COMES:
            return
        if moment.turn is Turn.GOES:
            self._lose(set(moment.nodes), moment.at_s)
        elif self._is_due(Due.STOP, moment.at_s + self.costs.plan_s) and not self._is_chosen(
            self.presence.leaving
        ):
            self._again = True
        elif self.running is not None:
            self._chosen = None
            self._due = moment.at_s + self.costs.plan_s, Due.WEIGH
        elif self._idle is Spent.WAITING:
            self._due = moment.at_s + self.costs.plan_s, Due.DECIDE
        else:
            self._again = True

    def _lose(self, gone: set[str], at_s: Seconds) -> None:
        self._lost_nodes += len(gone)
        members = nodes_of(self.running.plan) if self.running is not None else frozenset()
        holding = nodes_of(self.source) if self.source is not None else frozenset()
        if self.source is not None and gone & holding:
            names = {name: name + GONE if name in gone else name for name in holding}
            self.source = moved_to(self.source, names)
        found_s = at_s + self.costs.detect_s + self.costs.plan_s
        if self.running is not None and gone & members:
            self._fail(at_s)
            self._due = found_s, Due.DECIDE
        elif self.running is not None and self._is_chosen(gone):
            self._chosen, self._due = None, (at_s + self.costs.plan_s, Due.WEIGH)
        elif (
            self.running is None
            and self._idle is Spent.STANDSTILL
            and (gone & holding or self._is_chosen(gone))
        ):
            self._chosen, self._due = None, (found_s, Due.DECIDE)

    def _fail(self, at_s: Seconds) -> None:
        """The step in which a member goes is lost; those before it are whole."""
        assert self.running is not None
        whole = self.running.first_step + int(self.running.steps_until(at_s) + 1e-9)
        self._bank(at_s)
        self._redone = self.ledger.steps - whole
        self.ledger.back_to(whole, at_s)
        self._chosen = None
        self._idle, self._stopped_s = Spent.STANDSTILL, at_s

    def _bank(self, at_s: Seconds) -> None:
        """Training ends, and its steps are in the books."""
        assert self.running is not None
        run, self.running = self.running, None
        self.ledger.train(run.since_s, at_s, run.pace)
        steps = int(run.steps_until(at_s) + 1e-9)
        every = run.pace.snapshot_every
        if every:
            self.snapshot_step = max(self.snapshot_step, run.first_step + steps // every * every)
        last = (run.first_step + steps) // run.pace.checkpoint_every * run.pace.checkpoint_every
        if last > run.first_step:
            self.checkpoint_step = last
        self._idle_since_s = at_s

    def _stand(self, at_s: Seconds, what: Spent) -> None:
        self.ledger.stand(self._idle_since_s, at_s, self._idle)
        self._idle, self._idle_since_s = what, at_s

    # --- what the job does

    def _decide(self, at_s: Seconds) -> None:
        """After a loss, or where nothing ran: a plan for those that are there, or waiting."""
        source = self._state_source()
        chosen = self._choose(self.presence.usable, source, at_s, planned=False)
        if chosen is None:
            self._stand(at_s, Spent.WAITING)
            return
        self._stand(at_s, Spent.STANDSTILL)
        self._chosen, self._again = chosen, False
        self._reloads += source is Source.CHECKPOINT
        self._go_back(source, at_s)
        self._due = at_s + chosen.standstill_s, Due.BEGIN

    def _weigh(self, at_s: Seconds) -> None:
        """While training goes on: whether another plan pays."""
        assert self.running is not None
        source = Source.CHECKPOINT if self.policy.way is Way.RESTART else Source.HOLDERS
        chosen = self._choose(self.presence.usable, source, at_s, planned=True)
        if chosen is None:
            self._look_again(at_s)
            return
        self._chosen, self._again = chosen, False
        self._due = self._stop_s(at_s, chosen.standstill_s), Due.STOP

    def _stop_s(self, at_s: Seconds, standstill_s: Seconds) -> Seconds:
        """The end of the step, or of the last one with which a change is done before a member goes."""
        assert self.running is not None
        run, told = self.running, self.presence.leaving
        steps = ceil(run.steps_until(at_s) - 1e-9)
        leave_s = [told[name] for name in nodes_of(run.plan) if name in told]
        if leave_s:
            steps = max(steps, int(run.steps_until(min(leave_s) - standstill_s)))
        return run.since_s + steps * run.pace.whole_step_s

    def _look_again(self, at_s: Seconds) -> None:
        if self.policy.looks_again:
            self._due = at_s + max(LEAST_LOOK_S, self.calm.expected_s(at_s)), Due.WEIGH

    def _stop(self, at_s: Seconds) -> None:
        assert self._chosen is not None
        self._bank(at_s)
        self.ledger.steps = round(self.ledger.steps)
        self._redone = 0.0
        self._idle, self._stopped_s = Spent.STANDSTILL, at_s
        if self.policy.way is Way.RESTART:
            self.checkpoint_step = self.ledger.steps
        self._due = at_s + self._chosen.standstill_s, Due.BEGIN

    def _begin(self, at_s: Seconds) -> None:
        assert self._chosen is not None
        chosen, self._chosen = self._chosen, None
        self._stand(at_s, Spent.STANDSTILL)
        self._train(chosen.known, chosen.plan, at_s)
        assert self.running is not None
        self.changes.append(
            Change(
                at_s=at_s,
                standstill_s=at_s - self._stopped_s,
                nodes=len(nodes_of(chosen.plan)),
                plan=in_short(chosen.plan),
                samples_per_s=self.running.samples_per_s,
                source=chosen.source,
                redone_steps=self._redone,
            )
        )
        if self._again:
            self._due = at_s + self.costs.plan_s, Due.WEIGH
        else:
            self._look_again(at_s)

    # --- what it knows

    def _train(self, known: Known, plan: Plan, at_s: Seconds) -> None:
        held = holdings(plan, self.table.request)
        self.source, self.held = plan, held
        pace = self._pace(known, plan, at_s)
        self.running = Running(known, plan, pace, at_s, self.ledger.steps)
        self._copies = pace.snapshot_every is not None
        if self._copies:  # the first step's copy is of the state that it begins with
            self.snapshot_step = self.ledger.steps

    def _pace(self, known: Known, plan: Plan, at_s: Seconds) -> Pace:
        """Times until losses: those so far, and one in the time that the planner expects between changes."""
        held, seen_s = holdings(plan, self.table.request), CHANGE_EVERY_S + at_s
        to_node_loss_s = max(1, len(self.presence.here)) * seen_s / (1 + self._lost_nodes)
        live = self.policy.way is Way.LIVE
        return pace_of(
            known.step_s,
            held,
            len(plan.devices),
            state_bytes(self.table.request),
            self.costs,
            to_node_loss_s=to_node_loss_s,
            to_checkpoint_s=seen_s / (1 + self._reloads) if live else to_node_loss_s / len(held.nodes),
            snapshots=live,
        )

    def _candidates(self, nodes: frozenset[str]) -> tuple[Known, ...]:
        fitting = self.table.fitting(self.table.counts(nodes))
        if self.policy.keeps_shape and self.first is not None:
            return tuple(known for known in fitting if known is self.first)
        return fitting[:MOST_PRICED]

    def _choose(
        self, nodes: frozenset[str], source: Source, now_s: Seconds, *, planned: bool
    ) -> Option | None:
        """What the policy wants to change to; None: nothing else than what runs."""
        running = self.running if self.running and nodes_of(self.running.plan) <= nodes else None
        candidates = tuple(k for k in self._candidates(nodes) if running is None or k is not running.known)
        found = self.pricer.options(candidates, nodes, self.source, self.policy.way, source, planned=planned)
        return self.policy.choose(
            Situation(
                running_samples_per_s=running.samples_per_s if running is not None else 0.0,
                offers=tuple(
                    (o, self.table.request.global_batch / self._pace(o.known, o.plan, now_s).whole_step_s)
                    for o in found
                ),
                calm_s=self.calm.expected_s(now_s),
            )
        )

    def _state_source(self) -> Source:
        if self.source is None:
            return Source.NOTHING
        if self.policy.way is Way.RESTART:
            return Source.CHECKPOINT
        alive = {name for name in nodes_of(self.source) if not name.endswith(GONE)}
        assert self.held is not None
        if self.held.are_alive(alive):
            return Source.HOLDERS
        return Source.SNAPSHOT if self._copies and self.held.are_copied(alive) else Source.CHECKPOINT

    def _go_back(self, source: Source, at_s: Seconds) -> None:
        step = {Source.SNAPSHOT: self.snapshot_step, Source.CHECKPOINT: self.checkpoint_step}.get(source, inf)
        before = self.ledger.steps
        self.ledger.back_to(step, at_s)
        self._redone += before - self.ledger.steps

    def _is_due(self, due: Due, before_s: Seconds) -> bool:
        return self._due is not None and self._due[1] is due and self._due[0] <= before_s

    def _is_chosen(self, nodes: Iterable[str]) -> bool:
        return self._chosen is not None and not nodes_of(self._chosen.plan).isdisjoint(nodes)
