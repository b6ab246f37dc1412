"""What becomes of an elastic job when processes of it end: fresh ones, the job's end, or its error."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from arachne_runtime.errors import ArachneError, NoFeasiblePlanError, WorkerFailedError
from arachne_runtime.units import Seconds

from ..failure import Failure, NodeLostError, RanksFailedError, Report
from .afresh import Afresh
from .ledger import Ledger
from .words import LEFT_OUT_CODE, Again, Dismiss, Gone, Order

_ENDED_BY_COORDINATOR = "JobEndedError"
"""Kind of the error of a process that the coordinator told that the job cannot go on."""
_DONE = "JobDoneError"
"""The same, of one that waited for a place until the script was done."""
_MENDED = ("LostStateError", "CoordinatorLostError")
"""Of processes that could not go on, and whose successors can, from a checkpoint."""
_NO_PLAN = "no plan fits"
"""Begins the coordinator's words where that is why."""
MOST_ALIKE = 4
"""So many generations that the same error ended, and none of which brought the job a step further, end it."""


class Course:
    """Of one job. It sees ends of processes and the journal, and knows no process itself."""

    def __init__(self, devices: Iterable[str], ledger: Ledger, say: Callable[[str], None]) -> None:
        self.alive = set(devices)
        """Devices that have a process, or will have one."""
        self.error: ArachneError | None = None
        """Why the job fails; its other processes may have some time to end."""
        self.is_urgent = False
        """They have none."""
        self.is_ending = False
        """A script has come to its end."""
        self._num_devices = len(self.alive)
        self._ledger = ledger
        self._say = say
        self._afresh = Afresh()
        self._again_and_again = _Alike()
        self._gone: set[str] = set()
        """Incarnations."""
        self._dismissed: set[str] = set()
        self._failures: list[Failure] = []
        """While it ends."""
        self._lost: set[str] = set()
        """Devices of nodes that were lost while it ended."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to wait for."""
        return not self.alive or self.is_urgent

    def gone(self, word: Gone) -> list[Order]:
        """The process of a device has ended: what its island is to do, or another device's."""
        self._ledger.refresh()
        if word.incarnation is not None:
            self._gone.add(word.incarnation)
        if self.is_ending or self.error is not None:
            self._ended(word)
            return []
        if word.code == 0 or (word.failure is not None and word.failure.kind == _DONE):
            self.is_ending = True
            self._ended(word)
            return list(self._dismissals())
        if error := self._fatal(word):
            self._ended(word)
            self.error = error
            self.is_urgent = not isinstance(error, NoFeasiblePlanError | _ToldError)
            return []
        return self._again(word)

    def ended(self) -> None:
        """The coordinator has ended the job, and its processes had time to say more of it, if any is left."""
        self._ledger.refresh()
        found = self._ledger.ended
        if found is None or self.is_ending or self.error is not None:
            return
        if found.is_done:
            self.is_ending = True
        else:
            self.error = _told(found.why)

    def lost(self, devices: Iterable[str]) -> None:
        """A whole node has ended, with all processes of it; they may come back."""
        self._ledger.refresh()
        gone = set(devices)
        self._gone |= {m.incarnation for m in self._ledger.members if m.device in gone}
        if self.is_ending:
            self._lost |= (self.alive & gone) - self._dismissed
        self.alive -= gone
        self._weigh()

    def returned(self, devices: Iterable[str]) -> None:
        """A node is there again, with a process for each device."""
        self.alive |= set(devices)

    def _ended(self, word: Gone) -> None:
        self.alive.discard(word.device)
        failure = word.failure
        if self.is_ending and failure is not None and word.device not in self._dismissed:
            self._failures += [failure] if failure.kind not in (_DONE, _ENDED_BY_COORDINATOR) else []
        self._weigh()

    def _weigh(self) -> None:
        """What the end of a script is worth once nothing is left, whatever the first process said of it."""
        if not self.is_ending or self.alive or self.error is not None:
            return
        ended = self._ledger.ended
        if self._failures:
            self.error = self._failed(*self._failures)
        elif ended is not None and not ended.is_done:
            self.error = _told(ended.why)
        elif ended is None and self._lost:
            names = ", ".join(sorted(self._lost))
            self.error = NodeLostError(f"{names}: lost before the script came to its end there")

    def _dismissals(self) -> Iterator[Dismiss]:
        """Who waits for a place in the plan waits in vain, once a script has ended."""
        if self._ledger.record is None:  # nobody ever registered: a script without a session
            return
        self._dismissed |= self.alive - self._training()
        for device in sorted(self._dismissed):
            yield Dismiss(device=device)

    def _training(self) -> set[str]:
        """Devices of the newest generation whose processes live."""
        return {m.device for m in self._ledger.members if m.incarnation not in self._gone}

    def _fatal(self, word: Gone) -> ArachneError | None:
        """What no fresh process mends."""
        failure = word.failure
        if failure is None:
            return None
        if failure.kind == _ENDED_BY_COORDINATOR:
            return _told(failure.text)
        is_the_scripts = failure.recorded and not failure.is_consequence and failure.kind not in _MENDED
        if is_the_scripts and (self._ledger.completed == 0 or not self._training()):
            return self._failed(failure)
        if is_the_scripts and self._again_and_again.count(failure, self._ledger) >= MOST_ALIKE:
            return self._failed(failure)
        return None

    def _again(self, word: Gone) -> list[Order]:
        trained = word.incarnation in self._ledger.trained
        pause_s = self._afresh.after(word, trained=trained, job_trained=self._ledger.completed > 0)
        if pause_s is not None:
            self._say(f"{word.device}: {_how(word)}; a fresh process {_when(pause_s)}")
            return [Again(device=word.device, after_s=pause_s)]
        self.alive.discard(word.device)
        if word.failure is not None:
            error = self._failed(word.failure)
            if self._ledger.completed == 0 or not self.alive:
                self.error, self.is_urgent = error, True
            else:
                self._say(f"{word.device} is given up: its processes fail alike before they train\n{error}")
        return []

    def _failed(self, *failures: Failure) -> RanksFailedError:
        return RanksFailedError(Report(failures, self._num_devices))


@dataclass(slots=True)
class _Alike:
    """Generations in a row that one error ended in the same step, on whatever rank."""

    what: object = None
    generations: set[int] = field(default_factory=set)

    def count(self, failure: Failure, ledger: Ledger) -> int:
        """How many, with this one; 0 where nobody knows the step."""
        if ledger.step is None:
            return 0
        if (what := (failure.kind, failure.text, ledger.step)) != self.what:
            self.what, self.generations = what, set()
        self.generations.add(ledger.completed)
        return len(self.generations)


class _ToldError(WorkerFailedError):
    """The coordinator ended the job, for another reason than a lack of devices."""


def _told(why: str) -> ArachneError:
    return NoFeasiblePlanError(why) if why.startswith(_NO_PLAN) else _ToldError(why)


def _how(word: Gone) -> str:
    if word.code == LEFT_OUT_CODE:
        return "left out"
    if word.failure is not None and word.failure.recorded:
        return f"{word.failure.kind}: {word.failure.text.partition(chr(10))[0]}"
    if word.failure is not None and word.failure.stopped:
        return "stopped, and killed"
    return f"killed by signal {-word.code}" if word.code < 0 else f"exited with code {word.code}"


def _when(pause_s: Seconds) -> str:
    return f"in {pause_s:g} s" if pause_s else "takes its place"
