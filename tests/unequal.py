"""Ranks that train with HeteroDDP and random shares, and one process on the same global batches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import arachne_runtime as arachne
from arachne_runtime.data.order import GlobalOrder
from arachne_runtime.data_parallel import bucket

ROWS, WIDTH, KINDS = 22, 6, 3


class Wild:
    """Shares at random, with ranks that take nothing; alike on every rank."""

    def __init__(self, num_ranks: int, seed: int = 0, caps: tuple[int | None, ...] | None = None) -> None:
        self._chance = random.Random(seed)
        self.caps = caps or (None,) * num_ranks
        self.seen: list[Any] = []

    def observe(self, readings) -> None:
        self.seen.append(readings)

    def shares(self, global_batch: int) -> tuple[int, ...]:
        caps = [global_batch if cap is None else cap for cap in self.caps]
        found = [0] * len(caps)
        while sum(found) < global_batch:
            rank = self._chance.choice([r for r, cap in enumerate(caps) if found[r] < cap])
            found[rank] += self._chance.randint(1, min(caps[rank] - found[rank], global_batch - sum(found)))
        return tuple(found)

    def limit(self, replica: int, cap: int) -> None:
        caps = list(self.caps)
        caps[replica] = cap
        self.caps = tuple(caps)


class Net(nn.Module):
    """(B, WIDTH) → (B, KINDS); a part is used by some batches only, and one by none."""

    def __init__(self, *, normed: bool = False, sometimes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.last = nn.Linear(8, KINDS)
        self.sometimes = nn.Linear(8, KINDS) if sometimes else None
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x_BW: Tensor) -> Tensor:
        hidden_BH = torch.tanh(self.norm(self.first(x_BW)))
        out_BK = self.last(hidden_BH)
        if self.sometimes is not None and bool(x_BW[0, 0] > 0):
            out_BK = out_BK + 0 * self.sometimes(hidden_BH)
        return out_BK


def data(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(KINDS, (rows,), generator=generator))


def penalised(model: nn.Module, batch: Any) -> Tensor:
    """A mean over samples, and a term of the parameters alone."""
    inner = getattr(model, "module", model)
    decay = sum(p.square().sum() for p in inner.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * decay


def items(batch: Any) -> int:
    """As if each sample had as many tokens as its kind says, and one more."""
    return int((batch[1] + 1).sum())


def by_item(model: nn.Module, batch: Any) -> Tensor:
    """Mean over the items of a batch."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none") * (batch[1] + 1)
    return losses.sum() / max(items(batch), 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    loss: Callable[[nn.Module, Any], Tensor] = penalised
    global_batch: int = 5
    epochs: int = 2
    accumulate: int = 1
    """Batches between updates, by ``no_sync``."""
    keep: bool = False
    """Add up gradients between updates without ``no_sync``."""
    clip: float | None = None
    by_items: bool = False
    set_to_none: bool = True
    adam: bool = False
    in_steps: bool = False
    caps: tuple[int | None, ...] | None = None
    seed: int = 0
    tiny: bool = False
    """Buckets of one parameter each."""
    fail: tuple[int, int, str] | None = None
    """A rank that runs out of memory, from which of its batches on, and where."""
    host_waits: bool = True
    """For gradients, as gloo makes it; else words travel on their own."""
    net: dict[str, bool] = field(default_factory=dict)


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return arachne.convert_batch_norm(Net(**case.net).double())


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    return (
        torch.optim.AdamW(model.parameters(), 0.01) if case.adam else torch.optim.SGD(model.parameters(), 0.1)
    )


def update(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if case.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=case.set_to_none)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in getattr(model, "module", model).state_dict().items()}


def train_alone(case: Case) -> dict[str, Tensor]:
    model, dataset = build(case), data()
    optimizer = optimizer_of(case, model)
    order = GlobalOrder(num_samples=len(dataset), global_batch=case.global_batch)
    for step in range(case.epochs * order.steps_per_epoch):
        batch = default_collate([dataset[i] for i in order.samples(step, range(order.num_rows(step)))])
        (case.loss(model, batch) / case.accumulate).backward()
        if (step + 1) % case.accumulate == 0:
            update(case, model, optimizer)
    return values(model)


@contextmanager
def buckets_of(case: Case) -> Iterator[None]:
    sizes = bucket.FIRST_BYTES, bucket.BUCKET_BYTES
    if case.tiny:
        bucket.FIRST_BYTES = bucket.BUCKET_BYTES = 1
    try:
        yield
    finally:
        bucket.FIRST_BYTES, bucket.BUCKET_BYTES = sizes


def fail_in_backward(model: nn.Module) -> None:
    """When half of the gradients are there."""

    def fail(_: Tensor) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("by hand")

    handle = model.module.first.bias.register_hook(fail)


def fail_at_the_end(model: nn.Module) -> None:
    """When all gradients are there, and all hooks of HeteroDDP have run."""
    left = list(model.parameters())

    def fail(parameter: Tensor) -> None:
        left[:] = [one for one in left if one is not parameter]
        if not left:
            for handle in handles:
                handle.remove()
            raise torch.OutOfMemoryError("by hand")

    handles = [one.register_post_accumulate_grad_hook(fail) for one in left]


def train_on_ranks(case: Case) -> dict[str, Tensor]:
    with buckets_of(case):
        return _train_on_ranks(case)


def _train_on_ranks(case: Case) -> dict[str, Tensor]:
    num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed(rank)
    loader = arachne.HeteroLoader(
        data(),
        case.global_batch,
        sharing=Wild(num_ranks, case.seed, case.caps),
        num_items=items if case.by_items else None,
    )
    assert loader.link.peers.host_waits
    loader.link.peers = replace(loader.link.peers, host_waits=case.host_waits)
    model = arachne.HeteroDDP(build(case), loader=loader)
    optimizer = optimizer_of(case, model)
    step, awaited = 0, case.fail
    for _ in range(case.epochs):
        for batch in loader:
            step += 1
            fails = None
            if awaited and awaited[0] == rank and step >= awaited[1] and loader.num_rows > 1:
                fails, awaited = awaited[2], None
            due = step % case.accumulate == 0
            with loader.step(optimizer) if case.in_steps else nullcontext():
                if fails == "forward":
                    model(batch[0])
                    raise torch.OutOfMemoryError("by hand")
                if fails == "backward":
                    fail_in_backward(model)
                if fails == "end":
                    fail_at_the_end(model)
                with nullcontext() if due or case.keep else model.no_sync():
                    (case.loss(model, batch) / case.accumulate).backward()
                if due:
                    update(case, model, optimizer)
    assert awaited is None or awaited[0] != rank
    return values(model)


def gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
