"""Tensor-parallel stages of unlike degrees train like one process; what cannot be shared out is refused."""

import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.precision import Precision
from arachne_runtime.errors import ModelError, UnsupportedPlanError
from arachne_runtime.measure.recorder import Recorder
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.records import Record, RecordKind
from arachne_runtime.testing import run_ranks
from bench.cases import WIDTH, gap, train_all_by_plan, train_plainly
from bench.exactness_tensor import SEQUENCE, TensorCase, random_tensor_case


def stage(layers, *replicas, recompute=False):
    found = tuple(Replica(devices=tuple(devices), share=share) for devices, share in replicas)
    return Stage(layers=layers, replicas=found, recompute=recompute)


def plan_of(*pipelines, schedule=ScheduleKind.ONE_F_ONE_B):
    rows = sum(p.micro_batches * p.micro_batch for p in pipelines)
    return Plan(model="tiny", global_batch=rows, sequence=SEQUENCE, schedule=schedule, pipelines=pipelines)


def pipeline(micro_batches, micro_batch, *stages):
    return Pipeline(micro_batches=micro_batches, micro_batch=micro_batch, stages=stages)


A, B = [f"a:{i}" for i in range(6)], [f"b:{i}" for i in range(6)]
FOUR_TO_TWO = plan_of(pipeline(3, 2, stage((0, 2), (A[:4], 2)), stage((2, 5), (B[:2], 2), recompute=True)))
TWO_ONE_TWO = plan_of(
    pipeline(4, 2, stage((0, 2), (A[:2], 2)), stage((2, 3), (A[2:3], 2)), stage((3, 5), (A[3:5], 2)))
)
UNEQUAL_REPLICAS = plan_of(pipeline(3, 4, stage((0, 5), (A[:1], 1), (A[3:1:-1], 2), (B[:2], 1))))
SHARED = plan_of(
    pipeline(2, 2, stage((0, 3), (A[:2], 2)), stage((3, 5), (A[2:3], 2))),
    pipeline(3, 1, stage((0, 1), (B[:1], 1)), stage((1, 5), (B[1:3], 1))),
)


def outcomes_of(cases):
    found = run_ranks(len(cases[0].plan.devices), train_all_by_plan, cases)
    return list(zip(*found, strict=True))


def check(cases, tolerance=1e-9):
    by_size = defaultdict(list)
    for case in cases:
        by_size[len(case.plan.devices)].append(case)
    for alike in by_size.values():
        for case, outcomes in zip(alike, outcomes_of(alike), strict=True):
            wanted = train_plainly(case)
            for outcome in outcomes:
                assert outcome.losses == outcomes[0].losses
                found = gap(outcome, wanted)
                assert max(found.loss, found.norm, found.parameter, found.gradient) < tolerance, (case, found)


def test_stages_of_unlike_degrees():
    check(
        [
            TensorCase(FOUR_TO_TWO, adam=True, clip_norm=0.1),
            TensorCase(FOUR_TO_TWO, tied=False, fused=False, sharded_logits=True, by_items=True),
            TensorCase(TWO_ONE_TWO, sharded_logits=True, clip_norm=0.1),
            TensorCase(TWO_ONE_TWO, fused=False, blocking=True, in_pieces=True, rows=(7, 1, 8)),
        ]
    )


def test_replicas_of_unlike_degrees():
    check(
        [
            TensorCase(UNEQUAL_REPLICAS, clip_norm=0.1, in_pieces=True, blocking=True),
            TensorCase(UNEQUAL_REPLICAS, fused=False, tied=False, adam=True, rows=(1, 5, 12)),
        ]
    )


def test_pipelines_that_share_segments_in_unlike_degrees():
    gpipe = plan_of(*SHARED.pipelines, schedule=ScheduleKind.GPIPE)
    zero_bubble = plan_of(*SHARED.pipelines, schedule=ScheduleKind.ZERO_BUBBLE)
    check(
        [
            TensorCase(SHARED, adam=True, clip_norm=0.1, sharded_logits=True),
            TensorCase(gpipe, fused=False, by_items=True, blocking=True, in_pieces=True),
            TensorCase(zero_bubble, clip_norm=0.1, in_pieces=True),
        ]
    )


def test_random_plans():
    source = random.Random(5)
    check([random_tensor_case(source, index) for index in range(5)])


def test_single_precision_differs_by_rounding_only():
    case = TensorCase(TWO_ONE_TWO, dtype=torch.float32)
    for outcome in outcomes_of([case])[0]:
        found = gap(outcome, train_plainly(case))
        assert max(found.loss, found.gradient, found.parameter) < 1e-5


def train_in(precision, sharded_logits):
    case = TensorCase(TWO_ONE_TWO, dtype=torch.float32, sharded_logits=sharded_logits)
    recipe = Recipe(
        optimizer=case.optimizer, loss=case.loss, inputs=lambda b: (b["tokens"],), precision=precision, seed=5
    )
    engine = Engine(case.plan, ModelParts.of(case.model), recipe)
    losses = [engine.step(case.batch(step)).loss for step in range(2)]
    evaluated = engine.evaluate([case.batch(0)]).loss
    dtypes = {p.grad.dtype for _, p in engine.named_parameters() if p.grad is not None}
    engine.close()
    return losses, evaluated, dtypes


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("sharded_logits", [False, True])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_autocast_reaches_shards(precision, sharded_logits):
    found = run_ranks(5, train_in, precision, sharded_logits)
    single = train_plainly(TensorCase(TWO_ONE_TWO, dtype=torch.float32))
    for losses, evaluated, dtypes in found:
        assert losses == found[0][0]
        assert evaluated == found[0][1] < losses[0]
        assert losses == pytest.approx(single.losses[:2], rel=5e-3)
        assert losses != pytest.approx(single.losses[:2], rel=1e-9), "in half precision"
        assert dtypes == {torch.float32}


def test_the_comparison_can_fail():
    case = TensorCase(TWO_ONE_TWO)
    wanted = train_plainly(replace(case, clip_norm=0.05))
    assert all(gap(outcome, wanted).parameter > 1e-6 for outcome in outcomes_of([case])[0])


def test_copies_stay_equal_bit_by_bit():
    """Norms and biases on every rank, k and v of two heads on four ranks: held by several, and all alike."""
    case = TensorCase(FOUR_TO_TWO, dtype=torch.float32, adam=True, fused=False)
    outcomes = outcomes_of([case])[0]
    seen = {}
    for outcome in outcomes:
        for name, parameter in outcome.parameters.items():
            key = (name, outcome.held[name])
            assert torch.equal(seen.setdefault(key, parameter), parameter), key
    held = [(name, outcome.held[name]) for outcome in outcomes for name in outcome.parameters]
    copied = {name.split(".", 2)[2] for name, part in held if held.count((name, part)) > 1}
    assert {"norm.weight", "attention.norm_q.weight", "attention.k.weight", "down.bias"} <= copied
    assert not {"attention.q.weight", "up.weight", "table.weight"} & copied


def collectives_of(folder, sharded_logits):
    """(action, name, bytes) of the collectives of step 1, which checks nothing, on one rank."""
    case = TensorCase(PAIR_OF_WORDS, dtype=torch.float32, sharded_logits=sharded_logits)
    recipe = Recipe(optimizer=case.optimizer, loss=case.loss, inputs=lambda b: (b["tokens"],))
    rank = dist.get_rank()
    with Recorder(folder, rank=rank, plan=case.plan) as recorder:
        engine = Engine(case.plan, ModelParts.of(case.model), recipe, recorder=recorder)
        for _ in range(2):
            engine.step(case.batch(0))
        engine.close()
    lines = (folder / f"rank-{rank}.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=Record) for line in lines]
    return [
        (r.within, r.name, r.sent_bytes) for r in records if r.kind is RecordKind.COLLECTIVE and r.step == 1
    ]


@pytest.mark.parametrize("sharded_logits", [False, True])
def test_every_exchange_of_an_action_is_recorded(tmp_path, sharded_logits):
    """Of the words, of three row-wise products and of the head; and of gradients before column-wise ones."""
    found = run_ranks(2, collectives_of, tmp_path, sharded_logits)
    assert found[0] == found[1]
    rows_bytes = 2 * SEQUENCE * WIDTH * 4
    forward = [(name, sent) for within, name, sent in found[0] if within == "0F0"]
    backward = [(name, sent) for within, name, sent in found[0] if within == "0B0"]
    logits = "tensor all_reduce" if sharded_logits else "tensor all_gather"
    assert forward[:4] == [("tensor all_reduce", rows_bytes)] * 4
    assert [name for name, _ in forward[4:]] == [logits] * (2 if sharded_logits else 1)
    assert backward == [("tensor all_reduce", rows_bytes)] * 4


def make_engine(plan, model, **settings):
    recipe = Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda y, b: y.mean(), **settings)
    return Engine(plan, ModelParts.of(model), recipe)


PAIR_OF_WORDS = plan_of(pipeline(1, 2, stage((0, 3), (A[:2], 2))))
PAIR = plan_of(pipeline(1, 2, stage((0, 1), (A[:2], 2))))


class Mlp(nn.Module):
    def __init__(self, inner=4):
        super().__init__()
        block = nn.Sequential(nn.Linear(4, inner), nn.ReLU(), nn.Linear(inner, 4))
        self.blocks = nn.ModuleList([block])

    def forward(self, x):
        return self.blocks[0](x)


def marked(rules, **more):
    return arachne.pipelined(blocks="blocks", tensor_parallel=rules, **more)(type("Marked", (Mlp,), {}))


def message(kind, *args):
    with pytest.raises(kind) as caught:
        make_engine(*args)
    return str(caught.value)


def test_a_model_without_rules_is_refused_with_how_to_give_them(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    told = message(UnsupportedPlanError, PAIR, lambda: nn.Sequential(nn.Linear(2, 2)))
    assert "$.pipelines[0].stages[0].replicas[0] is tensor-parallel over 2 devices" in told
    assert 'pipelined(..., tensor_parallel={"up": "colwise", "down": "rowwise"})' in told


def test_a_cut_through_a_head_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    told = message(UnsupportedPlanError, PAIR, marked({"0": arachne.Colwise(heads=1), "2": "rowwise"}))
    assert "blocks.0.0.weight: dim 0 is 1 units of 4 rows, which 2 ranks cannot share" in told
    cls = marked({"0": "colwise", "2": "rowwise"}, divides={"0": ("out_features",)})
    told = message(UnsupportedPlanError, PAIR, lambda: cls(inner=5))
    assert "blocks.0.0.out_features is 5, which 2 ranks cannot share; let the degree divide it" in told


@pytest.mark.parametrize(
    ("rules", "more", "told"),
    [
        (
            {"up": "colwise"},
            {},
            "tensor_parallel={'up': ...}) matches no module of any block; names in blocks",
        ),
        ({"0": "columns"}, {}, "is no style; known: colwise, rowwise, vocabulary, partial"),
        ({"0": "colwise"}, {"divides": {"attn": ("heads",)}}, "divides={'attn': ...}) matches no module"),
        ({"0": "colwise"}, {"divides": {"0": ("heads",)}}, "names the attribute 'heads', which no module"),
        ({"0": arachne.Colwise(parts=3)}, {}, "blocks.0.0.weight has 4 features, which are not 1 + 1 + 1"),
        ({"0": arachne.Colwise(heads="heads")}, {}, "no module around it has a whole number of this name"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_when_the_model_is_read(rules, more, told):
    with pytest.raises(ModelError) as caught:
        ModelParts.of(marked(rules, **more))
    assert told in str(caught.value)


def test_a_tie_that_is_cut_in_two_ways_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(5, 2), nn.ModuleList([nn.Linear(2, 2)])
            self.head = nn.Linear(2, 5, bias=False)
            self.head.weight = self.embed.weight

    rules = {"embed": "vocabulary"}
    cls = arachne.pipelined(first="embed", blocks="layers", last="head", tensor_parallel=rules)(Tied)
    with pytest.raises(
        ModelError, match=r"blocks.0.weight and blocks.2.weight are one parameter, but the rul"
    ):
        ModelParts.of(cls)


class Headed(nn.Module):
    """Attention that knows its number of heads."""

    def __init__(self):
        super().__init__()
        self.heads = 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def first_loss_or_refusal(engine):
    try:
        return engine.step(torch.randn(4, 3, 8)).loss
    except UnsupportedPlanError as error:
        return str(error)
    finally:
        engine.close()


def step_of(qkv, divides, stochastic):
    model = type("Model", (nn.Module,), {})

    def make():
        found = model()
        found.layers = nn.ModuleList([Headed(), Headed()])
        return found

    rules = {"qkv": qkv, "out": "rowwise"}
    arachne.pipelined(blocks="layers", tensor_parallel=rules, divides=divides)(model)
    plan = plan_of(pipeline(2, 2, stage((0, 2), (A[:2], 2))))
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda y, b: y.square().mean(),
        stochastic=stochastic,
    )
    return first_loss_or_refusal(Engine(plan, ModelParts.of(make), recipe))


def test_what_gives_another_result_shared_out_than_whole_is_refused():
    """Nothing fails in these forwards: only the numbers are others."""
    fused, split = arachne.Colwise(parts=3, heads="heads"), {"": ("heads",)}
    right = run_ranks(2, step_of, fused, split, False)
    assert isinstance(right[0], float)
    assert right[0] == right[1]
    undivided = run_ranks(2, step_of, fused, {}, False)
    assert "block 0 (Headed) gives another result on 2 tensor-parallel ranks than whole" in undivided[0]
    assert undivided[0] == undivided[1]
    unlike_parts = run_ranks(2, step_of, "colwise", split, False)
    assert "block 0 (Headed) gives another result" in unlike_parts[0]
    waived = run_ranks(2, step_of, "colwise", split, True)
    assert isinstance(waived[0], float)
    assert waived[0] != right[0]


class Dropped(nn.Module):
    """Dropout of what all ranks hold alike; remembers what it let through."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.seen = []

    def forward(self, x):
        x = self.drop(self.down(torch.tanh(self.up(x))))
        self.seen.append((x != 0).sum((0, 1)).tolist())
        return x


def dropped(recompute):
    torch.manual_seed(dist.get_rank())
    model = type("Model", (nn.Module,), {})

    def make():
        found = model()
        found.layers = nn.ModuleList([Dropped(), Dropped()])
        return found

    arachne.pipelined(blocks="layers", tensor_parallel={"up": "colwise", "down": "rowwise"})(model)
    plan = plan_of(pipeline(2, 2, stage((0, 2), (A[:2], 2), recompute=recompute)))
    loss = lambda y, b: y.square().mean()  # noqa: E731
    recipe = Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=loss, stochastic=True)
    engine, before = Engine(plan, ModelParts.of(make), recipe), torch.get_rng_state()
    for _ in range(2):
        engine.step(torch.ones(4, 9, 8))
    seen = [block.seen for block in engine.stages[0].blocks.values()]
    engine.close()
    assert torch.equal(before, torch.get_rng_state())
    return seen


@pytest.mark.parametrize("recompute", [False, True])
def test_ranks_of_a_replica_drop_the_same(recompute):
    """They hold copies of each sample, which other masks would make differ."""
    one, other = run_ranks(2, dropped, recompute)
    assert one == other
    masks = {str(mask) for seen in one for mask in seen}
    assert len(masks) == 8  # another in each block, micro-batch and step, and no new ones where it runs again


class Normed(nn.Module):
    """A norm of each head between two layers that are shared out."""

    def __init__(self):
        super().__init__()
        self.heads = 2
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(4), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.norm(torch.tanh(self.up(x)).unflatten(-1, (self.heads, 4))).flatten(-2))


class AfterNorm(Normed):
    """The norm sees all features of the output."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.down(torch.tanh(self.up(x))))


def normed(kind, more, stochastic=False):
    model = type("Model", (nn.Module,), {})

    def make():
        found = model()
        found.layers = nn.ModuleList([kind(), kind()])
        return found

    rules = {"up": arachne.Colwise(heads="heads"), "down": "rowwise", **more}
    arachne.pipelined(blocks="layers", tensor_parallel=rules, divides={"": ("heads",)})(model)
    plan = plan_of(pipeline(2, 2, stage((0, 2), (A[:2], 2))))
    sgd = Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=of_squares, stochastic=stochastic)
    return first_loss_or_refusal(Engine(plan, ModelParts.of(make), sgd))


def of_squares(output, batch):
    return output.square().mean()


def test_a_parameter_of_which_each_rank_has_a_part_of_the_gradient_is_refused():
    """The result is the same: only the gradients are others."""
    unnamed = run_ranks(2, normed, Normed, {})
    assert "block 0: blocks.0.norm.weight has another gradient on 2 tensor-parallel ranks" in unnamed[0]
    assert unnamed[0] == unnamed[1]
    assert isinstance(run_ranks(2, normed, Normed, {"norm": "partial"})[0], float)
    assert isinstance(run_ranks(2, normed, Normed, {}, True)[0], float)
    assert isinstance(run_ranks(2, normed, AfterNorm, {})[0], float)
    twice = run_ranks(2, normed, AfterNorm, {"norm": "partial"})
    assert "the gradients of blocks.0.norm.weight on 2 tensor-parallel ranks add up to another" in twice[0]


def test_a_replica_over_two_nodes_is_refused():
    plan = plan_of(pipeline(1, 2, stage((0, 1), (("a:0", "b:0"), 2))))
    told = message(arachne.InvalidFileError, plan, marked({"0": "colwise", "2": "rowwise"}))
    assert "devices a:0 and b:0 are in different nodes" in told


def test_one_rank_does_not_import_dtensor():
    code = (
        "import sys, torch, bench.cases as c; from arachne_runtime.surroundings import lone_plan\n"
        "from arachne_runtime.engine import Engine, Recipe; from arachne_runtime.model import ModelParts\n"
        "parts = ModelParts.of(lambda: c.TinyGPT(1, True))\n"
        "recipe = Recipe(optimizer=torch.optim.SGD, loss=lambda y, b: y.mean())\n"
        "engine = Engine(lone_plan(3), parts, recipe)\n"
        "print('arachne_runtime.model.tensor_parallel' in sys.modules, engine.num_steps)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert told.stdout == "False 0\n", told.stderr
