"""What each rank of bench.migration runs: a GPT that changes its plan there and back, and a test of the link.

arachne run first.json -- -m bench.migration_train LOG second.json WIDTH LAYERS
"""

import itertools
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import arachne_runtime as arachne
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Plan
from arachne_runtime.state.changes import PlanChange
from examples.gpt import GPT, Config, StandardLibrary, adamw, next_byte_loss

PROBE_BYTES, MESSAGE_BYTES = 24 * 2**20, 4 * 2**20
"""What each rank of a node sends to one of the other to measure the link, and in which pieces."""


class LoggedChange(msgspec.Struct, frozen=True):
    """One change of plan, over all ranks."""

    sent_bytes: int
    """By all ranks together."""
    transfer_s: float
    """Of the rank that took longest."""
    seconds: float
    link_bytes_per_s: float
    """From node to node, measured just before by messages of the same backend."""


def main() -> None:
    log, second = Path(sys.argv[1]), Path(sys.argv[2])
    config = Config(width=int(sys.argv[3]), layers=int(sys.argv[4]))
    with arachne.Session() as session:
        engine = session.engine(lambda: GPT(config), optimizer=adamw, loss=next_byte_loss)
        first, told = session.plan, []
        batches = session.batches(StandardLibrary(Config.sequence), first.global_batch)
        for step, batch in enumerate(itertools.islice(batches, 3)):
            session.print(f"step {step}, loss {engine.step(batch).loss:.6f}")
            if step < 2:
                plan = arachne.read_plan(second) if step == 0 else first
                speed = link_bytes_per_s(first)
                told.append(_logged(session.replan(plan), speed))
        if session.rank == 0:
            log.write_bytes(b"\n".join(map(msgspec.json.encode, told)) + b"\n")


def _logged(change: PlanChange, speed: float) -> LoggedChange:
    sent = torch.tensor([change.sent_bytes])
    longest = torch.tensor([change.transfer_s, change.seconds], dtype=torch.float64)
    dist.all_reduce(sent)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return LoggedChange(int(sent), *longest.tolist(), speed)


def link_bytes_per_s(plan: Plan) -> float:
    """All ranks of the first node send to those of the second at once, as a change does."""
    devices, here = rank_order(plan), dist.get_rank()
    nodes = list(dict.fromkeys(map(node_of, devices)))
    left, right = ([r for r, device in enumerate(devices) if node_of(device) == node] for node in nodes)
    sends = here in left
    other = dict(zip(left, right, strict=True)) | dict(zip(right, left, strict=True))
    buffers = [torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(PROBE_BYTES // MESSAGE_BYTES)]
    dist.barrier()
    start = time.perf_counter()
    works = [(dist.isend if sends else dist.irecv)(buffer, other[here]) for buffer in buffers]
    for work in works:
        work.wait()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return len(left) * PROBE_BYTES / float(taken)


if __name__ == "__main__":
    main()
