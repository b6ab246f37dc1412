"""What users of DistributedDataParallel get wrong with HeteroDDP: told, or right all the same."""

import os
import warnings
from itertools import islice
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, default_collate, random_split

import arachne_runtime as arachne
from arachne_runtime.data.order import GlobalOrder
from arachne_runtime.errors import UsageError
from arachne_runtime.testing import run_ranks
from tests.unequal import Case, Net, Wild, build, data


def backward(model, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def train(model, loader, optimizer):
    for batch in loader:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def of_ddp():
    for options, told in [
        ({"device_ids": [0]}, "no device_ids.*move the module"),
        ({"find_unused_parameters": True}, "no find_unused_parameters.*leave it out"),
        ({"loader": [0]}, "loader is a list"),
        ({"loader": torch.optim.SGD(build(Case()).parameters(), 0.1)}, "loader is a SGD"),
    ]:
        with pytest.raises(UsageError, match=told):
            arachne.HeteroDDP(build(Case()), **options)


def of_loaders():
    dataset = data()
    for arguments, options, told in [
        ((), {"batch_size": 6}, "no batch_size.*global_batch"),
        ((DistributedSampler(dataset, 2, 0),), {}, "global_batch is a DistributedSampler"),
        ((6.0,), {}, "global_batch is a float"),
        ((), {}, "global_batch is missing"),
    ]:
        with pytest.raises(UsageError, match=told):
            arachne.HeteroLoader(dataset, *arguments, **options)
    with pytest.raises(UsageError, match="give it the dataset"):
        arachne.HeteroLoader(DataLoader(dataset, 3), 6)
    loader = arachne.HeteroLoader(dataset, 6)
    assert loader.dataset is dataset
    with pytest.raises(AttributeError, match=r"loader.set_epoch"):
        loader.sampler.set_epoch(1)
    with pytest.raises(AttributeError, match="global_batch"):
        loader.batch_size  # noqa: B018
    assert not hasattr(loader, "anything")


def test_arguments_of_the_classes_that_it_stands_for_are_refused():
    run_ranks(1, of_ddp)
    run_ranks(1, of_loaders)


def test_what_is_made_before_ranks_have_met_is_refused():
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"}):
        with pytest.raises(UsageError, match="init_process_group"):
            arachne.HeteroDDP(build(Case()))
        with pytest.raises(UsageError, match="init_process_group"):
            arachne.HeteroLoader(data(), 6)


def late():
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        model, loader = arachne.HeteroDDP(build(Case())), arachne.HeteroLoader(data(), 6)
    with pytest.raises(UsageError, match="init_process_group"):
        next(iter(loader))
    with pytest.raises(UsageError, match="init_process_group"):
        model(data()[0][0])


def test_ranks_that_meet_afterwards_are_refused_where_no_launcher_told():
    run_ranks(2, late)


def changed():
    new = build(Case())
    state = {name: value.clone() for name, value in new.state_dict().items()}
    for change in (
        lambda inner: inner.load_state_dict(state, assign=True),
        lambda inner: setattr(inner, "last", new.last),
        lambda inner: inner.float(),
    ):
        model = arachne.HeteroDDP(build(Case()))
        change(model.module)
        with pytest.raises(UsageError, match="since it was wrapped"):
            model(torch.ones(2, 6, dtype=next(model.parameters()).dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of local norms
        model = arachne.HeteroDDP(Net(normed=True))
    arachne.convert_batch_norm(model)
    with pytest.raises(UsageError, match="since it was wrapped"):
        model(torch.ones(2, 6))


def test_a_module_that_changed_after_it_was_wrapped_is_refused():
    run_ranks(2, changed)


def loaded_on_one():
    model = arachne.HeteroDDP(build(Case()))
    loader = arachne.HeteroLoader(data(), 6)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module.last.weight.add_(1)
    with pytest.raises(UsageError, match="parameters of rank 1 are not those of rank 0"):
        backward(model, next(iter(loader)))


def test_values_that_one_rank_alone_has_loaded_are_refused():
    run_ranks(2, loaded_on_one)


def resumed():
    loader = arachne.HeteroLoader(data(), 6, shuffle=False)
    first = [batch[0] for batch in islice(loader, 2)]
    again = arachne.HeteroLoader(data(), 6, shuffle=False)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(0)  # as scripts do at the top of each epoch
    rest = [batch[0] for batch in again]
    assert len(first) + len(rest) == len(loader)
    again.set_epoch(0)
    assert len(list(again)) == len(loader)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(1)
    assert len(list(again)) == len(loader)
    with pytest.raises(UsageError, match=r"no state of a HeteroLoader.*position"):
        again.load_state_dict({"epoch": 1})


def test_set_epoch_leaves_the_place_in_an_epoch_that_was_loaded():
    run_ranks(1, resumed)


def unlike():
    rank, dataset = dist.get_rank(), data()
    torch.manual_seed(rank)
    for mine in (Subset(dataset, range(rank, len(dataset), 2)), random_split(dataset, [11, 11])[0]):
        with pytest.raises(UsageError, match="differ in the dataset"):
            next(iter(arachne.HeteroLoader(mine, 6)))
    next(iter(arachne.HeteroLoader(Subset(dataset, range(11)), 6)))


def test_datasets_that_each_rank_has_cut_for_itself_are_refused():
    run_ranks(2, unlike)


UNTRAINED = "no HeteroDDP model"


def untrained(kind):
    """Of the two lines only one was changed."""
    loader = arachne.HeteroLoader(data(), 6)
    model = Net().double()
    model.never.requires_grad = False
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "listed":
        model = arachne.HeteroDDP(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(model, list(loader) if kind == "listed" else loader, torch.optim.SGD(model.parameters(), 0.1))
    return [str(one.message) for one in told]


@pytest.mark.parametrize("kind", ["bare", "ddp", "listed"])
def test_batches_that_train_no_heteroddp_model_are_told_once(kind):
    first, second = run_ranks(2, untrained, kind)
    assert sum(UNTRAINED in text for text in first) == 1
    assert not any(UNTRAINED in text for text in second)


def looked_at():
    """Nothing is told of evaluations, of accumulation, of rounds and of a second epoch."""
    with warnings.catch_warnings():  # pytest's filter does not come to the ranks, which serve other tests too
        warnings.simplefilter("error")
        look()


def look():
    loader, other = (arachne.HeteroLoader(data(), 6) for _ in range(2))
    model = arachne.HeteroDDP(build(Case()))
    with torch.no_grad():
        list(other)
    for number, batch in enumerate(loader):
        if number % 2:
            backward(model, batch)
        else:
            with model.no_sync():
                backward(model, batch)
        arachne.evaluate(model, other, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    train(model, loader, torch.optim.SGD(model.parameters(), 0.1))


def test_what_is_right_is_not_warned_of():
    run_ranks(2, looked_at)


def dropped():
    """A sum of gradients that the script gave up before it was sent."""
    loader = arachne.HeteroLoader(data(), 5, sharing=Wild(2, 3))
    model = arachne.HeteroDDP(build(Case()), loader=loader)
    for number, batch in enumerate(loader):
        if number == 1:
            backward(model, batch)
            return loader.shares, model.module.last.weight.grad.clone()
        with model.no_sync():
            (100 * F.cross_entropy(model(batch[0]), batch[1])).backward()
        model.zero_grad()
    raise AssertionError


def test_gradients_that_were_given_up_leave_nothing_behind():
    model, order = build(Case()), GlobalOrder(num_samples=22, global_batch=5)
    backward(model, default_collate([data()[i] for i in order.samples(1, range(5))]))
    for shares, found in run_ranks(2, dropped):
        assert min(shares) > 0
        torch.testing.assert_close(found, model.last.weight.grad, rtol=1e-12, atol=0)


def peeked():
    """A batch for its shapes, as scripts take it, is in their hands until the next iteration begins."""
    loader, other = (arachne.HeteroLoader(data(), 6) for _ in range(2))
    next(iter(loader))
    assert loader.num_rows == 6
    for _ in loader:
        list(other)
        assert loader.num_rows > 0
    assert loader.num_rows == 0


def test_a_batch_that_was_looked_at_does_not_come_back_behind_the_epoch():
    run_ranks(1, peeked)
