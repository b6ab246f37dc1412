"""Runs a script on every device of a plan, of one of its nodes, or of a list: what torchrun does, by a plan.

Torchrun is told numbers of processes and nodes on its command line; here the plan gives them, and the rank
and the place in words of each device.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import cuda

from arachne_runtime.backends.environment import refuse_without_deepspeed
from arachne_runtime.errors import UsageError
from arachne_runtime.plan import files
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.runnable import refuse_unrunnable

from . import lab
from .agent import Job, Meeting, launch
from .failure import where_in
from .folders import make_writable
from .hosts import Hosts, interface_of
from .nodes import nodes_of
from .script import script_command

PLAN_VARIABLE = "ARACHNE_PLAN"
TRACE_VARIABLE = "ARACHNE_TRACE"
TENSORBOARD_VARIABLE = "ARACHNE_TENSORBOARD"


def run_plan(
    plan_path: Path,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    trace: Path | None = None,
    tensorboard: Path | None = None,
    quiet: bool = False,
    log_dir: Path | None = None,
) -> None:
    """Run a script on every device of a plan, on this machine (or in the lab that is on), to its end.

    Raises InvalidFileError for the plan, UsageError for the command, and WorkerFailedError with the words of
    the rank that failed first.
    """
    plan = _runnable(plan_path)
    devices = rank_order(plan)
    _refuse_shared_gpus(devices)
    make_writable(trace, "--trace")
    make_writable(tensorboard, "--tensorboard")
    _keep_plan(plan, trace)
    launch(
        Job(
            devices=devices,
            command=script_command(command),
            num_ranks=len(devices),
            where=where_in(plan),
            environment=plan_environment(plan_path, trace, tensorboard, env),
            quiet=quiet,
            log_dir=log_dir,
            meeting=Meeting(address=_local_address()),
        )
    )


def run_node(
    plan_path: Path,
    hosts: Hosts,
    node: str,
    command: Sequence[str],
    *,
    trace: Path | None = None,
    tensorboard: Path | None = None,
    log_dir: Path | None = None,
) -> None:
    """Run one node of a plan that spans several; the others are started elsewhere and meet at the first."""
    plan = _runnable(plan_path)
    make_writable(trace, "--trace")
    make_writable(tensorboard, "--tensorboard")
    nodes = {found.name: found for found in nodes_of(plan)}
    if node not in nodes:
        raise UsageError(f"the plan has no devices on node {node!r}; its nodes are {', '.join(nodes)}")
    ours, first = nodes[node], hosts.node[next(iter(nodes))]
    if ours.node_rank == 0:
        _keep_plan(plan, trace)
    environment = plan_environment(plan_path, trace, tensorboard)
    interface = interface_of(hosts.node[node].address)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = interface
    launch(
        Job(
            devices=ours.devices,
            command=script_command(command),
            num_ranks=len(plan.devices),
            where=where_in(plan),
            environment=environment,
            log_dir=log_dir,
            meeting=Meeting(
                node_rank=ours.node_rank,
                num_nodes=len(nodes),
                address=first.address,
                port=first.port,
                first_rank=ours.first_rank,
                name=files.digest(plan),
            ),
        )
    )


def _keep_plan(plan: Plan, trace: Path | None) -> None:
    """Put the plan beside its records, which name it by its digest alone."""
    if trace is not None:
        number = files.digest(plan).partition(":")[2][:12]
        files.write(plan, trace / f"plan-{number}.json")


def _runnable(plan_path: Path) -> Plan:
    """The plan, unless this version's engine cannot run it, here or anywhere."""
    plan = files.read_plan(plan_path)
    refuse_unrunnable(plan)
    refuse_without_deepspeed(plan)
    return plan


def run_ranks(
    devices: Sequence[str],
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
    log_dir: Path | None = None,
) -> None:
    """Run a script on these devices without a plan: rank i on ``devices[i]``. Errors as in ``run_plan``."""
    launch(
        Job(
            devices=tuple(devices),
            command=script_command(command),
            num_ranks=len(devices),
            where=lambda rank: f"device {devices[rank]}",
            environment=env or {},
            quiet=quiet,
            log_dir=log_dir,
            meeting=Meeting(address=_local_address()),
        )
    )


def plan_environment(
    plan_path: Path,
    trace: Path | None,
    tensorboard: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What ranks need to find their plan and where to write their records."""
    found = {PLAN_VARIABLE: str(plan_path.absolute())}
    if trace is not None:
        found[TRACE_VARIABLE] = str(trace.absolute())
    if tensorboard is not None:
        found[TENSORBOARD_VARIABLE] = str(tensorboard.absolute())
    return {**found, **(env or {})}


def _local_address() -> str:
    state = lab.current()
    return state.address if state else "127.0.0.1"


def _refuse_shared_gpus(devices: Sequence[str]) -> None:
    nodes = list(dict.fromkeys(node_of(device) for device in devices))
    if len(nodes) > 1 and lab.current() is None and cuda.is_available():
        raise UsageError(
            f"the plan has the nodes {', '.join(nodes)}, and two of them would share this machine's GPUs; "
            f"give their addresses with --hosts, or start this node alone with --node"
        )
