"""One global order: every sample once an epoch, whatever the plan, and each rank loads only its rows."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, TensorDataset

from arachne_runtime.data import GlobalOrder, LoaderSettings, as_step_batch, default_inputs, load_steps
from arachne_runtime.data.batch import join_rows, take_rows
from arachne_runtime.data.loader import NeededRows, num_samples_of
from arachne_runtime.errors import ModelError, UsageError
from arachne_runtime.plan.placement import Place, holding, places
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.rows import micro_batch_rows, replica_rows
from tests.strategies import plans


class Numbers(Dataset[torch.Tensor]):
    """Sample ``i`` is the number ``i``; remembers what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor(index)


def first_stage_rows(plan: Plan, place: Place) -> NeededRows:
    """Rows whose inputs the rank at ``place`` feeds; none behind the first stage."""

    def needed(num_rows: int) -> Sequence[range]:
        if place.stage:
            return ()
        _, stage, _ = holding(plan, place)
        rows = micro_batch_rows(plan, num_rows)[place.pipeline]
        return tuple(replica_rows(stage, part)[place.replica] for part in rows)

    return needed


def loaded_by(
    dataset: Dataset[torch.Tensor], order: GlobalOrder, steps: range, needed: NeededRows, **kwargs: int
):
    """For each step: (row of the global batch, sample) of what one rank loads."""
    for batch in load_steps(dataset, order, steps, needed, LoaderSettings(**kwargs)):
        pieces = [(rows, batch.rows(rows)) for rows in needed(batch.num_rows) if rows]
        yield [(row, int(x)) for rows, tree in pieces for row, x in zip(rows, tree, strict=True)]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ranks_together_load_every_sample_once_in_the_global_order(data: st.DataObject) -> None:
    plan = data.draw(plans())
    order = GlobalOrder(num_samples=data.draw(st.integers(1, 40)), global_batch=plan.global_batch, seed=3)
    steps = range(2 * order.steps_per_epoch)
    by_step: list[list[tuple[int, int]]] = [[] for _ in steps]
    for place in places(plan):
        if place.tp_rank == 0:
            loaded = loaded_by(Numbers(order.num_samples), order, steps, first_stage_rows(plan, place))
            for step, rows in zip(steps, loaded, strict=True):
                by_step[step] += rows
    for step, rows in zip(steps, by_step, strict=True):
        assert sorted(rows) == list(enumerate(order.samples(step, range(order.num_rows(step)))))
    for epoch in range(2):
        one = by_step[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]
        assert sorted(sample for rows in one for _, sample in rows) == list(range(order.num_samples))


def test_order_is_that_of_torchs_distributed_sampler() -> None:
    """So a script that moves from DistributedDataParallel keeps its global batches."""
    order = GlobalOrder(num_samples=12, global_batch=4, seed=5)
    for epoch in (0, 1):
        ranks = [DistributedSampler(Numbers(12), 2, rank, seed=5) for rank in (0, 1)]
        for sampler in ranks:
            sampler.set_epoch(epoch)
        theirs = [index for pair in zip(*ranks, strict=True) for index in pair]
        ours = [index for step in range(3) for index in order.samples(3 * epoch + step, range(4))]
        assert ours == theirs


def test_the_last_batch_of_an_epoch_may_be_short() -> None:
    order = GlobalOrder(num_samples=10, global_batch=4, seed=5)
    assert [order.num_rows(step) for step in range(4)] == [4, 4, 2, 4]


def test_drop_last_leaves_out_the_short_batch() -> None:
    order = GlobalOrder(num_samples=10, global_batch=4, drop_last=True)
    assert order.steps_per_epoch == 2
    assert [order.num_rows(step) for step in range(3)] == [4, 4, 4]
    with pytest.raises(UsageError, match="drop_last leaves no step: 3 samples, a global batch of 4"):
        GlobalOrder(num_samples=3, global_batch=4, drop_last=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_start_continues_the_same_sequence(workers: int) -> None:
    order = GlobalOrder(num_samples=7, global_batch=3, seed=1)

    def needed(num_rows: int) -> Sequence[range]:
        return (range(1), range(1, num_rows))

    whole = list(loaded_by(Numbers(7), order, range(6), needed))
    rest = list(loaded_by(Numbers(7), order, range(2, 6), needed, num_workers=workers))
    assert rest == whole[2:]


def test_a_rank_reads_only_its_rows_and_not_ahead_of_time() -> None:
    dataset, order = Numbers(6), GlobalOrder(num_samples=6, global_batch=6)
    settings = LoaderSettings(exact=False)  # else some are read twice
    batch = next(load_steps(dataset, order, range(1), lambda n: (range(2, 4),), settings))
    assert dataset.read == order.samples(0, range(2, 4))
    assert batch.num_rows == 6
    with pytest.raises(UsageError, match="rows 1:3 were not loaded on this rank; loaded: 2:4"):
        batch.rows(range(1, 3))


def test_a_part_of_a_loaded_range_can_be_asked_for() -> None:
    order = GlobalOrder(num_samples=6, global_batch=6)
    batch = next(load_steps(Numbers(6), order, range(1), lambda n: (range(1, 5),), LoaderSettings()))
    assert batch.rows(range(2, 4)).tolist() == order.samples(0, range(2, 4))


def test_a_rank_without_rows_takes_the_same_number_of_steps() -> None:
    dataset, order = Numbers(7), GlobalOrder(num_samples=7, global_batch=3)
    batches = list(load_steps(dataset, order, range(3), lambda n: (), LoaderSettings()))
    assert [batch.num_rows for batch in batches] == [3, 3, 1]
    assert dataset.read == []


def test_loading_leaves_the_random_state_of_the_script_alone() -> None:
    order = GlobalOrder(num_samples=6, global_batch=3)
    before = torch.random.get_rng_state()
    list(load_steps(Numbers(6), order, range(2), lambda n: (range(n),), LoaderSettings()))
    assert torch.equal(before, torch.random.get_rng_state())


def test_collate_fn_gets_the_rows_of_one_range() -> None:
    sizes: list[int] = []

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        sizes.append(len(samples))
        return torch.stack(samples)

    order = GlobalOrder(num_samples=5, global_batch=5)
    parts = LoaderSettings(collate_fn=collate)
    list(load_steps(Numbers(5), order, range(1), lambda n: (range(3), range(3, 5)), parts))
    assert sizes == [3, 2]


def test_streams_and_overlapping_ranges_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):
            return iter((1, 2))

    with pytest.raises(UsageError, match="Stream is a stream"):
        num_samples_of(Stream())
    order = GlobalOrder(num_samples=5, global_batch=5)
    with pytest.raises(UsageError, match="rows 0:3 and 2:5 of a batch overlap"):
        list(load_steps(Numbers(5), order, range(1), lambda n: (range(3), range(2, 5)), LoaderSettings()))


def test_whole_batches_are_sliced_by_rows() -> None:
    tree = {
        "x": torch.arange(12).view(6, 2),
        "more": (torch.arange(6), ["a", "b", "c", "d", "e", "f"]),
        "k": 3,
    }
    batch = as_step_batch(tree)
    part = batch.rows(range(1, 3))
    assert batch.num_rows == 6
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert part["more"][0].tolist() == [1, 2]
    assert part["more"][1] == ["b", "c"]
    assert part["k"] == 3
    assert as_step_batch(batch) is batch
    with pytest.raises(UsageError, match="rows 4:7 of a global batch of 6"):
        batch.rows(range(4, 7))


def test_arrays_and_lists_of_lists_have_rows_too() -> None:
    """A list or an array that stayed whole gave every micro-batch the first rows' targets."""
    tree = {
        "x": torch.arange(3),
        "array": np.arange(6).reshape(3, 2),
        "ragged": [[1, 2], [3], []],
        "records": [{"k": 1}, {"k": 2}, {"k": 3}],
        "columns": [("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i")],
        "few": (7, [8, 9]),
    }
    batch = as_step_batch(tree)
    part = batch.rows(range(1, 3))
    assert part["array"].tolist() == [[2, 3], [4, 5]]
    assert part["ragged"] == [[3], []]
    assert part["records"] == [{"k": 2}, {"k": 3}]
    assert part["columns"] == [("b", "c"), ("e", "f"), ("h", "i")]
    assert part["few"] == (7, [8, 9])
    ends = take_rows(tree, (0, 2), 3)
    assert ends["array"].tolist() == [[0, 1], [4, 5]]
    assert ends["records"] == [{"k": 1}, {"k": 3}]
    rows = {name: value for name, value in tree.items() if name not in ("columns", "few")}
    both = join_rows(take_rows(rows, (2,), 3), take_rows(rows, (0,), 3))
    assert both["array"].tolist() == [[4, 5], [0, 1]]
    assert both["ragged"] == [[], [1, 2]]
    assert both["records"] == [{"k": 3}, {"k": 1}]
    with pytest.raises(UsageError, match="a row of one value, or a column of one row"):
        join_rows([[1]], [[2]])
    with pytest.raises(UsageError, match=r"batch\['x'\] has 2, batch\['y'\] has 3"):
        as_step_batch({"x": torch.zeros(2), "y": np.zeros(3)})


def test_batches_without_a_number_of_rows_are_refused() -> None:
    with pytest.raises(UsageError, match=r"batch\['x'\] has 2, batch\['y'\] has 3"):
        as_step_batch({"x": torch.zeros(2), "y": torch.zeros(3)})
    with pytest.raises(UsageError, match="found str"):
        as_step_batch("text")


def test_default_inputs_follow_common_custom() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    for batch in ((x, y), [x, y], {"y": y, "input_ids": x}, {"x": x}, x, TensorDataset(x, y)[0:1]):
        (found,) = default_inputs(batch)
        assert torch.equal(found, x)
    assert default_inputs(((x, y), y)) == (x, y)
    with pytest.raises(ModelError, match=r"a mapping with tokens.*inputs=lambda"):
        default_inputs({"tokens": x})
