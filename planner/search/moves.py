"""Templates that differ from one by one decision: width, TP degree, depth, order, number of copies."""

from collections.abc import Iterator, Sequence

from .batch import StagePlan, Templates

Line = tuple[tuple[StagePlan, ...], int, int]
"""Stages, copies, micro-batch."""

_Run = tuple[StagePlan, int]
"""Alike neighbours, and how many."""


def neighbours(line: Line, degrees: Sequence[int], pools: int, *, experts: bool = False) -> Iterator[Line]:
    """Every template that one move makes; some may not fit. ``experts``: whether their tilings move too."""
    stages, copies, size = line
    yield from _number_moves(line)
    runs = _runs(stages)
    for at, run in enumerate(runs):
        for changed in _run_moves(run, degrees, experts):
            yield _joined([*runs[:at], *changed, *runs[at + 1 :]]), copies, size
        for other in range(len(runs)):
            if other != at and run[1] > 1:
                moved = [(s, n + (i == other) - (i == at)) for i, (s, n) in enumerate(runs)]
                yield _joined(moved), copies, size
        for other in range(at + 1, len(runs)):
            swapped = list(runs)
            swapped[at], swapped[other] = runs[other], runs[at]
            yield _joined(swapped), copies, size
    for changed in _added(runs, degrees, pools):
        yield _joined(changed), copies, size


def lines_of(templates: Templates) -> list[Line]:
    """As plain numbers."""
    return [
        (templates.stages(k), int(templates.copies[k]), int(templates.micro_batch[k]))
        for k in range(len(templates))
    ]


def _number_moves(line: Line) -> Iterator[Line]:
    """Copies and micro-batches; copies for width, which keeps the devices."""
    stages, copies, size = line
    for other in dict.fromkeys((2 * size, size // 2, 3 * size // 2, 2 * size // 3, size + 1, size - 1)):
        yield stages, copies, other
    for number in (copies + 1, copies - 1):
        yield stages, number, size
    yield tuple((p, t, 2 * w, e) for p, t, w, e in stages), copies // 2, 2 * size
    if all(w % 2 == 0 for _, _, w, _ in stages):
        halves = tuple((p, t, w // 2, _tile(e, t * w // 2)) for p, t, w, e in stages)
        yield halves, 2 * copies, max(1, size // 2)


def _runs(stages: Sequence[StagePlan]) -> list[_Run]:
    found: list[_Run] = []
    for stage in stages:
        if found and found[-1][0] == stage:
            found[-1] = stage, found[-1][1] + 1
        else:
            found.append((stage, 1))
    return found


def _joined(runs: Sequence[_Run]) -> tuple[StagePlan, ...]:
    return tuple(stage for stage, number in runs for _ in range(number))


def _run_moves(run: _Run, degrees: Sequence[int], experts: bool) -> Iterator[list[_Run]]:
    """Of a whole run, or of its first or last stage alone."""
    own, number = run
    yield [(own, number + 1)]
    yield [(own, number - 1)]
    for stage in _shapes(own, degrees, experts):
        yield [(stage, number)]
        devices = own[1] * own[2] * number
        alike = devices // (stage[1] * stage[2])
        if alike != number:
            yield [(stage, alike)]
        if number > 1:
            yield [(stage, 1), (own, number - 1)]
            yield [(own, number - 1), (stage, 1)]
            yield [(stage, 1), (own, number - 2)]
            yield [(own, number - 2), (stage, 1)]


def _shapes(stage: StagePlan, degrees: Sequence[int], experts: bool) -> Iterator[StagePlan]:
    """Another width, TP degree or tiling of experts, with as many devices or not."""
    pool, tp, width, tile = stage
    found = [(pool, tp, w) for w in (width + 1, width - 1, 2 * width, width // 2)]
    for degree in degrees:
        if degree != tp:
            found += [(pool, degree, width), (pool, degree, max(1, tp * width // degree))]
    shapes = [(p, t, w, _tile(tile, t * w)) for p, t, w in found if w >= 1]
    if experts:
        shapes += [(pool, tp, width, _tile(e, tp * width)) for e in (2 * tile, tile // 2, tp * width)]
    return (s for s in dict.fromkeys(shapes) if s != stage)


def _tile(tile: int, devices: int) -> int:
    """The largest number up to ``tile`` that divides the devices."""
    return max(n for n in range(1, max(1, min(tile, devices)) + 1) if devices % n == 0)


def _added(runs: list[_Run], degrees: Sequence[int], pools: int) -> Iterator[list[_Run]]:
    """A stage of a pool that is not there yet, before or behind the others."""
    there = {stage[0] for stage, _ in runs}
    for pool in range(pools):
        if pool not in there:
            for tp in degrees:
                yield [((pool, tp, 1, 1), 1), *runs]
                yield [*runs, ((pool, tp, 1, 1), 1)]
