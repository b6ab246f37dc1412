"""Where an engine stands as its generation ends, in the words of the commit rule, and what follows."""

import math

from ..engine import Engine
from ..engine.open_step import OpenStep
from ..membership.decision import Decision, Flags, Report, StatesDifferError, Verdict
from .step_start import StepStart


def report_of(engine: Engine) -> Report:
    """Its steps count from 1, those of the engine from 0."""
    opened = engine.open
    if opened is None:
        return Report(applied=engine.num_steps, entered=engine.num_steps)
    entered = max(engine.num_steps, opened.number + 1)
    return Report(applied=engine.num_steps, entered=entered, held=opened.generation, flags=_flags_of(opened))


def _flags_of(opened: OpenStep) -> Flags | None:
    if not opened.is_agreed:
        return None
    finite = math.isfinite(opened.norm)
    return Flags(step=opened.number + 1, is_finite=finite, wants_change=opened.wants_change)


def obey(engine: Engine, decision: Decision, start: StepStart | None) -> None:
    """Apply the open step, or make the engine as it was when the step began.

    ``start``: of the step that this rank was in; None: it was in none.

    Raises:
        StatesDifferError: It cannot come to where all are to be.

    """
    opened, done = engine.open, decision.next_step - 1
    if decision.verdict is Verdict.APPLY and engine.num_steps == done - 1:
        if opened is None or opened.number != engine.num_steps:
            raise StatesDifferError(f"step {done} is to be applied, but this rank does not hold it")
        engine.apply_open()
    elif engine.num_steps == done:
        if opened is not None and opened.number == done:
            engine.discard()
        if start is not None and start.number == done:
            start.give_back()
    if engine.num_steps != done:
        raise StatesDifferError(
            f"the job goes on behind step {done}, this rank has done {engine.num_steps}; start the job "
            "again, from its checkpoint"
        )


def is_half_done(engine: Engine | None) -> bool:
    """Whether an optimizer step has begun and not ended: what this rank has is the state of no step."""
    if engine is None or (opened := engine.open) is None:
        return False
    return opened.is_begun and opened.number == engine.num_steps
