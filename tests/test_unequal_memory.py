"""A rank that runs out of memory: the step is repeated everywhere, or every rank ends with a clear error."""

import subprocess
import sys

import pytest
import torch

import arachne_runtime as arachne
from arachne_runtime.data_parallel.memory import MemoryWatch, fitting_rows
from arachne_runtime.errors import WorkerFailedError
from arachne_runtime.testing import run_ranks
from tests.unequal import (
    Case,
    Wild,
    build,
    data,
    fail_in_backward,
    gap,
    penalised,
    train_alone,
    train_on_ranks,
)

CASES = {
    "before the backward": Case(in_steps=True, fail=(1, 2, "forward")),
    "in the backward, with messages under way": Case(
        in_steps=True, tiny=True, adam=True, fail=(0, 3, "backward")
    ),
    "at the end of the backward": Case(in_steps=True, tiny=True, fail=(1, 3, "end"), seed=1),
    "with words of their own": Case(in_steps=True, tiny=True, fail=(1, 3, "backward"), host_waits=False),
    "in the first step": Case(in_steps=True, tiny=True, fail=(2, 1, "backward"), seed=2),
    "with batch norm": Case(
        in_steps=True, net={"normed": True}, global_batch=6, fail=(1, 3, "forward"), seed=4
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_repeated_everywhere(name):
    case = CASES[name]
    wanted = train_alone(case)
    for found in run_ranks(3, train_on_ranks, case):
        assert gap(found, wanted) < 1e-9


def without_the_third_line(where):
    """What each rank ends with, and the rank it names."""
    rank = torch.distributed.get_rank()
    loader = arachne.HeteroLoader(data(), 6, sharing=Even())
    model = arachne.HeteroDDP(build(Case()), loader=loader)
    try:
        for step, batch in enumerate(loader):
            if rank == 1 and step == 1 and where == "forward":
                model.module.last.register_forward_pre_hook(out_of_memory)
            if rank == 1 and step == 1 and where == "backward":
                fail_in_backward(model)
            try:
                penalised(model, batch).backward()
            except torch.OutOfMemoryError:
                continue  # as careless scripts do
    except WorkerFailedError as error:
        return str(error), error.rank
    return "", None


class Even(Wild):
    def __init__(self):
        super().__init__(3)

    def shares(self, global_batch):
        return (2, 2, 2) if global_batch == 6 else (global_batch, 0, 0)


def out_of_memory(*_):
    raise torch.OutOfMemoryError("by hand")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_the_third_line_every_rank_ends_with_a_clear_error(where):
    for text, rank in run_ranks(3, without_the_third_line, where):
        assert rank == 1
        assert "rank 1 ran out of memory with 2 samples; put the body" in text


def test_a_cap_is_learnt_from_peaks_of_different_batches():
    peaks = iter([10, 900, 140, 180, 180])  # the first two do not count; 100 + 10 a row
    watch = MemoryWatch(peak=lambda: next(peaks), limit=1000)
    for rows in (4, 4, 4, 8):
        assert watch.cap() is None
        watch.observe(rows)
    assert watch.cap() == 80
    watch.observe(8)
    assert (fitting_rows(200, watch), fitting_rows(8, watch), fitting_rows(1, watch)) == (80, 6, 0)


def narrow():
    """The second rank's memory holds two samples."""
    loader = arachne.HeteroLoader(data(60), 6, sharing=Wild(2, 2))
    model = arachne.HeteroDDP(build(Case()), loader=loader)
    if torch.distributed.get_rank():
        model._reducer.memory = MemoryWatch(lambda: loader.num_rows, limit=3)
    shares = []
    for batch in loader:
        shares.append(loader.shares[1])
        penalised(model, batch).backward()
    return shares


def test_shares_keep_to_a_cap_that_a_rank_has_learnt():
    first, second = run_ranks(2, narrow)
    assert first == second
    assert max(first[:5]) > 2
    assert max(first[-3:]) <= 2


def in_rounds():
    """Samples of readings, and the shares of the last round of each step."""
    sharing = Wild(2, 3, (2, 2))
    loader = arachne.HeteroLoader(data(30), 6, sharing=sharing)
    model = arachne.HeteroDDP(build(Case()), loader=loader)
    optimizer, last = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in loader:
        with loader.step(optimizer):
            penalised(model, batch).backward()
            optimizer.step()
        last = [*last[: loader.link.turn.step], loader.shares]
    return [tuple(one.samples for one in readings) for readings in sharing.seen], last


def test_a_reading_of_a_step_in_rounds_is_of_the_last_one():
    for seen, last in run_ranks(2, in_rounds):
        assert len(seen) >= 3
        assert seen == last[len(last) - len(seen) - 1 : -1]


SCRIPT = """
import sys, torch, torch.distributed as dist
import arachne_runtime as arachne
from torch.utils.data import TensorDataset
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = arachne.HeteroDDP(torch.nn.Linear(3, 1))
for step, (x,) in enumerate(arachne.HeteroLoader(TensorDataset(torch.ones(12, 3)), 4)):
    loss = model(x).mean()
    if rank and step == 1:
        raise torch.OutOfMemoryError("by hand")
    loss.backward()
"""


def test_a_script_that_ends_by_it_tells_the_others_why(tmp_path):
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=110)[1] for rank in ranks]
    assert "WorkerFailedError: rank 1 ran out of memory with 2 samples" in told[0]
    assert "OutOfMemoryError: by hand" in told[1]
    assert all(rank.returncode for rank in ranks)
