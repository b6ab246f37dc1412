"""Measured costs fed back: a wrong profile, a run of its plan in a lab, and the price of the next plan.

The devices are CPU shares of 0.8, 0.4, 0.2 and 0.2 of a core (``launch.demo.LAB``). A wrong profile to start
from is one of these: the catalog's analytic estimate; what one device with a whole core measures alone, over
each device's share; the lab's own profile. All are spoilt, by a factor for each device type and one for each
block kind, drawn from a seed. The plan that such a profile gives runs with hooks and is fed back; the
corrected profile gives another plan, whose run is what both prices are held against.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from msgspec.structs import replace

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.measure.blocks import measure_blocks
from arachne_runtime.measure.timing import Effort
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import BlockTiming, StepTiming, UpdateTiming
from launch.demo.run import LAB, SAMPLES, examples_folder
from launch.feeding import feed_back
from launch.lab import Lab, LabDevice, active
from launch.profiling.cluster_file import write_cluster
from launch.profiling.merge import merge
from launch.profiling.run import measure as measure_profile
from launch.profiling.workload import load_workload
from launch.report.runs import report_run
from launch.torchrun import run_plan
from planner import Request, find_plan
from planner.catalog import profile_for
from planner.cost import Infeasible, price
from planner.peers.uniform import Uniform

from .report import Options, Result, at_least, at_most, run_bench

BY_TYPE, BY_KIND = 0.35, 0.15
"""Deviations of the logs of the factors that spoil a profile."""
LAB_SEEDS = (2, 3, 4)
STEPS, QUICK_STEPS = 12, 6
"""Of each run; two of them are its warm-up."""
BATCH = 128
ALONE_SAMPLES = (1, 32)
"""Shares that are timed alone; no plan gives a replica more than the last."""
SEARCH_S = 2.0
"""Of each search for a plan: four devices take less."""
BOUND = 0.05
WORKLOAD = f"{examples_folder() / 'gpt.py'}:workload"

Row = TypeVar("Row", BlockTiming, UpdateTiming, StepTiming)


@dataclass(frozen=True, kw_only=True)
class Second:
    """The run of a plan that the first run knew nothing of."""

    start: str
    plan: str
    measured_s: float
    before_s: float
    after_s: float

    @property
    def before(self) -> float:
        """Error of the price with the spoilt profile."""
        return self.before_s / self.measured_s - 1

    @property
    def after(self) -> float:
        """Error of the price with the corrected one."""
        return self.after_s / self.measured_s - 1

    def __str__(self) -> str:
        return (
            f"{self.start}, {self.plan}: measured {self.measured_s:.3f} s, price before "
            f"{self.before_s:.3f} s ({self.before:+.1%}), after {self.after_s:.3f} s ({self.after:+.1%})"
        )


def measure(options: Options) -> Iterator[Result]:
    """With ``--quick`` one start and its next plan; else five, each with up to two plans."""
    found: list[Second] = []
    with tempfile.TemporaryDirectory(prefix="arachne-feedback-") as scratch:
        starts = [("analytic, seed 0", spoilt(analytic(), 0))]
        if not options.quick:
            starts.append(("alone, seed 1", spoilt(alone(), 1)))
        with active(LAB):
            if not options.quick:
                right = profiled()
                starts += [(f"lab, seed {seed}", spoilt(right, seed)) for seed in LAB_SEEDS]
            for name, wrong in starts:
                for second in seconds(wrong, name, Path(scratch) / name.replace(", ", "-"), options):
                    print(second, flush=True)
                    found.append(second)
    errors = {f"{s.start}, {s.plan}": {"before": s.before, "after": s.after} for s in found}
    before, after = (median(abs(getattr(s, when)) for s in found) for when in ("before", "after"))
    yield at_least("feedback-error-before", before, "of 1, the median", bound=BOUND)
    yield at_most("feedback-error-after", after, "of 1, the median", bound=BOUND, errors=errors)


def alone() -> Request:
    """One device with a whole core, measured while the others idle; divided by the shares. No links."""
    lab = Lab(device=(LabDevice(name="alone", share=1.0),))
    with active(lab):
        found = merge(measure_profile(WORKLOAD, lab.cluster(), None, ALONE_SAMPLES, show=False))
    shares = {device.device_type: device.share for device in LAB.device}

    def everywhere(rows: Sequence[Row], *fields: str) -> tuple[Row, ...]:
        return tuple(
            replace(row, device=name, **{field: getattr(row, field) / share for field in fields})
            for row in rows
            for name, share in shares.items()
        )

    profile = replace(
        found.profile,
        timings=everywhere(found.profile.timings, "forward_s", "backward_s"),
        updates=everywhere(found.profile.updates, "update_s"),
        steps=everywhere(found.profile.steps, "step_s"),
    )
    return Request(cluster=LAB.cluster(), model=found.model, profile=profile, global_batch=BATCH)


def profiled() -> Request:
    """The example's model on the lab that is on, measured as it should be."""
    cluster = LAB.cluster()
    merged = merge(measure_profile(WORKLOAD, cluster, None, SAMPLES, show=False))
    return Request(cluster=cluster, model=merged.model, profile=merged.profile, global_batch=BATCH)


def spoilt(request: Request, seed: int) -> Request:
    """As if measured under other conditions: a factor by type times one by kind, the same in all parts."""
    profile, generator = request.profile, np.random.default_rng(seed)

    def drawn(names: Iterable[str], deviation: float) -> dict[str, float]:
        return {name: float(np.exp(generator.normal(0, deviation))) for name in sorted(set(names))}

    by_type = drawn((t.device for t in profile.timings), BY_TYPE)
    by_kind = drawn((t.kind for t in profile.timings), BY_KIND)
    timings, updates = [], []
    for t in profile.timings:
        factor = by_type[t.device] * by_kind[t.kind]
        timings.append(replace(t, forward_s=t.forward_s * factor, backward_s=t.backward_s * factor))
    for u in profile.updates:
        updates.append(replace(u, update_s=u.update_s * by_type[u.device] * by_kind[u.kind]))
    return dataclasses.replace(
        request, profile=replace(profile, timings=tuple(timings), updates=tuple(updates))
    )


def analytic() -> Request:
    """What the catalog estimates of the model on these types; its blocks are looked at, and not timed."""
    looked_at = measure_blocks(
        load_workload(WORKLOAD),
        device=torch.device("cpu"),
        device_type="cpu",
        samples=(1,),
        effort=Effort(rounds=1, batch_s=1e-3),
    )
    types = dict.fromkeys(entry.device for entry in LAB.cluster().node)
    profile = profile_for(looked_at.model, types)
    return Request(cluster=LAB.cluster(), model=looked_at.model, profile=profile, global_batch=BATCH)


def seconds(wrong: Request, start: str, folder: Path, options: Options) -> Iterator[Second]:
    """Plan, run, feed back; then each next plan: its prices before it ran, and its run."""
    steps = QUICK_STEPS if options.quick else STEPS
    home = folder / "profile"
    home.mkdir(parents=True)
    write(wrong.profile, home / "profile.json")
    write(wrong.model, home / "model.json")
    write_cluster(wrong.cluster, home / "cluster.toml")
    first = find_plan(wrong, time_budget_s=SEARCH_S).plan
    train(first, folder / "runs" / "first", steps)
    fed = feed_back(folder / "runs", home / "profile.json")
    for note in fed.notes:
        print(f"{start}: {note}")
    [told] = fed.correction.report
    if told.before and told.after:
        print(f"{start}, first plan: {told.before.error:+.1%} before, {told.after.error:+.1%} after")
    corrected = dataclasses.replace(wrong, profile=fed.correction.profile)
    for name, plan in next_plans(corrected, first)[: 1 if options.quick else None]:
        before_s, after_s = (priced_s(plan, request) for request in (wrong, corrected))
        measured_s = train(plan, folder / f"second-{name.replace(' ', '-')}", steps)
        yield Second(start=start, plan=name, measured_s=measured_s, before_s=before_s, after_s=after_s)


def next_plans(corrected: Request, first: Plan) -> Sequence[tuple[str, Plan]]:
    """The best plan now, unless it is the first one again, and a pipeline of one stage a device."""
    best = find_plan(corrected, time_budget_s=SEARCH_S).plan
    pipeline = Uniform(depth=len(corrected.cluster.devices)).propose(corrected)
    if pipeline is None:
        raise NoFeasiblePlanError("no uniform pipeline fits the lab's devices")
    plans = [("next plan", best), ("uniform pipeline", pipeline)]
    return [(name, plan) for name, plan in plans if plan.pipelines != first.pipelines]


def priced_s(plan: Plan, request: Request) -> float:
    """Seconds of an iteration."""
    found = price(plan, request)
    if isinstance(found, Infeasible):
        raise NoFeasiblePlanError(found.reason)
    return found.iteration_s


def train(plan: Plan, trace: Path, steps: int) -> float:
    """Run a plan with hooks; the median of its steps behind the warm-up."""
    trace.mkdir(parents=True)
    path = trace / "plan.json"
    write(plan, path)
    script = str(examples_folder() / "train_gpt.py")
    run_plan(
        path,
        [script, "--global-batch", str(plan.global_batch), "--steps", str(steps)],
        trace=trace,
        quiet=True,
    )
    return report_run(plan, trace).measured_s


if __name__ == "__main__":
    raise SystemExit(run_bench("feedback", measure))
