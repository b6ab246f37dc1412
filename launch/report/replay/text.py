"""A simulation for a person: a row for each policy, with what its seconds went into."""

from collections.abc import Iterator

from arachne_runtime.units import HOUR_S, Seconds, significant
from launch.simulation.ledger import Spent
from launch.simulation.outcome import Outcome, Replayed

from ..answers import Answer

COLUMNS = {
    Spent.COPYING: "copying",
    Spent.REDONE: "redone",
    Spent.STANDSTILL: "standstill",
    Spent.WAITING: "waiting",
}
"""What is lost beside slower plans, as headings."""


class ReplayAnswer(Answer, frozen=True, kw_only=True):
    """Everything that ``arachne simulate --trace --json`` prints."""

    plan: str
    file: str
    out: str | None
    replayed: Replayed


def replay_text(answer: ReplayAnswer) -> str:
    """The whole of it."""
    r = answer.replayed
    lines = [
        f"{answer.file}: {hours(r.duration_s)} of {r.model}, global batch {r.global_batch}, "
        f"at most {r.most_devices} devices; nodes went {r.losses} times and came {r.joins} times",
        *_rows(r),
    ]
    ours = r.outcomes[1]
    if ours.changes:
        longest = max(ours.changes, key=lambda change: change.standstill_s)
        lines.append(
            f"{ours.policy}: the longest standstill was {significant(longest.standstill_s)} s, at "
            f"{hours(longest.at_s)}, to {longest.plan}"
        )
    if answer.out is not None:
        lines.append(f"written to {answer.out}")
    return "\n".join(lines)


def _rows(replayed: Replayed) -> Iterator[str]:
    width = max(len(o.policy) for o in replayed.outcomes)
    heads = "".join(f"{name:>12}" for name in COLUMNS.values())
    yield f"  {'':<{width}}  {'samples':>12}  of oracle  changes{heads}"
    for outcome in replayed.outcomes:
        parts = "".join(f"{percent(outcome, spent, replayed.duration_s):>12}" for spent in COLUMNS)
        yield (
            f"  {outcome.policy:<{width}}  {outcome.samples:>12,.0f}  {100 * outcome.of_oracle:>7.2f} %  "
            f"{len(outcome.changes):>7}{parts}"
        )


def percent(outcome: Outcome, spent: Spent, duration_s: Seconds) -> str:
    """A part of the whole time: ``1.24 %``; a dash for nothing."""
    seconds = outcome.seconds[spent.value]
    return f"{100 * seconds / duration_s:.2f} %" if seconds > 0 else "-"


def hours(seconds: Seconds) -> str:
    """``11.4 h``; below two hours ``38.0 min``."""
    return f"{seconds / HOUR_S:.1f} h" if seconds >= 2 * HOUR_S else f"{seconds / 60:.1f} min"
