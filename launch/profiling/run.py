"""Starts the ranks of a profile on the devices of this machine and collects what they measured."""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import msgspec

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster

from .. import lab
from ..progress import line_of
from ..torchrun import run_ranks
from .job import ProfileJob, RankResult
from .workload import load_workload, verify_blocks


def measure(
    workload: str, cluster: Cluster, node: str | None, samples: tuple[int, ...], *, show: bool
) -> list[RankResult]:
    """The results of all ranks, by rank: one rank on each device of ``cluster`` (of ``node`` alone).

    Raises UsageError for devices that this machine does not hold, WorkerFailedError with a rank's own words.
    """
    devices = _devices(cluster, node)
    verify_blocks(load_workload(workload))  # a mistyped name or model ends here, before ranks start
    with tempfile.TemporaryDirectory(prefix="arachne-profile-") as scratch:
        folder = Path(scratch)
        job = ProfileJob(
            workload=workload,
            cluster=cluster,
            devices=devices,
            samples=samples,
            results=str(folder / "results.json"),
            progress=str(folder / "progress"),
        )
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        with line_of(Path(job.progress), "starting ranks") if show else nullcontext():
            run_ranks(devices, ["-m", "launch.profiling.worker", str(folder / "job.json")])
        return msgspec.json.decode(Path(job.results).read_bytes(), type=list[RankResult])


def _devices(cluster: Cluster, node: str | None) -> tuple[str, ...]:
    if node is not None and node not in cluster.nodes_by_name:
        raise UsageError(f"the cluster has no node {node!r}; it has {', '.join(cluster.nodes_by_name)}")
    devices = cluster.nodes_by_name[node].devices if node is not None else cluster.devices
    running = lab.current()
    if running is not None:
        for device in devices:
            running.seat(device)
    elif node is None and len(cluster.nodes) > 1:
        raise UsageError(
            f"the cluster has {len(cluster.nodes)} nodes, and this machine is one of them: run "
            f"`arachne profile --node NAME` on a node of each device type, all with one --out"
        )
    return devices
