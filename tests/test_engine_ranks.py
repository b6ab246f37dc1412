"""What ranks tell of a failure, and which rows they read."""

import math
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine import program as program_module
from arachne_runtime.errors import UsageError, WorkerFailedError
from arachne_runtime.measure.recorder import Recorder
from arachne_runtime.mesh import GlooTransport
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.limits import PENDING_SENDS
from arachne_runtime.plan.order import Transfer
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.records import Record, RecordKind
from arachne_runtime.testing import run_ranks
from bench.cases import reductions_of


def stage(layers, *shares, start, **options):
    replicas = tuple(Replica(devices=(f"a:{start + i}",), share=share) for i, share in enumerate(shares))
    return Stage(layers=layers, replicas=replicas, **options)


def plan_of(*stages, micro_batches=4):
    rows = sum(stages[0].shares)
    pipeline = Pipeline(micro_batches=micro_batches, micro_batch=rows, stages=stages)
    return Plan(model="tiny", global_batch=rows * micro_batches, sequence=1, pipelines=(pipeline,))


TWO = plan_of(stage((0, 2), 2, start=0), stage((2, 4), 2, start=1))
THREE = plan_of(stage((0, 1), 2, start=0), stage((1, 3), 2, start=1), stage((3, 4), 2, start=2))
WIDE = plan_of(stage((0, 2), 3, 1, start=0), stage((2, 4), 2, 2, start=2))


class Shift(nn.Module):
    """A block of one weight; ``fail`` makes it fail on a micro-batch, ``grow`` changes its output's shape."""

    def __init__(self, fail_at=None, grow=False):
        super().__init__()
        self.scale = nn.Linear(3, 3)
        self.calls, self.fail_at, self.grow = 0, fail_at, grow

    def forward(self, x):
        self.calls += torch.is_grad_enabled()  # the engine also looks at a block without training it
        if torch.is_grad_enabled() and self.calls - 1 == self.fail_at:
            raise FloatingPointError("the scale is lost")
        x = self.scale(x)
        return torch.cat([x[:, :3]] * self.calls, 1) if self.grow else x


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def engine_of(plan, blocks, **options):
    given = {"optimizer": sgd, "loss": lambda output, batch: F.mse_loss(output, batch[1])} | options
    ours = {name: given.pop(name) for name in ("recorder", "blocking") if name in given}
    return Engine(plan, ModelParts.of(lambda: nn.Sequential(*blocks())), Recipe(**given), **ours)


def batch(num_rows):
    return torch.randn(num_rows, 3), torch.randn(num_rows, 3)


def fails_on_a_stage():
    engine = engine_of(TWO, lambda: [Shift(), Shift(), Shift(), Shift(fail_at=2)])
    engine.step(batch(8))


def test_an_error_names_rank_stage_and_action():
    with pytest.raises(WorkerFailedError, match=r"rank 1: FloatingPointError: the scale is lost") as caught:
        run_ranks(2, fails_on_a_stage)
    assert "rank 1 (a:1), stage 1 of pipeline 0, at 1F2, in step 0" in str(caught.value)


def changes_shape_within_a_step():
    engine = engine_of(TWO, lambda: [Shift(), Shift(grow=True), Shift(), Shift()])
    engine.step(batch(8))


def test_a_shape_that_differs_between_micro_batches_is_told():
    with pytest.raises(
        WorkerFailedError, match=r"ModelError: 0F1 gives .* an earlier micro-batch of this step"
    ):
        run_ranks(2, changes_shape_within_a_step)


def other_lengths(lengths):
    engine = engine_of(TWO, lambda: [nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)])
    return [engine.step((torch.ones(8, length, 3), torch.zeros(8, length, 3))).loss for length in lengths]


def test_shapes_may_change_between_steps():
    losses = run_ranks(2, other_lengths, [5, 2, 7])
    assert losses[0] == losses[1]
    assert all(math.isfinite(loss) for loss in losses[0])


class OnlyNeeded:
    """A batch that holds the rows of one rank, and says so when asked for others."""

    def __init__(self, engine, num_rows):
        self.num_rows, self._needed, self.asked = num_rows, engine.needed_rows(num_rows), []
        torch.manual_seed(3)
        self._tree = batch(num_rows)

    def rows(self, rows):
        if not any(rows.start >= span.start and rows.stop <= span.stop for span in self._needed):
            raise UsageError(f"rows {rows} were not said to be needed")
        self.asked.append(rows)
        return tuple(tensor[rows.start : rows.stop] for tensor in self._tree)


def reads_rows(num_rows):
    engine = engine_of(WIDE, lambda: [nn.Linear(3, 3) for _ in range(4)])
    needed = OnlyNeeded(engine, num_rows)
    loss = engine.step(needed).loss
    return loss, needed.asked, engine.needed_rows(num_rows)


@pytest.mark.parametrize("num_rows", [16, 7])
def test_each_rank_reads_the_rows_it_needs_and_no_others(num_rows):
    found = run_ranks(4, reads_rows, num_rows)
    assert len({loss for loss, _, _ in found}) == 1
    for _, asked, needed in found:
        assert sorted(asked, key=lambda r: r.start) == list(needed)
    for side in (found[:2], found[2:]):
        assert sorted(row for _, asked, _ in side for rows in asked for row in rows) == list(range(num_rows))


def middle_stage_reads_nothing():
    return engine_of(THREE, lambda: [nn.Linear(3, 3) for _ in range(4)]).needed_rows(8)


def test_a_middle_stage_needs_no_rows():
    assert [bool(rows) for rows in run_ranks(3, middle_stage_reads_nothing)] == [True, False, True]


def counts_messages():
    engine = engine_of(TWO, lambda: [nn.Linear(3, 3) for _ in range(4)])
    sent, send = [], dist.isend
    dist.isend = lambda tensor, *args, **kwargs: sent.append(tensor.shape) or send(tensor, *args, **kwargs)
    try:
        engine.step(batch(8))
    finally:
        dist.isend = send
    return len(sent)


def test_shapes_travel_once_a_step_not_once_a_micro_batch():
    assert run_ranks(2, counts_messages) == [4 + 1, 4 + 1]


def swapped(order):
    """The second and third hop the other way round: a gradient is sent before an output is received."""
    hops = [i for i, c in enumerate(order) if isinstance(c, Transfer)]
    order[hops[1]], order[hops[2]] = order[hops[2]], order[hops[1]]
    return order


def issues_in_a_wrong_order(blocking):
    right = program_module.communications
    if dist.get_rank() == 1:
        program_module.communications = lambda *args: swapped(list(right(*args)))
    try:
        engine = engine_of(TWO, lambda: [nn.Linear(3, 3) for _ in range(4)], blocking=blocking)
        return engine.step(batch(8)).loss
    finally:
        program_module.communications = right


def test_a_wrong_order_hangs_only_where_communication_blocks():
    assert len(set(run_ranks(2, issues_in_a_wrong_order, False))) == 1
    with pytest.raises(WorkerFailedError):
        run_ranks(2, issues_in_a_wrong_order, True, timeout_s=2)


def different_batches():
    engine = engine_of(plan_of(stage((0, 2), 1, 1, start=0)), lambda: [nn.Linear(3, 3) for _ in range(2)])
    engine.step(batch(8 - dist.get_rank()))


def test_ranks_with_different_batches_are_told():
    with pytest.raises(WorkerFailedError, match="give all the same batches"):
        run_ranks(2, different_batches)


def half_precision():
    plan = plan_of(stage((0, 2), 1, 1, start=0), stage((2, 4), 2, start=2))
    engine = engine_of(plan, lambda: [nn.Linear(3, 3) for _ in range(4)], dtype=torch.bfloat16)
    x, y = batch(8)
    return engine.step((x.bfloat16(), y.bfloat16())).loss


def test_bfloat16_crosses_boundaries_and_is_summed():
    losses = run_ranks(3, half_precision)
    assert math.isfinite(losses[0])
    assert len(set(losses)) == 1


def records(directory):
    rank = dist.get_rank()
    with Recorder(directory, rank=rank, plan=WIDE) as recorder:
        engine = engine_of(WIDE, lambda: [nn.Linear(3, 3) for _ in range(4)], recorder=recorder)
        return [engine.step(batch(16)).seconds for _ in range(2)]


def test_a_recorder_writes_every_piece_of_every_step(tmp_path):
    seconds = run_ranks(4, records, tmp_path)
    for rank in range(4):
        lines = Path(tmp_path, f"rank-{rank}.jsonl").read_bytes().splitlines()
        found = [msgspec.json.decode(line, type=Record) for line in lines]
        assert {(r.rank, r.plan) for r in found} == {(rank, digest(WIDE))}
        for step in range(2):
            mine = [r for r in found if r.step == step]
            actions = [r.name for r in mine if r.kind is RecordKind.ACTION]
            depth = rank // 2
            assert sorted(actions) == sorted(f"{depth}{work}{m}" for work in "FB" for m in range(4))
            assert [r.name for r in mine if r.kind is RecordKind.REDUCE] == [("0:2", "2:4")[depth]]
            last = [RecordKind.COMMIT, RecordKind.UPDATE, RecordKind.MEMORY, RecordKind.STEP]
            assert [r.kind for r in mine][-4:] == last
            assert mine[-2].peak_bytes > 4 * 12 * 4  # two layers, their gradients and buckets, and more
            spent = sum(r.wait_s + r.compute_s + r.transfer_s for r in mine[:-1])
            assert 0 < spent <= mine[-1].compute_s <= seconds[rank][step]
            assert all(r.samples == (3, 1, 2, 2)[rank] for r in mine if r.kind is RecordKind.ACTION)
            assert all(r.sent_bytes >= r.samples * 12 for r in mine if r.name[:2] in ("0F", "1B"))


class Overwrites(nn.Module):
    """Changes its input in place, as ``nn.ReLU(inplace=True)`` at the start of a block does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(F.relu_(x))


class Line(nn.Linear):
    """A linear block of the right size."""

    def __init__(self):
        super().__init__(3, 3)


class Saves(nn.Module):
    """Autograd keeps its output, which must not pass for changed when the next piece begins."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def in_pieces(plan, kinds):
    with reductions_of(1):
        engine = engine_of(plan, lambda: [kind() for kind in kinds], dtype=torch.float64)
        torch.manual_seed(1)
        x, y = batch(16)
        report = engine.step((x.double(), y.double()))
        return report.loss, report.grad_norm, sum(len(play.pieces) for play in engine._plays.values())


@pytest.mark.parametrize("kinds", [(Line, Overwrites, Overwrites, Overwrites), (Saves,) * 4])
@pytest.mark.parametrize("cut", [1, 3])
def test_the_last_backward_goes_in_pieces_and_blocks_may_change_their_input(cut, kinds):
    alone = run_ranks(1, in_pieces, plan_of(stage((0, 4), 4, start=0)), kinds)[0]
    plan = plan_of(stage((0, cut), 3, 1, start=0), stage((cut, 4), 2, 2, start=2))
    found = run_ranks(4, in_pieces, plan, kinds)
    for loss, norm, _ in found:
        assert abs(loss - alone[0]) < 1e-12
        assert abs(norm - alone[1]) < 1e-12
    assert [pieces for _, _, pieces in found] == [cut, cut, 4 - cut, 4 - cut]


class Positions(nn.Module):
    """For one row, autograd gives this parameter the memory of the gradient of the input."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        nn.init.ones_(self.table)

    def forward(self, x):
        return x + self.table.unsqueeze(0)


def sends_what_a_parameter_holds():
    plan = plan_of(stage((0, 1), 1, start=0), stage((1, 3), 1, start=1))
    engine = engine_of(plan, lambda: [nn.Linear(3, 3), Positions(), nn.Linear(3, 3)])
    shared, send = [], GlooTransport.send

    def watch(self, tensor, receiver, tag):
        held = [p.grad for _, p in engine.named_parameters() if p.grad is not None]
        shared.extend(
            g for g in held if g.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        )
        return send(self, tensor, receiver, tag)

    GlooTransport.send = watch
    try:
        engine.step(batch(4))
    finally:
        GlooTransport.send = send
    return len(shared)


def test_a_gradient_under_way_is_not_the_memory_of_a_parameters_gradient():
    assert run_ranks(2, sends_what_a_parameter_holds) == [0, 0]


def most_sends_under_way():
    plan = plan_of(stage((0, 2), 2, start=0), stage((2, 4), 2, start=1), micro_batches=24)
    engine = engine_of(plan, lambda: [nn.Linear(3, 3) for _ in range(4)])
    alive, send = weakref.WeakSet(), GlooTransport.send
    most = 0

    def watch(self, tensor, receiver, tag):
        nonlocal most
        alive.add(tensor)
        most = max(most, len(alive))
        return send(self, tensor, receiver, tag)

    GlooTransport.send = watch
    try:
        engine.step(batch(48))
    finally:
        GlooTransport.send = send
    return most


def test_memory_of_sends_is_freed_during_the_step():
    first, last = run_ranks(2, most_sends_under_way)
    assert first <= 2 + 2  # a header, outputs that wait for their gradient, and one more
    assert last <= PENDING_SENDS + 2
