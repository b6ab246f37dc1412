"""Batches are copied one step ahead, in their order, and a dataset may be read unshuffled."""

from collections.abc import Iterator

import pytest
import torch

from arachne_runtime.data import GlobalOrder, LoadedRows, LoaderSettings, load_steps
from arachne_runtime.data.prefetch import CudaLane, one_ahead


class Diary:
    """A lane that notes when copies start and end."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, batch: LoadedRows) -> LoadedRows:
        self.notes.append(f"start {batch.num_rows}")
        return batch

    def finish(self, handle: LoadedRows) -> LoadedRows:
        self.notes.append(f"finish {handle.num_rows}")
        return handle


def batches(count: int) -> Iterator[LoadedRows]:
    return (LoadedRows(number, ()) for number in range(1, count + 1))


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_batch_comes_once_in_its_order(count: int) -> None:
    assert [batch.num_rows for batch in one_ahead(batches(count), Diary())] == list(range(1, count + 1))


def test_the_next_copy_has_started_when_a_batch_is_given_out_and_no_other() -> None:
    lane = Diary()
    seen = [list(lane.notes) for _ in one_ahead(batches(3), lane)]
    assert seen[0] == ["start 1", "start 2", "finish 1"]
    assert seen[1] == [*seen[0], "start 3", "finish 2"]
    assert seen[2] == [*seen[1], "finish 3"]


def test_an_error_of_the_loader_arrives_a_step_early() -> None:
    def failing() -> Iterator[LoadedRows]:
        yield from batches(2)
        raise OSError("the disk is gone")

    found = one_ahead(failing(), Diary())
    assert next(found).num_rows == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)


def test_without_shuffle_samples_come_in_the_order_of_the_dataset() -> None:
    order = GlobalOrder(num_samples=7, global_batch=3, shuffle=False)
    found = [order.samples(step, range(order.num_rows(step))) for step in range(4)]
    assert found == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    assert GlobalOrder(num_samples=7, global_batch=7).samples(0, range(7)) != list(range(7))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: copies to a GPU run only on one")
def test_batches_reach_the_gpu_from_pinned_memory() -> None:
    device, data = torch.device("cuda", 0), torch.arange(12.0).view(12, 1)
    order = GlobalOrder(num_samples=12, global_batch=4, shuffle=False)
    loaded = load_steps(data, order, range(3), lambda n: (range(n),), LoaderSettings(pin_memory=True))
    found = [batch.rows(range(4)) for batch in one_ahead(loaded, CudaLane(device))]
    assert {tensor.device for tensor in found} == {device}
    assert torch.cat(found).flatten().tolist() == list(range(12))
