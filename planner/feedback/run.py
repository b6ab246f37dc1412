"""A run that was recorded, and what its steps took; knows nothing of prices."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Profile
from arachne_runtime.plan.records import APART, WARM_UP_STEPS, Record, RecordKind
from arachne_runtime.plan.rules import check_plan
from arachne_runtime.units import Seconds

LONGEST_S: Seconds = 1e7
"""No piece of a step takes four months."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one plan."""

    name: str
    """What reports call it: its folder."""
    plan: Plan
    cluster: Cluster
    """The devices that it ran on."""
    model: ModelSpec
    records: tuple[Record, ...]
    """Of this plan alone."""

    @cached_property
    def counted(self) -> tuple[Record, ...]:
        """Records of the steps behind the warm-up, without those that no clock can have written."""
        sane = [record for record in self.records if _is_sane(record)]
        steps = sorted({record.step for record in sane})
        kept = frozenset(steps[min(WARM_UP_STEPS, len(steps) - 1) :])
        return tuple(record for record in sane if record.step in kept)

    @property
    def num_insane(self) -> int:
        """Records with times that are negative, or longer than any step."""
        return sum(not _is_sane(record) for record in self.records)

    @cached_property
    def step_seconds(self) -> tuple[Seconds, ...]:
        """Seconds of each step that counts: the mean of the ranks, as all meet in every step."""
        by_step: dict[int, list[Seconds]] = defaultdict(list)
        for record in self.counted:
            if record.kind is RecordKind.STEP:
                by_step[record.step].append(spent(record))
        return tuple(statistics.fmean(of) for _, of in sorted(by_step.items()))

    @cached_property
    def rest_s(self) -> Seconds | None:
        """What a step holds beside all that is told: the commit word, reading rows, bookkeeping.

        Of each step that of the rank with the least of it, as the others also wait for that one; the median
        over the steps. None where no rank wrote whole steps.
        """
        rests: dict[int, dict[int, Seconds]] = defaultdict(lambda: defaultdict(float))
        whole = {(r.rank, r.step) for r in self.counted if r.kind is RecordKind.STEP}
        for record in self.counted:
            told = record.kind in APART or record.kind is RecordKind.STEP
            if told and (record.rank, record.step) in whole:
                sign = 1 if record.kind is RecordKind.STEP else -1
                rests[record.step][record.rank] += sign * spent(record)
        return statistics.median(min(of.values()) for of in rests.values()) if rests else None

    def refusal(self, profile: Profile) -> str | None:
        """Why nothing can be learnt from it for this profile; None where something can."""
        for what in ("model", "sequence"):
            ours, theirs = getattr(profile, what), getattr(self.plan, what)
            if ours != theirs:
                return f"its plan is for {what} {theirs!r}, and the profile measures {ours!r}"
        problems = check_plan(self.plan, cluster=self.cluster, model=self.model)
        if problems:
            return "its plan does not fit cluster and model: " + "; ".join(_said(problems))
        if not self.step_seconds:
            return "its records hold no whole step"
        return None


def spent(record: Record) -> Seconds:
    """All seconds of a record, waiting too."""
    return record.wait_s + record.compute_s + record.transfer_s


def _is_sane(record: Record) -> bool:
    times = (record.start_s, record.wait_s, record.compute_s, record.transfer_s)
    return all(0 <= t < LONGEST_S for t in times)  # no NaN either


def _said(problems: Sequence[object], most: int = 3) -> Iterator[str]:
    for problem in problems[:most]:
        yield f"{getattr(problem, 'path', '$')} {getattr(problem, 'message', problem)}"
