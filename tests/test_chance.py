"""What a dataset draws for a sample is the same on every rank, under every plan, with or without workers."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from arachne_runtime.data import GlobalOrder, LoaderSettings, load_steps
from arachne_runtime.errors import UsageError


class Crops(Dataset):
    """Each sample with a draw of each generator that people use."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index, torch.rand(()).item(), random.random(), np.random.rand()


class ManyAtOnce(Crops):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def loaded(rows, *, seed=0, epochs=1, dataset=None, **settings):
    """By (epoch, sample): what was drawn for it on a rank that loads these rows of each batch."""
    order = GlobalOrder(num_samples=6, global_batch=3, seed=seed)
    keep = LoaderSettings(collate_fn=list, **settings)
    steps = load_steps(dataset or Crops(), order, range(2 * epochs), lambda num_rows: rows, keep)
    return {
        (step // 2, sample): tuple(drawn)
        for step, batch in enumerate(steps)
        for _, samples in batch.pieces
        for sample, *drawn in samples
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_is_the_same_whoever_loads_it_and_with_whatever_others(workers):
    whole = loaded((range(3),))
    assert len(set(whole.values())) == 6
    for rows in ((range(1), range(1, 3)), (range(2, 3),)):
        torch.manual_seed(len(rows))
        part = loaded(rows, num_workers=workers)
        assert part == {place: whole[place] for place in part}
    assert loaded((range(3),)) == whole


def test_draws_differ_by_epoch_and_seed():
    found = loaded((range(3),), epochs=2)
    assert len(set(found.values())) == 12
    assert not set(found.values()) & set(loaded((range(3),), seed=1).values())


def test_the_scripts_random_states_are_left_alone():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loaded((range(3),))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


class OwnGenerator(Crops):
    """Draws from a generator that nobody seeds by sample, now and then."""

    def __init__(self, kind):
        self.generator = torch.Generator() if kind == "torch" else np.random.default_rng(0)

    def __getitem__(self, index):
        if isinstance(self.generator, torch.Generator):
            drawn = torch.rand(2, generator=self.generator)
        else:
            drawn = self.generator.random(2)
        return index, {"crop": [drawn if index % 2 else 0.0, float("nan"), "name", None]}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_dataset_with_a_generator_of_its_own_is_refused_unless_that_is_waived(kind):
    rows = (range(3),)
    with pytest.raises(UsageError, match=r"of OwnGenerator differs when it is read again.*stochastic=True"):
        loaded(rows, dataset=OwnGenerator(kind), epochs=3)
    assert loaded(rows, dataset=OwnGenerator(kind), exact=False)


def masking(samples):
    return [sample for sample in samples if torch.rand(()) < 2]


def test_a_collate_function_that_draws_is_refused():
    order = GlobalOrder(num_samples=6, global_batch=3)
    steps = load_steps(Crops(), order, range(1), lambda n: (range(n),), LoaderSettings(collate_fn=masking))
    with pytest.raises(UsageError, match=r"collate_fn draws random numbers.*__getitem__"):
        next(steps)


def test_a_dataset_that_loads_many_at_once_does_so_without_draws():
    with pytest.raises(UsageError, match="__getitems__ draws random numbers"):
        loaded((range(3),), dataset=ManyAtOnce())
    torch.manual_seed(0)

    class Plain(ManyAtOnce):
        def __getitem__(self, index):
            return index, index

    assert loaded((range(3),), dataset=Plain()) == {(0, index): (index,) for index in range(6)}
