"""The total order of communication: no deadlock, every row once, every sum by its holders."""

import math
import random
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from arachne_runtime.plan.order import (
    REDUCTION_BYTES,
    Commit,
    Inside,
    Reduction,
    Summed,
    Transfer,
    communications,
    needs,
    reductions,
    share_of,
)
from arachne_runtime.plan.placement import holding, places_of
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.rules import check_plan
from arachne_runtime.plan.schedule import Action, Work, last_work, num_rows, row_actions
from arachne_runtime.plan.shards import Axis, ParameterForm, Split
from arachne_runtime.plan.tiling import shares_experts
from tests.strategies import plans

TIED = Summed({"blocks.0.weight": (0, 5)})


@dataclass
class InOrderDevices:
    """Ranks that execute one communication at a time, blocking, in the order they were given."""

    plan: Plan
    programs: list

    def stuck(self):
        """Names of the communications that can never run; empty when the step ends."""
        at = [0] * len(self.programs)
        done = set()
        while True:
            heads = [
                program[i] if i < len(program) else None for i, program in zip(at, self.programs, strict=True)
            ]
            ready = next((c for c in heads if c is not None and self._can_run(c, heads, done)), None)
            if ready is None:
                return [c for c in heads if c is not None]
            for member in ready.members:
                at[member] += 1
            done.add(ready)

    def _can_run(self, c, heads, done):
        return all(heads[member] == c and self._computed(member, c, done) for member in c.members)

    def _computed(self, rank, c, done):
        """Whether all that the rank's own part of ``c`` depends on has ended: receives, exchanges inside."""
        if isinstance(c, Transfer) and c.receiver == rank:
            return True
        actions, depth = actions_of(self.plan, rank)
        if isinstance(c, Transfer):
            actions = actions[: actions.index(c.source) + 1]
        elif isinstance(c, Reduction):
            actions = actions[: max(map(actions.index, completes(self.plan, rank, c))) + 1]
        elif isinstance(c, Inside):
            actions = actions[: actions.index(c.action) + 1]
        needed = {a for a in actions if needs(a, depth)}
        lowest = {Transfer: -1, Commit: -1, Inside: math.inf}.get(type(c)) or c.blocks[0]
        for t in self.programs[rank]:
            if isinstance(t, Transfer) and t.receiver == rank and t.target in needed and t not in done:
                return False
            earlier = isinstance(t, Inside) and t.action in actions
            if earlier and (t.action != actions[-1] or t.block >= lowest) and t not in done:
                return False
        return True


def actions_of(plan, rank):
    """The actions of a rank, and the depth of its pipeline."""
    place = places_of(plan, rank)[0]
    pipeline, _, _ = holding(plan, place)
    rows, depth = num_rows(plan.schedule, pipeline), len(pipeline.stages)
    return row_actions(plan.schedule, place.stage, rows, depth, pipeline.micro_batches), depth


def completes(plan, rank, reduction):
    """The actions of a rank that complete its part of a sum of gradients, one of each stage that has one."""
    for place in places_of(plan, rank):
        pipeline, stage, _ = holding(plan, place)
        if set(reduction.blocks) & set(stage.blocks):
            yield Action(place.stage, last_work(plan.schedule), pipeline.micro_batches - 1)


def programs(plan, order):
    return [list(share_of(rank, order)) for rank in range(len(plan.devices))]


@settings(max_examples=150, deadline=None)
@given(plan=plans(max_devices=8, max_micro_batches=5, schedules=tuple(ScheduleKind)), data=st.data())
def test_blocking_execution_in_the_total_order_never_deadlocks(plan, data):
    rows = data.draw(st.integers(1, plan.global_batch))
    ties = {"blocks.0.weight": (0, plan.num_blocks - 1)} if plan.num_blocks > 1 else {}
    sizes = data.draw(st.sampled_from(((), [REDUCTION_BYTES] * plan.num_blocks)))
    forms = data.draw(st.sampled_from(((), [split_block(b) for b in range(plan.num_blocks)])))
    order = communications(plan, rows, Summed(ties if not forms else {}, sizes, forms))
    assert InOrderDevices(plan, programs(plan, order)).stuck() == []


@st.composite
def tiled_plans(draw):
    """Plans of which a stage at least shares out its experts, by any EP x ETP that the rules allow."""
    plan = draw(plans(max_devices=8, max_micro_batches=4, schedules=tuple(ScheduleKind)))
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(s, **draw(tilings(len(s.devices)))) for s in pipeline.stages))
        for pipeline in plan.pipelines
    )
    tiled = replace(plan, pipelines=pipelines)
    assume(any(shares_experts(stage) for pipeline in pipelines for stage in pipeline.stages))
    assume(not check_plan(tiled))
    return tiled


def tilings(num_devices):
    every = product(range(1, num_devices + 1), repeat=2)
    fitting = [(ep, etp) for ep, etp in every if num_devices % (ep * etp) == 0]
    return st.sampled_from([{"expert_parallel": ep, "expert_tensor": etp} for ep, etp in fitting])


@settings(max_examples=100, deadline=None)
@given(plan=tiled_plans(), data=st.data())
def test_devices_that_share_experts_never_deadlock_in_the_total_order(plan, data):
    rows = data.draw(st.integers(1, plan.global_batch))
    sizes = data.draw(st.sampled_from(((), [REDUCTION_BYTES] * plan.num_blocks)))
    order = communications(
        plan, rows, Summed({}, sizes, [block_of_experts(b) for b in range(plan.num_blocks)])
    )
    assert rows < plan.global_batch or any(isinstance(c, Inside) for c in order)
    assert InOrderDevices(plan, programs(plan, order)).stuck() == []


def block_of_experts(block):
    """Twelve experts of inner width twelve, which any degree divides, and what all devices hold."""
    whole, inner = Split(Axis.EXPERT, 0, (12,), (12,)), Split(Axis.EXPERT_TENSOR, 1, (12,), (12,))
    routed = ParameterForm(f"{block}.moe", (12, 12), 4, splits=(whole, inner))
    return [routed, *split_block(block)]


def test_a_rank_that_exchanges_tokens_in_another_order_deadlocks_and_is_caught():
    shared = Stage(layers=(0, 2), expert_parallel=2, replicas=line(2).stages[0].replicas)
    other = replace(shared.replicas[0], devices=("n:1",))
    pipeline = Pipeline(
        micro_batches=2, micro_batch=4, stages=(replace(shared, replicas=(*shared.replicas, other)),)
    )
    plan = Plan(model="tiny", global_batch=8, sequence=1, pipelines=(pipeline,))
    found = programs(plan, communications(plan, 8, Summed()))
    assert InOrderDevices(plan, found).stuck() == []
    assert [isinstance(c, Inside) for c in found[1][:2]] == [True, True]
    found[1][:2] = reversed(found[1][:2])
    assert InOrderDevices(plan, found).stuck()


@settings(max_examples=50, deadline=None)
@given(plan=plans(tp=1, max_devices=6), data=st.data())
def test_hops_move_every_row_once_each_way(plan, data):
    rows = data.draw(st.integers(1, plan.global_batch))
    order = communications(plan, rows, Summed())
    hops = [c for c in order if isinstance(c, Transfer)]
    assert len(set(hops)) == len(hops)
    boundaries = sum(len(p.stages) - 1 for p in plan.pipelines)
    if boundaries == len(plan.pipelines) * (len(plan.pipelines[0].stages) - 1):
        moved = sum(len(t.rows) for t in hops)
        assert moved == 2 * rows * (len(plan.pipelines[0].stages) - 1)
    assert order[-1] == Commit(tuple(range(len(plan.devices))))


def line(*cut, micro_batches=4, start=0, schedule=ScheduleKind.ONE_F_ONE_B):
    edges = [0, *cut]
    stages = tuple(
        Stage(layers=(a, b), replicas=(Replica(devices=(f"n:{start + i}",), share=2),))
        for i, (a, b) in enumerate(pairwise(edges))
    )
    return Pipeline(micro_batches=micro_batches, micro_batch=2, stages=stages)


def unlike_pipelines(schedule=ScheduleKind.ONE_F_ONE_B):
    pipelines = (line(1, 3, 6), line(4, 6, micro_batches=3, start=3))
    return Plan(model="tiny", global_batch=14, sequence=1, schedule=schedule, pipelines=pipelines)


def test_reductions_are_segments_and_ties_with_the_union_of_holders():
    found = {r.name: r.members for r in reductions(unlike_pipelines(), TIED)}
    assert found == {
        "0:1": (0, 3), "1:3": (1, 3), "3:4": (2, 3), "4:6": (2, 4), "blocks.0.weight": (0, 2, 3, 4),
    }  # fmt: skip


def split_block(block):
    rows = Split(Axis.TENSOR, 0, (6,), (6,))
    forms = (("up", rows), ("norm", None), ("frozen", rows))
    return [
        ParameterForm(f"{block}.{n}", (6, 2), 4, n != "frozen", splits=(s,) if s else ()) for n, s in forms
    ]


def test_shards_are_summed_with_their_like_and_what_is_whole_with_all():
    wide = Stage(layers=(0, 2), replicas=(Replica(devices=("a:0", "a:1"), share=2),))
    pipelines = (line(1, 2), Pipeline(micro_batches=1, micro_batch=2, stages=(wide,)))
    plan = Plan(model="tiny", global_batch=10, sequence=1, pipelines=pipelines)
    found = reductions(plan, Summed.of([split_block(0), split_block(1)]))
    # ranks 0, 1: the line's; 2, 3: the tensor-parallel ones
    assert [(r.name, r.members, [f.name for f, _ in r.atoms]) for r in found] == [
        ("0:1", (0, 2), ["0.up"]), ("0:1.1", (0, 2, 3), ["0.norm"]), ("0:1.2", (0, 3), ["0.up"]),
        ("1:2", (1, 2), ["1.up"]), ("1:2.1", (1, 2, 3), ["1.norm"]), ("1:2.2", (1, 3), ["1.up"]),
    ]  # fmt: skip
    assert found[1].atoms[0][1].contributors == (0, 2)


def test_tensor_parallel_ranks_each_receive_all_rows_once_and_give_one_gradient_back():
    stages = [
        Stage(layers=(i, i + 1), replicas=(Replica(devices=devices, share=2),))
        for i, devices in enumerate((("a:0", "a:1"), ("b:0",), ("c:0", "c:1", "c:2")))
    ]
    pipeline = Pipeline(micro_batches=1, micro_batch=2, stages=tuple(stages))
    plan = Plan(model="tiny", global_batch=2, sequence=1, pipelines=(pipeline,))
    hops = [c for c in communications(plan, 2, Summed()) if isinstance(c, Transfer)]
    forward = [t.members for t in hops if t.source.work is Work.FORWARD]
    backward = [t.members for t in hops if t.source.work is Work.BACKWARD]
    assert forward == [(0, 2), (2, 3), (2, 4), (2, 5)]
    assert backward == [(3, 2), (2, 0), (2, 1)]


def test_a_tensor_parallel_rank_that_receives_before_it_computes_deadlocks_and_is_caught():
    stages = [
        Stage(layers=(i, i + 1), replicas=(Replica(devices=devices, share=2),))
        for i, devices in enumerate((("a:0",), ("b:0", "b:1"), ("c:0",)))
    ]
    pipeline = Pipeline(micro_batches=2, micro_batch=2, stages=tuple(stages))
    plan = Plan(model="tiny", global_batch=4, sequence=1, pipelines=(pipeline,))
    found = programs(plan, communications(plan, 4, Summed()))
    names = [str(c.action) if isinstance(c, Inside) else type(c).__name__[0] for c in found[2]]
    assert names == ["T", "1F0", "T", "1F1", "T", "1B0", "T", "1B1", "R", "C"]
    assert InOrderDevices(plan, found).stuck() == []
    found[2].sort(key=lambda c: not isinstance(c, Transfer))
    assert InOrderDevices(plan, found).stuck()


def test_exchanges_of_the_last_backward_have_sums_of_gradients_between_them():
    groups = (Replica(devices=("a:0", "a:1"), share=1), Replica(devices=("b:0",), share=1))
    pipeline = Pipeline(micro_batches=2, micro_batch=2, stages=(Stage(layers=(0, 2), replicas=groups),))
    plan = Plan(model="tiny", global_batch=4, sequence=1, pipelines=(pipeline,))
    remainder = ["0B0:1", "0B0:0", "1:2", "0:1"]  # one row: the second micro-batch has none
    for rows, wanted in ((4, ["0B1:1", "1:2", "0B1:0", "0:1"]), (1, remainder)):
        order = communications(plan, rows, Summed(block_bytes=[REDUCTION_BYTES] * 2))
        told = [f"{c.action}:{c.block}" if isinstance(c, Inside) else c.name for c in share_of(0, order)[:-1]]
        assert told[-4:] == wanted


def test_reductions_follow_the_receives_of_each_rank_in_descending_block_order():
    for rank in range(5):
        mine = share_of(rank, communications(unlike_pipelines(), 14, Summed()))
        first = next(i for i, c in enumerate(mine) if isinstance(c, Reduction))
        assert not [c for c in mine[first:] if isinstance(c, Transfer) and c.receiver == rank]
        starts = [c.blocks[0] for c in mine if isinstance(c, Reduction)]
        assert starts == sorted(starts, reverse=True)


def test_large_blocks_are_summed_while_those_below_are_computed():
    plan = unlike_pipelines()
    sizes = [REDUCTION_BYTES // 2] * 6
    assert [r.name for r in reductions(plan, Summed(block_bytes=sizes))] == ["0:1", "1:3", "3:4", "4:6"]
    sizes = [REDUCTION_BYTES] * 6
    found = share_of(2, communications(plan, 14, Summed(block_bytes=sizes)))
    names = [c.name if isinstance(c, Reduction) else str(c.source) for c in found[:-1]]
    assert names[-4:] == ["5:6", "4:5", "2B3", "3:4"]


def test_each_rank_in_the_order_of_its_own_actions_deadlocks_and_is_caught():
    plan = unlike_pipelines()
    order = communications(plan, 14, Summed())
    own = []
    for rank, program in enumerate(programs(plan, order)):
        actions, _ = actions_of(plan, rank)
        hops = [c for c in program if isinstance(c, Transfer)]
        rest = [c for c in program if not isinstance(c, Transfer)]
        own.append([c for a in actions for c in hops if a in (c.target, c.source)] + rest)
    assert InOrderDevices(plan, own).stuck()


def test_ascending_reductions_on_one_rank_deadlock_and_are_caught():
    pipelines = (line(4, micro_batches=1), line(4, start=1), line(2, 4, start=2))
    plan = Plan(model="tiny", global_batch=18, sequence=1, pipelines=pipelines)
    wrong = programs(plan, communications(plan, 18, Summed()))
    assert [c.name for c in wrong[1][:-1]] == ["2:4", "0:2"]
    assert InOrderDevices(plan, wrong).stuck() == []
    wrong[1] = [wrong[1][1], wrong[1][0], wrong[1][2]]
    assert InOrderDevices(plan, wrong).stuck()


@pytest.mark.parametrize("seed", range(5))
def test_a_shuffled_order_is_caught(seed):
    plan = unlike_pipelines(ScheduleKind.GPIPE)
    order = list(communications(plan, 14, TIED))
    random.Random(seed).shuffle(order)
    assert InOrderDevices(plan, programs(plan, order)).stuck()
