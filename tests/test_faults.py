"""What goes wrong on one rank ends all ranks, in seconds and not at the time limit of collectives."""

import json
import os
import re
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.errors import WorkerFailedError
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks
from launch.agent import free_port
from launch.torchrun import run_plan

WIDTH, ROWS = 3, 8
SECONDS = 60.0
"""Until the last rank ends; collectives wait 600 s. Measured: below 2 s, and 12 s at load 40 on 2 cores."""


def stage(layers, *devices):
    share = 2 // len(devices)
    return Stage(layers=layers, replicas=tuple(Replica(devices=(d,), share=share) for d in devices))


PLAN = Plan(
    model="tiny",
    global_batch=ROWS,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=4,
            micro_batch=2,
            stages=(stage((0, 1), "a:0"), stage((1, 2), "a:1", "a:2"), stage((2, 3), "b:0")),
        ),
    ),
)
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


class Block(nn.Module):
    """A linear map that meets ``fault`` in its third forward."""

    def __init__(self, fault=None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fault, self.calls = fault, 0

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        if self.fault is not None and self.calls == 3:
            self.fault()
        return torch.tanh(self.linear(x))


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def not_reduced(output, batch):
    return (output - batch[1]).square()


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where."""

    block: object = None
    """Called in the third forward of block 1 on rank 1."""
    loss: object = mse
    lengths: tuple[int, ...] = (5, 5, 5, 5)
    """Of the sequences that each rank is given."""
    rows: tuple[int, ...] = (ROWS,) * 4


def train(rank, fault, steps=1):
    with arachne.Session(PLAN, device="cpu") as session:
        broken = fault.block if rank == 1 else None
        engine = session.engine(
            lambda: nn.Sequential(Block(), Block(broken), Block()),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            loss=fault.loss,
        )
        shape = (fault.rows[rank], fault.lengths[rank], WIDTH)
        for _ in range(steps):
            engine.step((torch.ones(shape), torch.zeros(shape)))


def ending(port, fault):
    """How this rank ended, and how long after the start."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    places = ("127.0.0.1", str(port), str(rank), str(world_size))
    os.environ.update(zip(VARIABLES, places, strict=True))
    start = time.monotonic()
    try:
        train(rank, fault)  # its session makes the process group, as under torchrun
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error} [{notes}]", time.monotonic() - start
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)
    return "fine", time.monotonic() - start


FAULTS = {
    "memory": (
        Fault(block=out_of_memory),
        1,
        r"OutOfMemoryError: CUDA out of memory.*\[in block 1 \(Block\), .* rank 1 \(a:1\), stage 1 .*1F2",
    ),
    "loss": (
        Fault(loss=not_reduced),
        3,
        r"ModelError: .*must return one number.*\[rank 3 \(b:0\), stage 2 .*2F0",
    ),
    "length": (
        Fault(lengths=(5, 5, 5, 7)),
        3,
        r"The size of tensor a \(5\) must match.*\[rank 3 \(b:0\), stage 2",
    ),
    "rows": (
        Fault(rows=(8, 8, 8, 7)),
        3,
        r"rank \d has a batch of 8 rows and rank 3 one of 7.*\[rank 3 \(b:0\)",
    ),
    "first-rows": (
        Fault(rows=(7, 8, 8, 8)),
        1,
        r"rank 0 has a batch of 7 rows and rank 1 one of 8.*\[rank 1",
    ),
}
"""What goes wrong, which rank tells it, and its words."""


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_end_soon_after_one_and_that_one_says_why(name):
    fault, rank, told = FAULTS[name]
    found = run_ranks(4, ending, free_port(), fault)
    assert re.search(told, found[rank][0]), found[rank][0]
    for words, seconds in found:
        assert words != "fine"
        assert re.search(r"\[(in block \d .*)?rank \d", words), words
        assert seconds < SECONDS


def test_without_a_fault_all_is_fine():
    assert [words for words, _ in run_ranks(4, ending, free_port(), Fault())] == ["fine"] * 4


def test_a_batch_without_rows_is_refused_on_every_rank_at_once():
    for words, seconds in run_ranks(4, ending, free_port(), Fault(rows=(0,) * 4)):
        assert words.startswith("UsageError: a batch of 0 rows; the plan's global_batch is 8")
        assert seconds < SECONDS


def test_the_launcher_ends_all_ranks_and_tells_the_one_that_failed(tmp_path):
    write(PLAN, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(WorkerFailedError) as caught:
        run_plan(tmp_path / "plan.json", [str(tmp_path / "train.py"), str(tmp_path / "failed")], quiet=True)
    ended = time.time()
    failed = json.loads((tmp_path / "failed").read_text())
    assert caught.value.rank == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in str(caught.value)
    assert "a:1" in str(caught.value)
    assert "1F2" in str(caught.value)
    assert ended - failed < SECONDS


SCRIPT = """
import json, os, sys, time
import torch
from tests import test_faults

def fault():
    with open(sys.argv[1], "w") as file:
        json.dump(time.time(), file)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

test_faults.train(int(os.environ["RANK"]), test_faults.Fault(block=fault))
"""
