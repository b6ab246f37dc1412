"""What a device's process and a node's agent say to the coordinator, and wait for."""

import secrets
import threading
from collections.abc import Callable
from typing import Self, TypeAlias

from ..errors import ArachneError
from ..units import Seconds
from .decision import Report
from .line import Line
from .messages import (
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

Stop: TypeAlias = Freeze | ChangeWanted


class CoordinatorLostError(ArachneError, ConnectionError):
    """No word of the coordinator within the time allowed; save a checkpoint and end."""


class RefusedError(ArachneError, RuntimeError):
    """The coordinator does not take this process (again); its state is of no use, start another."""


class JobEndedError(ArachneError, RuntimeError):
    """The coordinator has ended the job; save a checkpoint and end."""


class MemberClient:
    """A device's process in an elastic job, from any thread.

    ``on_stop`` is called in the line's thread as soon as the generation must end; it must not block.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        device: str,
        on_stop: Callable[[Stop], None] = lambda stop: None,
    ) -> None:
        self.member = Member(device=device, incarnation=secrets.token_hex(8))
        self.record: Record | None = None
        """The newest that it is in, as a member or as a holder of the state before."""
        self._on_stop = on_stop
        self._changed = threading.Condition()
        self._completed = 0
        self._stop: Stop | None = None
        self._end: ArachneError | None = None
        self._repeated: tuple[Inbound, ...] = ()
        self._leaving = False
        self._line = Line(address, token, self._opening, self._hear)

    @property
    def generation(self) -> int:
        """Of the newest record that it is in; 0: none."""
        return 0 if self.record is None else self.record.generation

    @property
    def stop(self) -> Stop | None:
        """What ends the generation it is in; None: it goes on."""
        return self._stop

    def failed(self, why: str) -> None:
        """A collective of this generation has failed here; of ``why`` the first line is told."""
        self._line.say(Failed(generation=self.generation, why=why.partition("\n")[0][:200]))

    def frozen(self, report: Report | None) -> None:
        """Nothing changes here until the next record; None: it holds no state yet."""
        self._say_until_next(Frozen(generation=self.generation, report=report))

    def ready(self) -> None:
        """All parts that the newest record gives it are there."""
        self._say_until_next(Ready(generation=self.generation))

    def leaving(self) -> None:
        """It will be ended soon: plan without it."""
        self._leaving = True
        self._line.say(Leaving())

    def wait_record(self, after: int, timeout_s: Seconds) -> Record:
        """The first record newer than generation ``after`` that it is in.

        Raises CoordinatorLostError after ``timeout_s``, RefusedError and JobEndedError.
        """
        self._wait(lambda: self.generation > after, timeout_s, f"a record after generation {after}")
        assert self.record is not None
        return self.record

    def wait_completed(self, generation: int, timeout_s: Seconds) -> bool:
        """Whether all became ready; False: the generation ends before that. Raises as `wait_record`."""
        self._wait(
            lambda: self._completed >= generation or self.generation > generation or self._stop is not None,
            timeout_s,
            f"all members of generation {generation} to be ready",
        )
        return self._completed >= generation

    def wait_stop(self, timeout_s: Seconds) -> Stop | None:
        """What ends the generation it is in; None: nothing within the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop is not None or self._end is not None, timeout_s)
        return self._stop

    def close(self) -> None:
        """Leave the line; the coordinator declares the process dead if it does not come back."""
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, condition: Callable[[], bool], timeout_s: Seconds, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._end is not None, timeout_s)
            if self._end is not None:
                raise self._end
            if not condition():
                fault = self._line.fault and f" ({self._line.fault})"
                raise CoordinatorLostError(
                    f"{self.member.device}: waited {timeout_s:g} s for {what}, in vain{fault}"
                )

    def _say_until_next(self, message: Inbound) -> None:
        """Again after a reconnection, until the next record."""
        with self._changed:
            self._repeated = (*self._repeated, message)
        self._line.say(message)

    def _opening(self) -> list[Inbound]:
        device, incarnation = self.member.device, self.member.incarnation
        with self._changed:
            hello = MemberHello(device=device, incarnation=incarnation, generation=self.generation)
            return [hello, *self._repeated, *([Leaving()] if self._leaving else [])]

    def _hear(self, message: Outbound) -> None:
        with self._changed:
            stop = self._take(message)
            self._changed.notify_all()
        if stop is not None:
            self._on_stop(stop)

    def _take(self, message: Outbound) -> Stop | None:
        match message:
            case Published(record=record) if record.generation > self.generation:
                if self.member in record.members or self.member in record.holders:
                    self.record, self._stop, self._repeated = record, None, ()
            case Completed(generation=number) if number == self.generation:
                self._completed = number
            case (Freeze() | ChangeWanted()) as stop if stop.generation == self.generation:
                if self._stop != stop:
                    self._stop = stop
                    return stop
            case Refused(why=why):
                self._end = RefusedError(f"{self.member.device}: {why}")
            case Ended(why=why):
                self._end = JobEndedError(why)
        return None


class AgentClient:
    """A node's agent: beats by itself, and says what became of the node's processes."""

    def __init__(self, address: tuple[str, int], token: str, node: str, beat_s: Seconds = 0.1) -> None:
        self._hello = AgentHello(node=node)
        self._said: list[Inbound] = []
        self._line = Line(address, token, self._opening, lambda _: None, beat=Beat(), beat_s=beat_s)

    def exited(self, member: Member, code: int) -> None:
        """A process has ended."""
        self._say(Exited(device=member.device, incarnation=member.incarnation, code=code))

    def stopped(self, member: Member) -> None:
        """A process has been in state T for a second."""
        self._say(Stopped(device=member.device, incarnation=member.incarnation))

    def close(self) -> None:
        """No more beats."""
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, message: Inbound) -> None:
        self._said.append(message)  # a coordinator that was restarted has not heard it
        self._line.say(message)

    def _opening(self) -> list[Inbound]:
        return [self._hello, *self._said]


def ask_status(address: tuple[str, int], token: str, timeout_s: Seconds) -> Status:
    """What a person sees of the job; CoordinatorLostError where nobody answers with the job's token."""
    answered = threading.Event()
    found: list[Status] = []

    def hear(message: Outbound) -> None:
        if isinstance(message, Status):
            found.append(message)
            answered.set()

    line = Line(address, token, lambda: [AskStatus()], hear)
    try:
        if not answered.wait(timeout_s):
            raise CoordinatorLostError(
                f"no answer from {address[0]}:{address[1]} in {timeout_s:g} s: {line.fault}"
            )
    finally:
        line.close()
    return found[0]
