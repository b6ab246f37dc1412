"""Schedules as a grid that prints, parses and can be pointed at: one row for each device, one column a slot.

    a-0:0  0F0 0F1         0B0 0B1
    v-0:0      1F0 1F1 1B0 1B1

In the grid every action takes one slot. A row may hold several stages (interleaved schedules).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from .plan import Plan
from .schedule import Action, Work, num_rows, row_actions


@dataclass(frozen=True, slots=True)
class Row:
    """What one device does, in order."""

    name: str
    """A device; where a stage is wider, the first of its devices."""
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class ScheduleFault:
    """One thing wrong with a schedule: the action at ``rows[row].actions[index]``, or the end of the row."""

    row: int
    index: int
    message: str


def pipeline_rows(plan: Plan, pipeline: int) -> tuple[Row, ...]:
    """The schedule of one pipeline of a plan, a row for each stage, or for each that a device holds."""
    held = plan.pipelines[pipeline]
    rows = num_rows(plan.schedule, held)
    return tuple(
        Row(
            held.stages[r].devices[0],
            row_actions(plan.schedule, r, rows, len(held.stages), held.micro_batches),
        )
        for r in range(rows)
    )


def parse_grid(text: str) -> tuple[Row, ...]:
    """Rows from their printed form (columns do not matter); UsageError where a word is no action."""
    rows = []
    for line in text.splitlines():
        words = line.split()
        if words and not words[0].startswith("^"):
            rows.append(Row(words[0], tuple(Action.parse(word) for word in words[1:])))
    return tuple(rows)


def print_grid(rows: Sequence[Row], fault: ScheduleFault | None = None) -> str:
    """The grid, with a caret under the action that ``fault`` points at."""
    slots = _slots(rows)
    margin = max((len(row.name) for row in rows), default=0) + 2
    width = max((len(str(action)) for row in rows for action in row.actions), default=0) + 1
    lines = []
    for r, row in enumerate(rows):
        columns = _columns(slots[r], len(row.actions))
        line = row.name.ljust(margin)
        for column, action in zip(columns, row.actions, strict=False):
            line = line.ljust(margin + column * width) + str(action)
        lines.append(line.rstrip())
        if fault is not None and fault.row == r:
            lines.append(" " * (margin + columns[fault.index] * width) + f"^ {fault.message}")
    return "\n".join(lines)


def check_schedule(rows: Sequence[Row], *, num_stages: int, num_micro_batches: int) -> None:
    """Raise UsageError, pointing at the action, unless the schedule trains each micro-batch once and ends.

    Each stage does the forward and the backward (whole, or in its two halves) of each micro-batch once, the
    forward first, and no device waits for ever for what another does only later.
    """
    if not rows:
        raise UsageError("a schedule without a row trains nothing; give a row for each device")
    fault = next(_faults(rows, num_stages, num_micro_batches), None)
    if fault is not None:
        where = f"{rows[fault.row].name}, action {fault.index}"
        raise UsageError(f"a schedule that cannot run ({where}):\n{print_grid(rows, fault)}")


def _faults(rows: Sequence[Row], num_stages: int, num_micro_batches: int) -> Iterator[ScheduleFault]:
    yield from _foreign(rows, num_stages, num_micro_batches)
    yield from _repeated(rows)
    yield from _backward_first(rows)
    yield from _stuck(rows)
    yield from _missing(rows, num_stages, num_micro_batches)


def _foreign(rows: Sequence[Row], num_stages: int, num_micro_batches: int) -> Iterator[ScheduleFault]:
    for r, i, action in _all_actions(rows):
        if action.stage >= num_stages:
            yield ScheduleFault(r, i, f"there is no stage {action.stage}: the pipeline has {num_stages}")
        if action.micro_batch >= num_micro_batches:
            message = f"there is no micro-batch {action.micro_batch}: the pipeline has {num_micro_batches}"
            yield ScheduleFault(r, i, message)


def _repeated(rows: Sequence[Row]) -> Iterator[ScheduleFault]:
    seen: Counter[Action] = Counter()
    for r, i, action in _all_actions(rows):
        seen[action] += 1
        if seen[action] > 1:
            yield ScheduleFault(r, i, f"{action} is done twice")


def _backward_first(rows: Sequence[Row]) -> Iterator[ScheduleFault]:
    for r, row in enumerate(rows):
        order = {action: i for i, action in enumerate(row.actions)}
        for i, action in enumerate(row.actions):
            if action.work is Work.FORWARD:
                continue
            half = action.work is Work.WEIGHT
            before = Action(action.stage, Work.INPUT if half else Work.FORWARD, action.micro_batch)
            if order.get(before, -1) > i:
                what = "gradient of the input" if half else "forward"
                yield ScheduleFault(r, i, f"comes before its {what} {before}")


def _stuck(rows: Sequence[Row]) -> Iterator[ScheduleFault]:
    """The first row that waits for ever; for what nobody sends, if there is such a row."""
    slots = _slots(rows)
    holder = {action: (r, i) for r, i, action in _all_actions(rows)}
    done = {rows[r].actions[i] for r, mine in enumerate(slots) for i in range(len(mine))}
    last_stage = max((action.stage for action in holder), default=0)
    stuck = [
        (needed in holder, r, needed)
        for r, row in enumerate(rows)
        if len(slots[r]) < len(row.actions)
        for needed in _needs(row.actions[len(slots[r])], last_stage)
        if needed not in done
    ]
    for sent, r, needed in sorted(stuck, key=lambda found: found[:2]):
        message = f"waits for {needed}, which nobody sends"
        if sent:
            other = holder[needed][0]
            blocked = rows[other].actions[len(slots[other])]
            message = f"waits for {needed}, which {rows[other].name} does only after {blocked}"
        yield ScheduleFault(r, len(slots[r]), message)


def _missing(rows: Sequence[Row], num_stages: int, num_micro_batches: int) -> Iterator[ScheduleFault]:
    have = {action for _, _, action in _all_actions(rows)}
    for stage in range(num_stages):
        row = next((r for r, row in enumerate(rows) if any(a.stage == stage for a in row.actions)), 0)
        for micro_batch in range(num_micro_batches):
            in_halves = bool(have & {Action(stage, half, micro_batch) for half in (Work.INPUT, Work.WEIGHT)})
            backward = (Work.INPUT, Work.WEIGHT) if in_halves else (Work.BACKWARD,)
            for work in (Work.FORWARD, *backward):
                action = Action(stage, work, micro_batch)
                if action not in have:
                    yield ScheduleFault(row, len(rows[row].actions), f"{action} is missing")


def _all_actions(rows: Sequence[Row]) -> Iterator[tuple[int, int, Action]]:
    for r, row in enumerate(rows):
        for i, action in enumerate(row.actions):
            yield r, i, action


def _needs(action: Action, last_stage: int) -> tuple[Action, ...]:
    """What must be done elsewhere, or before, for an action to start."""
    stage, work, micro_batch = action.stage, action.work, action.micro_batch
    if work is Work.FORWARD:
        return (Action(stage - 1, work, micro_batch),) if stage > 0 else ()
    if work is Work.WEIGHT:
        return (Action(stage, Work.INPUT, micro_batch),)
    own = Action(stage, Work.FORWARD, micro_batch)
    return (own, Action(stage + 1, work, micro_batch)) if stage < last_stage else (own,)


def _slots(rows: Sequence[Row]) -> list[list[int]]:
    """The slot of each action, row by row, as far as the schedule gets."""
    last_stage = max((action.stage for _, _, action in _all_actions(rows)), default=0)
    slots: list[list[int]] = [[] for _ in rows]
    slot_of: dict[Action, int] = {}
    moved = True
    while moved:
        moved = False
        for row, mine in zip(rows, slots, strict=True):
            while len(mine) < len(row.actions):
                action = row.actions[len(mine)]
                before = [slot_of.get(needed) for needed in _needs(action, last_stage)]
                known = [slot for slot in before if slot is not None]
                if len(known) < len(before):
                    break
                mine.append(max([*known, *mine[-1:]], default=-1) + 1)
                slot_of.setdefault(action, mine[-1])
                moved = True
    return slots


def _columns(placed: list[int], count: int) -> list[int]:
    """Columns of all actions of a row and of the end of it: behind where it got stuck, one by one."""
    start = placed[-1] + 1 if placed else 0
    return [*placed, *range(start, start + count - len(placed) + 1)]
