"""What a device's process and a node's agent say to the coordinator, and wait for."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
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
    Costs,
    Done,
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
    Progress,
    Published,
    Ready,
    Record,
    Refused,
    Status,
    Stopped,
)

Stop: TypeAlias = Freeze | ChangeWanted
PROGRESS_S: Seconds = 1.0
"""Between two words of progress."""
COSTS_S: Seconds = 2.0
"""Between two words of costs."""
COSTS_S_PER_MEMBER: Seconds = 0.002
"""The least of it for each member, so that the coordinator hears at most 500 such words a second."""
WARM_STEPS = 2
"""Steps of a generation that make connections and fill caches; they say nothing of costs."""


class CoordinatorLostError(ArachneError, ConnectionError):
    """No word of the coordinator within the time allowed; save a checkpoint and end."""


class RefusedError(ArachneError, RuntimeError):
    """The coordinator does not take this process (again); its state is of no use, start another."""


class LeftOutError(RefusedError):
    """A newer plan does without this process; its state is of no use any more, start another."""


class JobEndedError(ArachneError, RuntimeError):
    """The coordinator has ended the job; save a checkpoint and end."""


class JobDoneError(JobEndedError):
    """The script of every member has come to its end: nothing is left to do, and nothing to save."""


class MemberClient:
    """A device's process in an elastic job, from any thread.

    ``on_stop`` is called in the line's thread as soon as the generation must end; it must not block. A
    refusal, a plan without this process and an end of the job come as a `Freeze` there; the waits raise them.
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
        self._lasting: tuple[Inbound, ...] = ()
        """Said again on each connection."""
        self._progress_at_s: Seconds = 0.0
        self._costs_at_s: Seconds = 0.0
        self._computed_s: deque[Seconds] = deque(maxlen=1024)
        """Of the steps since the last word of costs."""
        self._warm_steps = WARM_STEPS
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
        self._say_until_next(Failed(generation=self.generation, why=why.partition("\n")[0][:200]))

    def frozen(self, report: Report | None) -> None:
        """Nothing changes here until the next record; None: it holds no state yet."""
        self._say_until_next(Frozen(generation=self.generation, report=report))

    def ready(self) -> None:
        """All parts that the newest record gives it are there."""
        self._say_until_next(Ready(generation=self.generation))

    def leaving(self) -> None:
        """It will be ended soon: plan without it."""
        self._say_always(Leaving())

    def done(self) -> None:
        """Its script has come to its end, so its going stops nobody; say it before leaving the groups."""
        self._say_always(Done())

    def progress(self, step: int, samples_per_s: float, compute_s: Seconds = 0.0) -> None:
        """For the status and for drift: after each step, from one thread; what is to be said is said rarely.

        ``step``: the last one applied, from 1. ``compute_s``: what this rank computed in it, forwards,
        backwards and update without any wait for others; 0: nobody measured it. It costs 1 us.
        """
        self._computed_s.append(compute_s)
        now_s = time.monotonic()
        if now_s >= self._progress_at_s:
            self._progress_at_s = now_s + PROGRESS_S
            self._tell_progress(step, samples_per_s)
        if now_s >= self._costs_at_s:
            self._tell_costs(now_s)

    def _tell_progress(self, step: int, samples_per_s: float) -> None:
        if self.record is not None and self.record.members[0] == self.member:
            told = Progress(generation=self.generation, step=step, samples_per_s=samples_per_s)
            self._line.say(told)

    def _tell_costs(self, now_s: Seconds) -> None:
        num_members = len(self.record.members) if self.record is not None else 0
        self._costs_at_s = now_s + max(COSTS_S, COSTS_S_PER_MEMBER * num_members)
        measured = [seconds for seconds in self._computed_s if seconds > 0]
        if num_members and len(self._computed_s) > self._warm_steps and measured:
            told = median(measured[self._warm_steps :] or measured)
            self._line.say(Costs(generation=self.generation, compute_s=told))
            self._computed_s.clear()
            self._warm_steps = 0

    def wait_record(self, after: int, timeout_s: Seconds) -> Record:
        """The first record newer than generation ``after`` that it is in.

        Raises CoordinatorLostError after ``timeout_s``, RefusedError (LeftOutError where a newer record does
        without it) and JobEndedError (JobDoneError where the script is done).
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
        """What ends the generation it is in; None: nothing within the time. Raises as `wait_record`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop is not None or self._end is not None, timeout_s)
            if self._end is not None:
                raise self._end
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

    def _say_always(self, message: Inbound) -> None:
        with self._changed:
            self._lasting = (*self._lasting, message)
        self._line.say(message)

    def _opening(self) -> list[Inbound]:
        device, incarnation = self.member.device, self.member.incarnation
        with self._changed:
            hello = MemberHello(device=device, incarnation=incarnation, generation=self.generation)
            return [hello, *self._repeated, *self._lasting]

    def _hear(self, message: Outbound) -> None:
        with self._changed:
            stop = self._take(message)
            self._changed.notify_all()
        if stop is not None:
            self._on_stop(stop)

    def _take(self, message: Outbound) -> Stop | None:
        """What is new of it; a stop that `on_stop` has not heard of."""
        match message:
            case Published(record=record) if record.generation > self.generation:
                return self._follow(record)
            case Completed(generation=number) if number == self.generation:
                self._completed = number
            case (Freeze() | ChangeWanted()) as stop if stop.generation == self.generation:
                return self._stop_by(stop)
            case Refused(why=why):
                return self._end_by(RefusedError(f"{self.member.device}: {why}"))
            case Ended(why=why, is_done=is_done):
                return self._end_by(JobDoneError(why) if is_done else JobEndedError(why))
        return None

    def _follow(self, record: Record) -> Stop | None:
        if self.member in record.members or self.member in record.holders:
            self.record, self._stop, self._repeated = record, None, ()
            self._computed_s.clear()
            self._warm_steps = WARM_STEPS
            return None
        if self.record is None:
            return None  # it waits for its first
        why = f"generation {record.generation} does without {self.member.device}: {record.why}"
        return self._end_by(LeftOutError(why))

    def _stop_by(self, stop: Stop) -> Stop | None:
        if self._stop == stop:
            return None
        self._stop = stop
        return stop

    def _end_by(self, error: ArachneError) -> Stop | None:
        """All waits raise it; who is in the middle of a step gets out of it first."""
        self._end = error
        return self._stop_by(Freeze(generation=self.generation, why=str(error))) if self.record else None


class AgentClient:
    """A node's agent: beats by itself, says what became of the node's processes, hears of the job's end."""

    def __init__(self, address: tuple[str, int], token: str, node: str, beat_s: Seconds = 0.1) -> None:
        self.ended: Ended | None = None
        """That the job is over, and why: no process need be started any more."""
        self._hello = AgentHello(node=node)
        self._said: list[Inbound] = []
        self._over = threading.Event()
        self._line = Line(address, token, self._opening, self._hear, beat=Beat(), beat_s=beat_s)

    def wait_ended(self, timeout_s: Seconds) -> Ended | None:
        """That the job is over; None: not within the time."""
        self._over.wait(timeout_s)
        return self.ended

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

    def _hear(self, message: Outbound) -> None:
        if isinstance(message, Ended):
            self.ended = message
            self._over.set()


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
