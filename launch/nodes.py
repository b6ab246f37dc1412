"""Starts a plan on several nodes: one ``arachne run --node NAME`` for each, through ssh where it is afar.

A node's process holds a leash: its standard input. When that closes, whoever ends (this process, ssh, the
network between them), it stops its ranks. It tells how they failed by lines on its standard error, so that
one error of one rank, the first that no other explains, ends the whole job.
"""

import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from arachne_runtime.errors import (
    ExitCode,
    InvalidFileError,
    Problem,
    UnsupportedEnvironmentError,
    UsageError,
)
from arachne_runtime.plan import files
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Plan

from .failure import Failure, NodeLostError, RanksFailedError, Report
from .hosts import Host, Hosts, is_local
from .streams import written
from .worker import EXIT_LIMIT_S

LEASH_VARIABLE = "ARACHNE_LEASH"
"""Digest of the plan that the starter read; set in the process of a node that a starter holds."""
FAILURE_MARK = "\x1earachne-failure "
"""Starts a line of standard error that carries one ``Failure`` as JSON."""
REPORT_S = EXIT_LIMIT_S + 2.0
"""How long other nodes may still report once one has ended with nothing but the loss of another's ranks."""
GRACE_S = 1.0
"""The same once a node has ended with a failure of its own."""
END_S = 15.0
"""How long a node may take to stop its ranks when its leash is gone."""
_TAIL_LINES = 10
_MISTAKES = (ExitCode.USAGE, ExitCode.INVALID_FILE, ExitCode.NO_FEASIBLE_PLAN)
"""A node that exits with one of these does so every time."""


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks of one node of a plan."""

    name: str
    node_rank: int
    first_rank: int
    devices: tuple[str, ...]


def nodes_of(plan: Plan) -> tuple[NodeRanks, ...]:
    """The nodes of a plan in the order of their ranks."""
    order = rank_order(plan)
    names = list(dict.fromkeys(node_of(device) for device in order))
    held = {name: tuple(device for device in order if node_of(device) == name) for name in names}
    return tuple(NodeRanks(name, i, order.index(held[name][0]), held[name]) for i, name in enumerate(names))


def check_hosts_of(plan: Plan, hosts: Hosts, source: Path) -> None:
    """Every node of the plan has a host; InvalidFileError with all that have none."""
    known = ", ".join(hosts.node) or "none"
    missing = [node.name for node in nodes_of(plan) if node.name not in hosts.node]
    if missing:
        message = f"missing; the plan has devices there (the file has: {known})"
        raise InvalidFileError(str(source), [Problem(f"$.node.{name}", message) for name in missing])


def node_command(
    node: str, plan_path: Path, hosts_path: Path, script: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """What starts one node by hand, in the working folder."""
    arachne = [sys.executable, "-P", "-m", "launch", "run", str(plan_path.absolute())]
    return [*arachne, "--hosts", str(hosts_path.absolute()), "--node", node, *options, "--", *script]


def commands(plan: Plan, hosts: Hosts, words: dict[str, list[str]]) -> dict[str, list[str]]:
    """What the starter runs for each node: ``words``, through ssh where the node is not this machine."""
    digest = files.digest(plan)
    found = {}
    for name, command in words.items():
        found[name] = at_host(hosts.node[name], command, [f"{LEASH_VARIABLE}={digest}"])
    return found


def at_host(
    host: Host, command: Sequence[str], settings: Sequence[str] = (), ssh_options: Sequence[str] = ()
) -> list[str]:
    """What runs a command on a host in this working folder, through ssh where it is afar.

    ``settings``: ``NAME=VALUE`` of its environment.
    """
    words = [*settings, *_search_path(), *command]
    if is_local(host.address):
        return ["env", *words]
    there = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join(words)}"
    return ["ssh", "-o", "BatchMode=yes", *ssh_options, host.ssh or host.address, there]


def start(plan: Plan, started: dict[str, list[str]]) -> None:
    """Run every node's command to its end; RanksFailedError with the root failure of all nodes.

    NodeLostError where a node ended and told of no rank; UnsupportedEnvironmentError where that was
    a mistake.
    """
    held = [_Held(name, command) for name, command in started.items()]
    first = None
    try:
        first = _watch(held)
    finally:
        for node in held:
            node.let_go()
        _end(held)
    failures = tuple(failure for node in held for failure in node.failures)
    if failures:
        raise RanksFailedError(Report(failures, len(plan.devices)))
    if first is not None:
        mistaken = first.process.returncode in _MISTAKES
        raise (UnsupportedEnvironmentError if mistaken else NodeLostError)(first.complaint())


def hold_leash(plan: Plan) -> None:
    """In a node's process: check that the plan is the starter's, and stop by SIGTERM when the leash goes."""
    digest = os.environ.pop(LEASH_VARIABLE)
    if digest != files.digest(plan):
        raise UsageError("the plan on this node differs from the one where the job was started; copy it over")

    def wait() -> None:
        while os.read(0, 4096):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="leash", daemon=True).start()


def tell(error: RanksFailedError) -> None:
    """In a node's process: say to the starter how ranks failed."""
    for failure in error.report.failures:
        written(sys.stderr, FAILURE_MARK + msgspec.json.encode(failure).decode() + "\n")


@dataclass(slots=True)
class _Held:
    """One node's process, its leash and what it says."""

    name: str
    command: list[str]
    failures: list[Failure] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    process: "subprocess.Popen[str]" = field(init=False)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the starter alone, which lets go
        )
        self.reader = threading.Thread(target=self._read, name=f"node-{self.name}", daemon=True)
        self.reader.start()

    def let_go(self) -> None:
        """Drop the leash: the node stops its ranks."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def complaint(self) -> str:
        """What a node said that ended without a failed rank."""
        last = "".join(f"\n  {line}" for line in self.tail)
        program = "ssh" if self.command[0] == "ssh" else "its process"
        return f"node {self.name}: {program} exited with code {self.process.returncode}{last}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith(FAILURE_MARK):
                self.failures.append(msgspec.json.decode(line.removeprefix(FAILURE_MARK), type=Failure))
            else:
                self.tail.append(line.rstrip())
                sys.stderr.write(line)
                sys.stderr.flush()


def _watch(held: Sequence[_Held]) -> _Held | None:
    """Until all nodes ended; or one failed, and the others had time to say why: that first one."""
    first, failed_at = None, math.inf
    while True:
        codes = [node.process.poll() for node in held]
        if first is None and any(codes):
            first = next(node for node, code in zip(held, codes, strict=True) if code)
            failed_at = time.monotonic()
        told = [failure.is_consequence for node in held for failure in node.failures]
        patience_s = REPORT_S if told and all(told) else GRACE_S
        if None not in codes or time.monotonic() > failed_at + patience_s:
            return first
        time.sleep(0.05)


def _end(held: Sequence[_Held]) -> None:
    stop_at = time.monotonic() + END_S
    for node in held:
        try:
            node.process.wait(max(0.1, stop_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()
        node.reader.join(1.0)
        assert node.process.stderr is not None
        node.process.stderr.close()


def _search_path() -> list[str]:
    """A source tree that is not installed is found on the other nodes as it is here."""
    root = Path(__file__).parents[1]
    return [] if root.name in ("site-packages", "dist-packages") else [f"PYTHONPATH={root}"]
