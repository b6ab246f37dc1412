"""ZeRO-1: states that DeepSpeed splits over the replicas of a stage train like whole ones."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from arachne_runtime.backends.split_states import SplitStates
from arachne_runtime.errors import WorkerFailedError
from arachne_runtime.testing import run_ranks

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
}


def parameters(dtype):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((7, 3), (3,), (1,), (2, 5), (4,))]


def stepped(optimizer, dtype, idle, groups):
    """Largest distance from one whole optimizer after each step, and bytes of both optimizers' states."""
    mine, plain = parameters(dtype), parameters(dtype)
    make = OPTIMIZERS[optimizer]
    split = [list(s) for s in groups] if groups else [range(len(mine))]
    whole = make([{"params": [plain[i] for i in s]} for s in split])
    group = dist.new_group(list(range(dist.get_world_size())))
    backend = SplitStates.of(
        [(f"blocks.{i}.weight", p) for i, p in enumerate(mine)],
        make([{"params": [mine[i] for i in s]} for s in split]),
        group,
        CPU,
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (whole, backend.optimizer)]
    random, gaps = torch.Generator().manual_seed(1), []
    for step in range(4):
        for i, (a, b) in enumerate(zip(mine, plain, strict=True)):
            gradient = torch.randn(a.shape, generator=random, dtype=dtype)
            a.grad, b.grad = (None, None) if step in idle.get(i, ()) else (gradient.clone(), gradient.clone())
        seen = [p.grad for p in mine]
        backend.step()
        whole.step()
        assert all(p.grad is g for p, g in zip(mine, seen, strict=True))
        for schedule in schedules:
            schedule.step()
        gaps.append(max((a - b).abs().max().item() for a, b in zip(mine, plain, strict=True)))
    backend.close()
    return gaps, state_bytes(backend.optimizer), state_bytes(whole)


def state_bytes(optimizer):
    return sum(v.nbytes for s in optimizer.state.values() for v in s.values() if v.numel() > 1)


def all_stepped(idle, groups):
    dtypes = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 0.05}
    return [
        (name, dtype, bound, *stepped(name, dtype, idle, groups))
        for name in OPTIMIZERS
        for dtype, bound in dtypes.items()
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("groups", [None, ((0, 3), (), (1, 2, 4))])
def test_split_states_step_like_whole_ones(num_ranks, groups):
    for found in run_ranks(num_ranks, all_stepped, {}, groups):
        for name, dtype, bound, gaps, mine, whole in found:
            assert max(gaps) <= bound, (name, dtype)
            # DeepSpeed pads each parameter group to two elements a rank
            assert mine <= whole / num_ranks + 3 * 2 * 2 * dtype.itemsize * 3


def test_a_parameter_that_is_never_used_stays_as_it_is():
    for found in run_ranks(3, all_stepped, {2: range(4), 4: range(4)}, None):
        for name, dtype, bound, gaps, _, _ in found:
            assert max(gaps) <= bound, (name, dtype)


def test_a_parameter_that_is_used_now_and_then_trains_where_steps_are_not_counted():
    for gaps, _, _ in run_ranks(2, stepped, "momentum", torch.float64, {0: (1,), 3: (0, 2)}, None):
        assert max(gaps) <= 1e-15


@pytest.mark.parametrize("idle", [{0: (1,)}, {3: (0,)}])
def test_a_parameter_that_is_used_now_and_then_is_refused_where_steps_are_counted(idle):
    with pytest.raises(WorkerFailedError, match=r"blocks.\d.weight has a gradient in step \d, but had none"):
        run_ranks(2, stepped, "adamw", torch.float64, idle, None)


def adagrad():
    named = [("a", nn.Parameter(torch.zeros(3)))]
    SplitStates.of(named, torch.optim.Adagrad([p for _, p in named]), dist.group.WORLD, CPU)


def test_states_from_before_the_first_step_are_refused():
    with pytest.raises(WorkerFailedError, match="Adagrad makes its states before the first step"):
        run_ranks(2, adagrad)


def mixed_dtypes():
    named = [("a", nn.Parameter(torch.zeros(3))), ("b", nn.Parameter(torch.zeros(3, dtype=torch.float64)))]
    SplitStates.of(named, torch.optim.SGD([p for _, p in named]), dist.group.WORLD, CPU)


def test_several_dtypes_in_a_parameter_group_are_refused():
    with pytest.raises(WorkerFailedError, match=r"group 0 .* holds torch.float32, torch.float64"):
        run_ranks(2, mixed_dtypes)


def split_of(group):
    named = [("a", nn.Parameter(torch.ones(4)))]
    return SplitStates.of(named, torch.optim.SGD([p for _, p in named], lr=0.1), group, CPU)


def seen_by_deepspeed():
    """The ranks that DeepSpeed takes for holders of the same, and the variable with its device."""
    from deepspeed.utils import groups

    held = groups.mpu and groups.mpu.get_data_parallel_group()
    return held and dist.get_process_group_ranks(held), os.environ.get("LOCAL_RANK")


def one_beside_another(first_to_close):
    """A change of plan makes the new optimizer beside the old one, of which either may go."""
    os.environ["LOCAL_RANK"] = "7"
    both = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    seen = [seen_by_deepspeed()]
    open_ones = []
    for group in (both, alone):
        open_ones.append(split_of(group))
        seen.append(seen_by_deepspeed())
    for number in (first_to_close, 1 - first_to_close):
        open_ones[number].close()
        seen.append(seen_by_deepspeed())
    del os.environ["LOCAL_RANK"]
    return seen


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_of_two_optimizers_deepspeed_goes_by_the_one_that_stays(first_to_close):
    found = run_ranks(2, one_beside_another, first_to_close)
    for rank, (before, first, second, left, after) in enumerate(found):
        assert before == after == (None, "7")
        assert first == ([0, 1], "0")
        assert second == ([rank], "0")
        assert left == (first if first_to_close else second)
