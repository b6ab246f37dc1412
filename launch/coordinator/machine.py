"""The coordinator's decisions as a state machine: messages and moments in, actions out; no socket."""

from collections.abc import Iterator

from arachne_runtime.membership.decision import Decision, StatesDifferError, decide
from arachne_runtime.membership.messages import (
    AgentHello,
    AskStatus,
    Beat,
    ChangeWanted,
    Completed,
    Ended,
    Exited,
    Failed,
    Freeze,
    Frozen,
    Inbound,
    Leaving,
    Member,
    MemberHello,
    Outbound,
    Published,
    Ready,
    Record,
    Refused,
    Status,
    Stopped,
)
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.units import Seconds

from .actions import Action, Append, AskPlan, Drop, Entry, Log, Send
from .history import History
from .phase import Phase
from .registration import why_not
from .roster import Roster, Seat
from .settings import Settings
from .worth import Offer, pays


class Machine:
    """Membership of one job. Every call returns what is to be done, in order."""

    def __init__(self, settings: Settings, history: History, now_s: Seconds) -> None:
        self.history = history
        self.phase = Phase.GATHERING if history.record is None else Phase.RECOVERING
        self._settings = settings
        self._roster = Roster(settings)
        self._roles: dict[int, AgentHello | MemberHello] = {}
        self._actions: list[Action] = []
        self._since_s = now_s
        self._alarm = ""
        """What has failed in this generation; empty: nothing."""
        self._wish = ""
        """Why a planned change stops it."""
        self._offer: Offer | None = None
        """What that change is for, as long as the same devices are there."""
        self._why = "the job begins" if history.record is None else history.record.why
        self._asked = 0
        self._considered: tuple[str, ...] = ()
        """The devices of the newest request for a plan."""

    def receive(self, connection: int, message: Inbound, now_s: Seconds) -> list[Action]:
        """One message of a connection that holds the token."""
        role = self._roles.get(connection)
        match message, role:
            case AskStatus(), _:
                self._send(connection, self.status())
            case ((AgentHello() | MemberHello()), None):
                self._introduce(connection, message, now_s)
            case ((Beat() | Exited() | Stopped()), AgentHello(node=node)):
                self._hear_agent(node, message, now_s)
            case ((Failed() | Frozen() | Ready() | Leaving()), MemberHello()):
                self._hear_member(role, message)
            case _:
                self._log(f"connection {connection}: {type(message).__name__} ignored, not its to say")
        return self._finish(now_s)

    def disconnect(self, connection: int, now_s: Seconds) -> list[Action]:
        """A connection has ended."""
        self._roles.pop(connection, None)
        self._roster.disconnect(connection, now_s)
        return self._finish(now_s)

    def tick(self, now_s: Seconds) -> list[Action]:
        """Time has gone by."""
        if self.phase is not Phase.RECOVERING:
            for node in self._roster.newly_suspected(now_s):
                self._log(f"node {node} has been silent for {self._settings.suspect_s:g} s")
            for seat, why in self._roster.expired(now_s):
                self._remove(seat, why)
        return self._finish(now_s)

    def planned(self, number: int, offer: Offer | None, now_s: Seconds) -> list[Action]:
        """The answer to `AskPlan`; None: no plan fits. An answer to an older request is of no use."""
        if number == self._asked:
            self._asked += 1  # it is answered
            if self.phase is Phase.TRAINING:
                self._weigh(offer, now_s)
            elif self.phase is Phase.PLANNING:
                self._settle(offer, now_s)
        return self._finish(now_s)

    def status(self) -> Status:
        """What a person sees."""
        members = () if self.history.record is None else self.history.record.members
        used = {member.device for member in members}
        return Status(
            phase=self.phase,
            generation=self.history.generation,
            members=tuple(member.device for member in members),
            idle=tuple(device for device in self._roster.devices if device not in used),
            suspected=tuple(sorted(self._roster.suspected)),
            why=self._why,
        )

    # ---- what is heard

    def _introduce(self, connection: int, hello: AgentHello | MemberHello, now_s: Seconds) -> None:
        if isinstance(hello, AgentHello):
            self._roles[connection] = hello
            self._roster.hear(hello.node, now_s)
            return
        member = Member(device=hello.device, incarnation=hello.incarnation)
        ended = self._why if self.phase is Phase.ENDED else None
        if fault := ended or why_not(hello, self.history, self._roster.dead):
            self._log(f"{hello.device} refused: {fault}")
            self._send(connection, Refused(why=fault))
            self._actions.append(Drop(connection))
            return
        other = self._roster.seats.get(hello.device)
        if other is not None and other.member != member:
            self._remove(other, f"{hello.device} has a new process")
        self._roles[connection] = hello
        seat = self._roster.sit(member, connection, now_s)
        self._bring_up_to_date(seat, member in self.history.involved)

    def _bring_up_to_date(self, seat: Seat, is_involved: bool) -> None:
        if self.history.record is not None:
            self._tell(seat, Published(record=self.history.record))
        if self.history.is_completed:
            self._tell(seat, Completed(generation=self.history.generation))
        if is_involved and self.phase in (Phase.FREEZING, Phase.CHANGING):
            self._tell(seat, self._stop())

    def _hear_agent(self, node: str, message: Beat | Exited | Stopped, now_s: Seconds) -> None:
        if self._roster.hear(node, now_s):
            self._log(f"node {node} is heard again")
        if isinstance(message, Beat):
            return
        seat = self._roster.seat(Member(device=message.device, incarnation=message.incarnation))
        if seat is None or node_of(message.device) != node:
            self._log(f"{type(message).__name__} of {message.device} ignored: no such process on node {node}")
        elif isinstance(message, Exited):
            self._remove(seat, f"{message.device} exited with code {message.code}")
        else:
            self._remove(seat, f"{message.device} is stopped")

    def _hear_member(self, hello: MemberHello, message: Failed | Frozen | Ready | Leaving) -> None:
        member = Member(device=hello.device, incarnation=hello.incarnation)
        seat = self._roster.seat(member)
        if seat is None:
            self._log(f"{type(message).__name__} of {hello.device} ignored: it was declared dead")
        elif isinstance(message, Leaving):
            seat.leaving = True
        elif message.generation != self.history.generation or member not in self.history.involved:
            self._log(f"{type(message).__name__} of {hello.device} ignored: not of this generation")
        elif isinstance(message, Ready):
            seat.ready = message.generation
        elif isinstance(message, Failed):
            self._alarm = self._alarm or f"{hello.device} failed: {message.why}"
        else:
            self._hear_report(seat, message)

    def _hear_report(self, seat: Seat, message: Frozen) -> None:
        device, fault = seat.member.device, message.report and message.report.fault
        if fault:
            self._log(f"report of {device} ignored: {fault}")
        elif seat.report_of(message.generation) is None:
            seat.frozen = message
            if self.phase in (Phase.TRAINING, Phase.RECOVERING):
                self._alarm = self._alarm or f"{device} has stopped"
        elif seat.frozen != message:
            self._log(f"report of {device} ignored: another than before")

    # ---- what follows

    def _finish(self, now_s: Seconds) -> list[Action]:
        """Go on as far as what is known allows."""
        while (step := self._next(now_s)) is not None:
            self._to(step, now_s)
        done, self._actions = self._actions, []
        return done

    def _next(self, now_s: Seconds) -> Phase | None:
        """The phase that follows now; None: stay."""
        match self.phase:
            case Phase.GATHERING:
                return self._gathered(now_s)
            case Phase.RECOVERING:
                waits = self._missing() and now_s - self._since_s < self._settings.restart_s
                return None if waits else Phase.TRAINING
            case Phase.TRAINING:
                return self._trained(now_s)
            case Phase.CHANGING | Phase.FREEZING:
                return self._stopped(now_s)
            case Phase.WAITING:
                return self._waited(now_s)
        return None

    def _gathered(self, now_s: Seconds) -> Phase | None:
        here = set(self._roster.devices)
        late = now_s - self._since_s >= self._settings.gather_s
        return Phase.PLANNING if here >= set(self._settings.devices) or (late and here) else None

    def _trained(self, now_s: Seconds) -> Phase | None:
        if not self._alarm and (missing := self._missing()):
            self._alarm = f"{missing[0].device} did not come back"
        if self._alarm:
            return Phase.FREEZING
        record = self.history.record
        assert record is not None
        if not self.history.is_completed:
            self._complete(record, now_s)
        elif self._roster.devices != self._considered:
            self._ask()
        return None

    def _complete(self, record: Record, now_s: Seconds) -> None:
        unready = [s for m in record.members if (s := self._roster.seat(m)) and s.ready < record.generation]
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
        late = [seat for seat in self._involved() if seat.report_of(self.history.generation) is None]
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
            self._end(f"no plan fits, and no device came in {self._settings.joiner_s:g} s")
        return None

    def _to(self, phase: Phase, now_s: Seconds) -> None:
        self.phase, self._since_s = phase, now_s
        if phase is Phase.PLANNING and self._offer is not None:
            offer, self._offer = self._offer, None
            self._settle(offer, now_s)
        elif phase is Phase.PLANNING:
            self._ask()
        elif phase in (Phase.FREEZING, Phase.CHANGING):
            stop = self._stop()
            self._log(f"generation {stop.generation}: {phase}, since {stop.why}")
            for seat in self._involved():
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
        self._actions.append(AskPlan(self._asked, self._considered, running))

    def _weigh(self, offer: Offer | None, now_s: Seconds) -> None:
        """Whether a plan for other devices is worth a stop; one that leaves is not asked."""
        record = self.history.record
        assert record is not None
        forced = any(seat.leaving for m in record.members if (seat := self._roster.seat(m)))
        if offer is None or offer.plan == record.plan:
            return
        if not forced and not pays(offer, self._settings.horizon_s):
            self._log(
                f"no change for {', '.join(self._considered)}: {offer.samples_per_s:.3g} samples/s after "
                f"{offer.migration_s:.3g} s of standstill, {offer.running_samples_per_s:.3g} now"
            )
            return
        self._wish = "a device leaves" if forced else f"a better plan for {len(self._considered)} devices"
        self._offer = offer
        self._to(Phase.CHANGING, now_s)

    def _settle(self, offer: Offer | None, now_s: Seconds) -> None:
        if self._roster.devices != self._considered:
            self._ask()
        elif offer is None:
            self._log(f"no plan fits {', '.join(self._considered) or 'no device'}; waiting for more")
            self._to(Phase.WAITING, now_s)
        elif not set(offer.plan.devices) <= set(self._considered):
            self._end("the planner's plan uses devices that are not there")
        else:
            self._publish(offer, now_s)

    def _publish(self, offer: Offer, now_s: Seconds) -> None:
        try:
            decision = self._decision()
        except StatesDifferError as error:
            self._end(str(error))
            return
        self._why = self._alarm or self._wish or self._why
        record = Record(
            generation=self.history.generation + 1,
            members=tuple(self._roster.seats[device].member for device in offer.plan.devices),
            plan=offer.plan,
            source=self.history.source(self._holders()),
            decision=decision,
            why=self._why,
        )
        self._append(Published(record=record))
        self._alarm = self._wish = ""
        self._log(f"generation {record.generation}: {len(record.members)} devices, since {record.why}")
        self._tell_all(Published(record=record))
        self._to(Phase.TRAINING, now_s)

    def _decision(self) -> Decision | None:
        """About the open step, over those that hold state."""
        reports = [s.frozen.report for s in self._holding_seats() if s.frozen and s.frozen.report]
        return decide(reports) if reports else None

    def _holding_seats(self) -> Iterator[Seat]:
        source = self.history.source(self._roster.members)
        for member in source.holders if source is not None else ():
            seat = self._roster.seat(member)
            frozen = seat.report_of(self.history.generation) if seat is not None else None
            if seat is not None and frozen is not None and frozen.report is not None:
                yield seat

    def _holders(self) -> frozenset[Member]:
        return frozenset(seat.member for seat in self._holding_seats())

    # ---- words

    def _missing(self) -> list[Member]:
        return [member for member in self.history.involved if self._roster.seat(member) is None]

    def _involved(self) -> list[Seat]:
        return [seat for member in self.history.involved if (seat := self._roster.seat(member)) is not None]

    def _remove(self, seat: Seat, why: str) -> None:
        self._log(f"declared dead: {why}")
        if seat.member in self.history.involved:
            self._alarm = f"{why}; {self._alarm}" if self._alarm else why
        self._roster.remove(seat)
        if seat.connection is not None:
            self._actions.append(Drop(seat.connection))

    def _end(self, why: str) -> None:
        self._why = why
        self._log(f"the job ends: {why}")
        self._tell_all(Ended(why=why))
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
