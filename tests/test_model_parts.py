"""From a user's model to blocks: what is cut, named, tied, allocated and run."""

import threading
import weakref
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from arachne_runtime.errors import ModelError
from arachne_runtime.model import ModelParts, StageModule, pipelined
from arachne_runtime.model.construct import construct, parameters_on_meta
from tests.models import GPT

CPU = torch.device("cpu")


def run_stages(stages: list[StageModule], inputs: tuple[Tensor, ...], context: Mapping[str, Tensor]):
    for stage in stages:
        inputs = stage(inputs, context)
    return inputs


def cut(parts: ModelParts, *edges: int, **kwargs) -> list[StageModule]:
    bounds = [0, *edges, parts.num_blocks]
    return [parts.stage(range(a, b), device=CPU, seed=0, **kwargs) for a, b in pairwise(bounds)]


def test_blocks_kinds_and_names_of_a_gpt() -> None:
    parts = ModelParts.of(GPT)
    assert parts.num_blocks == 5
    assert parts.kinds == ("embedding", "layer", "layer", "layer", "head")
    assert [info.name for info in parts.parameters_of(4)] == [
        "blocks.4.norm.weight",
        "blocks.4.norm.bias",
        "blocks.4.head.weight",
    ]
    (embedding,) = parts.parameters_of(0)
    assert (embedding.name, embedding.shape, embedding.numel) == ("blocks.0.weight", (31, 16), 31 * 16)
    assert (embedding.dtype, embedding.requires_grad, embedding.tie) == (torch.float32, True, None)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("edges", [(), (1,), (2, 4), (1, 2, 3, 4)])
def test_any_cut_computes_what_the_whole_model_does(edges: tuple[int, ...], tied: bool) -> None:
    parts = ModelParts.of(lambda: GPT(tied=tied))
    tokens = torch.randint(31, (2, 6))
    assert parts.context is not None
    (whole,) = run_stages(cut(parts), (tokens,), parts.context(tokens))
    (found,) = run_stages(cut(parts, *edges), (tokens,), parts.context(tokens))
    assert torch.equal(found, whole)
    parts.verify(tokens)


def test_modules_are_listed_by_block() -> None:
    listed = [(block, name) for block, name, _ in ModelParts.of(lambda: GPT(layers=1)).modules()]
    assert listed[:3] == [(0, ""), (1, ""), (1, "norm")]
    assert listed[-2:] == [(2, "norm"), (2, "head")]


def test_state_dict_names_are_global_names() -> None:
    (stage,) = cut(ModelParts.of(GPT))
    named = {name for block in stage.block_range for name, _ in stage.block_parameters(block)}
    assert set(stage.state_dict()) == named
    assert {name for name, _ in stage.named_parameters()} == named
    assert "blocks.1.mlp.1.weight" in named


def test_stage_holds_only_its_blocks_and_no_memory_before() -> None:
    parts = ModelParts.of(GPT)
    stage = parts.stage(range(1, 3), device=CPU, seed=0)
    assert stage.block_range == range(1, 3)
    assert {name.split(".")[1] for name, _ in stage.named_parameters()} == {"1", "2"}
    assert all(parameter.is_meta for parameter in parts._model.parameters())
    with pytest.raises(ModelError, match=r"consecutive blocks out of 0\.\.4, not range\(3, 6\)"):
        parts.stage(range(3, 6), device=CPU, seed=0)


def test_buffers_of_constructors_survive() -> None:
    parts = ModelParts.of(GPT)
    stage = parts.stage(range(1, 2), device=CPU, seed=0)
    assert stage.blocks["1"].hidden.tolist() == torch.ones(8, 8).triu(1).bool().tolist()
    assert parts.context is not None
    assert torch.equal(parts.context(torch.zeros(1, 3))["cos"], GPT().cos[:3])


def test_construction_keeps_no_memory_but_that_of_buffers() -> None:
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            scratch = torch.zeros(8, 8)
            alive.append(weakref.ref(scratch.untyped_storage()))
            self.register_buffer("mask", scratch.fill_(1).triu(1).bool())

    built = construct(lambda: nn.Sequential(Masked()))
    assert built.log.of(built.model[0].weight)
    assert alive[0]() is None


def test_context_is_where_and_what_the_stage_is() -> None:
    """The device meta stands for a GPU: what is not moved there would stay on the CPU."""
    parts = ModelParts.of(GPT)
    half = parts.context_on(CPU, torch.float16)
    assert half is not None
    table = half(torch.zeros(1, 3))["cos"]
    assert table.dtype == torch.float16
    assert torch.equal(table, GPT().cos[:3].half())

    def rotary(batch: Tensor) -> Mapping[str, Tensor]:
        return {"cos": torch.ones(3), "sin": torch.ones(3)}

    free = pipelined(first="embed", blocks="layers", last=("norm", "head"), context=rotary)(
        type("Free", (GPT,), {})
    )
    for model in (GPT, free):
        away = ModelParts.of(model).context_on(torch.device("meta"))
        assert away is not None
        assert away(torch.zeros(1, 3))["cos"].is_meta


def test_stages_do_not_share_memory() -> None:
    parts = ModelParts.of(GPT)
    a, b = (parts.stage(range(1, 2), device=CPU, seed=0) for _ in range(2))
    with torch.no_grad():
        a.blocks["1"].qkv.weight.zero_()
        a.blocks["1"].hidden.zero_()
    assert b.blocks["1"].qkv.weight.abs().sum() > 0
    assert b.blocks["1"].hidden.any()


def test_ties_are_found_and_kept_inside_a_stage() -> None:
    parts = ModelParts.of(lambda: GPT(tied=True))
    (tie,) = parts.ties
    assert (tie.name, tie.blocks) == ("blocks.0.weight", (0, 4))
    assert [info.tie for info in parts.parameters_of(4)] == [None, None, "blocks.0.weight"]
    whole, (first, last) = cut(parts)[0], cut(parts, 2)
    assert whole.blocks["0"].weight is whole.blocks["4"].head.weight
    for stage, held in ((whole, True), (first, True), (last, True), (cut(parts, 1, 4)[1], False)):
        assert [name for name, _ in stage.tied_parameters()] == (["blocks.0.weight"] if held else [])
        own = [name for block in stage.block_range for name, _ in stage.block_parameters(block)]
        assert "blocks.0.weight" not in own
        assert "blocks.4.head.weight" not in own
    assert first.tied_parameters()[0][1] is first.blocks["0"].weight
    assert torch.equal(first.blocks["0"].weight, last.blocks["4"].head.weight)


def test_one_layer_used_in_every_block_is_one_set_of_parameters() -> None:
    class Shared(nn.Sequential):
        def __init__(self) -> None:
            layer = nn.Linear(4, 4)
            super().__init__(layer, nn.Linear(4, 4), layer)

    parts = ModelParts.of(Shared)
    assert [(tie.name, tie.blocks) for tie in parts.ties] == [
        ("blocks.0.bias", (0, 2)),
        ("blocks.0.weight", (0, 2)),
    ]
    first, last = cut(parts, 1)
    assert torch.equal(first.blocks["0"].weight, last.blocks["2"].weight)
    assert len(list(cut(parts)[0].parameters())) == 4
    assert last.block_parameters(2) == ()


class Two(nn.Module):
    """Takes and gives two tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) * scale, self.b(y) + x


class Join(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pipelined(blocks=("twos", "join"), context=lambda batch: {"scale": batch[0].mean()})
class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twos = nn.ModuleDict({"left": Two(3), "right": Two(3)})
        self.join = Join()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = x.mean()
        for two in self.twos.values():
            x, y = two(x, y, scale=scale)
        return self.join(x, y)


def test_several_tensors_cross_a_boundary_and_context_goes_where_it_is_taken() -> None:
    parts = ModelParts.of(Pair)
    assert parts.kinds == ("layer", "layer", "head")
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    parts.verify((x, y), inputs=lambda batch: batch)
    first, rest = cut(parts, 1)
    assert parts.context is not None
    context = parts.context((x, y))
    boundary = first((x, y), context)
    assert [tuple(t.shape) for t in boundary] == [(2, 3), (2, 3)]
    assert torch.equal(rest(boundary, context)[0], cut(parts)[0]((x, y), context)[0])


def test_blocks_of_a_sequential_are_its_children() -> None:
    parts = ModelParts.of(
        lambda: nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.ReLU())
    )
    assert parts.kinds == ("embedding", "layer", "layer", "layer", "head")
    parts.verify(torch.randn(3, 4))
    alike = ModelParts.of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    assert alike.kinds == ("layer", "layer", "layer-2", "layer")
    assert ModelParts.of(lambda: nn.Sequential(nn.Linear(8, 8))).kinds == ("layer",)


def test_settings_make_a_kind_and_positions_do_not() -> None:
    class Windowed(nn.Module):
        def __init__(self, layer_idx: int, window: int) -> None:
            super().__init__()
            self.layer_idx, self.window = layer_idx, window

    layers = [Windowed(0, 8), Windowed(1, 8), Windowed(2, 16), Windowed(3, 8)]
    assert ModelParts.of(lambda: nn.Sequential(*layers)).kinds == ("layer", "layer", "layer-2", "layer")


def test_dtype_casts_parameters_and_keeps_values_and_ties() -> None:
    parts = ModelParts.of(lambda: GPT(tied=True))
    single, double = cut(parts)[0], cut(parts, dtype=torch.float64)[0]
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    assert double.blocks["1"].hidden.dtype == torch.bool
    assert double.blocks["0"].weight is double.blocks["4"].head.weight is double.tied_parameters()[0][1]
    listed = [p for block in double.block_range for _, p in double.block_parameters(block)]
    assert {id(p) for p in listed} < {id(p) for p in double.parameters()}
    assert all(
        torch.equal(a.double(), b) for a, b in zip(single.parameters(), double.parameters(), strict=True)
    )


def test_what_the_user_put_on_a_parameter_is_kept() -> None:
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].bias.requires_grad_(False)
        model[0].weight.no_decay = True
        return model

    (stage,) = cut(ModelParts.of(frozen))
    assert not stage.blocks["0"].bias.requires_grad
    assert stage.blocks["0"].weight.no_decay


def test_registration_is_restored_after_an_error_and_elsewhere() -> None:
    before = nn.Module.register_parameter

    def fails() -> nn.Module:
        assert nn.Linear(2, 2).weight.is_meta
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer") as caught:
        ModelParts.of(fails)
    assert "with its parameters on the meta device" in caught.value.__notes__[0]
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_build_as_ever_meanwhile() -> None:
    built: list[nn.Module] = []
    with parameters_on_meta():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta


def test_a_parameter_made_before_it_is_shared_stays_one() -> None:
    class Given(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    def shared() -> nn.Module:
        weight = nn.Parameter(torch.zeros(2))
        return nn.Sequential(Given(weight), Given(weight))

    assert [tie.name for tie in ModelParts.of(shared).ties] == ["blocks.0.weight"]


def test_constructing_leaves_the_random_state_alone() -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    cut(ModelParts.of(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout())))
    assert torch.equal(before, torch.random.get_rng_state())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.empty = (
            nn.Linear(2, 2),
            nn.ModuleList([nn.Linear(2, 2)]),
            nn.ModuleList(),
        )


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("start", self.layer.weight.detach().clone())


@pipelined(first="embed", blocks="layers")
class WithPositions(nn.Module):
    """A table of positions of the model itself, as many scripts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(4, 2), nn.ModuleList([nn.Linear(2, 2)])
        self.positions = nn.Parameter(torch.zeros(4, 2))


def marked(name: str, **layout) -> type[nn.Module]:
    return pipelined(**layout)(type(name, (Plain,), {}))


EXISTING = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Plain, "Plain does not say which of its submodules are blocks; mark the class @arachne.pipelined"),
        (EXISTING, "a model .Sequential. where a function that makes one is wanted.* lambda"),
        (lambda: 3, "the model factory returned int, not an nn.Module"),
        (lambda: EXISTING, "0.weight has memory already: the model existed before"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet: lazy modules"),
        (lambda: nn.Sequential(WithBuffer()), "buffer 0.start was computed from a parameter"),
        (
            marked("A", blocks="layers"),
            "parameters of A are in no block: first.weight, first.bias; name their modules in @pipelined",
        ),
        (
            WithPositions,
            "parameters of WithPositions are in no block: positions; make positions part of a module",
        ),
        (marked("B", first="embed", blocks="layers"), "no submodule 'embed', .* first, layers"),
        (marked("C", blocks="empty"), "C has no blocks: empty is an empty list"),
        (marked("D", first="first", blocks="layers", context="masks"), "D has no method 'masks'"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_are_refused(factory: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelParts.of(factory)


def test_pipelined_marks_classes_of_modules_only() -> None:
    with pytest.raises(ModelError, match=r"marks a class of nn\.Module, and <function"):
        pipelined(blocks="layers")(lambda: None)  # type: ignore[type-var]
    with pytest.raises(ModelError, match="names no submodule"):
        pipelined(blocks=())


def test_a_forward_that_is_more_than_its_blocks_is_found() -> None:
    @pipelined(blocks="layers")
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) * 2

    with pytest.raises(ModelError, match=r"Doubling\.forward and its blocks in a row differ by up to"):
        ModelParts.of(Doubling).verify(torch.ones(1, 2))


def test_context_that_no_block_takes_or_that_needs_parameters_is_refused() -> None:
    wrong = pipelined(first="first", blocks="layers", context=lambda batch: {"mask": batch})(
        type("W", (Plain,), {})
    )
    context = ModelParts.of(wrong).context
    assert context is not None
    with pytest.raises(ModelError, match="context of W gives 'mask', which the forward of no block takes"):
        context(torch.ones(1))

    @pipelined(blocks="layers", context="first_weight")
    class Reading(GPT):
        def first_weight(self, batch: Tensor) -> Mapping[str, Tensor]:
            return {"cos": self.layers[0].qkv.weight}

    reading = pipelined(first="embed", blocks="layers", last=("norm", "head"), context="first_weight")(
        Reading
    )
    context = ModelParts.of(reading).context
    assert context is not None
    with pytest.raises(ModelError, match="computes 'cos' from a parameter"):
        context(torch.ones(1))


def test_a_block_that_returns_something_else_is_named() -> None:
    class Talks(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    (stage,) = cut(ModelParts.of(lambda: nn.Sequential(nn.Linear(2, 2), Talks())))
    with pytest.raises(ModelError, match=r"block 1 \(Talks\) returned dict; what leaves a block is a tensor"):
        stage((torch.ones(1, 2),), {})
