"""The coordinator's decisions as a state machine: messages and moments in, actions out; no socket."""

from math import isfinite

from arachne_runtime.membership.messages import (
    AgentHello,
    AskStatus,
    Beat,
    Completed,
    Costs,
    Done,
    Exited,
    Failed,
    Frozen,
    Inbound,
    Leaving,
    Member,
    MemberHello,
    Progress,
    Published,
    Ready,
    Refused,
    Status,
    Stopped,
)
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.units import Seconds

from .actions import Action, Drop
from .course import Course
from .phase import Phase
from .registration import why_not
from .roster import Seat
from .words import in_words
from .worth import Offer

_AWAITED: dict[Phase, type[Inbound]] = {
    Phase.RECOVERING: MemberHello,
    Phase.TRAINING: Ready,
    Phase.CHANGING: Frozen,
    Phase.FREEZING: Frozen,
}
"""What all members say before a phase goes on."""


class Machine(Course):
    """Membership of one job. Every call returns what is to be done, in order."""

    def receive(self, connection: int, message: Inbound, now_s: Seconds) -> list[Action]:
        """One message of a connection that holds the token."""
        self._notice_sleep(now_s)
        role = self._roles.get(connection)
        match message, role:
            case AskStatus(), _:
                self._send(connection, self.status())
            case ((AgentHello() | MemberHello()), None):
                self._introduce(connection, message, now_s)
            case ((Beat() | Exited() | Stopped()), AgentHello(node=node)):
                self._hear_agent(node, message, now_s)
            case ((Failed() | Frozen() | Ready() | Leaving() | Progress() | Costs() | Done()), MemberHello()):
                self._hear_member(role, message)
            case _:
                self._log(f"connection {connection}: {type(message).__name__} ignored, not its to say")
        if isinstance(message, Beat | Progress | Costs | AskStatus) or self._awaits_another(
            connection, message
        ):
            return self._taken()  # nothing follows of it, and there are many
        return self._finish(now_s)

    def _awaits_another(self, connection: int, message: Inbound) -> bool:
        """Whether it is one of many such words, of which one is known to be missing still."""
        kind, role = _AWAITED.get(self.phase), self._roles.get(connection)
        if kind is None or not isinstance(message, kind) or not isinstance(role, MemberHello):
            return False
        return self._awaited is not None and self._awaited.incarnation != role.incarnation

    def disconnect(self, connection: int, now_s: Seconds) -> list[Action]:
        """A connection has ended."""
        self._notice_sleep(now_s)
        self._roles.pop(connection, None)
        self._roster.disconnect(connection, now_s)
        return self._finish(now_s)

    def tick(self, now_s: Seconds) -> list[Action]:
        """Time has gone by."""
        self._notice_sleep(now_s)
        if self.phase is not Phase.RECOVERING:
            for node in self._roster.newly_suspected(now_s):
                self._log(f"node {node} has been silent for {self._settings.suspect_s:g} s")
            for seat, why in self._roster.expired(now_s):
                self._remove(seat, why)
        return self._finish(now_s)

    def planned(self, number: int, offer: Offer | None, now_s: Seconds) -> list[Action]:
        """The answer to `AskPlan`; None: no plan fits. An answer to an older request is of no use."""
        self._notice_sleep(now_s)
        if self.wants(number):
            self._asked += 1  # it is answered
            if self.phase is Phase.TRAINING:
                self._weigh(offer, now_s)
            elif self.phase in (Phase.PLANNING, Phase.WAITING):
                self._settle(offer, now_s)
        return self._finish(now_s)

    def wants(self, number: int) -> bool:
        """Whether the answer to this `AskPlan` would be of use still."""
        return number == self._asked and self.phase is not Phase.ENDED

    def status(self) -> Status:
        """What a person sees."""
        record, told = self.history.record, self._progress
        members = () if record is None else record.members
        used = {member.device for member in members}
        is_new = told is not None and told.generation == self.history.generation
        return Status(
            phase=self.phase,
            generation=self.history.generation,
            members=tuple(member.device for member in members),
            idle=tuple(device for device in self._roster.devices if device not in used),
            suspected=tuple(sorted(self._roster.suspected)),
            why=self._why,
            plan="" if record is None else in_words(record.plan),
            step=0 if told is None else told.step,
            samples_per_s=told.samples_per_s if told is not None and is_new else 0.0,
        )

    # ---- what is heard

    def _introduce(self, connection: int, hello: AgentHello | MemberHello, now_s: Seconds) -> None:
        if self.phase is Phase.ENDED:
            self._send(connection, self._ended)
        if isinstance(hello, AgentHello):
            self._roles[connection] = hello
            self._roster.hear(hello.node, now_s)
            return
        if self.phase is Phase.ENDED:
            self._actions.append(Drop(connection))
            return
        member = Member(device=hello.device, incarnation=hello.incarnation)
        if fault := why_not(hello, self.history, self._roster.dead, self._roster.members):
            self._log(f"{hello.device} refused: {fault}")
            self._send(connection, Refused(why=fault))
            self._actions.append(Drop(connection))
            return
        other = self._roster.seats.get(hello.device)
        if other is not None and other.member != member:
            self._remove(other, f"{hello.device} has a new process")
        self._roles[connection] = hello
        seat = self._roster.sit(member, connection, now_s)
        self._bring_up_to_date(seat, self.history.involves(member))

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
        member = Member(device=message.device, incarnation=message.incarnation)
        is_done = isinstance(message, Exited) and message.code == 0 and self.history.involves(member)
        seat = self._roster.seat(member)
        if node_of(message.device) != node or (seat is None and not is_done):
            self._log(f"{type(message).__name__} of {message.device} ignored: no such process on node {node}")
            return
        if is_done:
            self._roster.done.add(member.incarnation)
        if seat is not None:
            told = f"exited with code {message.code}" if isinstance(message, Exited) else "is stopped"
            self._remove(seat, f"{message.device} {told}")

    def _hear_member(
        self, hello: MemberHello, message: Failed | Frozen | Ready | Leaving | Progress | Costs | Done
    ) -> None:
        member = Member(device=hello.device, incarnation=hello.incarnation)
        seat = self._roster.seat(member)
        if seat is None:
            self._log(f"{type(message).__name__} of {hello.device} ignored: it was declared dead")
        elif isinstance(message, Leaving):
            seat.leaving = True
        elif isinstance(message, Done):
            self._roster.done.add(member.incarnation)
        elif message.generation != self.history.generation or not self.history.involves(member):
            self._log(f"{type(message).__name__} of {hello.device} ignored: not of this generation")
        elif isinstance(message, Ready):
            seat.ready = message.generation
        elif isinstance(message, Progress):
            self._hear_progress(member, message)
        elif isinstance(message, Costs):
            self._hear_costs(member, message)
        elif isinstance(message, Failed):
            self._alarm = self._alarm or f"{hello.device} failed: {message.why}"
        else:
            self._hear_report(seat, message)

    def _hear_progress(self, member: Member, message: Progress) -> None:
        record = self.history.record
        if record is None or member != record.members[0]:
            self._log(f"Progress of {member.device} ignored: not of the first member")
        elif message.step < 0 or not (isfinite(message.samples_per_s) and message.samples_per_s >= 0):
            self._log(f"Progress of {member.device} ignored: no job makes it")
        else:
            self._progress = message

    def _hear_costs(self, member: Member, message: Costs) -> None:
        if isfinite(message.compute_s) and message.compute_s > 0:
            self._drift.hear(member.device, message.compute_s)
        else:
            self._log(f"Costs of {member.device} ignored: no clock gives them")

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
