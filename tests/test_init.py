"""First values: the same under every plan, those of the constructors, refused where they would be lost."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from arachne_runtime.errors import ModelError
from arachne_runtime.model import ModelParts, pipelined
from tests.models import GPT

CPU = torch.device("cpu")


def first_values(parts: ModelParts, *edges: int, seed: int = 0) -> dict[str, Tensor]:
    """All values by global name (and name of tie), from stages cut at ``edges``."""
    bounds = [0, *edges, parts.num_blocks]
    values: dict[str, Tensor] = {}
    for a, b in pairwise(bounds):
        stage = parts.stage(range(a, b), device=CPU, seed=seed)
        for block in range(a, b):
            values |= {name: p.detach() for name, p in stage.block_parameters(block)}
        for name, parameter in stage.tied_parameters():
            assert torch.equal(values.setdefault(name, parameter.detach()), parameter)
    return values


@pytest.mark.parametrize("tied", [False, True])
def test_values_do_not_depend_on_the_cut_or_the_random_state(tied: bool) -> None:
    parts = ModelParts.of(lambda: GPT(tied=tied))
    whole = first_values(parts)
    for edges in ((1,), (2, 4), (1, 2, 3, 4)):
        torch.manual_seed(sum(edges))
        found = first_values(parts, *edges)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_the_whole_model_starts_where_the_stages_start() -> None:
    parts = ModelParts.of(lambda: GPT(tied=True))
    model = parts.whole(seed=3)
    values = first_values(parts, 2, seed=3)
    assert torch.equal(model.layers[1].qkv.weight, values["blocks.2.qkv.weight"])
    assert isinstance(model, GPT)
    assert model.embed.weight is model.head.weight


def test_values_depend_on_seed_and_block() -> None:
    parts = ModelParts.of(GPT)
    values, others = first_values(parts), first_values(parts, seed=1)
    assert not torch.equal(values["blocks.1.qkv.weight"], values["blocks.2.qkv.weight"])
    assert not torch.equal(values["blocks.1.qkv.weight"], others["blocks.1.qkv.weight"])


def test_values_have_the_distribution_of_the_constructors() -> None:
    values = first_values(ModelParts.of(lambda: GPT(width=64, vocabulary=200)))
    assert values["blocks.0.weight"].std() == pytest.approx(1.0, rel=0.05)
    bound = 1 / math.sqrt(64)
    assert values["blocks.1.qkv.weight"].abs().max() == pytest.approx(bound, rel=0.01)
    assert values["blocks.1.norm.weight"].tolist() == [1.0] * 64


def test_a_tied_parameter_starts_as_the_constructor_left_it() -> None:
    """Whichever block is lower: the module that brought the parameter initialises it."""

    class HeadFirst(GPT):
        def __init__(self) -> None:
            super().__init__(width=64, vocabulary=200)
            self.embed.weight = self.head.weight

    from_embedding = first_values(ModelParts.of(lambda: GPT(width=64, vocabulary=200, tied=True)), 2)
    from_head = first_values(ModelParts.of(HeadFirst), 2)
    assert from_embedding["blocks.0.weight"].std() == pytest.approx(1.0, rel=0.05)
    assert from_head["blocks.0.weight"].abs().max() == pytest.approx(1 / math.sqrt(64), rel=0.01)


def modules_of_torch() -> list[nn.Module]:
    return [
        nn.Linear(4, 4),
        nn.Embedding(5, 4, padding_idx=0),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.GroupNorm(2, 4),
        nn.BatchNorm1d(4),
        nn.Conv2d(2, 2, 3),
        nn.LSTM(4, 4),
        nn.PReLU(),
        nn.Bilinear(2, 2, 2),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
    ]


def test_modules_of_torch_initialise_themselves() -> None:
    parts = ModelParts.of(lambda: nn.Sequential(*modules_of_torch()))
    values = first_values(parts)
    assert all(value.isfinite().all() for value in values.values())
    assert values["blocks.1.weight"][0].tolist() == [0.0] * 4
    assert values["blocks.10.out_proj.bias"].tolist() == [0.0] * 4


def test_layers_that_are_copies_are_initialised_apart() -> None:
    parts = ModelParts.of(lambda: nn.Sequential(*nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False).layers))  # fmt: skip
    values = first_values(parts)
    assert not torch.equal(values["blocks.0.linear1.weight"], values["blocks.1.linear1.weight"])


class Scale(nn.Module):
    """A parameter whose value only its constructor gives."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class GoodScale(Scale):
    def __init__(self) -> None:
        super().__init__()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 3.0)


class SmallLinear(nn.Linear):
    """Changes its parameters behind the back of the ``reset_parameters`` it inherits."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        with torch.no_grad():
            self.weight.mul_(0.1)


class OtherLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight = nn.Parameter(torch.randn(2, 2) * 0.02)


def small_weights(module: nn.Module, block: int = 0) -> None:
    """The kind of function that models hand to ``apply``."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(std=0.001)
        if isinstance(part, Scale):
            part.scale.data.fill_(block)


@pipelined(first="first", blocks="layers")
class Applies(nn.Module):
    """Initialises all of its parts itself, through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.apply(small_weights)


class Residual(nn.Module):
    """GPT-2's habit: one matrix gets another width, after the loop over all."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * 12))


def copied_small_linear() -> nn.Module:
    layer = SmallLinear()
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(2)))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda: nn.Sequential(Scale()),
            r"nothing initialises scale of block 0 \(Scale\): .*no reset_parameters\(\)",
        ),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), Scale())),
            r"nothing initialises 1.scale of block 0 \(Sequential\)",
        ),
        (
            lambda: nn.Sequential(SmallLinear()),
            r"weight of block 0 \(SmallLinear\), SmallLinear.weight: a constructor of the model",
        ),
        (
            lambda: nn.Sequential(OtherLinear()),
            r"weight of block 0 \(OtherLinear\), OtherLinear.weight: a constructor of the model",
        ),
        (
            lambda: nn.Sequential(Residual()),
            r"proj.weight of block 0 \(Residual\), Linear.weight: a constructor of the model",
        ),
        (Applies, r"weight of block 0 \(Linear\), Linear.weight: .*would be lost; say how with pipelined"),
        (
            copied_small_linear,
            r"weight of block 0 \(SmallLinear\), SmallLinear.weight: a constructor of the model changes it",
        ),
    ],
)
def test_values_that_a_rank_could_not_find_again_are_refused(
    factory: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ModelParts.of(factory)
    assert "init=fn(module, block)" in str(caught.value)


def test_a_reset_of_the_same_class_is_trusted() -> None:
    values = first_values(ModelParts.of(lambda: nn.Sequential(GoodScale())))
    assert values["blocks.0.scale"].tolist() == [3.0, 3.0]


def test_a_container_may_reset_what_its_children_hold() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
            self.linear = nn.Linear(2, 2)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            self.linear.reset_parameters()
            for weight in self.weights:
                nn.init.constant_(weight, 5.0)

    values = first_values(ModelParts.of(lambda: nn.Sequential(Owner())))
    assert values["blocks.0.weights.1"].tolist() == [5.0, 5.0]


def with_init(init: Callable[[nn.Module, int], None]) -> Callable[[], nn.Module]:
    @pipelined(first="first", blocks="layers", last=("scale", "head"), init=init)
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.layers = nn.ModuleList([nn.Linear(2, 2)])
            self.scale, self.head = Scale(), nn.Linear(2, 2)
            self.apply(small_weights)

    return Own


def test_init_is_the_way_out_and_knows_the_block() -> None:
    values = first_values(ModelParts.of(with_init(small_weights)), 1)
    assert values["blocks.2.scale.scale"].tolist() == [2.0, 2.0]
    assert all(values[f"blocks.{name}.weight"].abs().max() < 0.01 for name in ("0", "1", "2.head"))
    assert values["blocks.0.bias"].abs().max() > 0.01


def test_init_that_leaves_a_parameter_out_is_refused() -> None:
    parts = ModelParts.of(with_init(lambda module, block: None))
    with pytest.raises(ModelError, match=r"nothing initialises scale.scale of block 2 \(Scale, Linear\)"):
        parts.stage(range(1, 3), device=CPU, seed=0)


def test_init_may_assign_but_not_reshape() -> None:
    def assign(module: nn.Module, block: int) -> None:
        if isinstance(module, Scale):
            module.scale = nn.Parameter(torch.full((2,), 7.0))

    assert first_values(ModelParts.of(with_init(assign)))["blocks.2.scale.scale"].tolist() == [7.0, 7.0]

    def reshape(module: nn.Module, block: int) -> None:
        if isinstance(module, Scale):
            module.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(ModelError, match=r"init\(module, 2\) must leave scale.scale with shape \(2,\)"):
        first_values(ModelParts.of(with_init(reshape)))


def test_buffers_drawn_at_random_are_equal_on_every_rank() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("directions", torch.randn(3))

    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        stage = ModelParts.of(lambda: nn.Sequential(Features())).stage(range(1), device=CPU, seed=0)
        found.append(stage.blocks["0"].directions)
    assert torch.equal(*found)
