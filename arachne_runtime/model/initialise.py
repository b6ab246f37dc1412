"""The first values of a block's parameters: a function of (model, seed, block) and of nothing else."""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .layout import Block, InitFunction
from .writes import Write, WriteLog

_RESETS = ("reset_parameters", "_reset_parameters")
"""torch.nn.MultiheadAttention and Transformer spell it with an underscore."""
_WAY_OUT = "say how with pipelined(..., init=fn(module, block))"


def block_seed(seed: int, block: int) -> int:
    """The seed of one block: 63 bits of the SHA-256 of ``"seed:block"``."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{block}".encode()).digest()[:8]) >> 1


def initial_values(block: Block, seed: int, init: InitFunction | None) -> dict[str, Tensor]:
    """First values on the CPU, by name in the block, for any holder of this block under any plan.

    The block is copied alone, its parts are reset innermost first, then ``init`` is called on each part, all
    under the block's seed; the caller's random state is left as it was.

    Raises:
        ModelError: A parameter that nothing sets, or that ``init`` took away or gave another shape.

    """
    (alone,) = copies([block])
    empty = {id(p): torch.empty(p.shape, dtype=p.dtype) for p in block.parameters().values()}
    give_values([alone], [block], empty)
    before = alone.parameters()
    with torch.random.fork_rng(devices=[]), WriteLog("cpu") as log:
        torch.manual_seed(block_seed(seed, block.index))
        initialise(alone, init)
    values = alone.parameters()
    for name, parameter in before.items():
        if name not in values or values[name].shape != parameter.shape:
            raise ModelError(
                f"init(module, {block.index}) must leave {name} with shape {tuple(parameter.shape)}"
            )
        if values[name] is parameter and not log.of(parameter):
            raise _uninitialised(block, name)
    return {name: values[name].detach() for name in before}


def initialise(block: Block, init: InitFunction | None) -> None:
    """Reset the parts of a block in place, innermost modules first, then call ``init`` on each part."""
    for module in _innermost_first(part for _, part in block.parts):
        reset = _reset_of(module)
        if reset is not None:
            getattr(module, reset)()
    if init is not None:
        with torch.no_grad():
            for _, part in block.parts:
                init(part, block.index)


def copies(blocks: Sequence[Block]) -> list[Block]:
    """Deep copies that share among themselves what the originals share; parameters on meta stay there."""
    parts = copy.deepcopy([block.parts for block in blocks])
    return [Block(block.index, part, block.half) for block, part in zip(blocks, parts, strict=True)]


def give_values(blocks: Sequence[Block], originals: Sequence[Block], values: Mapping[int, Tensor]) -> None:
    """Make the parameters of copies from ``values``, which has them by id of the original parameter.

    A parameter that several modules share stays one object; what the user put on it is kept.
    """
    made: dict[int, nn.Parameter] = {}
    for block, original in zip(blocks, originals, strict=True):
        held = zip(list(block.holders()), list(original.holders()), strict=True)
        for (_, module, name, _), (_, _, _, parameter) in held:
            if id(parameter) not in made:
                made[id(parameter)] = _like(parameter, values[id(parameter)])
            setattr(module, name, made[id(parameter)])


def check_initialisation(blocks: Sequence[Block], built: WriteLog) -> dict[int, int]:
    """Refuse a model whose first values are not those of ``reset_parameters``.

    ``built`` logged its construction. Each parameter's last writes there must be those of a reset, repeated
    here on the meta device. Returns, by id of a parameter, the lowest block whose reset gives it the values
    that the constructor gave.

    Raises:
        ModelError: A parameter that no reset sets, or that the class's own code changes after construction.

    """
    sources: dict[int, int] = {}
    refused: dict[int, ModelError] = {}
    for block in blocks:
        with WriteLog("meta") as log:
            initialise(block, None)
        for name, module, attribute, parameter in block.holders():
            fault = _fault(block, name, module, attribute, built.of(parameter), log.of(parameter))
            if fault is None:
                sources.setdefault(id(parameter), block.index)
            else:
                refused.setdefault(id(parameter), fault)
    for key, fault in refused.items():
        if key not in sources:  # one good holder of a shared parameter is enough
            raise fault
    return sources


def _fault(
    block: Block,
    name: str,
    module: nn.Module,
    attribute: str,
    built: tuple[Write, ...],
    reset: tuple[Write, ...],
) -> ModelError | None:
    if not reset:
        return _uninitialised(block, name)
    if built and _same_end(built, reset):
        return None
    if not built and _reset_knows_constructor(module):
        return None
    return ModelError(
        f"{name} of {block}, {type(module).__name__}.{attribute}: a constructor of the model changes it "
        "after its module was made, and reset_parameters does not; each rank builds its own blocks alone, so "
        f"this would be lost; {_WAY_OUT}"
    )


def _uninitialised(block: Block, name: str) -> ModelError:
    return ModelError(
        f"nothing initialises {name} of {block}: its module has no reset_parameters() that sets it, and what "
        f"a constructor sets is not kept, as each rank builds its own blocks alone; add one, or {_WAY_OUT}"
    )


def _same_end(built: tuple[Write, ...], reset: tuple[Write, ...]) -> bool:
    """The shorter is the end of the longer; what reads another tensor is only compared in full."""
    if built == reset:
        return True
    shared = min(len(built), len(reset))
    end = built[-shared:]
    return end == reset[-shared:] and not any(write.reads_tensor for write in end)


def _reset_knows_constructor(module: nn.Module) -> bool:
    """Whether the reset belongs to the class of the constructor, or to one derived from it."""
    order = type(module).__mro__
    definer = {attribute: next((i for i, c in enumerate(order) if attribute in vars(c)), len(order))
               for attribute in ("__init__", *_RESETS)}  # fmt: skip
    reset = _reset_of(module)
    return reset is None or definer[reset] <= definer["__init__"]


def _reset_of(module: nn.Module) -> str | None:
    return next((name for name in _RESETS if callable(getattr(module, name, None))), None)


def _innermost_first(parts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                yield from walk(child)
            yield module

    for part in parts:
        yield from walk(part)


def _like(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new
