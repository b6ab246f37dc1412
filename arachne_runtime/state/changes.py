"""The plans of a running job, one after the other: who asks for the next, and who is told of it."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..data import StepBatch
from ..engine import Engine, StepReport
from ..errors import InvalidFileError, ReplanError, UsageError
from ..measure.recorder import Records
from ..measure.together import Together
from ..model.parameters import Values
from ..plan.cluster import node_of
from ..plan.files import encode, read_plan
from ..plan.placement import rank_order
from ..plan.plan import Plan
from ..plan.rules import check_plan
from ..plan.zero import zero_group_of
from ..units import Bytes, Seconds
from .old import Old
from .replan import replan
from .words import Word, agreed, first_unlike

Tell: TypeAlias = Callable[[StepReport], None] | None
Hooks: TypeAlias = Callable[[Plan, int], tuple[Records, Tell]]
"""From a plan and this process's rank in it: what records its times, and what is told of each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A change of plan that has been made."""

    old: Plan
    new: Plan
    step: int
    """Steps done before it."""
    moved_bytes: Bytes
    """Sent between all processes: the least that could be."""
    sent_bytes: Bytes
    """By this process."""
    transfer_s: Seconds
    """From the first message of this process to its last."""
    seconds: Seconds
    """How long this process did not train."""


@dataclass(slots=True)
class PlanChanges:
    """Changes the plan of one engine, and listens for wishes in every step."""

    engine: Engine
    devices: Sequence[str]
    """Of each process of the job."""
    hooks: Hooks
    listeners: list[Callable[[PlanChange], None]] = field(default_factory=list)
    source: Callable[[], Plan | None] | None = None
    """Gives this process a plan that it may not have given before."""
    _wish: Plan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.engine.wants_change = self._wants
        self.engine.after_step.append(self._follow)

    def to(self, plan: Plan) -> PlanChange:
        """Change to ``plan``; see ``Session.replan``."""
        change = self._changed(plan)
        self._tell(change)
        return change

    def _changed(self, plan: Plan) -> PlanChange:
        """Change to ``plan``, of which nobody has heard yet."""
        start, engine = time.perf_counter(), self.engine
        together = Together.of_default_group(engine.device)
        _refuse_unlike(together.gather(encode(plan)))
        self._refuse(plan)
        processes = [self.devices.index(device) for device in rank_order(plan)]
        old, rank = engine.plan, processes.index(together.rank)
        hooks: list[tuple[Records, Tell]] = []
        had: list[Old] = []

        def prepare() -> Word:
            hooks.append(self.hooks(plan, rank))
            had.append(Old.of(engine))
            return Word()

        def beside(values: Values) -> Engine:
            ((records, tell),) = hooks
            return engine.beside(plan, processes=processes, values=values, recorder=records, on_step=tell)

        agreed(together, prepare)  # one that fails within `beside` would leave others in its collectives
        made = replan(
            had.pop(),
            beside,
            together,
            lambda process: node_of(self.devices[process]),
            is_split=bool(zero_group_of(plan, rank)),
        )
        made.commit(engine)
        return PlanChange(
            old=old,
            new=plan,
            step=engine.num_steps,
            moved_bytes=made.moved.moves.nbytes,
            sent_bytes=made.moved.sent_bytes,
            transfer_s=made.moved.seconds,
            seconds=time.perf_counter() - start,
        )

    def _refuse(self, plan: Plan) -> None:
        """UsageError for what another plan cannot change."""
        now = self.engine.plan
        if problems := tuple(check_plan(plan)):
            raise InvalidFileError("the next plan", problems)
        if set(plan.devices) != set(self.devices):
            raise UsageError(
                f"the next plan uses {', '.join(rank_order(plan))}, but the processes of this job are "
                f"{', '.join(self.devices)}; a running job changes between plans of all its devices; "
                "for others start it again"
            )
        for what in ("global_batch", "num_blocks"):
            if getattr(plan, what) != getattr(now, what):
                raise UsageError(
                    f"the next plan has {what} {getattr(plan, what)}, this job {getattr(now, what)}; no plan "
                    "changes it: plan again with the same"
                )

    def _wants(self) -> bool:
        """The newest wish of this process counts; one for the plan that the job has is granted already."""
        if self.source is not None:
            self._wish = self.source() or self._wish
        if self._wish == self.engine.plan:
            self._wish = None
        return self._wish is not None

    def _follow(self, report: StepReport, batch: StepBatch) -> None:
        """Behind a step in which any process wanted another plan: take the one of the lowest.

        Others' wishes wait for the next step.
        """
        if not self.engine.is_change_wanted:
            return
        together = Together.of_default_group(self.engine.device)
        wishes = together.gather(encode(self._wish) if self._wish is not None else b"")
        plan = msgspec.json.decode(next(filter(None, wishes)), type=Plan)
        if self._wish == plan:
            self._wish = None
        try:
            change = self._changed(plan)
        except (UsageError, InvalidFileError, ReplanError) as error:
            warnings.warn(f"step {report.step}: the plan is not changed: {error}", stacklevel=2)
            return
        self._tell(change)

    def _tell(self, change: PlanChange) -> None:
        """Errors of those that listen are their own: the plan has changed."""
        for listener in self.listeners:
            listener(change)


class PlanFile:
    """Reads a plan's file, and again whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def __call__(self) -> Plan | None:
        """A plan; None where the file is as it was, is not there, or, with a warning, has faults."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        if self._seen == (found.st_mtime_ns, found.st_size):
            return None
        self._seen = (found.st_mtime_ns, found.st_size)
        try:
            return read_plan(self._path)
        except InvalidFileError as error:
            warnings.warn(f"the plan is not changed: {error}", stacklevel=2)
            return None


def _refuse_unlike(plans: Sequence[bytes]) -> None:
    """UsageError on every process where they were given different plans."""
    if (unlike := first_unlike(plans)) is not None:
        raise UsageError(f"processes 0 and {unlike} were given different plans; give all the same one")
