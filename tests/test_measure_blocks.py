"""Which blocks are timed, and what the model file says of them."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from arachne_runtime.errors import ModelError, UsageError
from arachne_runtime.measure.blocks import measure_blocks
from arachne_runtime.measure.kept import kept_bytes
from arachne_runtime.measure.probe import find_probes, kinds_by_cost
from arachne_runtime.measure.timing import Effort
from arachne_runtime.model import ModelParts, Workload, pipelined
from arachne_runtime.plan.rules import check_model
from arachne_runtime.testing import run_ranks
from tests.models import GPT, next_token_loss

QUICK = Effort(batch_s=0.002, rounds=1)
CPU = torch.device("cpu")
FLOAT = 4


def gpt(*, tied, optimizer=torch.optim.AdamW):
    return Workload(
        name="gpt",
        model=lambda: GPT(tied=tied),
        loss=next_token_loss,
        optimizer=lambda p: optimizer(p, lr=1e-3),
        batch=lambda n: torch.randint(31, (n, 8)),
        sequence=8,
    )


def chain(*makers, width=8, out=5):
    """An nn.Sequential of what the makers make."""
    return Workload(
        name="chain",
        model=lambda: nn.Sequential(*(make() for make in makers)),
        loss=lambda output, batch: mse_loss(output, batch[1]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch=lambda n: (torch.randn(n, width), torch.randn(n, out)),
        sequence=1,
    )


def linear(a, b):
    return lambda: nn.Linear(a, b)


def measured(workload, samples=(1, 2, 4), effort=QUICK):
    return measure_blocks(workload, device=CPU, device_type="cpu", samples=samples, effort=effort)


def test_every_kind_is_timed_for_every_number_of_samples():
    found = measured(gpt(tied=False))
    assert [(t.kind, t.samples) for t in found.timings] == [
        (kind, n) for kind in ("embedding", "layer", "head") for n in (1, 2, 4)
    ]
    assert all(t.forward_s > 0 and t.backward_s > 0 for t in found.timings)
    assert [u.kind for u in found.updates] == ["embedding", "layer", "head"]
    assert all(u.update_s > 0 for u in found.updates)


def test_the_model_file_has_every_block_with_its_parameters():
    model = measured(gpt(tied=False)).model
    parts = ModelParts.of(lambda: GPT())
    assert check_model(model) == ()
    assert [b.kind for b in model.blocks] == ["embedding", "layer", "layer", "layer", "head"]
    assert [b.parameters for b in model.blocks] == [
        sum(p.numel for p in parts.parameters_of(b)) for b in range(parts.num_blocks)
    ]
    assert all(b.tied_to is None and b.tied_parameters == 0 for b in model.blocks)
    assert [b.output_bytes for b in model.blocks] == [8 * 16 * FLOAT] * 4 + [0]


def test_a_tied_head_names_its_owner():
    model = measured(gpt(tied=True)).model
    assert check_model(model) == ()
    head = model.blocks[-1]
    assert (head.tied_to, head.tied_parameters) == (0, 31 * 16)
    assert head.parameters == 31 * 16 + 2 * 16  # the shared matrix and the norm
    assert [b.tied_to for b in model.blocks[:-1]] == [None] * 4


class TwoOwners(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.last = nn.Bilinear(4, 4, 4, bias=False)
        self.last.a, self.last.b = self.layers[0].weight, self.layers[1].weight


def test_a_block_tied_to_two_owners_is_refused():
    marked = pipelined(blocks="layers", last="last")(TwoOwners)
    workload = Workload(
        name="two", model=marked, loss=lambda o, b: o.mean(), optimizer=torch.optim.SGD,
        batch=lambda n: torch.randn(n, 4), sequence=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"block 2 .* shares parameters with blocks \[0, 1\]"):
        measured(workload, samples=(1,))


def test_flops_of_a_linear_layer_are_two_for_each_weight():
    found = measured(chain(linear(8, 32), linear(32, 5)), samples=(1, 4))
    assert [b.flops for b in found.model.blocks] == [2 * 8 * 32, 2 * 32 * 5]


@pytest.mark.parametrize(("optimizer", "expected"), [(torch.optim.AdamW, 8), (torch.optim.SGD, 0)])
def test_optimizer_state_is_counted(optimizer, expected):
    sizes = measured(gpt(tied=False, optimizer=optimizer), samples=(1,)).model.bytes_per_parameter
    assert (sizes.weight, sizes.gradient, sizes.optimizer) == (4, 4, expected)


def test_kept_bytes_of_a_linear_chain_agree_with_a_hand_count():
    """Linear keeps its input; Tanh its output, which the next block counts as its input; mse both sides."""
    found = measured(chain(linear(8, 32), nn.Tanh, linear(32, 5)), samples=(1, 4))
    kept = {(t.kind, t.samples): t.activation_bytes for t in found.timings}
    kinds = [b.kind for b in found.model.blocks]
    for n in (1, 4):
        assert kept[kinds[0], n] == n * 8 * FLOAT  # its input
        assert kept[kinds[1], n] == n * 32 * FLOAT  # its input, though it saves only its output
        assert kept[kinds[2], n] == n * (32 + 5 + 5) * FLOAT  # its input, its output and the target
    assert [b.activation_bytes for b in found.model.blocks] == [32, 128, 168]


class Inner(nn.Module):
    """Keeps its input (for the first matrix), the sum, and the tanh (for itself and the second matrix)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("scale", torch.full((10,), 2.0))

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x) * self.scale))


def test_kept_bytes_count_each_storage_once_and_no_parameters_or_buffers():
    module, x = Inner(), torch.randn(3, 6, requires_grad=True)
    kept = kept_bytes(module, (x,), lambda: (module(x),), context={}, outputs_stay=False)
    assert kept == 3 * (6 + 10) * FLOAT


def test_what_autograd_saves_from_the_context_is_not_the_blocks():
    x, table = torch.randn(3, 6, requires_grad=True), torch.randn(3, 6)
    kept = kept_bytes(nn.Identity(), (x,), lambda: (x * table,), context={"t": table}, outputs_stay=False)
    assert kept == 3 * 6 * FLOAT


def test_blocks_built_alike_cost_differently_at_both_ends():
    assert kinds_by_cost(("layer",) * 4) == ("layer@first", "layer", "layer", "layer@last")
    assert kinds_by_cost(("embedding", "layer", "layer", "head")) == ("embedding", "layer", "layer", "head")
    assert kinds_by_cost(("layer",)) == ("layer",)


def test_a_block_is_run_as_the_engine_runs_it():
    parts, workload = ModelParts.of(lambda: GPT()), gpt(tied=False)
    embedding, layer, head = find_probes(parts, workload, 4, device=CPU)
    for probe in (embedding, layer, head):
        passes = probe.passes(3)
        for _ in range(2):
            outputs = passes.forward()
            passes.backward()
        assert all(p.grad is not None for p in probe.stage.parameters())
        assert outputs[0].shape == (() if probe is head else (3, 8, 16))
    assert not embedding.inputs[0].is_floating_point()
    torch.manual_seed(0)
    whole = parts.stage(range(parts.num_blocks), device=CPU, seed=0)
    tokens = embedding.batch.rows(range(4))
    expected = whole.blocks["0"](tokens)
    assert torch.equal(layer.inputs[0], expected)


def test_gradients_add_up_over_repeats():
    parts, workload = ModelParts.of(lambda: GPT()), gpt(tied=False)
    head = find_probes(parts, workload, 2, device=CPU)[-1]
    passes = head.passes(2)
    passes.forward()
    passes.backward()
    once = [p.grad.clone() for p in head.stage.parameters()]
    passes.forward()
    passes.backward()
    for parameter, first in zip(head.stage.parameters(), once, strict=True):
        assert torch.allclose(parameter.grad, 2 * first)


def test_more_samples_take_longer():
    """Best of 5 attempts: 64 times the samples of a wide layer take at least 8 times as long."""
    workload = chain(*[linear(256, 256)] * 3, width=256, out=256)
    for _ in range(5):
        found = measured(workload, (16, 1024), Effort(batch_s=0.05, rounds=3))
        times = [(t.forward_s, t.backward_s) for t in found.timings if t.kind == "layer"]
        if all(late > 8 * early for early, late in zip(*times, strict=True)):
            return
    pytest.fail(f"16 and 1024 samples took {times}")


@pytest.mark.parametrize("samples", [(), (0, 1), (2, 1), (1, 1)])
def test_samples_that_do_not_ascend_are_refused(samples):
    with pytest.raises(UsageError, match="ascend"):
        measured(gpt(tied=False), samples)


def kinds_and_samples_on_a_rank():
    found = measured(gpt(tied=False), (1, 2))
    return [(t.kind, t.samples) for t in found.timings], found.model


def test_ranks_measure_together_and_see_one_model():
    (first, model), (second, other) = run_ranks(2, kinds_and_samples_on_a_rank)
    assert first == second
    assert model == other


def test_progress_counts_down():
    said = []
    measure_blocks(
        gpt(tied=False), device=CPU, device_type="cpu", samples=(1,), effort=QUICK,
        on_progress=lambda kind, samples, left: said.append((kind, samples, left)),
    )  # fmt: skip
    assert said[0] == ("embedding", 1, 11)  # three kinds and their optimizers, a warm-up and a round
    assert all(a[2] - b[2] == 1 for a, b in pairwise(said))
    assert said[-1] == ("head", 0, 0)
