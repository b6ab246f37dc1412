"""The one tree of errors: what a user did, or met, that the project cannot go on from.

Each class carries the exit code of the command line (1 a training process failed, 2 wrong usage,
3 invalid file, 4 no feasible plan, 5 environment).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What ``arachne`` exits with."""

    FINE = 0
    WORKER_FAILED = 1
    USAGE = 2
    INVALID_FILE = 3
    NO_FEASIBLE_PLAN = 4
    ENVIRONMENT = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a document: where it is and what is wrong, with the way out."""

    path: str
    """Address inside the file, ``$.pipelines[0].stages[1].layers``."""
    message: str


class ArachneError(Exception):
    """Root of every error this project raises on purpose."""

    exit_code = ExitCode.WORKER_FAILED


class UsageError(ArachneError, ValueError):
    """A call or command line that cannot mean anything: names the argument, its value and what is allowed."""

    exit_code = ExitCode.USAGE


class DisagreementError(UsageError):
    """Ranks are in different steps, or were given different batches or settings; all hear it alike."""


class InvalidFileError(ArachneError, ValueError):
    """A document with one or more faults; all of them are listed, each with its address."""

    exit_code = ExitCode.INVALID_FILE

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        width = max((len(p.path) for p in self.problems), default=0)
        lines = [f"{source}: {count} problem{'s' if count != 1 else ''}"]
        lines += [f"  {p.path:<{width}}  {p.message}" for p in self.problems]
        super().__init__("\n".join(lines))


class UnsupportedPlanError(ArachneError, ValueError):
    """A valid plan that this runtime, model or optimizer cannot execute exactly; says why and the way out."""

    exit_code = ExitCode.INVALID_FILE


class ModelError(ArachneError, ValueError):
    """A model that cannot be cut, built or initialised block by block; says which module and the way out."""

    exit_code = ExitCode.USAGE


class ReplanError(ArachneError, RuntimeError):
    """A change of plan failed before it counted; says which process, why, and that the old plan goes on."""

    exit_code = ExitCode.WORKER_FAILED

    def __init__(self, message: str, processes: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)
        """Those whose own fault it was, which is the cause on them; none where each is well by itself."""


class LostStateError(ReplanError):
    """Parts of the state that no living process holds; says which, and where they may come from."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
        """Global names of the parameters and buffers of which a part is lost."""


class NonFiniteGradientError(ArachneError, FloatingPointError):
    """A gradient of a step is infinite or no number; says block and rank. No parameter was changed."""

    exit_code = ExitCode.WORKER_FAILED


class NotMeasuredError(ArachneError, LookupError):
    """A cost that no profile holds; never treated as zero, never as impossible."""

    exit_code = ExitCode.INVALID_FILE


class NoFeasiblePlanError(ArachneError, ValueError):
    """No plan fits the devices; says what binds and the smallest change that would help."""

    exit_code = ExitCode.NO_FEASIBLE_PLAN


class PolicyMissingError(ArachneError, FileNotFoundError):
    """No weights of the learned policy where they should be; says where, and that planning works without."""

    exit_code = ExitCode.ENVIRONMENT


class PolicyStaleError(ArachneError, ValueError):
    """Weights of the learned policy know other features than this program has; says both, and the way out."""

    exit_code = ExitCode.ENVIRONMENT


class UnsupportedEnvironmentError(ArachneError, RuntimeError):
    """The machine lacks something (root, a cgroup, a device, a package); says what and the way out."""

    exit_code = ExitCode.ENVIRONMENT


class WorkerFailedError(ArachneError, RuntimeError):
    """A training process failed; its text carries rank, stage, exit code and own words."""

    exit_code = ExitCode.WORKER_FAILED
    rank: int | None = None
    """Rank of the root failure, where it is known."""
    worker_code: int | None = None
    """What that process exited with; negative: the signal that ended it."""
