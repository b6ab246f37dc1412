"""Seconds until a target loss: the base batch in even shares, in unequal shares, and an adaptive batch.

On each lab the three train a small GPT (AdamW) or convolutional network (SGD) from the same parameters, on
real ranks, some seconds each in turns, so that what else the machine does falls on all. Linux and root.

``--quick`` races once, on the lab with the slow link.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import msgspec

from launch.lab.document import LabNetwork

from .report import Options, Result, at_least, at_most, interval, run_bench
from .unequal_labs import FOUR, lab_of, run_on
from .unequal_target_curves import apart, reached
from .unequal_target_records import Contestant, Race, TargetTask, Workload, read_race, write

NOT_SLOWER = 1.02
"""Seconds of the adaptive batch over those of the fixed one: as much as unequal_dp allows its best split."""
ALIKE = 0.05
"""Relative difference of losses at the same progress, beyond that of two trainings by the fixed batch."""
CONFIDENCE = 0.90
NUM_SEEDS = 3
NETWORK = LabNetwork(rate_Mbps=200)


@dataclass(frozen=True, kw_only=True)
class TargetCase:
    """A lab and what trains on it."""

    name: str
    shares: Sequence[float]
    """Of a core, by device."""
    task: TargetTask
    network: LabNetwork | None = None


TEXT = TargetTask(workload=Workload.TEXT, width=128, base_batch=16, target=2.1)
PICTURES = TargetTask(workload=Workload.PICTURES, width=32, base_batch=16, target=0.2)
EQUAL = (0.4, 0.4, 0.4, 0.4)

LINKED = TargetCase(name="text-linked", shares=FOUR, task=TEXT, network=NETWORK)
CASES = (
    LINKED,
    TargetCase(name="text", shares=FOUR, task=TEXT),
    TargetCase(name="pictures", shares=FOUR, task=PICTURES),
    TargetCase(name="text-equal-linked", shares=EQUAL, task=TEXT, network=NETWORK),
)


def measure(options: Options) -> Iterator[Result]:
    """Every lab."""
    seeds = range(1 if options.quick else NUM_SEEDS)
    for case in (LINKED,) if options.quick else CASES:
        races = []
        for seed in seeds:
            races.append(race_on(case, seed))
            print(table(f"{case.name}, seed {seed}", case.task.target, races[-1]), flush=True)
        yield from judged(case.name, case.task.target, races)


def race_on(case: TargetCase, seed: int) -> Race:
    """One race."""
    with tempfile.TemporaryDirectory(prefix="arachne-target-") as scratch:
        task, out = Path(scratch) / "task.json", Path(scratch) / "race.json"
        write(msgspec.structs.replace(case.task, seed=seed), task)
        command = ["-m", "bench.unequal_target_train", str(task), str(out)]
        run_on(lab_of(case.shares, case.network), case.name, command)
        return read_race(out)


def judged(name: str, target: float, races: Sequence[Race]) -> Iterator[Result]:
    """Seconds beside both fixed batches, and whether losses match at the same progress."""
    ends = [{contestant: reached(race[contestant].points, target) for contestant in race} for race in races]
    by_unequal = [one[Contestant.ADAPTIVE].seconds / one[Contestant.UNEQUAL].seconds for one in ends]
    by_even = [one[Contestant.EVEN].seconds / one[Contestant.ADAPTIVE].seconds for one in ends]
    progress = [one[Contestant.ADAPTIVE].progress / one[Contestant.UNEQUAL].progress for one in ends]
    at, gain = interval(by_unequal, CONFIDENCE), interval(by_even, CONFIDENCE)
    print(
        f"{name}: adaptive over unequal {at}, even over adaptive {gain}; progress at the target over that of "
        f"the fixed batch {interval(progress, CONFIDENCE)}; {len(races)} races",
        flush=True,
    )
    yield at_most(
        f"{name}-adaptive", at.median if at.median <= NOT_SLOWER else at.low, "of the fixed batch's time",
        bound=NOT_SLOWER, ratios=by_unequal, progress=progress,
        ends=[{contestant: asdict(end) for contestant, end in one.items()} for one in ends],
    )  # fmt: skip
    yield at_least(f"{name}-gain", gain.median, "x even shares of the fixed batch", bound=1.0, ratios=by_even)
    gaps, floors = zip(*map(_gaps, races), strict=True)
    yield at_most(
        f"{name}-curve", median(gaps) - median(floors), "of the loss, at the same progress", bound=ALIKE,
        gaps=gaps, floors=floors,
    )  # fmt: skip


def _gaps(race: Race) -> tuple[float, float]:
    """Of the adaptive batch from the fixed one, and of two trainings by the fixed one from each other."""
    unequal = race[Contestant.UNEQUAL].points
    return apart(race[Contestant.ADAPTIVE].points, unequal), apart(race[Contestant.EVEN].points, unequal)


def table(head: str, target: float, race: Race) -> str:
    """Each contestant's end, and the changes of the batch."""
    rows = [f"{head}: to a held-out loss of {target}"]
    for contestant, run in race.items():
        last, at = run.points[-1], reached(run.points, target)
        rows.append(
            f"  {contestant:9}{at.seconds:7.1f} s, worth {at.progress:7.1f} steps; at the end "
            f"{last.seconds:6.1f} s, {last.steps:5} steps worth {last.progress:7.1f}, batch {last.batch:4}, "
            f"loss {last.loss:.3f}"
        )
        rows += [f"    {decision}" for decision in run.decisions]
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(run_bench("unequal_target", measure))
