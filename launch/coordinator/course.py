"""What follows from who is there and what they reported: the phases of a job, its plans and its records."""

from arachne_runtime.membership.decision import StatesDifferError
from arachne_runtime.membership.messages import (
    AgentHello,
    ChangeWanted,
    Completed,
    Ended,
    Freeze,
    Member,
    MemberHello,
    Outbound,
    Progress,
    Published,
    Record,
)
from arachne_runtime.units import Seconds

from .actions import Action, Append, AskPlan, Drop, Entry, Log, Send
from .drift import Drift
from .history import History
from .phase import Phase
from .roster import Roster, Seat
from .settings import Settings
from .team import Team
from .worth import Offer, pays


class Course:
    """The state of one job, and how it goes on; `Machine` is told what happens."""

    def __init__(self, settings: Settings, history: History, now_s: Seconds) -> None:
        self.history = history
        self.phase = _resumed(history)
        self._settings = settings
        self._roster = Roster(settings)
        self._roles: dict[int, AgentHello | MemberHello] = {}
        self._actions: list[Action] = []
        self._since_s = self._seen_s = now_s
        """Of the phase, and the last call."""
        self._progress: Progress | None = None
        self._drift = Drift()
        self._alarm = ""
        """What has failed in this generation; empty: nothing."""
        self._wish = ""
        """Why a planned change stops it."""
        self._offer: Offer | None = None
        """What that change is for, as long as the same devices are there."""
        self._why = _why_of(history)
        self._awaited: Member | None = None
        """One that is known to be waited for in this phase."""
        self._ended = history.ended or Ended(why="")
        """Once it has."""
        self._asked = 0
        self._considered: tuple[str, ...] = ()
        """The devices of the newest request for a plan."""

    def _notice_sleep(self, now_s: Seconds) -> None:
        """Ticks are close together: a long time between two calls is one in which nothing was read."""
        slept_s, self._seen_s = now_s - self._seen_s, now_s
        if slept_s >= self._settings.suspect_s:
            self._log(f"the coordinator itself slept for {slept_s:.1f} s; no limit counts them")
            self._roster.sleep(slept_s, now_s)
            self._since_s += slept_s

    def _finish(self, now_s: Seconds) -> list[Action]:
        """Go on as far as what is known allows."""
        while (step := self._next(now_s)) is not None:
            self._to(step, now_s)
        return self._taken()

    def _taken(self) -> list[Action]:
        taken, self._actions = self._actions, []
        return taken

    def _next(self, now_s: Seconds) -> Phase | None:
        """The phase that follows now; None: stay."""
        self._end_where_done()
        match self.phase:
            case Phase.GATHERING:
                return self._gathered(now_s)
            case Phase.RECOVERING:
                missing = self._team.missing
                self._awaited = missing[-1] if missing else None
                waits = missing and now_s - self._since_s < self._settings.restart_s
                return None if waits else Phase.TRAINING
            case Phase.TRAINING:
                return self._trained(now_s)
            case Phase.CHANGING | Phase.FREEZING:
                return self._stopped(now_s)
            case Phase.PLANNING if now_s - self._since_s >= self._settings.plan_s:
                self._log(f"no plan in {self._settings.plan_s:g} s for {', '.join(self._considered)}")
                return Phase.WAITING
            case Phase.WAITING:
                return self._waited(now_s)
        return None

    def _end_where_done(self) -> None:
        """Where nobody is left that has something to do, and not since all are dead."""
        if not self._roster.done:
            return
        team = self._team
        waits = self.phase is Phase.RECOVERING and team.missing
        if self.phase is Phase.ENDED or not team.some_are_done or team.seats or waits:
            return
        if missing := team.missing:
            lost = self._alarm or f"{missing[0].device} did not come back"
            self._end(f"{lost}; all others are done")
        else:
            self._end("the script is done", is_done=True)

    def _gathered(self, now_s: Seconds) -> Phase | None:
        late = now_s - self._since_s >= self._settings.gather_s
        if len(self._roster.seats) < len(self._settings.devices) and not late:
            return None
        here = set(self._roster.devices)
        return Phase.PLANNING if here >= set(self._settings.devices) or (late and here) else None

    def _trained(self, now_s: Seconds) -> Phase | None:
        if not self._alarm and (missing := self._team.missing):
            self._alarm = f"{missing[0].device} did not come back"
        if self._alarm:
            return Phase.FREEZING
        record = self.history.record
        assert record is not None
        if not self.history.is_completed:
            self._complete(record, now_s)
        elif self._roster.devices != self._considered and not self._team.some_are_done:
            self._ask()
        elif self._drift.moved():
            self._log(self._drift.why)
            self._ask()
        return None

    def _complete(self, record: Record, now_s: Seconds) -> None:
        unready = self._team.unready
        self._awaited = unready[-1].member if unready else None
        if not unready:
            done = Completed(generation=record.generation)
            self._append(done)
            self._tell_all(done)
        elif now_s - self._since_s >= self._settings.ready_s:
            for seat in unready:
                self._remove(
                    seat, f"{seat.member.device} did not get its parts in {self._settings.ready_s:g} s"
                )

    def _stopped(self, now_s: Seconds) -> Phase | None:
        """All have reported, or the wait is over."""
        if self.phase is Phase.CHANGING and self._alarm:
            return Phase.FREEZING
        late = self._team.unreported
        self._awaited = late[-1].member if late else None
        if not late:
            return Phase.PLANNING
        if self.phase is Phase.CHANGING and now_s - self._since_s >= self._settings.step_s:
            self._alarm = f"{late[0].member.device} did not stop for a change in {self._settings.step_s:g} s"
            return Phase.FREEZING
        if self.phase is Phase.FREEZING and now_s - self._since_s >= self._settings.freeze_s:
            for seat in late:
                self._remove(seat, f"{seat.member.device} did not report in {self._settings.freeze_s:g} s")
            return Phase.PLANNING
        return None

    def _waited(self, now_s: Seconds) -> Phase | None:
        if set(self._roster.devices) - set(self._considered):
            return Phase.PLANNING
        if now_s - self._since_s >= self._settings.joiner_s:
            self._end(f"no plan fits, and nothing changed in {self._settings.joiner_s:g} s")
        return None

    def _to(self, phase: Phase, now_s: Seconds) -> None:
        self.phase, self._since_s, self._awaited = phase, now_s, None
        if phase is Phase.PLANNING and self._offer is not None:
            offer, self._offer = self._offer, None
            self._settle(offer, now_s)
        elif phase is Phase.PLANNING:
            self._ask()
        elif phase in (Phase.FREEZING, Phase.CHANGING):
            stop = self._stop()
            self._log(f"generation {stop.generation}: {phase}, since {stop.why}")
            for seat in self._team.seats:
                self._tell(seat, stop)

    def _stop(self) -> Freeze | ChangeWanted:
        """What ends the generation: at once after a failure, at a step's end for a planned change."""
        if self.phase is Phase.FREEZING:
            return Freeze(generation=self.history.generation, why=self._alarm)
        return ChangeWanted(generation=self.history.generation, why=self._wish)

    def _ask(self) -> None:
        self._asked += 1
        self._considered = self._roster.devices
        running = self.history.record.plan if self.history.record is not None else None
        self._actions.append(AskPlan(self._asked, self._considered, running, dict(self._drift.slower)))

    def _weigh(self, offer: Offer | None, now_s: Seconds) -> None:
        """Whether a plan for other devices is worth a stop; one that leaves is not asked."""
        record = self.history.record
        assert record is not None
        forced = self._team.one_leaves
        drifted, self._drift.why = self._drift.why, ""
        if offer is not None:
            self._drift.expect(offer.running_compute_s)
        if offer is None or offer.plan == record.plan or self._team.some_are_done:
            return
        if not forced and not pays(offer, self._settings.horizon_s):
            self._log(
                f"no change for {', '.join(self._considered)}: {offer.samples_per_s:.3g} samples/s after "
                f"{offer.migration_s:.3g} s of standstill, {offer.running_samples_per_s:.3g} now"
            )
            return
        better = drifted or f"a better plan for {len(self._considered)} devices"
        self._wish = "a device leaves" if forced else better
        self._offer = offer
        self._to(Phase.CHANGING, now_s)

    def _settle(self, offer: Offer | None, now_s: Seconds) -> None:
        here, used = self._roster.devices, offer.plan.devices if offer is not None else ()
        if here != self._considered and not (used and set(used) <= set(here)):  # who has come since can wait
            self._to(Phase.PLANNING, now_s)
        elif offer is None:
            self._log(f"no plan fits {', '.join(self._considered) or 'no device'}; waiting for more")
            self._to(Phase.WAITING, now_s)
        elif not set(offer.plan.devices) <= set(self._considered):
            self._end("the planner's plan uses devices that are not there")
        else:
            self._publish(offer, now_s)

    def _publish(self, offer: Offer, now_s: Seconds) -> None:
        try:
            decision = self._team.decision()
        except StatesDifferError as error:
            self._end(str(error))
            return
        self._why = self._alarm or self._wish or self._why
        record = Record(
            generation=self.history.generation + 1,
            members=tuple(self._roster.seats[device].member for device in offer.plan.devices),
            plan=offer.plan,
            source=self.history.source(self._team.holders),
            decision=decision,
            why=self._why,
        )
        self._append(Published(record=record))
        if self._alarm:  # its plan was made in a hurry: it is looked at again, once they train
            self._considered = ()
        self._alarm = self._wish = ""
        self._drift.expect(offer.compute_s)
        self._log(f"generation {record.generation}: {len(record.members)} devices, since {record.why}")
        self._tell_all(Published(record=record))
        self._to(Phase.TRAINING, now_s)

    # ---- words

    @property
    def _team(self) -> Team:
        return Team(self.history, self._roster)

    def _remove(self, seat: Seat, why: str) -> None:
        is_done = seat.member.incarnation in self._roster.done
        self._log(f"{'done' if is_done else 'declared dead'}: {why}")
        if self.history.involves(seat.member) and not is_done:
            self._alarm = f"{why}; {self._alarm}" if self._alarm else why
        self._roster.remove(seat)
        if seat.connection is not None:
            self._actions.append(Drop(seat.connection))

    def _end(self, why: str, *, is_done: bool = False) -> None:
        self._why = why
        self._ended = Ended(why=why, is_done=is_done)
        self._append(self._ended)
        self._log(f"the job ends: {why}")
        for connection in self._roles:
            self._send(connection, self._ended)
        self.phase = Phase.ENDED

    def _append(self, entry: Entry) -> None:
        self.history = self.history.after(entry)
        self._actions.append(Append(entry))

    def _tell(self, seat: Seat, message: Outbound) -> None:
        if seat.connection is not None:
            self._send(seat.connection, message)

    def _tell_all(self, message: Outbound) -> None:
        for seat in self._roster.seats.values():
            self._tell(seat, message)

    def _send(self, connection: int, message: Outbound) -> None:
        self._actions.append(Send(connection, message))

    def _log(self, text: str) -> None:
        self._actions.append(Log(text))


def _resumed(history: History) -> Phase:
    """Where a coordinator goes on that has read the journal of one before."""
    if history.ended is not None:
        return Phase.ENDED
    return Phase.GATHERING if history.record is None else Phase.RECOVERING


def _why_of(history: History) -> str:
    """The last change, as a person is told."""
    if history.ended is not None:
        return history.ended.why
    return "the job begins" if history.record is None else history.record.why
