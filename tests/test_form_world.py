"""Ranks of which some failed to form a generation meet in the next one."""

import pytest
import torch
import torch.distributed as dist

from arachne_runtime.membership.watch import form_world, leave_world
from arachne_runtime.testing import run_ranks


def meet_after_a_failure(path: str) -> float:
    """Only rank 0 tries generation 1, in vain; both form generation 2."""
    rank = dist.get_rank()
    leave_world()
    store = dist.FileStore(path, 2)
    if rank == 0:
        with pytest.raises(RuntimeError):
            form_world(store, 1, 0, 2, form_s=0.2, timeout_s=10)
        leave_world()
    form_world(store, 2, rank, 2, form_s=5, timeout_s=10)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_rank_that_failed_to_form_a_generation_meets_the_others_in_the_next(tmp_path):
    assert run_ranks(2, meet_after_a_failure, str(tmp_path / "store")) == [2.0, 2.0]
