"""Starts the ranks of one node through torch's own elastic agent, and waits for them.

A failure ends in the one error that explains it. Nothing here knows of plans.
"""

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from torch import cuda
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from arachne_runtime.errors import UnsupportedEnvironmentError

from . import lab
from .agent_logs import AgentLogs
from .failure import RanksFailedError, Report, read_failure
from .folders import make_writable
from .rank_environment import RUN_VARIABLE, on_cpus, search_path
from .stopped import StopWatch
from .streams import RankStreams
from .survivors import SHUTDOWN_S, no_survivors
from .worker import DEVICE_VARIABLE

RENDEZVOUS_S = 600
"""How long nodes wait for each other."""
_PORT_TRIES = 3
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the agents of a job's nodes meet, and which of them this one is."""

    node_rank: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    """None: any free port (one node only)."""
    first_rank: int = 0
    """Global rank of this node's first device."""
    name: str = "arachne"
    """Agents meet only under the same name: the digest of the plan, so that all nodes have the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What runs on this node."""

    devices: tuple[str, ...]
    """By local rank."""
    command: tuple[str, ...]
    """``train.py ARGS`` or ``-m module ARGS``."""
    num_ranks: int
    """Of all nodes."""
    where: Callable[[int], str]
    """Words for the place of a rank."""
    environment: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False
    log_dir: Path | None = None
    meeting: Meeting = field(default_factory=Meeting)


def launch(job: Job) -> None:
    """Start this node's ranks and wait for them; no process of the job outlives the call."""
    seats = [state.seat(device) for device in job.devices] if (state := lab.current()) is not None else []
    supervised = any(seat.roster for seat in seats)  # a duty cycle stops ranks on purpose
    make_writable(job.log_dir, "--log-dir")
    run_id = f"arachne-{secrets.token_hex(8)}"
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    stops = StopWatch(len(job.devices), mark, limit_s=0.0 if supervised else None)
    with tempfile.TemporaryDirectory(prefix="arachne-run-") as scratch:
        ranks = range(job.meeting.first_rank, job.meeting.first_rank + len(job.devices))
        names = [str(rank) for rank in ranks]
        streams = RankStreams(
            Path(scratch), names, prefixed=job.num_ranks > 1, quiet=job.quiet, log_dir=job.log_dir
        )
        environments = [_rank_environment(job, device, run_id) for device in job.devices]
        logs = AgentLogs(Path(scratch), names, environments, streams)
        stopped_by: signal.Signals | None = None
        failed: ChildFailedError | None = None
        with _undisturbed():
            try:
                with streams, no_survivors(mark), stops:
                    _start(job, logs)
            except SignalException as error:
                stopped_by = error.sigval
            except ChildFailedError as error:
                failed = error
        if stopped_by is not None:
            os.kill(os.getpid(), stopped_by)  # as if we had never caught it: the caller's handler decides
            raise KeyboardInterrupt
        if failed is not None:
            raise RanksFailedError(_report(job, failed, streams, stops.ended))


def _start(job: Job, logs: AgentLogs) -> None:
    meeting = job.meeting
    for attempt in range(_PORT_TRIES):
        port = meeting.port or free_port()
        config = LaunchConfig(
            min_nodes=meeting.num_nodes,
            max_nodes=meeting.num_nodes,
            nproc_per_node=len(job.devices),
            run_id=meeting.name,
            role="rank",
            rdzv_backend="static",
            rdzv_endpoint=f"{meeting.address}:{port}",
            rdzv_configs={"rank": meeting.node_rank, "timeout": RENDEZVOUS_S},
            max_restarts=0,
            monitor_interval=0.05,
            logs_specs=logs,
            shutdown_timeout=SHUTDOWN_S,
            signals_to_handle=",".join(number.name for number in _heeded()),
        )
        try:
            elastic_launch(config, sys.executable)("-P", "-u", "-m", "launch.worker", *job.command)
        except DistNetworkError as error:
            taken = "EADDRINUSE" in str(error)
            if taken and meeting.port is None and attempt + 1 < _PORT_TRIES:
                continue
            raise _no_meeting(meeting, port, taken, error) from error
        return


def _heeded() -> list[signal.Signals]:
    """Those that end the job. Under nohup a lost terminal does not, though torch's agent would have it so."""
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _no_meeting(
    meeting: Meeting, port: int, taken: bool, error: DistNetworkError
) -> UnsupportedEnvironmentError:
    if taken:
        return UnsupportedEnvironmentError(
            f"port {port} of this machine is taken; set another port in hosts.toml"
        )
    first = str(error).splitlines()[0]
    return UnsupportedEnvironmentError(
        f"node {meeting.node_rank} of {meeting.num_nodes} did not reach the first node at "
        f"{meeting.address}:{port} within {RENDEZVOUS_S} s ({first}); does it run, with the same plan, and "
        f"does a firewall let the port through?"
    )


def _rank_environment(job: Job, device: str, run_id: str) -> dict[str, str]:
    found = {DEVICE_VARIABLE: device, RUN_VARIABLE: run_id, **search_path()}
    if not cuda.is_available():
        found |= on_cpus()
    return {**found, **job.environment}


def _report(job: Job, failed: ChildFailedError, streams: RankStreams, stopped: Set[int]) -> Report:
    failures = []
    first_s = min(process.timestamp for process in failed.failures.values())
    for rank, process in failed.failures.items():
        told, now_s, tail = process.error_file_data, time.time(), streams.tail(str(rank))
        failure = read_failure(rank, job.where(rank), process.exitcode, now_s, told, tail)
        killed = not failure.recorded and failure.code == -signal.SIGKILL
        failures.append(
            msgspec.structs.replace(
                failure,
                stopped=rank in stopped,
                unresponsive=rank not in stopped
                and killed
                and process.timestamp - first_s >= SHUTDOWN_S - 1,  # whole seconds
                traceback_file=streams.keep_traceback(str(rank)),
            )
        )
    is_whole = job.meeting.num_nodes == 1
    departed = [rank for rank in range(job.num_ranks) if rank not in failed.failures] if is_whole else []
    return Report(tuple(failures), job.num_ranks, tuple(departed), is_whole)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Take back what torch's agent leaves in this process: signal handlers, a variable, log lines."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    variable = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    logger = logging.getLogger("torch.distributed.elastic")
    silence, propagate = logging.NullHandler(), logger.propagate
    if "LOGLEVEL" not in os.environ:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        if variable is not None:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = variable
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
