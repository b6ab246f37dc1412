"""Network namespaces of a lab: a hub with a bridge, and one for each node with a limited network card.

Nothing is made in the namespace that the machine itself uses. The lab holds each namespace by an open file
alone, so the kernel removes them when the lab ends, however it ends.
"""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arachne_runtime.errors import UnsupportedEnvironmentError

from .document import LabNetwork

INTERFACE = "lab0"
"""Name of the network card in every namespace of a lab."""
HUB_ADDRESS = "10.77.0.1"
MAX_NODES = 250
_CLONE_NEWNET = 0x40000000
_PREFIX = 24
_BURST_S = 0.004
"""A token bucket holds what its rate carries in this time (a kernel timer tick at 250 Hz), and at least a
segment that TCP hands over in one piece."""
_MIN_BURST_BYTES = 65_536
_QUEUE_MS = 50
"""Longest wait in the queue of a full link, after which packets are dropped and TCP slows down."""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Open files of the namespaces of one lab."""

    hub: int
    nodes: dict[str, int]
    enforced: tuple[str, ...]
    """What limits every node's network card."""
    shortfalls: tuple[str, ...]
    """What could not be enforced, and why."""

    def file_of(self, node: str) -> str:
        """Path by which a process of the same user enters a node's namespace while the lab lives."""
        return f"/proc/{os.getpid()}/fd/{self.nodes[node]}"

    def close(self) -> None:
        """Let the kernel remove the namespaces."""
        for descriptor in (self.hub, *self.nodes.values()):
            os.close(descriptor)


def create(nodes: Sequence[str], network: LabNetwork) -> Namespaces:
    """The hub and a namespace for each node; UnsupportedEnvironmentError where that fails."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UnsupportedEnvironmentError(f"the command {tool!r} is missing; install iproute2")
    if os.geteuid() != 0:
        raise UnsupportedEnvironmentError("network namespaces need root")
    if len(nodes) > MAX_NODES:
        raise UnsupportedEnvironmentError(f"{len(nodes)} nodes; a lab's network holds at most {MAX_NODES}")
    return _in_thread(lambda: _build(nodes, network))


def enter(file: str) -> None:
    """Move the calling thread, and the threads and processes that it starts, into a network namespace."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        _enter(descriptor)
    finally:
        os.close(descriptor)


def own() -> int:
    """Open file of the namespace of the calling thread."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _build(nodes: Sequence[str], network: LabNetwork) -> Namespaces:
    """Runs in a thread of its own, which changes its namespace as it goes."""
    opened: list[int] = []
    try:
        _unshare()
        opened.append(hub := own())
        _ip(["link set lo up", f"link add {INTERFACE} type bridge", f"link set {INTERFACE} up"])
        _ip([f"addr add {HUB_ADDRESS}/{_PREFIX} dev {INTERFACE}"])
        for i, _ in enumerate(nodes):
            _unshare()
            opened.append(own())
            peer = f"type veth peer name node{i} netns /proc/{os.getpid()}/fd/{hub}"
            _ip(["link set lo up", f"link add {INTERFACE} {peer}", f"link set {INTERFACE} up"])
            _ip([f"addr add 10.77.0.{i + 2}/{_PREFIX} dev {INTERFACE}"])
            faults = _limit(INTERFACE, network.rate_Mbps, network.latency_ms)
        _enter(hub)
        for i, _ in enumerate(nodes):
            _ip([f"link set node{i} master {INTERFACE}", f"link set node{i} up"])
            _limit(f"node{i}", network.rate_Mbps, 0.0)
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise
    said = {f"{network.rate_Mbps:g} Mbit/s": faults[0]}
    if network.latency_ms:
        said[f"a latency of {network.latency_ms:g} ms"] = faults[1]
    return Namespaces(
        hub,
        dict(zip(nodes, opened[1:], strict=True)),
        tuple(limit for limit, fault in said.items() if not fault),
        tuple(f"{limit} ({fault})" for limit, fault in said.items() if fault),
    )


def _limit(interface: str, rate_mbps: float, latency_ms: float) -> tuple[str, str]:
    """Shape what leaves an interface; returns what stood against rate and latency (empty: nothing)."""
    burst = max(_MIN_BURST_BYTES, round(rate_mbps * 1e6 / 8 * _BURST_S))
    queue_ms = _QUEUE_MS + round(latency_ms)
    rate = f"rate {round(rate_mbps * 1e3)}kbit burst {burst} latency {queue_ms}ms"
    no_rate = _shape(interface, "root handle 1:", "tbf", rate)
    if not latency_ms:
        return no_rate, ""
    parent = "root" if no_rate else "parent 1:1"
    delay = f"delay {round(latency_ms * 1e3)}us limit 100000"
    return no_rate, _shape(interface, f"{parent} handle 10:", "netem", delay)


def _ip(lines: Sequence[str]) -> None:
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedEnvironmentError(f"ip {lines[0]}: {done.stderr.strip() or done.stdout.strip()}")


def _shape(interface: str, at: str, queue: str, options: str) -> str:
    """Put a queue on an interface; returns what tc complained of, empty where it did not."""
    line = f"tc qdisc add dev {interface} {at} {queue} {options}"
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if not done.returncode:
        return ""
    said = done.stderr.strip().partition("\n")[0] or f"tc exited with {done.returncode}"
    return f"this kernel has no {queue} queue" if "kind is unknown" in said else said


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare() -> None:
    _check(_libc().unshare(_CLONE_NEWNET), "make a network namespace")


def _enter(descriptor: int) -> None:
    _check(_libc().setns(descriptor, _CLONE_NEWNET), "enter a network namespace")


def _check(result: int, what: str) -> None:
    if result:
        raise UnsupportedEnvironmentError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def _in_thread(function: Callable[[], Namespaces]) -> Namespaces:
    """Run ``function`` in a new thread, so that this one stays in its namespace."""
    found: list[Namespaces | BaseException] = []

    def body() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, name="lab-network")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
