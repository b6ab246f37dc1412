"""How long a job of two ranks takes to start, and from a worker's death to its next step after a restart.

Wall seconds on whatever machine this is, with others' work beside it: ``start_s`` and ``restart_s`` of
``launch.simulation.costs``. A model of 17 parameters, so that reading its checkpoint takes no time.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage

from .report import Options, Result, at_most, run_bench

REPEATS, QUICK_REPEATS = 5, 1
MOST_S = 60.0
"""A start that takes longer is one of a machine that is too busy to be measured on."""

PLAN = Plan(
    model="two",
    global_batch=4,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=2,
            micro_batch=2,
            stages=(
                Stage(layers=(0, 2), replicas=(Replica(devices=("a:0",), share=2),)),
                Stage(layers=(2, 3), replicas=(Replica(devices=("b:0",), share=2),)),
            ),
        ),
    ),
)


def measure(options: Options) -> Iterator[Result]:
    runs = [_run() for _ in range(QUICK_REPEATS if options.quick else REPEATS)]
    starts, restarts = zip(*runs, strict=True)
    load = os.getloadavg()[0]
    yield at_most("start", median(starts), "s", MOST_S, all_s=starts, load=load)
    yield at_most("restart", median(restarts), "s", MOST_S, all_s=restarts, load=load)


def _run() -> tuple[float, float]:
    """From the command to the last engine, and from the kill to the end of the first step behind it."""
    with tempfile.TemporaryDirectory(prefix="arachne-restarts-") as scratch:
        folder = Path(scratch)
        write(PLAN, folder / "plan.json")
        words = [
            "run",
            folder / "plan.json",
            "--max-restarts",
            "1",
            "--",
            "-m",
            "bench.restarts_train",
            folder,
        ]
        begun_s = time.time()
        subprocess.run([sys.executable, "-m", "launch", *map(str, words)], check=True, capture_output=True)
        told = [line.split() for path in folder.glob("told-*") for line in path.read_text().splitlines()]
    moments = [(what, float(at_s)) for what, at_s in told]
    killed_s = next(at_s for what, at_s in moments if what == "killed")
    engine_s = max(at_s for what, at_s in moments if what == "engine" and at_s < killed_s)
    again_s = min(at_s for what, at_s in moments if what == "engine" and at_s > killed_s)
    step_s = min(at_s for what, at_s in moments if what == "step" and at_s > again_s)  # not a survivor's last
    return engine_s - begun_s, step_s - killed_s


if __name__ == "__main__":
    raise SystemExit(run_bench("restarts", measure))
