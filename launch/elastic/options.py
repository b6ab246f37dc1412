"""From the words of ``arachne run --elastic`` to the job: what goes together, and what plans later plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.files import read_cluster, read_plan
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.zero import is_split

from .. import lab
from ..coordinator.planner_words import Problem
from ..folders import make_writable
from ..hosts import Hosts, is_local, own_address, read_hosts
from ..inputs import model_from, profile_from
from ..nodes import check_hosts_of, nodes_of
from ..script import script_command
from .run import ElasticJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanning:
    """What plans for other devices are made from."""

    min_devices: int = 1
    cluster: Path | None = None
    """None: in a lab the lab's."""
    model: str | None = None
    """None: the catalog's of the plan's name."""


def elastic_job(
    plan_path: Path,
    plan: Plan,
    script: Sequence[str],
    replanning: Replanning,
    *,
    hosts_path: Path | None = None,
    log_dir: Path | None = None,
) -> ElasticJob:
    """The job; UsageError or InvalidFileError for what cannot be."""
    _refuse(plan, replanning)
    state, words = lab.current(), script_command(script)
    hosts = _hosts(plan, hosts_path)
    if state is not None:
        for device in plan.devices:
            state.seat(device)
    problem = _problem(plan_path, plan, replanning)
    make_writable(log_dir, "--log-dir")
    return ElasticJob(
        plan=plan,
        command=words,
        host=_host(plan, hosts),
        hosts=hosts,
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
    "node": "an elastic job starts all its nodes, which come and go",
    "dry_run": "the commands of an elastic job hold its addresses, which come as it starts",
    "max_restarts": "an elastic job starts single processes again by itself",
    "trace": "records are of the ranks of one plan, and it changes",
    "tensorboard": "records are of the ranks of one plan, and it changes",
}


def _hosts(plan: Plan, path: Path | None) -> Hosts | None:
    if path is None:
        return None
    if lab.current() is not None:
        raise UsageError("--hosts inside a lab: the nodes of a lab are here; leave --hosts out")
    hosts = read_hosts(path)
    check_hosts_of(plan, hosts, path)
    return hosts


def _host(plan: Plan, hosts: Hosts | None) -> str:
    """Where the coordinator and the store listen: on the interface to the nodes, or to this machine alone."""
    if hosts is None:
        state = lab.current()
        return state.address if state is not None else "127.0.0.1"
    addresses = [hosts.node[node.name].address for node in nodes_of(plan)]
    return own_address(next((one for one in addresses if not is_local(one)), addresses[0]))


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
