"""The checkpoints of a job in a folder: when they are written, which are kept, from which one it goes on."""

import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch.distributed as dist

from ..data.batch import StepBatch
from ..engine import Engine, StepReport
from ..engine.recipe import refuse_no_integers
from ..errors import UnsupportedEnvironmentError, UsageError
from ..measure.together import Together
from ..units import Seconds
from .alone import save_alone
from .checkpoint import Snapshot, commit, load
from .disk import ATTEMPT, refuse_no_safetensors, remove, remove_attempts, sync
from .job import Positions
from .words import first_unlike

LATEST = "latest"
"""A link to the newest, for people and their scripts."""
VISIBLE_S: Seconds = 60.0
"""How long what another rank has written may take to be seen: network file systems cache for up to a minute
(acregmax, acdirmax of nfs(5))."""
ALONE_S: Seconds = 60.0
"""How long a process that lost the others waits for their files: as long as those may take to be seen."""
CLOSE_S: Seconds = 1.0
"""How long a job that failed waits for its own files: what it writes is no checkpoint without the others'."""
LOOK_S: Seconds = 0.05
"""Between two looks whether processes went."""
_STEP = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a user says of the checkpoints of a job; UsageError for what makes no sense."""

    folder: Path
    every: int
    """Steps from one to the next."""
    keep: int
    """Newest ones that stay."""
    background: bool
    """Write while training goes on."""
    timeout_s: Seconds
    """How long the first rank waits for the files of the others in the background."""

    def __post_init__(self) -> None:
        refuse_no_integers(every=self.every, keep=self.keep)
        if self.every < 1 or self.keep < 1:
            raise UsageError(f"every={self.every}, keep={self.keep}: both must be at least 1")

    @property
    def number(self) -> int:
        """What ranks can compare of it."""
        return zlib.crc32(repr((str(self.folder), self.every, self.keep, self.background)).encode())


class Checkpoints:
    """Writes the state of a job every few steps; made by ``Session.checkpoints``, on every rank."""

    def __init__(self, policy: Policy, engine: Engine, positions: Callable[[], Positions]) -> None:
        self.resumed_from: int | None = None
        """Steps done when the checkpoint was written from which the job went on, or when this process joined
        it; None: it began anew."""
        self._policy = policy
        self._engine = engine
        self._positions = positions
        self._writing: _Writing | None = None

    @classmethod
    def open(
        cls, policy: Policy, engine: Engine, positions: Callable[[], Positions]
    ) -> tuple["Checkpoints", Positions]:
        """Go on from the newest one of the folder, if there is any; all ranks call it together.

        Returns:
            The checkpoints, and where the job was in its data.

        Raises:
            InvalidFileError: The newest one was altered or cut short.
            UsageError: It is of another model; the ranks have other arguments, or the engine is in use.
            UnsupportedEnvironmentError: safetensors is not installed.

        """
        if engine.num_steps:
            raise UsageError(
                f"the engine has done {engine.num_steps} steps, which a checkpoint would undo; call "
                "session.checkpoints(...) before the first one"
            )
        refuse_no_safetensors()
        made = cls(policy, engine, positions)
        if first_unlike(made._together.gather(str(policy.number).encode())) is not None:
            raise _unlike()
        return made, made._resume()

    @classmethod
    def join(cls, policy: Policy, engine: Engine, positions: Callable[[], Positions]) -> "Checkpoints":
        """Of a process that came to a job in training and has its state: no other is asked, no file read."""
        refuse_no_safetensors()
        made = cls(policy, engine, positions)
        made.resumed_from = engine.num_steps
        return made

    def steps(self) -> tuple[int, ...]:
        """Steps done at each checkpoint that is there, ascending."""
        found = (path.name.removeprefix(_STEP) for path in self._policy.folder.glob(f"{_STEP}*"))
        return tuple(sorted(int(number) for number in found if number.isdigit()))

    def save(self) -> None:
        """Write one now, between two steps, and return when it can be loaded; all ranks call it together.

        Raises:
            OSError: This rank could not write.
            UnsupportedEnvironmentError: Another one could not; its own error says why.
            UsageError: The ranks do not share the folder.

        """
        self._settle()
        if (writing := self._begin(copies=False)) is not None:
            writing.write()
            self._agree(writing)
            if self._is_first:
                writing.commit(VISIBLE_S, self._publish)
            self._agree(writing)

    def save_alone(self, timeout_s: Seconds = ALONE_S) -> bool:
        """Write all that this process holds, without a word to the others; whether it became a checkpoint.

        It does where the processes that call it, in the same step, hold the whole job between them.

        Raises:
            OSError: This process could not write.

        """
        if self._writing is not None:
            self._writing.stop.set()
        final = self._folder_of(self._engine.num_steps)
        return save_alone(self._engine, final, self._positions(), timeout_s, self._publish)

    def wait(self) -> None:
        """Until what this rank writes in the background is on the disk; raises what went wrong with it."""
        writing = self._joined()
        if writing is not None and writing.error is not None:
            raise writing.error

    def _joined(self) -> "_Writing | None":
        """What was written, at its end; where the processes are others by now, files may never come."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        is_here = writing.world is None or writing.world() is dist.group.WORLD
        if not is_here:
            writing.stop.set()
        assert writing.thread is not None
        while writing.thread.is_alive():
            writing.thread.join(LOOK_S)
            if is_here and self._has_ended:
                is_here = False
                writing.stop.set()
                writing.thread.join(CLOSE_S)
                break
        if not is_here and writing.error is not None:
            warnings.warn(f"{writing.final} was given up, as processes went: {writing.error}", stacklevel=2)
            writing.error = None
        return writing

    def _settle(self) -> None:
        """What was written in the background is there, or all ranks have its error: they go on alike."""
        self._agree(self._joined())

    def after_step(self, report: StepReport, batch: StepBatch) -> None:
        """Write one where it is time."""
        if self._writing is not None and self._writing.error is not None:
            self.wait()
        if self._engine.num_steps % self._policy.every:
            return
        if not self._policy.background:
            self.save()
            return
        self._settle()
        if (writing := self._begin(copies=True)) is not None:
            self._writing = writing
            writing.start(self._policy.timeout_s, self._publish if self._is_first else None)

    def close(self, *, failed: bool) -> None:
        """Wait for what is being written; after a failure neither for others nor long, without error."""
        if failed and self._writing is not None:
            self._writing.stop.set()
            self._writing.error = None
            assert self._writing.thread is not None
            self._writing.thread.join(CLOSE_S)
            self._writing = None
        self.wait()

    @property
    def _together(self) -> Together:
        """The processes of now: the next plan may have others, and a group of its own."""
        return Together.of_default_group(self._engine.device)

    @property
    def _has_ended(self) -> bool:
        """Whether processes went while this one waits."""
        survival = self._engine.survival
        return survival is not None and survival.has_ended

    @property
    def _is_first(self) -> bool:
        """Of the processes: the ranks of the plan may be others, after a change of plan."""
        return self._together.rank == 0

    def _folder_of(self, num_steps: int) -> Path:
        return self._policy.folder / f"{_STEP}{num_steps:08d}"

    def _begin(self, *, copies: bool) -> "_Writing | None":
        """Copy the state; None, on every rank, where it is on the disk already."""
        final = self._folder_of(self._engine.num_steps)
        mine = (time.time_ns(), int(final.is_dir()), self._policy.number)
        number, is_there, policy = self._told(mine)
        if is_there:
            return None
        attempt = final.with_name(f"{ATTEMPT}{final.name}-{number}")
        writing = _Writing(attempt, final, self._positions())
        writing.take(self._engine, copies=copies)
        if policy != self._policy.number:  # of one that joined
            writing.error = _unlike()
        return writing

    def _told(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The numbers of the first process, on every one."""
        first, *_ = self._together.gather(msgspec.msgpack.encode(numbers))
        return msgspec.msgpack.decode(first, type=tuple[int, ...])

    def _agree(self, writing: "_Writing | None") -> None:
        """UnsupportedEnvironmentError, or its own error, on every rank where one failed."""
        error = writing.error if writing is not None else None
        failed = self._together.largest(error is not None)
        if error is not None:
            raise error
        if failed:
            raise UnsupportedEnvironmentError(
                f"another rank could not write its part of a checkpoint in {self._policy.folder}; its own "
                "error says why. The checkpoints before it are as they were"
            )

    def _publish(self, final: Path) -> None:
        """On the process that commits: point to the newest, remove the oldest."""
        link = final.with_name(f"{ATTEMPT}{LATEST}")
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(final.with_name(LATEST))
        sync(final.parent)
        for old in self.steps()[: -self._policy.keep]:
            if self._folder_of(old) != final:
                remove(self._folder_of(old))

    def _resume(self) -> Positions:
        newest = -1
        if self._is_first:
            self._policy.folder.mkdir(parents=True, exist_ok=True)
            remove_attempts(self._policy.folder)
            newest = max(self.steps(), default=-1)
        (newest,) = self._told([newest])
        if newest < 0:
            return ()
        manifest = load(self._engine, self._folder_of(newest))
        self.resumed_from = newest
        return manifest.feeds


def _world() -> "weakref.ref[dist.ProcessGroup] | None":
    return weakref.ref(dist.group.WORLD) if dist.group.WORLD is not None else None


@dataclass(slots=True)
class _Writing:
    """One attempt of one rank."""

    attempt: Path
    final: Path
    positions: Positions
    snapshot: Snapshot | None = None
    error: Exception | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    world: "weakref.ref[dist.ProcessGroup] | None" = field(default_factory=_world)
    """Of the processes that write it; held weakly, since a group lives as long as anything holds it."""

    def take(self, engine: Engine, *, copies: bool) -> None:
        """Make room on the disk, and take the state."""
        with self._caught():
            self.attempt.mkdir(parents=True, exist_ok=True)
            self.snapshot = Snapshot.of(engine, copies=copies)

    def write(self) -> None:
        """Write this rank's part, if it could be taken."""
        with self._caught():
            if self.snapshot is not None:
                self.snapshot.write(self.attempt)

    def commit(self, timeout_s: Seconds, publish: Callable[[Path], None]) -> None:
        """Make it a checkpoint when the parts of all are there."""
        with self._caught():
            assert self.snapshot is not None
            if commit(
                self.attempt, self.final, num_ranks=self.snapshot.num_ranks, positions=self.positions,
                timeout_s=timeout_s, is_stopped=self.stop.is_set,
            ):  # fmt: skip
                publish(self.final)

    def start(self, timeout_s: Seconds, publish: Callable[[Path], None] | None) -> None:
        """Write in the background; ``publish`` on the first rank, which also commits."""
        self.thread = threading.Thread(
            target=self._run, args=(timeout_s, publish), name="checkpoint", daemon=True
        )
        self.thread.start()

    def _run(self, timeout_s: Seconds, publish: Callable[[Path], None] | None) -> None:
        self.write()
        if publish is not None and self.error is None:
            self.commit(timeout_s, publish)

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """An error is told where all ranks meet, or at the next step."""
        try:
            yield
        except Exception as error:
            self.error = error


def _unlike() -> UsageError:
    return UsageError(
        "the ranks call session.checkpoints with other arguments; give all the same folder, every, keep and "
        "background"
    )
