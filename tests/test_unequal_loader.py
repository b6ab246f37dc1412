"""HeteroLoader: every sample once for any shares, resumed at the exact sample, on any number of ranks."""

import pickle
import random
from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset

import arachne_runtime as arachne
from arachne_runtime.data.order import GlobalOrder
from arachne_runtime.errors import UsageError
from arachne_runtime.testing import run_ranks
from tests.unequal import Wild

NUM = 23


class Numbers(Dataset):
    """Sample i is (i, a number that it draws)."""

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return index, torch.rand(()).item() + random.random()


def own(loader, batch):
    """The samples of a batch that are this rank's, and what they drew."""
    return list(zip(batch[0].tolist(), batch[1].tolist(), strict=True))[: loader.num_rows]


def make(seed=0, **options):
    return arachne.HeteroLoader(
        Numbers(), 5, sharing=Wild(torch.distributed.get_world_size(), seed), **options
    )


def read(seed, workers):
    loader = make(seed, num_workers=workers)
    state = torch.get_rng_state()
    found = [[own(loader, batch) for batch in loader] for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    return found


def in_steps(by_rank, epoch):
    """Samples of each step, of all ranks."""
    return [
        sorted(chain.from_iterable(parts)) for parts in zip(*(ranks[epoch] for ranks in by_rank), strict=True)
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_once_whatever_the_shares(workers):
    by_rank = run_ranks(3, read, 1, workers, timeout_s=110)  # processes are slow to start where all are busy
    order = GlobalOrder(num_samples=NUM, global_batch=5)
    drawn = []
    for epoch in range(2):
        steps = in_steps(by_rank, epoch)
        wanted = [sorted(order.at(epoch, range(start, min(start + 5, NUM)))) for start in range(0, NUM, 5)]
        assert [[sample for sample, _ in step] for step in steps] == wanted
        drawn.append([value for step in steps for _, value in sorted(step)])
    assert drawn[0] != drawn[1]


def test_what_a_sample_draws_does_not_depend_on_shares():
    three, two = run_ranks(3, read, 1, 0), run_ranks(2, read, 2, 0)
    assert [in_steps(three, epoch) for epoch in range(2)] == [in_steps(two, epoch) for epoch in range(2)]


def stop_and_go(state, stop_at):
    loader = make(4)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for _ in range(2):
        for batch in loader:
            found.append(own(loader, batch))
            if len(found) == stop_at:
                return found, pickle.loads(pickle.dumps(loader.state_dict()))
    return found, loader.state_dict()


@pytest.mark.parametrize("stop_at", [3, 5])
def test_a_run_goes_on_at_the_exact_sample_with_other_ranks(stop_at):
    whole = [found for found, _ in run_ranks(3, stop_and_go, None, None)]
    first = run_ranks(3, stop_and_go, None, stop_at)
    then = [found for found, _ in run_ranks(2, stop_and_go, first[0][1], 10 - stop_at)]
    steps = [sorted(chain.from_iterable(parts)) for parts in zip(*whole, strict=True)]
    again = [sorted(chain.from_iterable(parts)) for parts in zip(*(found for found, _ in first), strict=True)]
    again += [sorted(chain.from_iterable(parts)) for parts in zip(*then, strict=True)]
    assert again == steps


def unlike():
    rank = torch.distributed.get_rank()
    with pytest.raises(UsageError, match="differ in seed: rank 0 has 0, rank 1 has 1"):
        next(iter(arachne.HeteroLoader(Numbers(), 5, seed=rank)))
    with pytest.raises(UsageError, match="the state has seed=3, this loader 0"):
        make().load_state_dict({"epoch": 0, "position": 0, "num_samples": NUM, "seed": 3, "shuffle": 1})
    with pytest.raises(UsageError, match="takes no sampler"):
        arachne.HeteroLoader(Numbers(), 5, sampler=[1])


def test_what_cannot_be_is_refused():
    run_ranks(2, unlike)


def evaluated():
    loader = arachne.HeteroLoader(Numbers(), 5, sharing=Wild(3, 5), shuffle=False)
    model = torch.nn.Linear(1, 1)
    found = arachne.evaluate(model, loader, lambda _, batch: batch[0].double().mean())
    assert model.training
    weighted = arachne.HeteroLoader(Numbers(), 5, sharing=Wild(3, 6), num_items=lambda batch: batch[0].sum())
    return found, arachne.evaluate(
        model, weighted, lambda _, batch: (batch[0].double() ** 2).sum() / max(1, batch[0].sum())
    )


def test_an_evaluation_is_the_mean_over_all_samples_on_every_rank():
    square = sum(i * i for i in range(NUM)) / sum(range(NUM))
    for mean, weighted in run_ranks(3, evaluated):
        assert mean == pytest.approx((NUM - 1) / 2, rel=1e-12)
        assert weighted == pytest.approx(square, rel=1e-12)
