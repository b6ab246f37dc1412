"""Workers, agents and a planner around the coordinator's state machine, without sockets or real time."""

from collections import deque
from dataclasses import dataclass, field

from arachne_runtime.membership.decision import Flags, Report, Verdict
from arachne_runtime.membership.messages import (
    AgentHello,
    Beat,
    ChangeWanted,
    Completed,
    Done,
    Ended,
    Exited,
    Freeze,
    Frozen,
    Member,
    MemberHello,
    Published,
    Ready,
    Refused,
    decode_inbound,
    decode_outbound,
    encode_inbound,
    encode_outbound,
)
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from launch.coordinator.actions import Append, AskPlan, Drop, Log, Send
from launch.coordinator.history import History
from launch.coordinator.machine import Machine
from launch.coordinator.settings import Settings
from launch.coordinator.worth import Offer


def plan_of(devices: tuple[str, ...]) -> Plan:
    """Each device a replica of the one stage."""
    replicas = tuple(Replica(devices=(device,), share=1) for device in devices)
    stage = Stage(layers=(0, 4), replicas=replicas)
    pipeline = Pipeline(micro_batches=1, micro_batch=len(devices), stages=(stage,))
    return Plan(model="tiny", global_batch=len(devices), sequence=8, pipelines=(pipeline,))


@dataclass
class Worker:
    """One process: answers as a rank does."""

    member: Member
    connection: int | None = None
    alive: bool = True
    generation: int = 0
    trains: bool = False
    holds: bool = False
    applied: int = 0
    entered: int = 0
    held: int | None = None
    flags: Flags | None = None
    repeated: list = field(default_factory=list)  # what it says again after a reconnection
    end: Refused | Ended | None = None

    def hear(self, message) -> list:
        """What it answers."""
        match message:
            case Published(record=record) if record.generation > self.generation:
                return self.follow(record)
            case Completed(generation=number) if number == self.generation:
                self.trains, self.holds = True, True
            case Freeze(generation=number) | ChangeWanted(generation=number) if number == self.generation:
                return self.stop()
            case Refused() | Ended():
                self.alive, self.end = False, message
        return []

    def stop(self) -> list:
        self.trains = False
        report = Report(applied=self.applied, entered=self.entered, held=self.held, flags=self.flags)
        return self.say(Frozen(generation=self.generation, report=report if self.holds else None))

    def follow(self, record) -> list:
        if self.member in record.holders:
            self.act_on(record.decision)
        elif self.member not in record.members:
            return []
        self.generation, self.trains = record.generation, False
        if record.source is None:
            self.applied = self.entered = 0
            self.held = None
        self.repeated = []
        return self.say(Ready(generation=record.generation)) if self.member in record.members else []

    def act_on(self, decision) -> None:
        if decision.verdict is Verdict.APPLY and self.applied < decision.step:
            assert self.entered == decision.step
            assert self.held is not None
            self.applied = decision.step
        self.held = None
        assert self.applied == decision.next_step - 1

    def say(self, message) -> list:
        self.repeated.append(message)
        return [message]


class World:
    """Everything but the machine under test; its state is what was journalled, as after a crash."""

    settings = Settings(devices=("a:0", "a:1", "b:0"), freeze_s=3.0, ready_s=5.0, joiner_s=20.0)

    def __init__(self, fits=lambda devices: len(devices) >= 2, gain=2.0) -> None:
        self.fits, self.gain = fits, gain
        self.now_s = 0.0
        self.journal: list = []
        self.records: dict = {}
        self.workers: list[Worker] = []
        self.silent: set[str] = set()  # nodes whose agent says nothing
        self.asked: deque[AskPlan] = deque()
        self.log: list[str] = []
        self.said: list[Exited] = []  # by agents, who say it again to another coordinator
        self.connections = 0
        self.restart()

    def restart(self) -> None:
        """The coordinator dies and another reads the journal."""
        history = History()
        for entry in self.journal:
            history = history.after(entry)
        self.machine = Machine(self.settings, history, self.now_s)
        self.agents: dict[str, int] = {}
        self.asked.clear()
        for worker in self.workers:
            worker.connection = None

    # ---- the network

    def connect(self) -> int:
        self.connections += 1
        return self.connections

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Append(entry=entry):
                    self.journal.append(entry)
                    if isinstance(entry, Published):
                        assert entry.record.generation not in self.records
                        self.records[entry.record.generation] = entry.record
                    elif isinstance(entry, Completed):
                        self.move_state()
                case Send(connection=connection, message=message):
                    self.check(message)
                    self.deliver(connection, decode_outbound(encode_outbound(1, message), 0)[1])
                case AskPlan():
                    self.asked.append(action)
                case Drop(connection=connection):
                    for worker in self.workers:
                        if worker.connection == connection:
                            worker.connection = None
                    self.do(self.machine.disconnect(connection, self.now_s))
                case Log(text=text):
                    self.log.append(text)

    def move_state(self) -> None:
        """As it is completed a joiner of the newest generation has the state of its holders."""
        holders = [worker for worker in self.team() if worker.holds]
        for worker in self.team() if holders else ():
            if not worker.holds:
                worker.applied = worker.entered = holders[0].applied

    def check(self, message) -> None:
        """Nobody hears what is not in the journal."""
        if isinstance(message, Published):
            assert Published(record=message.record) in self.journal
        if isinstance(message, Completed | Ended):
            assert message in self.journal

    def deliver(self, connection, message) -> None:
        for worker in self.workers:
            if worker.connection == connection and worker.alive:
                for answer in worker.hear(message):
                    self.say(connection, answer)

    def say(self, connection, message) -> None:
        message = decode_inbound(encode_inbound(1, message), 0)[1]
        self.do(self.machine.receive(connection, message, self.now_s))

    # ---- what happens

    def start(self, device: str) -> Worker:
        """A new process on a device; one that is there is gone, and nobody has said so."""
        for other in self.workers:
            if other.member.device == device:
                other.alive = False
        worker = Worker(Member(device=device, incarnation=f"{device}/{len(self.workers)}"))
        self.workers.append(worker)
        self.register(worker)
        return worker

    def register(self, worker: Worker) -> None:
        worker.connection = self.connect()
        member = worker.member
        hello = MemberHello(
            device=member.device, incarnation=member.incarnation, generation=worker.generation
        )
        self.say(worker.connection, hello)
        for message in list(worker.repeated):
            if worker.connection is not None:
                self.say(worker.connection, message)

    def agent(self, node: str) -> int:
        if node not in self.agents:
            self.agents[node] = self.connect()
            self.say(self.agents[node], AgentHello(node=node))
            for exited in [one for one in self.said if one.device[0] == node]:
                self.say(self.agents[node], exited)
        return self.agents[node]

    def finish(self, worker: Worker) -> None:
        """Its script comes to its end."""
        worker.trains = False
        worker.repeated.append(Done())
        if worker.connection is not None:
            self.say(worker.connection, Done())

    def die(self, worker: Worker, told: bool = True, code: int = -9) -> None:
        worker.alive = False
        if told:
            member = worker.member
            exited = Exited(device=member.device, incarnation=member.incarnation, code=code)
            self.said.append(exited)
            self.say(self.agent(member.device[0]), exited)
        if worker.connection is not None:
            self.do(self.machine.disconnect(worker.connection, self.now_s))

    def plan(self) -> None:
        """The planner answers what it was asked first."""
        if self.asked:
            ask = self.asked.popleft()
            plan = plan_of(ask.devices) if self.fits(ask.devices) else None
            costs = dict.fromkeys(ask.devices, 1.0)
            offer = plan and Offer(
                plan=plan,
                samples_per_s=self.gain,
                running_samples_per_s=1.0,
                compute_s=costs,
                running_compute_s=costs if ask.running else {},
            )
            self.do(self.machine.planned(ask.number, offer, self.now_s))

    def team(self) -> list[Worker]:
        """The members of the newest record that live."""
        record = self.machine.history.record
        members = record.members if record is not None else ()
        return [worker for worker in self.workers if worker.alive and worker.member in members]

    def step(self, applied: int | None = None) -> None:
        """All members train a step; all enter part 2, only the first ``applied`` have finished part 3."""
        record, team = self.machine.history.record, self.team()
        if record is None or len(team) < len(record.members) or not all(worker.trains for worker in team):
            return
        step = max(worker.applied for worker in team) + 1
        for worker in team:  # who has not finished the last step does it now
            worker.applied, worker.entered, worker.held = step - 1, step, record.generation
        for worker in team[:applied]:
            worker.applied, worker.flags = step, Flags(step=step, is_finite=True)

    def pass_time(self, seconds: float) -> None:
        """In ticks; the agents beat unless silent, processes come back after a lost connection."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.25
            for node in {worker.member.device[0] for worker in self.workers} - self.silent:
                self.say(self.agent(node), Beat())
            for worker in self.workers:
                if worker.alive and worker.connection is None:
                    self.register(worker)
            self.do(self.machine.tick(self.now_s))
            self.plan()
