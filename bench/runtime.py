"""What the runtime reaches of the ideal on unequal devices, with overlap and without, beside its prediction.

Two labs of CPU shares on one machine: four unequal devices, and two nodes with a link of 100 Mbit/s (Linux
and root). Each is profiled and planned, then the plan trains in alternating runs with overlap and without:
sums of gradients only at the end of a stage, no receive before its turn. The ideal is all compute split in
proportion to profiled speeds, communication free; on the lab with the link it is told, not judged.

The global batch is three times the demonstration's, so that computing binds the first lab: what a step costs
beside its samples (its sum of gradients, its optimizer, its bookkeeping) is the same for any batch. Steps in
which the engine also checks what would depend on the plan (engine.watch: 0, 1, 2, 4, 8, ...) are not judged.

Overlap is also timed on a wider model over the link, in a plan whose sums of gradients are as long as its
backward: the price of a plan does not know that they begin in it.

``--quick`` leaves out the second lab.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachne_runtime import __version__
from arachne_runtime.engine.watch import is_watched
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.text import describe
from examples.gpt import Config
from launch.demo.run import LAB, SAMPLES, WARM_UP_STEPS, LoggedStep, examples_folder
from launch.lab import Lab, LabDevice, active
from launch.lab.document import LabNetwork
from launch.profiling.merge import merge
from launch.profiling.run import measure as measure_profile
from launch.torchrun import run_plan
from planner.cost import Ideal
from planner.request import Request
from planner.search import find_plan, signed

from .report import Options, Result, at_least, at_most, run_bench

LINKED = Lab(
    device=tuple(
        LabDevice(name=f"{node}-{i}", node=node, share=share)
        for node, share in (("left", 0.6), ("right", 0.3))
        for i in range(2)
    ),
    network=LabNetwork(rate_Mbps=100, latency_ms=0.2),
)
GLOBAL_BATCH, QUICK_BATCH = 384, 256
QUICK_SAMPLES = (1, 16, 72)
NUM_STEPS, QUICK_STEPS = 11, 6
REPEATS = 3
LEAST_GAIN = 0.98
"""The example's gradients (7.6 MB) are one sum of a stage, with nothing left beside it; two trainings by one
plan in a row differ by up to 2 %."""
WIDTH = 384
"""Of the same model with 28 MB of gradients, four times the example's: two long sums and a short one."""


@dataclass(frozen=True)
class Turns:
    """Seconds of single steps, with overlap and without."""

    on_s: Sequence[float]
    off_s: Sequence[float]

    @property
    def on(self) -> float:
        """Of the median step."""
        return statistics.median(self.on_s)

    @property
    def off(self) -> float:
        """Of the median step."""
        return statistics.median(self.off_s)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One lab's plan, as it went."""

    ideal_s: float
    predicted_s: float
    turns: Turns

    @property
    def share_of_ideal(self) -> float:
        """Of the median step."""
        return self.ideal_s / self.turns.on

    @property
    def prediction_error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.turns.on - 1


def measure(options: Options) -> Iterator[Result]:
    """Both labs."""
    labs = {"shares": LAB} if options.quick else {"shares": LAB, "link": LINKED}
    for name, lab in labs.items():
        with (
            tempfile.TemporaryDirectory(prefix="arachne-runtime-") as scratch,
            active(lab) as on,
        ):
            print(*on.notes, sep="\n", flush=True)
            found = trained(lab, Path(scratch), options)
            yield from _judged(name, found)
            if name == "link":
                wide = by_turns(wide_plan(), Path(scratch), NUM_STEPS, 1, WIDTH)
                yield _overlap("wide", wide, bound=1.05)


def _judged(name: str, found: Trained) -> Iterator[Result]:
    print(
        f"{name}: ideal {found.ideal_s:.3f} s, predicted {found.predicted_s:.3f} s, measured "
        f"{found.turns.on:.3f} s with overlap: {found.share_of_ideal:.3f} of the ideal",
        flush=True,
    )
    if name == "shares":  # the link binds the other, and is free in the ideal
        yield at_least(f"{name}-share-of-ideal", found.share_of_ideal, "of 1", bound=0.92)
    yield at_most(f"{name}-prediction-error", abs(found.prediction_error), "of 1", bound=0.05)
    yield _overlap(name, found.turns, bound=LEAST_GAIN)


def _overlap(name: str, turns: Turns, bound: float) -> Result:
    print(f"{name}: {turns.on:.3f} s with overlap, {turns.off:.3f} s without", flush=True)
    gain = turns.off / turns.on
    return at_least(f"{name}-overlap-gain", gain, "x", bound=bound, on=turns.on_s, off=turns.off_s)


def trained(lab: Lab, folder: Path, options: Options) -> Trained:
    """Profile, plan and train in the lab that is on."""
    steps, repeats = (QUICK_STEPS, 1) if options.quick else (NUM_STEPS, REPEATS)
    samples, global_batch = (QUICK_SAMPLES, QUICK_BATCH) if options.quick else (SAMPLES, GLOBAL_BATCH)
    request = profiled(lab, samples, global_batch)
    plan = signed(find_plan(request), request, version=__version__)
    print(describe(plan), flush=True)
    turns = by_turns(plan, folder, steps, repeats, Config.width)
    assert plan.predicted is not None
    return Trained(ideal_s=Ideal(request).iteration_s, predicted_s=plan.predicted.iteration_s, turns=turns)


def by_turns(plan: Plan, folder: Path, steps: int, repeats: int, width: int) -> Turns:
    """Train by a plan with overlap and without."""
    taken: dict[str, list[float]] = {"on": [], "off": []}
    write(plan, folder / "plan.json")
    for repeat in range(repeats):
        for overlap in ("on", "off") if repeat % 2 == 0 else ("off", "on"):
            log = folder / f"{overlap}-{repeat}-{width}.jsonl"
            words = ["-m", "bench.runtime_train", str(log), str(steps), overlap, str(width)]
            run_plan(folder / "plan.json", words, quiet=True)
            told = [msgspec.json.decode(line, type=LoggedStep) for line in log.read_bytes().splitlines()]
            judged = (step for step in told[WARM_UP_STEPS:] if not is_watched(step.step))
            taken[overlap] += [step.seconds for step in judged]
    return Turns(taken["on"], taken["off"])


def wide_plan() -> Plan:
    """A replica in each node of the second lab, in one micro-batch: its sums are long, and start early."""
    shares = {"left:0": 32, "right:0": 16}
    stage = Stage(
        layers=(0, Config.layers + 2),
        replicas=tuple(Replica(devices=(name,), share=share) for name, share in shares.items()),
    )
    rows = sum(shares.values())
    pipeline = Pipeline(micro_batches=1, micro_batch=rows, stages=(stage,))
    return Plan(model="byte-gpt", global_batch=rows, sequence=Config.sequence, pipelines=(pipeline,))


def profiled(lab: Lab, samples: tuple[int, ...], global_batch: int) -> Request:
    """The example's model as the lab that is on computes it."""
    workload = f"{examples_folder() / 'gpt.py'}:workload"
    found = merge(measure_profile(workload, lab.cluster(), None, samples, show=False))
    return Request(cluster=lab.cluster(), model=found.model, profile=found.profile, global_batch=global_batch)


if __name__ == "__main__":
    raise SystemExit(run_bench("runtime", measure))
