"""The recover loop of one rank: what a lost peer cuts short is repeated in the next generation.

Every wait of a rank ends: an operation breaks when the coordinator says so, a group forms within its limit,
and the coordinator answers or is told to be lost. A rank that dies anywhere in here ends the generation for
the others, who come through here again.
"""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from ..engine import Engine, EvaluationReport, StepReport
from ..errors import DisagreementError, UnsupportedEnvironmentError
from ..measure.together import Together
from ..membership.client import JobEndedError, LeftOutError, MemberClient, RefusedError
from ..membership.messages import ChangeWanted, Freeze, Record
from ..membership.watch import Watch, leave_world
from ..state.changes import PlanChange
from ..units import Seconds
from .between import Between, again
from .entering import Entering, Entry
from .lost import first_line, is_fault_of_another, is_lost_peer, is_own
from .patience import Patience
from .standing import is_half_done, obey, report_of
from .step_start import StepStart

RECORD_S: Seconds = 1800.0
"""More than a coordinator takes to plan and to wait for devices (600 s each by default)."""
COMPLETED_S: Seconds = 900.0
"""More than a coordinator waits for members to be ready (600 s by default)."""
FIRST_RECORD_S: Seconds = 30 * 24 * 3600.0
"""A device that no plan uses waits as long as the job takes; its node's agent ends it with the job."""
LOOK_S: Seconds = 0.05
"""Between two looks whether a generation still goes on."""
VERDICT_S: Seconds = 4.0
"""After an error that may come from a lost peer and may not: the coordinator declares one dead in 2 s."""
FAILURES = 20
"""Generations that may fail in a row: each costs 10 s of forming where two hosts do not meet."""
FAILURES_OF_JOINERS = 10
"""Likewise, of a process that holds no state."""

T = TypeVar("T")


@dataclass(slots=True)
class Survivor:
    """One rank in a job that outlives its ranks; ``join`` makes its engine, which it then serves."""

    client: MemberClient
    watch: Watch
    patience: Patience
    entering: Entering
    on_entered: Callable[[Record, int], None] = lambda record, rank: None
    """Told of each generation that counts, and of this process's rank in it."""
    listeners: list[Callable[[PlanChange], None]] = field(default_factory=list)
    """Told of each change of plan behind the first."""
    engine: Engine | None = None
    generation: int = 0
    _record: Record | None = None
    """That of the generation."""
    _start: StepStart | None = None
    """Of the step that this rank is in, or was in last."""
    _left_s: Seconds = 0.0
    """When the last generation was left."""
    has_joined: bool = False
    """Whether the job was in training when this process came."""
    _between: Between = field(default_factory=Between)
    _num_failures: int = 0
    """Generations in a row that failed before anything was done in them."""
    _told_steps: int = 0
    """Steps done, as the script has heard."""

    def join(self) -> Engine:
        """Wait for a plan that uses this device, and make its engine.

        Raises:
            RefusedError: The coordinator does without this process.
            JobEndedError: The job is over.
            LostStateError: Nobody has a block any more.

        """
        with self.patience.counting():
            self._enter()
        return self._engine()

    @property
    def has_ended(self) -> bool:
        """Whether the generation is over, though this rank may not have left it."""
        return isinstance(self.client.stop, Freeze)

    def step(self, engine: Engine, batch: Any) -> StepReport:
        """As ``Engine.step``; in the next generation the same step, if it was not applied."""
        number = self._number(engine)
        with self.patience.counting():
            if engine.is_change_wanted:  # not behind the last step: all have done what comes between
                self._leave("")
                self._enter()
            report = self._repeated(lambda: self._stepped(engine, batch, number), engine, number)
        self._between.stepped()
        self._told_steps = number + 1
        computed = self.entering.make.hooks.computed
        compute_s = computed.seconds if computed is not None else 0.0
        self.client.progress(report.step + 1, report.num_rows / report.seconds, compute_s)
        return report

    def evaluate(self, engine: Engine, batches: Iterable[Any]) -> EvaluationReport:
        """As ``Engine.evaluate``; what a lost rank cuts short is repeated, with the batches given before.

        Raises:
            UsageError: On a process that joined and has not trained yet: the others are elsewhere.

        """
        between = self._between
        between.refuse_joined()
        count, seen, rest = len(between.results), list[Any](), iter(batches)

        def evaluated() -> None:
            if len(between.results) == count:  # else another rank had the result
                report = engine.evaluate_once(again(seen, rest, self.entering.feeds, engine))
                between.results.append(report)

        between.evaluates = True
        try:
            with self.patience.counting():
                self._repeated(evaluated, engine, self._number(engine))
        finally:  # a script may go on behind an error of its own
            between.evaluates = False
        return between.results[count]

    def finish(self) -> None:
        """The script has come to its end here: wait until all ranks have, so that none needs this one."""
        engine = self._engine()
        self._between.ended = True
        with self.patience.counting():
            self._repeated(lambda: dist.barrier(), engine, self._number(engine))
        self.client.done()

    def settle(self) -> None:
        """The job ends here: be between two steps, whatever was cut short, for as long as it takes."""
        self.patience.close()
        engine, start = self.engine, self._start
        if engine is not None and start is not None and start.number == engine.num_steps:
            start.give_back()

    def close(self) -> None:
        """Leave the groups; the client and the watch are its owner's."""
        self.watch.release()
        self.patience.close()
        self.entering.end_snapshots()
        if self.engine is not None:
            self.engine.close()
        leave_world()

    def _number(self, engine: Engine) -> int:
        """Steps done, as the script has heard: more than the engine has, where that went back."""
        return max(engine.num_steps, self._told_steps)

    def _stepped(self, engine: Engine, batch: Any, number: int) -> StepReport:
        """The step behind ``number`` others, or what it gave where it is applied already."""
        if engine.num_steps > number:
            return engine.apply_open()
        return self._once(engine, self.entering.feeds.reload(batch, engine))

    def _once(self, engine: Engine, batch: Any) -> StepReport:
        snapshots = self.entering.snapshots
        if engine.num_steps % snapshots.every == 0:  # it waits for the copy before
            self._await_copy()
        snapshots.before_step(engine, self.entering.feeds)
        self._start = StepStart.of(engine)
        return engine.step_once(batch)

    def _await_copy(self) -> None:
        """Until the copy under way has ended, unless the generation ends: then it may not (see ``leave``)."""
        while not self.entering.snapshots.ends_within(LOOK_S):
            if self.has_ended:
                raise RuntimeError("a copy of the state was under way as the generation ended")

    def _repeated(self, action: Callable[[], T], engine: Engine, number: int) -> T:
        """What the action gives, in as many generations as it takes; ``number``: steps done before it.

        Where the state went back to a snapshot, the steps since then come first.
        """
        while True:
            try:
                if engine.num_steps < number:
                    for batch in self.entering.feeds.since(engine.num_steps, engine):
                        self._once(engine, batch)
                done = action()
            except Exception as error:
                failure = self._lost(error)
            else:
                self._num_failures = 0
                return done
            self._leave(failure)
            self._enter()

    def _engine(self) -> Engine:
        assert self.engine is not None, "no generation was entered"
        return self.engine

    def _lost(self, error: Exception) -> str:
        """Why the generation ends; the error itself where it is this rank's or its user's.

        An error that does not look like one of a connection may still follow from one.
        """
        is_anothers = is_fault_of_another(error) or self._is_joiners(error)
        if is_half_done(self.engine) or (is_own(error) and not is_anothers):
            raise error
        known = is_anothers or is_lost_peer(error) or self.has_ended
        if not known and isinstance(error, RuntimeError):
            known = isinstance(self._stop_within(VERDICT_S), Freeze)
        if not known:
            raise error
        return first_line(error)

    def _is_joiners(self, error: Exception) -> bool:
        """Whether ranks differ in the first step of one that joined, which then ends alone.

        A script with batches of its own begins with its first one, wherever the others are.
        """
        between = self._between
        return isinstance(error, DisagreementError) and between.meets_joiners and not between.joins

    def _stop_within(self, timeout_s: Seconds) -> object:
        end = time.monotonic() + timeout_s
        while (stop := self.client.wait_stop(max(0.0, end - time.monotonic()))) is not None:
            if isinstance(stop, Freeze) or time.monotonic() >= end:
                return stop
            time.sleep(0.05)
        return None

    def _leave(self, why: str, entry: Entry | None = None) -> None:
        """End the generation here, and say where this rank stands; ``why``: what failed, or nothing did.

        Groups are broken before the report: from then on nothing of them changes this rank, and peers that
        wait for it do not any more.
        """
        self._left_s = time.perf_counter()
        if why:
            self.client.failed(why)
            self.watch.break_all()
        else:
            with suppress(RuntimeError):  # a peer is lost now
                self._await_copy()
        self.entering.snapshots.leave()
        self.watch.release()
        self.patience.left(self.entering.generation)
        self.client.frozen(report_of(self.engine) if self.engine is not None else None)
        if entry is not None:
            entry.drop()
        if self.engine is not None:
            self.engine.close()
        leave_world()
        if why:
            self._refuse_endless(why)

    def _refuse_endless(self, why: str) -> None:
        """An error where generation after generation failed, and nothing was done in any of them.

        Two hosts that do not reach one another, say, fail alike for ever, and live. Who holds no state ends
        sooner: the others may do without it.

        Raises:
            JobEndedError: On a process that holds state.
            UnsupportedEnvironmentError: On one that does not.

        """
        self._num_failures += 1
        said = f"{self._num_failures} generations in a row failed before anything was done; the last: {why}"
        if self.engine is None and self._num_failures >= FAILURES_OF_JOINERS:
            raise UnsupportedEnvironmentError(said)
        if self._num_failures >= FAILURES:
            raise JobEndedError(said)

    def _enter(self) -> None:
        """Follow records until a generation counts."""
        while True:
            limit_s = RECORD_S if self.engine is not None else FIRST_RECORD_S
            seen = self.entering.generation
            record = self.client.wait_record(seen, limit_s)
            if self.engine is not None and record.decision is not None:
                obey(self.engine, record.decision, self._start)
            failure, entry = "", None
            try:
                entry = self.entering.enter(record, self.engine)
            except Exception as error:
                failure = self._lost(error)
            back = entry is not None and entry.back is not None
            if not failure and self._counts(record, entry):
                entry = None  # it is the engine's now
                if not (failure := self._met(back)):
                    return
            self._leave(failure, entry)

    def _met(self, back: bool) -> str:
        """Agree with the others on what was done since the last step; why it failed, or nothing."""
        engine = self._engine()
        try:
            self._between.meet(Together.of_default_group(engine.device), went_back=back)
            self.entering.keep_snapshots(engine)
        except Exception as error:
            return self._lost(error)
        return ""

    def _counts(self, record: Record, entry: Entry | None) -> bool:
        """Whether all members became ready: then the old state goes."""
        if entry is not None:
            self.client.ready()
        if not self.client.wait_completed(record.generation, COMPLETED_S):
            return False
        if entry is None:
            raise LeftOutError(
                f"generation {record.generation} does without {self.client.member.device}: {record.why}"
            )
        before, self._record, self.generation = self._record, record, record.generation
        comes = self.engine is None
        self.engine = entry.commit(self.engine)
        if comes:
            self.has_joined = self._between.joins = record.source is not None
            self.engine.survival = self
            self.engine.wants_change = lambda: isinstance(self.client.stop, ChangeWanted)
            self.entering.feeds.go_on(entry.feeds)
            self.entering.feeds.forget(self.engine.num_steps)
        elif entry.back is not None:
            self._go_back(record, entry)
        self.engine.is_change_wanted = False
        self.on_entered(record, entry.rank)
        if before is not None:
            change = entry.told(before.plan, record.plan, time.perf_counter() - self._left_s)
            for listener in self.listeners:
                listener(change)
        return True

    def _go_back(self, record: Record, entry: Entry) -> None:
        """The state is that of a snapshot: so is the place in the data, and no step is open.

        Raises:
            RefusedError: This process was not there when so many steps were done: it cannot do them again.

        """
        engine = self._engine()
        if not self.entering.feeds.has_since(engine.num_steps):
            raise RefusedError(
                f"the job goes back to step {engine.num_steps}, from which on this process has no batches; "
                "start it anew"
            )
        engine.discard()
        self._start = None
        self.entering.feeds.go_back(entry.feeds)
        if entry.rank == 0:
            count = self._number(engine) - engine.num_steps
            print(
                f"generation {record.generation}: nobody held a part of the state any more; back to the "
                f"snapshot of step {entry.back}, {count} steps are done again",
                file=sys.stderr,
                flush=True,
            )
