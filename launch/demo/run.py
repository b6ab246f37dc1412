"""Profiles the example's model, plans it, and trains the same global batches three ways."""

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachne_runtime import __version__
from arachne_runtime.errors import NoFeasiblePlanError, UnsupportedEnvironmentError
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds
from planner.cost import Ideal, with_prediction
from planner.peers.uniform import Uniform
from planner.request import Request
from planner.search import find_plan, signed

from ..lab import Lab, LabDevice, active
from ..profiling.cluster_file import write_cluster
from ..profiling.merge import merge
from ..profiling.run import measure
from ..torchrun import run_plan, run_ranks

LAB = Lab(
    device=(
        LabDevice(name="fast", share=0.8),
        LabDevice(name="middle", share=0.4),
        LabDevice(name="slow-0", share=0.2),
        LabDevice(name="slow-1", share=0.2),
    )
)
GLOBAL_BATCH = 128
NUM_STEPS = 11
SAMPLES = (1, 2, 4, 8, 16, 32, 72)
"""Shares that are timed; no plan gives a replica more than the last, somewhat above the fast device's part of
the batch."""
WARM_UP_STEPS = 3
"""Not judged: the first steps allocate, and process groups connect."""
TAIL_S = 0.2
"""How often the log of a running training is read for the progress bar."""

Progress = Callable[[str, float], None]
"""Called with what is being done and which part of it is done, 0..1."""


class LoggedStep(msgspec.Struct, frozen=True):
    """One line of a training script's ``--log``."""

    step: int
    loss: float
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One of the three ways, as it went."""

    name: str
    steps: tuple[LoggedStep, ...]
    plan: Plan | None
    """None for torch's own DistributedDataParallel."""

    @property
    def step_s(self) -> Seconds:
        """Median over the steps behind the warm-up."""
        return statistics.median(step.seconds for step in self.steps[WARM_UP_STEPS:])

    @property
    def samples_per_s(self) -> float:
        """Of the global batch, at the median step."""
        return GLOBAL_BATCH / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """What was found."""

    even: Training
    uniform: Training
    planned: Training
    ideal_s: Seconds
    """Step time if all compute were split in proportion to profiled speeds and communication were free."""

    @property
    def trainings(self) -> tuple[Training, ...]:
        """Slowest idea first."""
        return (self.even, self.uniform, self.planned)

    @property
    def speedup(self) -> float:
        """Even data parallelism's step over the plan's."""
        return self.even.step_s / self.planned.step_s

    @property
    def share_of_ideal(self) -> float:
        """The ideal step over the plan's."""
        return self.ideal_s / self.planned.step_s

    @property
    def prediction_error(self) -> float:
        """Predicted over measured step of the plan, minus one."""
        assert self.planned.plan is not None
        assert self.planned.plan.predicted is not None
        return self.planned.plan.predicted.iteration_s / self.planned.step_s - 1

    @property
    def loss_gap(self) -> float:
        """Largest difference between the three losses at any step."""
        even, uniform, planned = ([step.loss for step in t.steps] for t in self.trainings)
        rows = zip(even, uniform, planned, strict=True)
        return max(max(losses) - min(losses) for losses in rows)


def demonstrate(
    folder: Path,
    *,
    on_progress: Progress,
    num_steps: int = NUM_STEPS,
    samples: tuple[int, ...] = SAMPLES,
) -> Demonstration:
    """Profile, plan and train on the lab ``LAB``; everything written goes under ``folder``.

    ``samples`` are the shares that are timed; no plan gives a replica more than the last.

    Raises UnsupportedEnvironmentError where the lab cannot be had or the examples are not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    examples = examples_folder()
    with active(LAB):
        on_progress("profile: each kind of block on each device", 0.0)
        request = _profile(examples, folder, samples)
        on_progress("plan", 0.0)
        planned = signed(find_plan(request), request, version=__version__)
        devices = request.cluster.devices
        uniform = _uniform_pipeline(request)

        def train(name: str, plan: Plan | None) -> Training:
            log = folder / f"{_file_name(name)}.jsonl"
            with _following(log, num_steps, lambda part: on_progress(f"train: {name}", part)):
                return _train(name, plan, examples, log, devices, num_steps)

        return Demonstration(
            even=train("even DDP", None),
            uniform=train("uniform pipeline", uniform),
            planned=train("plan", planned),
            ideal_s=Ideal(request).iteration_s,
        )


def examples_folder() -> Path:
    """Where the example scripts are: beside the packages in a checkout, inside ``launch`` when installed."""
    here = Path(__file__).resolve()
    for place in (here.parents[2] / "examples", here.parents[1] / "examples"):
        if (place / "train_gpt.py").is_file():
            return place
    raise UnsupportedEnvironmentError("the example scripts are not installed; run the demo from a checkout")


def _profile(examples: Path, folder: Path, samples: tuple[int, ...]) -> Request:
    cluster = LAB.cluster()
    merged = merge(measure(f"{examples / 'gpt.py'}:workload", cluster, None, samples, show=False))
    write(merged.model, folder / "model.json")
    write(merged.profile, folder / "profile.json")
    write_cluster(cluster, folder / "cluster.toml")
    return Request(cluster=cluster, model=merged.model, profile=merged.profile, global_batch=GLOBAL_BATCH)


def _uniform_pipeline(request: Request) -> Plan:
    plan = Uniform(depth=len(request.cluster.devices)).propose(request)
    if plan is None:
        raise NoFeasiblePlanError("no uniform pipeline fits the demonstration's devices")
    return with_prediction(plan, request)


def _file_name(name: str) -> str:
    return name.lower().replace(" ", "-")


def _train(
    name: str, plan: Plan | None, examples: Path, log: Path, devices: Sequence[str], num_steps: int
) -> Training:
    """Its plan and trace lie beside its log."""
    arguments = ["--global-batch", str(GLOBAL_BATCH), "--steps", str(num_steps), "--log", str(log)]
    if plan is None:
        run_ranks(devices, [str(examples / "train_gpt_ddp.py"), *arguments], quiet=True)
    else:
        path, trace = log.with_suffix(".json"), log.with_suffix(".trace")
        write(plan, path)
        run_plan(path, [str(examples / "train_gpt.py"), *arguments], trace=trace, quiet=True)
    steps = tuple(msgspec.json.decode(line, type=LoggedStep) for line in log.read_bytes().splitlines())
    return Training(name=name, steps=steps, plan=plan)


@contextmanager
def _following(log: Path, num_steps: int, on_part: Callable[[float], None]) -> Iterator[None]:
    """Report the growing log's lines as a part of ``num_steps`` while the body runs."""
    log.unlink(missing_ok=True)
    done = threading.Event()

    def follow() -> None:
        while not done.wait(TAIL_S):
            lines = log.read_bytes().count(b"\n") if log.exists() else 0
            on_part(lines / num_steps)

    thread = threading.Thread(target=follow, name="demo-progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
