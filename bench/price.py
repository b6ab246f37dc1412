"""The price against real runs: seconds of an iteration and peak bytes, predicted and measured.

`--runs DIR` takes every file of a folder, in the form of eth-easl/sailor's measured runs, in place of those
carried along. Runs of a single node or a single micro-batch stand apart: only their memory is judged.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from arachne_runtime.errors import NotMeasuredError, UsageError
from planner.cost.actors import Seat, Seats, seats_of
from planner.cost.price import peaks_of, simulate

from .measured_runs import MeasuredRun, carried_runs, runs_in
from .report import Options, Result, at_least, at_most, run_bench

BOUNDS = {"GH200": 0.06, "RTX": 0.10}
OTHER_BOUND = 0.10
SAME = 0.05
"""Of 1: plans closer than this are not told apart."""
HOP_PS_PER_BYTE = tuple(range(0, 81, 5))
"""Where the one fitted constant of the seconds is tried."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run, predicted and measured."""

    run: MeasuredRun
    iteration_s: float
    peak_bytes: int

    @property
    def error(self) -> float:
        """Of the seconds: above 0 is too slow."""
        return self.iteration_s / self.run.iteration_s - 1

    @property
    def memory_error(self) -> float:
        """Of the bytes: below 0 is too few."""
        return self.peak_bytes / self.run.peak_bytes - 1

    def __str__(self) -> str:
        run = self.run
        return (
            f"{run.name:30} {self.iteration_s:9.4f} s of {run.iteration_s:9.4f} {self.error:+7.1%}   "
            f"{self.peak_bytes / 1e9:6.2f} GB of {run.peak_bytes / 1e9:6.2f} {self.memory_error:+7.1%}"
            f"{'   apart' if run.is_apart else ''}"
        )


def compare(run: MeasuredRun, hop_ps_per_byte: float | None = None) -> Comparison:
    """Predict a run, with another constant than the catalog's if one is given."""
    tables = run.request.tables
    seats = seats_of(run.plan, tables)
    peaks, _ = peaks_of(run.plan, seats, tables)
    if hop_ps_per_byte is not None:
        seats = _with_constant(seats, hop_ps_per_byte)
    return Comparison(
        run=run,
        iteration_s=simulate(run.plan, seats, tables).iteration_s,
        peak_bytes=max(peaks.values()),
    )


def _with_constant(seats: Seats, hop_ps_per_byte: float) -> Seats:
    def changed(seat: Seat) -> Seat:
        device = replace(seat.node.device, hop_busy_s_per_byte=hop_ps_per_byte * 1e-12)
        return replace(seat, node=replace(seat.node, device=device))

    return tuple(tuple(tuple(map(changed, stage)) for stage in pipeline) for pipeline in seats)


def compared(runs: Sequence[MeasuredRun]) -> list[Comparison]:
    """All runs whose shares and degrees were profiled; the others are named with the reason."""
    found = []
    for run in runs:
        try:
            found.append(compare(run))
        except NotMeasuredError as error:
            print(f"{run.name}: not compared: {error}")
    return found


def measure(options: Options, runs: Sequence[MeasuredRun]) -> Iterator[Result]:
    """All runs by family."""
    del options
    found = compared(runs)
    for family in dict.fromkeys(c.run.family for c in found):
        mine = [c for c in found if c.run.family == family]
        print(f"{family}:", *mine, sep="\n  ")
        yield from _judge(family, mine)
    yield at_most("memory-median", median(c.memory_error for c in found), "of 1, above the peak", bound=0.15)
    yield from _leave_one_out([c.run for c in found])


def _judge(family: str, found: Sequence[Comparison]) -> Iterator[Result]:
    judged = [c for c in found if not c.run.is_apart]
    if judged:
        errors = {c.run.name: c.error for c in judged}
        mean = fmean(map(abs, errors.values()))
        bound = BOUNDS.get(family, OTHER_BOUND)
        yield at_most(f"price-error-{family}", mean, "of 1, the mean", bound=bound, errors=errors)
        yield at_most(f"price-ranked-wrong-{family}", len(list(_wrong_pairs(judged))), "pairs", bound=0)
    lowest = min(c.memory_error for c in found)
    yield at_least(f"memory-lowest-{family}", lowest, "of 1", bound=-0.03)


def _wrong_pairs(found: Sequence[Comparison]) -> Iterator[str]:
    """Plans of one group, the same devices and global batch, whose order is not the measured one."""
    for a, b in combinations(found, 2):
        measured = a.run.iteration_s / b.run.iteration_s - 1
        told_apart = _group(a.run) == _group(b.run) and abs(measured) > SAME
        if told_apart and (a.iteration_s > b.iteration_s) != (measured > 0):
            print(f"  ranked wrong: {a.run.name}, {b.run.name}")
            yield a.run.name


def _group(run: MeasuredRun) -> tuple[int, tuple[str, ...]]:
    nodes = sorted(f"{entry.device} {entry.gpus}" for entry in run.request.cluster.node)
    return run.plan.global_batch, tuple(nodes)


def _leave_one_out(runs: Sequence[MeasuredRun]) -> Iterator[Result]:
    """The constant of GH200 fitted to all runs but one, and the error of that one."""
    judged = [run for run in runs if run.family == "GH200" and not run.is_apart]
    if len(judged) < 3:
        return
    errors = {c: [abs(compare(run, c).error) for run in judged] for c in HOP_PS_PER_BYTE}
    left_out, constants = [], []
    for i in range(len(judged)):
        fitted = min(errors, key=lambda c: sum(errors[c]) - errors[c][i])
        left_out.append(errors[fitted][i])
        constants.append(fitted)
    yield at_most(
        "price-leave-one-out-GH200", fmean(left_out), "of 1, the mean", bound=0.06, constants=constants
    )


def main() -> int:
    """The benchmark with its own option."""
    parser = argparse.ArgumentParser(prog="python -m bench.price", add_help=False)
    parser.add_argument("--runs", type=Path, metavar="DIR")
    own, rest = parser.parse_known_args(sys.argv[1:])
    if "--help" in rest or "-h" in rest:
        print("--runs DIR: measured runs to compare with, in place of those carried along\n")
    try:
        runs = carried_runs() if own.runs is None else runs_in(own.runs)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return run_bench("price", lambda options: measure(options, runs), rest)


if __name__ == "__main__":
    raise SystemExit(main())
