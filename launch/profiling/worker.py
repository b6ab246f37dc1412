"""One rank of ``arachne profile``: ``python -m launch.profiling.worker JOB``, started by the launcher."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachne_runtime.errors import UnsupportedEnvironmentError
from arachne_runtime.measure.blocks import measure_blocks
from arachne_runtime.measure.links import LinkTrial, measure_links, sizes_for
from arachne_runtime.measure.step import measure_step
from arachne_runtime.measure.together import Together
from arachne_runtime.plan.cluster import index_of
from arachne_runtime.plan.files import write_whole
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import LinkTiming

from .job import ProfileJob, RankResult
from .workload import load_workload

RANK_TIMEOUT = timedelta(minutes=5)
"""Longest wait of a rank for the others: more than the slowest single measurement."""


def main(job_file: Path) -> None:
    """Measure with all ranks together; rank 0 writes everybody's results."""
    job = msgspec.json.decode(job_file.read_bytes(), type=ProfileJob)
    rank = int(os.environ["RANK"])
    device = _device(job.cluster.device_type(job.devices[rank]), job.devices[rank])
    with _group(device, rank, len(job.devices)):
        together = Together.of_default_group()
        answers = together.gather(msgspec.json.encode(_measure(job, rank, device, together)))
        if rank == 0:
            write_whole(Path(job.results), b"[" + b",".join(answers) + b"]")
        together.barrier()


def _measure(job: ProfileJob, rank: int, device: torch.device, together: Together) -> RankResult:
    start = time.perf_counter()
    say = _Progress(Path(job.progress) if rank == 0 else None)
    kind = job.cluster.device_type(job.devices[rank])
    workload = load_workload(job.workload)
    blocks = measure_blocks(
        workload,
        device=device,
        device_type=kind,
        samples=job.samples,
        together=together,
        on_progress=say.block,
    )
    say.step()
    step = measure_step(
        workload,
        devices=job.devices,
        device=device,
        device_type=kind,
        samples=job.samples[len(job.samples) // 2],
        together=together,
    )
    links = _links(job, blocks.model, device, together, say)
    return RankResult(
        device=kind,
        model=blocks.model,
        timings=blocks.timings,
        updates=blocks.updates,
        step=step,
        links=links,
        seconds=time.perf_counter() - start,
    )


def _links(
    job: ProfileJob, model: ModelSpec, device: torch.device, together: Together, say: "_Progress"
) -> tuple[LinkTiming, ...]:
    """None where there is one rank."""
    if together.size == 1:
        return ()
    return measure_links(
        job.cluster,
        job.devices,
        device=device,
        together=together,
        sizes=sizes_for(model, job.samples[-1]),
        on_progress=say.link,
    )


class _Progress:
    """One line in a file, for the person who waits."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def block(self, kind: str, samples: int, left: int) -> None:
        self._say(f"{kind}: {f'{samples} samples' if samples else 'optimizer'} ({left} more batches)")

    def step(self) -> None:
        self._say("what a step costs beside its blocks")

    def link(self, trial: LinkTrial) -> None:
        pairs = ", ".join(f"{a} and {b}" for a, b in trial.pairs)
        self._say(f"link between ranks {pairs}")

    def _say(self, line: str) -> None:
        if self._file is not None:
            write_whole(self._file, line.encode())


def _device(kind: str, name: str) -> torch.device:
    """A CPU type is measured on the CPU, any other on the CUDA device of its index."""
    if kind == "cpu" or kind.startswith("cpu-"):
        return torch.device("cpu")
    if not torch.cuda.is_available() or index_of(name) >= torch.cuda.device_count():
        raise UnsupportedEnvironmentError(
            f"device {name} is a {kind}, but this machine has {torch.cuda.device_count()} CUDA devices; "
            f"run `arachne profile` on the machine that holds it, or correct cluster.toml"
        )
    device = torch.device("cuda", index_of(name))
    torch.cuda.set_device(device)
    return device


@contextmanager
def _group(device: torch.device, rank: int, size: int) -> Iterator[None]:
    """The process group of all ranks, with a CPU backend for words; rendezvous by the launcher's words."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=RANK_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
