"""Enters the generation of a record: forms its world, brings the state, and makes the engine of its plan."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..engine import Engine
from ..errors import LostStateError, UnsupportedPlanError
from ..making import EngineMaker
from ..measure.together import Together
from ..membership.messages import Member, Record
from ..membership.watch import Watch, break_group, form_world, leave_world, limit_waits
from ..model.parameters import Values
from ..plan.cluster import node_of
from ..plan.plan import Plan
from ..plan.zero import zero_groups
from ..state.bring import bring
from ..state.buddy import Snapshots, go_on_or_back
from ..state.changes import PlanChange
from ..state.feeds import Feeds
from ..state.job import Positions
from ..state.old import Old
from ..state.replan import Change, replan
from ..units import Seconds

T = TypeVar("T")

FORM_S: Seconds = 10.0
"""Of one group: nothing breaks it as it forms, so a death in that moment costs so long."""


@dataclass(frozen=True, slots=True)
class Entry:
    """All that a generation gives to this rank is there; it counts when every member says so."""

    rank: int
    engine: Engine
    change: Change | None
    """None: nobody had any state, the engine begins."""
    back: int | None = None
    """Steps done at the snapshot that all go back to; None: nothing was lost."""

    @property
    def feeds(self) -> Positions:
        """Where the others are in their data."""
        return self.change.heard.feeds if self.change is not None else ()

    def commit(self, old: Engine | None) -> Engine:
        """It counts; the engine that trains on."""
        return self.engine if self.change is None else self.change.commit(old)

    def drop(self) -> None:
        """It does not: what was made goes, the old state is whole."""
        self.engine.close()

    def told(self, old: Plan, new: Plan, pause_s: Seconds) -> PlanChange:
        """The change, for those who listen."""
        assert self.change is not None, "a process that holds state is never told to begin anew"
        moved = self.change.moved
        return PlanChange(
            old=old,
            new=new,
            step=self.change.heard.num_steps,
            moved_bytes=moved.moves.nbytes,
            sent_bytes=moved.sent_bytes,
            transfer_s=moved.seconds,
            seconds=pause_s,
        )


@dataclass(slots=True)
class Entering:
    """What this process needs to enter any generation."""

    member: Member
    store: Store
    """Where groups meet."""
    watch: Watch
    make: EngineMaker
    feeds: Feeds
    snapshots: Snapshots
    timeout_s: Seconds
    """How long an operation may wait."""
    form_s: Seconds = FORM_S
    generation: int = 0
    """Of the newest record that was followed."""
    _lost: tuple[str, ...] = ()
    """Names of what nobody held in the newest generation that lost any."""
    _of_copies: tuple[dist.ProcessGroup, ...] = ()
    """In which copies of this generation are sent."""

    def enter(self, record: Record, engine: Engine | None) -> Entry | None:
        """Bring and take the state; None for a holder of state that the plan does without.

        Args:
            record: Newer than any before.
            engine: What this process has trained with; None: nothing, it joins.

        Raises:
            RuntimeError: A peer is gone.
            LostStateError: On every process: nobody has a block that the plan needs.
            UnsupportedPlanError: ZeRO.

        """
        self.generation = record.generation
        refuse_zero(record.plan)
        try:
            return self._entered(record, engine)
        except LostStateError as error:
            names = ", ".join((error.names or self._lost)[:4])
            raise LostStateError(
                f"the last process that held {names} is gone ({record.why}), so this job cannot go on; start "
                "it again: it goes on from its newest checkpoint, if the script has session.checkpoints(...)",
                error.names or self._lost,
            ) from error

    def _entered(self, record: Record, engine: Engine | None) -> Entry | None:
        if record.source is None and engine is not None:
            raise LostStateError(
                "the coordinator knows nobody who holds any state, though this process has trained; start "
                "the job again, from its checkpoint"
            )
        holds = engine is not None and self.member in record.holders
        old = Old.of(engine, feeds=self.feeds.positions()) if holds and engine is not None else None
        back = None
        others = [member for member in record.holders if member not in record.members]
        if others:
            old, back = self._brought(record, [*record.members, *others], old)
        if self.member not in record.members:
            return None
        rank = record.members.index(self.member)
        self._form(record.generation, rank, len(record.members))
        if record.source is None:
            return Entry(rank, self._made(record, rank, None), None)
        together = Together.of_default_group(self.make.device)

        def change(had: Old | None) -> Change:
            return replan(
                had,
                lambda values: self._made(record, rank, values),
                together,
                lambda process: node_of(record.members[process].device),
            )

        changed, further = self._go_on_or_back(change, old, together)
        return Entry(rank, changed.engine, changed, back if further is None else further)

    def _brought(
        self, record: Record, all_of_them: list[Member], old: Old | None
    ) -> tuple[Old | None, int | None]:
        """Those that go bring what the members lack, in a world with them; and how far all went back."""
        here = all_of_them.index(self.member)
        self._form(record.generation, here, len(all_of_them), "bring")
        together = Together.of_default_group(self.make.device)
        brought = self._go_on_or_back(
            lambda had: bring(
                had,
                record.plan,
                self.make.parts.summed(),
                range(len(record.members)),
                together,
                lambda process: node_of(all_of_them[process].device),
            ),
            old,
            together,
        )
        self.watch.release()
        leave_world()
        return brought

    def _go_on_or_back(
        self, change: Callable[[Old | None], T], old: Old | None, together: Together
    ) -> tuple[T, int | None]:
        """By the state of now or of a snapshot; and what was lost is noted."""

        def noting(had: Old | None) -> T:
            try:
                return change(had)
            except LostStateError as error:
                self._lost = error.names
                raise

        return go_on_or_back(noting, old, self.snapshots, together)

    def keep_snapshots(self, engine: Engine) -> None:
        """Choose who keeps whose copies in this generation, and guard the group of these too."""

        def guard(group: dist.ProcessGroup) -> None:
            self._of_copies = (group,)
            limit_waits(self._of_copies, self.timeout_s)
            self.watch.guard(self.generation, [*engine.every_group(), group])

        self._of_copies = ()
        self.snapshots.enter(engine, node_of(self.member.device), self.form_s, guard)

    def end_snapshots(self) -> None:
        """Nobody will go back any more: what is under way of a copy is dropped."""
        for group in self._of_copies:
            with suppress(ValueError):  # it went with its generation
                break_group(group)
        self.snapshots.leave()

    def _form(self, generation: int, rank: int, num_ranks: int, purpose: str = "") -> None:
        world = form_world(
            self.store, generation, rank, num_ranks,
            form_s=self.form_s, timeout_s=self.timeout_s, purpose=purpose,
        )  # fmt: skip
        self.watch.guard(generation, [world])

    def _made(self, record: Record, rank: int, values: Values | None) -> Engine:
        engine = self.make(record.plan, rank, values, form_s=self.form_s)
        if groups := engine.every_group():
            limit_waits(groups, self.timeout_s)
            self.watch.guard(record.generation, groups)
        return engine


def refuse_zero(plan: Plan) -> None:
    """UnsupportedPlanError where a state has one owner only, or a step gathers behind its word."""
    if any(True for _ in zero_groups(plan)):
        raise UnsupportedPlanError(
            "this plan splits states by ZeRO, so a rank that is lost takes its part along and a step gathers "
            "parameters behind its commit word; in an elastic job set zero to 0 in the plan"
        )
