"""The commit word: every rank hears in the same step that ranks differ."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from arachne_runtime.engine.agreement import added, committed
from arachne_runtime.errors import DisagreementError
from arachne_runtime.measure.recorder import Silence
from arachne_runtime.testing import run_ranks

ALIKE = (7, 64, 3_000_000_000, 4_000_000_000)
"""Step, rows, settings, samples."""


def told(apart, spread, wishing=None, word="commit"):
    """What this rank hears where number ``apart`` of rank r is more by ``spread * r``; one has a wish."""
    rank = dist.get_rank()
    mesh = SimpleNamespace(rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))
    same = tuple(number + spread * rank * (k == apart) for k, number in enumerate(ALIKE))
    try:
        if word == "commit":
            return committed((0.5, 2.0, 0.25, rank == wishing), same, mesh, Silence())
        return added((0.5, 2.0, 0.25), same, mesh)
    except DisagreementError as error:
        return str(error)


@pytest.mark.parametrize(
    ("apart", "words"),
    [(0, "is in step"), (1, "rows"), (2, "the engines of the ranks differ"), (3, "different samples")],
)
@pytest.mark.parametrize("word", ["commit", "figures"])
def test_a_rank_in_the_middle_hears_it_too(apart, words, word):
    """Of three ranks the second has the mean of all."""
    assert all(words in answer for answer in run_ranks(3, told, apart, 5, None, word))


def test_ranks_alike_get_the_sums():
    assert run_ranks(3, told, 0, 0) == [(1.5, 6.0, 0.75, False)] * 3
    assert run_ranks(3, told, 0, 0, None, "figures") == [(1.5, 6.0, 0.75)] * 3


@pytest.mark.parametrize("wishing", [0, 2])
def test_all_ranks_hear_in_the_same_step_that_one_wants_another_plan(wishing):
    assert [wanted for *_, wanted in run_ranks(3, told, 0, 0, wishing)] == [True] * 3
