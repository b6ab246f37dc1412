"""The harness that runs ranks: results, failures, hangs."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from arachne_runtime.errors import UsageError, WorkerFailedError
from arachne_runtime.testing import run_ranks


def rank_and_sum(value):
    total = torch.tensor([float(dist.get_rank() + value)])
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("the third block is empty")
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_on(rank):
    while dist.get_rank() == rank:
        time.sleep(0.05)


def process_id():
    return os.getpid(), torch.get_num_threads()


def test_results_come_by_rank_and_the_group_is_real():
    results = run_ranks(3, rank_and_sum, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 33 for _, total in results)


def test_processes_are_kept_and_have_one_thread():
    first, second = run_ranks(2, process_id), run_ranks(2, process_id)
    assert first == second
    assert {threads for _, threads in first} == {1}


def test_a_failing_rank_is_named_with_its_traceback():
    with pytest.raises(WorkerFailedError, match=r"^rank 1: ValueError: the third block is empty\n") as caught:
        run_ranks(3, fail_on, 1)
    assert "in fail_on" in str(caught.value)
    assert len(run_ranks(3, rank_and_sum, 0)) == 3


def test_a_dead_rank_is_named_and_replaced():
    before = run_ranks(2, process_id)
    with pytest.raises(WorkerFailedError, match="rank 0: the process died with exit code 7"):
        run_ranks(2, die_on, 0)
    after = run_ranks(2, process_id)
    assert after[0] != before[0]


def test_a_hang_ends_in_bounded_time_and_says_where():
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"(?s)rank \[1\] did not finish within 4 s.*in hang_on"):
        run_ranks(2, hang_on, 1, timeout_s=4)
    assert time.monotonic() - start < 20
    assert len(run_ranks(2, rank_and_sum, 0)) == 2


def test_a_function_that_cannot_travel_is_refused():
    with pytest.raises(UsageError, match="define it at module level"):
        run_ranks(1, lambda: None)


def test_ranks_end_with_the_process_that_started_them():
    script = (
        "import os; from arachne_runtime.testing import run_ranks\n"
        "if __name__ == '__main__': print(*run_ranks(2, os.getpid))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert ended.stderr == ""
    for pid in ended.stdout.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
