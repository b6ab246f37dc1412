"""``arachne run``: torchrun with a plan, on one node or on several."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from arachne_runtime.errors import ExitCode, UsageError
from arachne_runtime.plan.files import read_plan
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.runnable import refuse_unrunnable

from .. import lab, nodes
from ..failure import RanksFailedError
from ..hosts import Hosts, read_hosts
from ..restarts import with_restarts
from ..script import script_command

INTERRUPTED = 128 + signal.SIGINT
"""What a shell reports of a command that Ctrl-C ended."""


def command(
    plan: Annotated[Path, typer.Argument(help="The plan (plan.json).")],
    script: Annotated[
        list[str],
        typer.Argument(help="The script: train.py ARGS, or -m package.module ARGS.", metavar="-- SCRIPT"),
    ],
    hosts: Annotated[
        Path | None, typer.Option(help="Start every node of the plan at its address in this hosts.toml.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Start this node alone; the others are started by hand as well.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and start nothing.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write each rank's records into this folder.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write loss, speed and waiting for TensorBoard into this folder.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Also write each rank's output into this folder.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Start again so often when ranks fail; see Session.checkpoints."),
    ] = 0,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Go on without devices that are lost, and with those that come (docs/membership.md).",
        ),
    ] = False,
    min_devices: Annotated[
        int, typer.Option(min=1, help="With --elastic: wait while fewer are there.", hidden=True)
    ] = 1,
    cluster: Annotated[
        Path | None, typer.Option(help="With --elastic: all devices that may come.", hidden=True)
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --elastic: what it costs.", hidden=True)] = None,
) -> int | None:
    """Run a training script on every device of a plan."""
    found = read_plan(plan)  # a plan that is wrong is said at once, before torch is loaded
    refuse_unrunnable(found)
    asked = _Asked(plan, found, tuple(script), trace, tensorboard, log_dir, max_restarts)
    if hosts is None and node is not None:
        raise UsageError(f"--node {node} needs --hosts: the nodes meet at the address of the first one")
    if node is not None and max_restarts:
        raise UsageError(
            "--max-restarts starts all nodes again together, and --node starts one; leave --node out"
        )
    if elastic:
        return _elastic(asked, hosts, node, dry_run, min_devices, cluster, model)
    if min_devices > 1 or cluster is not None or model is not None:
        raise UsageError("--min-devices, --cluster and --model are for --elastic: no other job plans anew")
    if dry_run:
        for line in _lines(asked, hosts, node):
            print(line)
        return None
    _tell_other_devices(found)
    try:
        if hosts is not None:
            return _on_hosts(asked, hosts, node)
        _here(asked)
    except KeyboardInterrupt:
        print("interrupted; all ranks ended", file=sys.stderr)
        return INTERRUPTED
    return None


def _elastic(
    asked: "_Asked",
    hosts: Path | None,
    node: str | None,
    dry_run: bool,
    min_devices: int,
    cluster: Path | None,
    model: str | None,
) -> int | None:
    from ..elastic.options import Replanning, elastic_job, refuse_together
    from ..elastic.run import run_elastic

    refuse_together(
        node=node is not None,
        dry_run=dry_run,
        max_restarts=asked.max_restarts > 0,
        trace=asked.trace is not None,
        tensorboard=asked.tensorboard is not None,
    )
    replanning = Replanning(min_devices=min_devices, cluster=cluster, model=model)
    job = elastic_job(
        asked.plan_path, asked.plan, asked.script, replanning, hosts_path=hosts, log_dir=asked.log_dir
    )
    if hosts is None:
        _tell_one_machine(asked.plan)
    _tell_other_devices(asked.plan)
    try:
        run_elastic(job)
    except KeyboardInterrupt:
        print("interrupted; all ranks ended", file=sys.stderr)
        return INTERRUPTED
    return None


def _here(asked: "_Asked") -> None:
    words = script_command(asked.script)  # a missing script is said at once, too
    _tell_one_machine(asked.plan)
    from ..torchrun import run_plan

    def start() -> None:
        run_plan(
            asked.plan_path,
            words,
            trace=asked.trace,
            tensorboard=asked.tensorboard,
            log_dir=asked.log_dir,
        )

    with_restarts(start, asked.max_restarts)


def _tell_one_machine(plan: Plan) -> None:
    """Several nodes and no ``--hosts`` is a way to try a plan, and an easy omission."""
    names = [found.name for found in nodes.nodes_of(plan)]
    if len(names) > 1 and lab.current() is None:
        where = "all start on this machine; --hosts hosts.toml starts each at its address"
        print(f"the plan has {len(names)} nodes ({', '.join(names)}): {where}", file=sys.stderr)


def _tell_other_devices(plan: Plan) -> None:
    """A plan may run in a lab of other shares, but what it predicts then means nothing."""
    if (state := lab.current()) is None or plan.made_by is None:
        return
    for node, planned in plan.made_by.device_types.items():
        found = state.cluster.nodes_by_name.get(node)
        if found is not None and found.entry.device != planned:
            print(
                f"warning: {node} was planned for as {planned}, but is {found.entry.device} in this lab; "
                "predicted times do not hold: profile and plan again",
                file=sys.stderr,
            )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What runs, wherever it runs."""

    plan_path: Path
    plan: Plan
    script: tuple[str, ...]
    trace: Path | None
    tensorboard: Path | None
    log_dir: Path | None
    max_restarts: int

    def commands(self, hosts_path: Path, node: str | None) -> tuple[Hosts, dict[str, list[str]]]:
        """The hosts, and what starts each node of the plan by hand (or the one asked for)."""
        hosts = read_hosts(hosts_path)
        nodes.check_hosts_of(self.plan, hosts, hosts_path)
        names = [found.name for found in nodes.nodes_of(self.plan)]
        if node is not None and node not in names:
            raise UsageError(f"the plan has no devices on node {node!r}; its nodes are {', '.join(names)}")
        paths = {"--trace": self.trace, "--tensorboard": self.tensorboard, "--log-dir": self.log_dir}
        options = [word for name, path in paths.items() if path for word in (name, str(path.absolute()))]
        wanted = names if node is None else [node]
        return hosts, {
            name: nodes.node_command(name, self.plan_path, hosts_path, self.script, options)
            for name in wanted
        }


def _lines(asked: _Asked, hosts_path: Path | None, node: str | None) -> Iterator[str]:
    """The command of every node, or of every rank where there is one node."""
    if hosts_path is None:
        for rank, device in enumerate(rank_order(asked.plan)):
            setting = [
                f"RANK={rank}",
                f"ARACHNE_DEVICE={device}",
                f"ARACHNE_PLAN={asked.plan_path.absolute()}",
            ]
            yield shlex.join([*setting, sys.executable, "-P", "-u", "-m", "launch.worker", *asked.script])
        return
    hosts, words = asked.commands(hosts_path, node)
    if node is None:
        words = nodes.commands(asked.plan, hosts, words)
    for name, command_ in words.items():
        yield f"{name}: {shlex.join(command_)}"


def _on_hosts(asked: _Asked, hosts_path: Path, node: str | None) -> int | None:
    hosts, words = asked.commands(hosts_path, node)
    if node is None:
        started = nodes.commands(asked.plan, hosts, words)
        with_restarts(lambda: nodes.start(asked.plan, started), asked.max_restarts)
        return None
    if leashed := nodes.LEASH_VARIABLE in os.environ:
        nodes.hold_leash(asked.plan)
    from ..torchrun import run_node

    try:
        run_node(
            asked.plan_path,
            hosts,
            node,
            asked.script,
            trace=asked.trace,
            tensorboard=asked.tensorboard,
            log_dir=asked.log_dir,
        )
    except RanksFailedError as error:
        if not leashed:
            raise
        nodes.tell(error)
        return ExitCode.WORKER_FAILED
    return None
