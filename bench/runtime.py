"""What the runtime reaches of the ideal on unequal devices, with overlap and without, beside its prediction.

Two labs of CPU shares on one machine: four unequal devices, and two nodes with a link of 100 Mbit/s (Linux
and root). Each is profiled and planned, then the plan trains in alternating runs with overlap and without:
sums of gradients only at the end of a stage, no receive before its turn. The ideal is all compute split in
proportion to profiled speeds, communication free; on the lab with the link it is told, not judged.

The global batch is three times the demonstration's, so that computing binds the first lab: what a step costs
beside its samples (its sum of gradients, its optimizer, its bookkeeping) is the same for any batch. Steps in
which the engine also checks what would depend on the plan (engine.watch: 0, 1, 2, 4, 8, ...) are not judged.

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
from arachne_runtime.plan.text import describe
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
GLOBAL_BATCH = 384
QUICK_SAMPLES = (1, 8, 32, 72)
NUM_STEPS, QUICK_STEPS = 11, 6
REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One lab's plan, as it went."""

    ideal_s: float
    predicted_s: float
    on_s: Sequence[float]
    """Seconds of single steps, with overlap."""
    off_s: Sequence[float]

    @property
    def share_of_ideal(self) -> float:
        """Of the median step."""
        return self.ideal_s / statistics.median(self.on_s)

    @property
    def prediction_error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / statistics.median(self.on_s) - 1

    @property
    def gain(self) -> float:
        """Step without overlap over step with it."""
        return statistics.median(self.off_s) / statistics.median(self.on_s)


def measure(options: Options) -> Iterator[Result]:
    """Both labs."""
    labs = {"shares": LAB} if options.quick else {"shares": LAB, "link": LINKED}
    for name, lab in labs.items():
        with tempfile.TemporaryDirectory(prefix="arachne-runtime-") as scratch:
            found = trained(lab, Path(scratch), options)
        print(
            f"{name}: ideal {found.ideal_s:.3f} s, predicted {found.predicted_s:.3f} s, measured "
            f"{statistics.median(found.on_s):.3f} s with overlap, "
            f"{statistics.median(found.off_s):.3f} s without",
            flush=True,
        )
        if name == "shares":  # the link binds the other
            yield at_least(f"{name}-share-of-ideal", found.share_of_ideal, "of 1", bound=0.92)
        else:
            print(f"{name}: {found.share_of_ideal:.3f} of the ideal, whose communication is free")
        yield at_most(f"{name}-prediction-error", abs(found.prediction_error), "of 1", bound=0.05)
        yield at_least(f"{name}-overlap-gain", found.gain, "x", bound=0.99, on=found.on_s, off=found.off_s)


def trained(lab: Lab, folder: Path, options: Options) -> Trained:
    """Profile, plan and train by turns."""
    steps, repeats = (QUICK_STEPS, 1) if options.quick else (NUM_STEPS, REPEATS)
    taken: dict[str, list[float]] = {"on": [], "off": []}
    with active(lab) as on:
        print(*on.notes, sep="\n", flush=True)
        request = profiled(lab, QUICK_SAMPLES if options.quick else SAMPLES)
        plan = signed(find_plan(request), request, version=__version__)
        print(describe(plan), flush=True)
        write(plan, folder / "plan.json")
        for repeat in range(repeats):
            for overlap in ("on", "off") if repeat % 2 == 0 else ("off", "on"):
                log = folder / f"{overlap}-{repeat}.jsonl"
                words = ["-m", "bench.runtime_train", str(log), str(steps), overlap]
                run_plan(folder / "plan.json", words, quiet=True)
                lines = log.read_bytes().splitlines()
                told = [msgspec.json.decode(line, type=LoggedStep) for line in lines]
                judged = (step for step in told[WARM_UP_STEPS:] if not is_watched(step.step))
                taken[overlap] += [step.seconds for step in judged]
    assert plan.predicted is not None
    return Trained(
        ideal_s=Ideal(request).iteration_s,
        predicted_s=plan.predicted.iteration_s,
        on_s=taken["on"],
        off_s=taken["off"],
    )


def profiled(lab: Lab, samples: tuple[int, ...]) -> Request:
    """The example's model as the lab that is on computes it."""
    workload = f"{examples_folder() / 'gpt.py'}:workload"
    found = merge(measure_profile(workload, lab.cluster(), None, samples, show=False))
    return Request(cluster=lab.cluster(), model=found.model, profile=found.profile, global_batch=GLOBAL_BATCH)


if __name__ == "__main__":
    raise SystemExit(run_bench("runtime", measure))
