"""The commit rule: from what the survivors of a failure report, whether the open step is applied or redone.

A step k has three parts: (1) forward, backward, all reductions; (2) one small all-reduce of flags; (3) the
optimizer step, without any collective, and then whatever leaves the rank. A rank *enters* (2) when all of
(1) is finished and its reduced gradients are held untouched. After a failure each survivor freezes: it
leaves its groups, finishes (3) if it is in it, and only then reports.

The rule is safe because a rank completes (2) of k only after every rank of the generation has entered it.
So if anything of k left a rank, every survivor holds or has applied k, and all apply it.
tests/test_commit_rule.py explores every order of events.
"""

from collections.abc import Sequence
from enum import StrEnum

from ..errors import ArachneError
from ..plan.document import Document


class StatesDifferError(ArachneError, ValueError):
    """Reports that no run of one job can give: the ranks have different states; go back to a checkpoint."""


class Verdict(StrEnum):
    """What becomes of the step that was open."""

    APPLY = "apply"
    REDO = "redo"


class Flags(Document, frozen=True, kw_only=True):
    """What (2) of a step gave to all ranks alike."""

    step: int
    is_finite: bool
    """Whether all reduced gradients are finite."""
    wants_change: bool = False
    """Whether a planned change stops all ranks at this step's end."""
    batch_vote: int = 0
    """The batch controller's."""


class Report(Document, frozen=True, kw_only=True):
    """Where a rank stood when it froze. Steps count from 1; 0: none yet."""

    applied: int
    """The last step whose (3) is finished."""
    entered: int
    """The last step whose (2) was entered; its gradients may have been discarded since."""
    held: int | None = None
    """Generation in which the gradients of ``entered`` that it holds were reduced; None: holds none."""
    flags: Flags | None = None
    """Of the last step whose (2) it completed."""

    @property
    def fault(self) -> str | None:
        """Why no rank can be in this state; None where one can."""
        if not 0 <= self.applied <= self.entered:
            return f"applied step {self.applied} without having entered it (last entered {self.entered})"
        if self.entered > self.applied + 1:
            return f"entered step {self.entered} without having applied step {self.applied + 1}"
        if self.flags is not None and not self.applied <= self.flags.step <= self.entered:
            return f"has flags of step {self.flags.step}, not of one from {self.applied} to {self.entered}"
        return None


class Decision(Document, frozen=True, kw_only=True):
    """One answer for all members: after it each has applied ``step - 1`` (redo) or ``step`` (apply)."""

    verdict: Verdict
    step: int
    flags: Flags | None = None
    """For APPLY, of a survivor that completed (2); None: each recomputes them from its reduced gradients."""

    @property
    def next_step(self) -> int:
        """What the new generation computes first."""
        return self.step + (self.verdict is Verdict.APPLY)


def decide(reports: Sequence[Report]) -> Decision:
    """The rule, over the reports of all members of the published generation that were not removed.

    K is the smallest last-entered step. If each of them has applied K, or holds K's gradients, all of one
    generation, all apply K; otherwise all discard and redo K. Who has applied K already keeps it.

    Raises StatesDifferError where the reports cannot be of one job; ValueError without any.
    """
    if not reports:
        raise ValueError("no report: nobody is left to decide for")
    step = min(report.entered for report in reports)
    _refuse_different_states(reports, step)
    open_reports = [report for report in reports if report.applied < step]
    held = {report.held for report in open_reports}
    if open_reports and (None in held or len(held) > 1):
        return Decision(verdict=Verdict.REDO, step=step)
    known = [report.flags for report in reports if report.flags is not None and report.flags.step == step]
    if any(flags != known[0] for flags in known):
        raise StatesDifferError(
            f"survivors have unlike flags of step {step}: {known}; go back to a checkpoint"
        )
    return Decision(verdict=Verdict.APPLY, step=step, flags=known[0] if known else None)


def _refuse_different_states(reports: Sequence[Report], step: int) -> None:
    """A rank that applied K saw (2) of K complete, for which all had entered K."""
    faults = [fault for report in reports if (fault := report.fault) is not None]
    if any(report.applied > step for report in reports):
        ahead = max(report.applied for report in reports)
        faults.append(f"a survivor has applied step {ahead}, another entered only {step}")
    if faults:
        raise StatesDifferError("survivors have different states: " + "; ".join(faults))
