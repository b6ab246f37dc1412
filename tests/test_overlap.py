"""Communication runs beside computing: sums start during the last backward, receives are posted ahead."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.gradients import Gradients
from arachne_runtime.mesh import GlooTransport
from arachne_runtime.model import ModelParts
from arachne_runtime.plan import order
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks

MICRO_BATCHES = 4


def wide():
    """Two stages of two blocks, two replicas each."""
    stages = tuple(
        Stage(layers=layers, replicas=tuple(Replica(devices=(f"n:{2 * s + r}",), share=1) for r in (0, 1)))
        for s, layers in enumerate(((0, 2), (2, 4)))
    )
    pipeline = Pipeline(micro_batches=MICRO_BATCHES, micro_batch=2, stages=stages)
    return Plan(model="m", global_batch=2 * MICRO_BATCHES, sequence=1, pipelines=(pipeline,))


def happenings(options):
    """What happened on this rank in its fourth step, in order: starts of sums, posts, blocks' passes."""
    seen = []

    started, received = Gradients.start, GlooTransport.receive

    def start(self, reduction):
        found = started(self, reduction)
        if found:
            seen.append(("sum", reduction.name))
        return found

    def receive(self, tensor, sender, tag):
        if tag:  # 0 is a header's
            seen.append(("receive", sender))
        return received(self, tensor, sender, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "REDUCTION_BYTES", 1)  # each block is summed on its own
        patch.setattr(Gradients, "start", start)
        patch.setattr(GlooTransport, "receive", receive)
        engine = Engine(
            wide(),
            ModelParts.of(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))),
            Recipe(
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                loss=lambda output, batch: (output - batch[1]).square().mean(),
            ),
            **options,
        )
        (stage,) = engine.stages
        for block in stage.block_range:
            module = stage.blocks[str(block)]
            module.register_forward_pre_hook(lambda *_, block=block: seen.append(("forward", block)))
            module.register_full_backward_pre_hook(lambda *_, block=block: seen.append(("backward", block)))
        x = torch.randn(wide().global_batch, 8, generator=torch.Generator().manual_seed(0))
        for _ in range(4):  # no checks in the last
            dist.barrier()
            time.sleep(0.01 * (dist.get_rank() // 2))  # the first stage is ahead
            seen.clear()
            engine.step((x, x))
        engine.close()
    return seen


@pytest.fixture(scope="module")
def seen():
    ways = {"overlap": {}, "late": {"overlap": False}}
    return {name: run_ranks(4, happenings, options) for name, options in ways.items()}


@pytest.mark.parametrize("rank", range(4))
def test_a_block_is_summed_while_the_one_below_it_is_still_to_come(seen, rank):
    lower, upper = (0, 1) if rank < 2 else (2, 3)
    last = {what: i for i, what in enumerate(seen["overlap"][rank])}
    assert last["sum", f"{upper}:{upper + 1}"] < last["backward", lower] < last["sum", f"{lower}:{lower + 1}"]


@pytest.mark.parametrize("rank", range(4))
def test_without_overlap_sums_come_last(seen, rank):
    last = {what: i for i, what in enumerate(seen["late"][rank])}
    sums = [i for what, i in last.items() if what[0] == "sum"]
    assert len(sums) == 2
    assert min(sums) > last["backward", 0 if rank < 2 else 2]


@pytest.mark.parametrize("rank", [2, 3])
def test_the_next_input_is_asked_for_before_the_present_one_is_computed(seen, rank):
    asked = posts_before_forwards(seen["overlap"][rank])
    assert len(asked) == MICRO_BATCHES
    assert all(posts >= forward + 2 for forward, posts in enumerate(asked[:-1]))


def posts_before_forwards(what):
    """For each forward of the last stage, how many inputs had been asked for by then."""
    posts, found = 0, []
    for kind, which in what:
        posts += kind == "receive"
        if (kind, which) == ("forward", 2):
            found.append(posts)
    return found
