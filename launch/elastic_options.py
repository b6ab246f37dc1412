"""From the words of ``arachne run --elastic`` to the job: what goes together, and what plans later plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.files import read_cluster, read_plan
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.zero import is_split

from . import lab
from .coordinator.planner_words import Problem
from .elastic import ElasticJob
from .folders import make_writable
from .inputs import model_from, profile_from
from .script import script_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanning:
    """What plans for other devices are made from."""

    min_devices: int = 1
    cluster: Path | None = None
    """None: in a lab the lab's."""
    model: str | None = None
    """None: the catalog's of the plan's name."""


def elastic_job(
    plan_path: Path, plan: Plan, script: Sequence[str], replanning: Replanning, log_dir: Path | None
) -> ElasticJob:
    """The job; UsageError or InvalidFileError for what cannot be."""
    _refuse(plan, replanning)
    state, words = lab.current(), script_command(script)
    if state is not None:
        for device in plan.devices:
            state.seat(device)
    problem = _problem(plan_path, plan, replanning)
    make_writable(log_dir, "--log-dir")
    return ElasticJob(
        plan=plan,
        command=words,
        host=state.address if state is not None else "127.0.0.1",
        min_devices=replanning.min_devices,
        problem=problem,
        log_dir=log_dir,
    )


def refuse_together(**asked: bool) -> None:
    """UsageError for an option, by its name, that an elastic job has no use for, or not yet."""
    for name, is_asked in asked.items():
        if is_asked:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--elastic and {option} do not go together: {_WHY[name]}; leave {option} out")


_WHY = {
    "hosts": "all nodes of an elastic job run on this machine yet",
    "dry_run": "the commands of an elastic job hold its addresses, which come as it starts",
    "max_restarts": "an elastic job starts single processes again by itself",
    "trace": "records are of the ranks of one plan, and it changes",
    "tensorboard": "records are of the ranks of one plan, and it changes",
}


def _refuse(plan: Plan, replanning: Replanning) -> None:
    if replanning.min_devices > (count := len(plan.devices)):
        raise UsageError(f"--min-devices {replanning.min_devices}, but the plan has {count} devices")
    if any(is_split(stage) for pipeline in plan.pipelines for stage in pipeline.stages):
        raise UsageError("--elastic cannot lose a rank that holds a ZeRO shard yet; plan with zero 0")


def _problem(plan_path: Path, plan: Plan, replanning: Replanning) -> Problem | None:
    """For the planner; None where nobody said what the model costs: then only the first plan is shrunk."""
    if replanning.cluster is None and replanning.model is None:
        return None
    state = lab.current()
    if replanning.cluster is not None:
        cluster = read_cluster(replanning.cluster)
    elif state is not None:
        cluster = state.cluster
    else:
        raise UsageError(f"--model {replanning.model} needs --cluster: its devices are what plans are for")
    name = replanning.model or plan.model
    spec = model_from(name, plan.sequence)
    read_plan(plan_path, cluster=cluster, model=spec)  # says how the plan differs from them
    return Problem(
        cluster=cluster,
        model=spec,
        profile=profile_from(None, name, spec, cluster),
        first=plan,
        schedules=tuple(dict.fromkeys((plan.schedule, ScheduleKind.ONE_F_ONE_B))),
    )
