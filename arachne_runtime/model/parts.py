"""From a user's factory to the parts of the model that a rank can build alone, without building the rest."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import default_inputs
from ..errors import ModelError
from ..plan.order import Summed
from ..plan.shards import Position, held
from .construct import construct
from .context import context_function
from .initialise import check_initialisation, copies, give_values, initial_values
from .kinds import kinds_of
from .layout import Block, ContextFunction, Layout, find_blocks, layout_of
from .parameters import ParameterInfo, Values
from .rules import Cut, CutsItself, cuts_of, modules_of, rules_of
from .sharing import ALONE, Sharing
from .stage import StageModule, Tie


class ModelParts:
    """A model as blocks: known by shape everywhere, allocated only where a stage asks for it.

    parts = ModelParts.of(lambda: GPT(config))      # no parameter takes memory
    stage = parts.stage(range(0, 7), device=torch.device("cuda:0"), seed=0)

    """

    def __init__(self, model: nn.Module, layout: Layout, blocks: tuple[Block, ...], ties: Mapping[int, Tie]):
        """Hold a constructed and checked model; use ``ModelParts.of``."""
        self._model = model
        self._layout = layout
        self._blocks = blocks
        self._tie_of = dict(ties)
        self._rules = rules_of(layout, blocks)
        self._cuts = cuts_of(blocks, self._rules)
        self.kinds: tuple[str, ...] = kinds_of(blocks)
        """Name of each block's structure; blocks of one kind cost the same."""
        self.ties: tuple[Tie, ...] = tuple(sorted(set(ties.values()), key=lambda tie: tie.name))
        """Parameters that several blocks share."""
        self.context = self.context_on(torch.device("cpu"))
        """``batch -> {keyword: tensor}`` on the CPU, for the blocks that take these keywords, or None."""

    @classmethod
    def of(cls, factory: Callable[[], nn.Module]) -> "ModelParts":
        """Construct the model, parameters on the meta device and buffers real; check that it can be cut.

        Args:
            factory: Returns a new instance of a class marked with ``pipelined``, or an ``nn.Sequential``.

        Raises:
            ModelError: A model that cannot be cut, built or initialised block by block; says which module and
                the way out.

        """
        built = construct(factory)
        layout = layout_of(built.model)
        if layout is None:
            raise ModelError(
                f"{type(built.model).__name__} does not say which of its submodules are blocks; mark the "
                'class @arachne.pipelined(first="embed", blocks="layers", last=("norm", "head")), '
                "or give an nn.Sequential"
            )
        blocks = find_blocks(built.model, layout)
        _refuse_parameters_outside(built.model, blocks)
        sources = {} if layout.init or layout.values else check_initialisation(blocks, built.log)
        return cls(built.model, layout, blocks, _find_ties(blocks, sources))

    @property
    def num_blocks(self) -> int:
        """Blocks of the model, 0..L-1 in the order of execution."""
        return len(self._blocks)

    def parameters_of(self, block: int) -> tuple[ParameterInfo, ...]:
        """Every parameter of a block, those it shares with other blocks included."""
        own = self._blocks[block]
        return tuple(
            ParameterInfo(
                own.global_name(name), tuple(p.shape), p.dtype, p.requires_grad,
                self._tie_of[id(p)].name if id(p) in self._tie_of else None,
                self._cut_of(p).splits, self._cut_of(p).partial,
            )
            for name, p in own.parameters().items()
        )  # fmt: skip

    def _cut_of(self, parameter: nn.Parameter) -> Cut:
        return self._cuts.get(id(parameter), Cut())

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the model says how a replica of several devices shares its modules."""
        return bool(self._rules.styles)

    def refusals(self, block: int, position: Position) -> Iterator[str]:
        """Why a block cannot be shared out in the degrees of ``position``, with the way out."""
        for info in self.parameters_of(block):
            for split in info.splits:
                if told := split.refusal(position.along(split.axis)[1]):
                    yield f"{info.name}: {told}"
        yield from self._rules.refusals(self._blocks[block], position.tensor[1])

    def summed(self) -> Summed:
        """What the order of communication must know of the model."""
        return Summed.of([[i.form for i in self.parameters_of(block)] for block in range(self.num_blocks)])

    def modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        """Every (block, name inside the block, module), to check before a stage is built."""
        for block in self._blocks:
            for prefix, part in block.parts:
                yield from ((block.index, name, module) for name, module in part.named_modules(prefix=prefix))

    def context_on(self, device: torch.device, dtype: torch.dtype | None = None) -> ContextFunction | None:
        """The user's context function for a stage that was built with this device and dtype, or None.

        Raises:
            ModelError: The class has no such method.

        """
        return context_function(self._model, self._layout, self._blocks, _placing(device, dtype))

    def stage(
        self,
        blocks: range,
        *,
        device: torch.device,
        seed: int,
        dtype: torch.dtype | None = None,
        sharing: Sharing = ALONE,
    ) -> StageModule:
        """Allocate and initialise some consecutive blocks on ``device``.

        Every block's values are drawn on the CPU under ``(seed, block)``, so they do not depend on the plan.

        Args:
            blocks: Block ids, consecutive.
            device: Where the stage lives.
            seed: Seed of the whole model.
            dtype: Cast floating-point parameters and buffers after initialisation, as ``Module.to`` does.
            sharing: Which part of each block this rank holds, and with whom it runs; the part is cut from the
                whole block's values.

        Raises:
            ModelError: A parameter that nothing initialises.

        """
        (stage,) = self.stages([blocks], device=device, seed=seed, dtype=dtype, sharing=[sharing])
        return stage

    def stages(
        self,
        spans: Sequence[range],
        *,
        device: torch.device,
        seed: int,
        dtype: torch.dtype | None = None,
        sharing: Sequence[Sharing] = (),
        values: Values | None = None,
    ) -> tuple[StageModule, ...]:
        """Several stages of one rank, as ``stage`` makes one; what their blocks share is one parameter.

        Args:
            spans: Consecutive block ids of each stage.
            device: Where the stages live.
            seed: Seed of the whole model.
            dtype: As of ``stage``.
            sharing: As of ``stage``, for each; none: whole blocks.
            values: In place of first values; it is asked once for each parameter that the rank holds.

        Raises:
            ModelError: A parameter that nothing initialises.

        """
        for blocks in spans:
            if not blocks or blocks.step != 1 or blocks.start < 0 or blocks.stop > self.num_blocks:
                raise ModelError(
                    f"a stage holds consecutive blocks out of 0..{self.num_blocks - 1}, not {blocks}"
                )
        originals = [self._blocks[index] for blocks in spans for index in blocks]
        by_block = {block: each for blocks, each in zip(spans, sharing, strict=False) for block in blocks}
        return self._fill(copies(originals), originals, spans, device, seed, dtype, by_block, values)

    def may_be_whole(self, block: int) -> bool:
        """Whether a block may be built again without other ranks: it holds no experts of theirs."""
        return not any(isinstance(module, CutsItself) for _, module in modules_of(self._blocks[block]))

    def rebuilt(self, block: int, values: Mapping[str, Tensor], *, like: Sequence[Tensor]) -> StageModule:
        """A block alone and whole, with given values by global name, its buffers where its inputs are."""
        original = self._blocks[block]
        (alone,) = copies([original])
        named = original.parameters()
        given = {id(p): values[original.global_name(name)] for name, p in named.items()}
        give_values([alone], [original], given)
        dtype = next((p.dtype for p in alone.parameters().values() if p.is_floating_point()), None)
        return StageModule([alone], {}).to(device=like[0].device, dtype=dtype)

    def whole(
        self, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        """The user's own module, all of it, with the values that the stages of every plan start from."""
        model = copy.deepcopy(self._model)
        everything = [range(self.num_blocks)]
        blocks = find_blocks(model, self._layout)
        self._fill(blocks, self._blocks, everything, torch.device(device), seed, dtype, {})
        return model.to(device=device, dtype=dtype)  # buffers beside the blocks too

    @torch.no_grad()
    def verify(
        self, batch: Any, *, inputs: Callable[[Any], tuple[Tensor, ...]] = default_inputs, seed: int = 0
    ) -> None:
        """Check on the CPU that the blocks in a row give what the class's own ``forward`` gives.

        Allocates the whole model. Dropout is off in both.

        Raises:
            ModelError: They differ; says by how much.

        """
        whole = copy.deepcopy(self._model)
        blocks, everything = find_blocks(whole, self._layout), [range(self.num_blocks)]
        (stage,) = self._fill(blocks, self._blocks, everything, torch.device("cpu"), seed, None, {})
        stage.eval()
        whole.eval()
        expected = whole(*inputs(batch))
        found = stage(inputs(batch), self.context(batch) if self.context else {})
        wanted = tuple(expected) if isinstance(expected, tuple | list) else (expected,)
        if len(found) != len(wanted):
            raise ModelError(f"{self._name}.forward returns {len(wanted)} tensors, its blocks {len(found)}")
        for a, b in zip(found, wanted, strict=True):
            _refuse_difference(self._name, a, b)

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _fill(
        self,
        blocks: Sequence[Block],
        originals: Sequence[Block],
        spans: Sequence[range],
        device: torch.device,
        seed: int,
        dtype: torch.dtype | None,
        sharing: Mapping[int, Sharing],
        values: Values | None = None,
    ) -> tuple[StageModule, ...]:
        """Stages from copies of the original blocks, with their values on the device."""
        place = _placing(device, dtype)
        given = (
            self._ask(originals, values, dtype, sharing)
            if values is not None
            else self._draw(originals, seed, place, sharing)
        )
        give_values(blocks, originals, given)
        for block, original in zip(blocks, originals, strict=True):
            sharing.get(block.index, ALONE).apply(block, original, self._rules)
        named = [
            (block.parameters(), original.parameters())
            for block, original in zip(blocks, originals, strict=True)
        ]
        ties = {
            id(copied[name]): self._tie_of[id(parameter)]
            for copied, original in named
            for name, parameter in original.items()
            if id(parameter) in self._tie_of
        }
        held = [[block for block in blocks if block.index in span] for span in spans]
        return tuple(StageModule(mine, ties).to(device=device, dtype=dtype) for mine in held)

    def _ask(
        self,
        blocks: Sequence[Block],
        values: Values,
        dtype: torch.dtype | None,
        sharing: Mapping[int, Sharing],
    ) -> dict[int, Tensor]:
        """What others hand over, by id of the original parameter."""
        found: dict[int, Tensor] = {}
        for block in blocks:
            position = sharing.get(block.index, ALONE).position
            named = zip(block.parameters().values(), self.parameters_of(block.index), strict=True)
            for original, info in named:
                if id(original) not in found:
                    wanted = dtype if dtype is not None and original.is_floating_point() else original.dtype
                    found[id(original)] = values(info.form, held(info.form, position), wanted)
        return found

    def _draw(
        self,
        blocks: Sequence[Block],
        seed: int,
        place: Callable[[Tensor], Tensor],
        sharing: Mapping[int, Sharing],
    ) -> dict[int, Tensor]:
        """First values by id of the original parameter; those of a tie come from its source block."""
        wanted = {
            id(p): sharing.get(block.index, ALONE) for block in blocks for p in block.parameters().values()
        }
        sources = {self._tie_of[key].source for key in wanted if key in self._tie_of}
        values: dict[int, Tensor] = {}
        for index in sorted(sources | {block.index for block in blocks}):
            named = {
                name: id(p)
                for name, p in self._blocks[index].parameters().items()
                if id(p) in wanted and (id(p) not in self._tie_of or self._tie_of[id(p)].source == index)
            }
            found = self._values(index, tuple(named), seed)
            values |= {
                key: place(wanted[key].part(found[name], self._cuts.get(key))) for name, key in named.items()
            }
        return values

    def _values(self, block: int, names: Sequence[str], seed: int) -> Mapping[str, Tensor]:
        """First values of some parameters of a block, on the CPU: read, or drawn."""
        if self._layout.values is not None:
            return self._layout.values(block, names)
        return initial_values(self._blocks[block], seed, self._layout.init)


def _placing(device: torch.device, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Moves a tensor to the device, and to the dtype where it holds floating-point numbers."""
    return lambda value: value.to(device=device, dtype=dtype if value.is_floating_point() else None)


def _find_ties(blocks: Sequence[Block], sources: Mapping[int, int]) -> dict[int, Tie]:
    holders: dict[int, list[tuple[int, str]]] = {}
    for block in blocks:
        for name, parameter in block.parameters().items():
            holders.setdefault(id(parameter), []).append((block.index, block.global_name(name)))
    return {
        key: Tie(held[0][1], tuple(index for index, _ in held), sources.get(key, held[0][0]))
        for key, held in holders.items()
        if len(held) > 1
    }


def _refuse_parameters_outside(model: nn.Module, blocks: Sequence[Block]) -> None:
    inside = {id(p) for block in blocks for p in block.parameters().values()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if not outside:
        return
    own = [name for name in outside if "." not in name]
    ways = ["name their modules in @pipelined (first, blocks or last)"] if len(own) < len(outside) else []
    if own:
        told = ", ".join(own)
        ways += [f"make {told} part of a module that is in a block (an Embed of tokens and positions)"]
    raise ModelError(
        f"parameters of {type(model).__name__} are in no block: {', '.join(outside)}; {', and '.join(ways)}"
    )


def _refuse_difference(name: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise ModelError(
            f"{name}.forward returns shape {tuple(expected.shape)}, its blocks in a row {tuple(found.shape)}"
        )
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True):
        gap = (found - expected).abs().max().item()
        raise ModelError(
            f"{name}.forward and its blocks in a row differ by up to {gap:.3g}; "
            "forward does something between the blocks that no block does: move it into one"
        )
