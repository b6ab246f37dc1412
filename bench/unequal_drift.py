"""Whether shares follow a rank that is slowed in the middle of a training, and come back when that ends."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .report import Result, at_least, at_most
from .unequal_records import Drift

MARKED = 1.5
"""Times the usual seconds a sample, from which on a reading is evidence."""
MOST_STEPS = 10
"""From the first step that was slower to the first one with shares that fit it."""
SETTLED_STEPS = 6
"""At the end of a stretch, whose shares are those that fit it."""
LEFT = 0.25
"""Part of the way to these shares that may be left when they are said to follow."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one change of speed did to the shares of rank 0."""

    waited_steps: float
    """From evidence on; infinite: no evidence, or it never followed."""
    before: float
    after: float


def drift_results(drift: Drift) -> Iterator[Result]:
    """Slower, then as before."""
    begun, ended = drift.slowed
    end = len(drift.shares)
    slower = answer(drift, (0, begun), (begun, ended), slower=True)
    back = answer(drift, (begun, ended), (ended, end), slower=False)
    print(
        f"drift: rank 0 has {slower.before:g} samples, {slower.after:g} while it is slowed (steps {begun} to "
        f"{ended - 1}), {back.after:g} afterwards; these {slower.waited_steps:g} and {back.waited_steps:g} "
        "steps after the first step that was unlike those before",
        flush=True,
    )
    shares = [split[0] for split in drift.shares]
    yield at_most("drift-slower", slower.waited_steps, "steps", bound=MOST_STEPS, shares=shares)
    yield at_most("drift-recovery", back.waited_steps, "steps", bound=MOST_STEPS, readings=drift.readings)
    yield at_most("drift-shed", slower.after / slower.before, "of its samples left", bound=0.75)
    yield at_least("drift-regained", back.after / slower.before, "of its samples again", bound=0.85)


def answer(drift: Drift, usual: tuple[int, int], changed: tuple[int, int], *, slower: bool) -> Answer:
    """How shares of rank 0 followed in the steps ``changed`` what had been so in ``usual``."""
    shares = [split[0] for split in drift.shares]
    before, after = (median(shares[max(a, b - SETTLED_STEPS) : b]) for a, b in (usual, changed))
    since = evidence(drift.readings, usual, changed, slower=slower)
    near = [
        step
        for step in range(*changed)
        if abs(shares[step] - after) <= LEFT * abs(before - after) and before != after
    ]
    found = next((step for step in near if since is not None and step >= since), None)
    waited = math.inf if found is None or since is None else found - since
    return Answer(waited_steps=waited, before=before, after=after)


def evidence(
    readings: Sequence[tuple[int, float]], usual: tuple[int, int], changed: tuple[int, int], *, slower: bool
) -> int | None:
    """The first step of ``changed`` that took a sample markedly longer (or less long) than usual."""
    first = max(usual[0], usual[1] - 3 * SETTLED_STEPS)
    normal = [seconds for step, seconds in readings if first <= step < usual[1]]
    if not normal:
        return None
    limit = median(normal) * (MARKED if slower else 1 / MARKED)
    return next(
        (
            step
            for step, seconds in readings
            if changed[0] <= step < changed[1] and (seconds > limit if slower else seconds < limit)
        ),
        None,
    )
