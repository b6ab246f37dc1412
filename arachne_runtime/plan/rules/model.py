"""Rules of a model: sizes that can be, and ties that point at an earlier block."""

from collections.abc import Callable, Iterator

from ...errors import Problem
from ..model import BlockSpec, ModelSpec
from ..walk import said
from .bounds import at_least, not_negative

_ALIKE = ("parameters", "flops", "experts", "expert_parameters", "expert_flops", "experts_per_token")
"""What blocks of one kind have in common."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What may cross a boundary between stages."""


def check_model(model: ModelSpec) -> tuple[Problem, ...]:
    """Every violation of every rule."""
    return tuple(problem for rule in MODEL_RULES for problem in rule(model))


def is_named(model: ModelSpec) -> Iterator[Problem]:
    """A plan names its model."""
    if not model.name.strip():
        yield Problem("$.name", "is empty; give the model a name")


def has_blocks(model: ModelSpec) -> Iterator[Problem]:
    """A model has a block."""
    if not model.blocks:
        yield Problem("$.blocks", "has no block")


def sequence_is_positive(model: ModelSpec) -> Iterator[Problem]:
    """A sample has at least one token."""
    yield from at_least(1, {"$.sequence": model.sequence})


def dtype_is_known(model: ModelSpec) -> Iterator[Problem]:
    """What crosses a boundary has a size."""
    if model.dtype not in DTYPES:
        yield Problem("$.dtype", f"{model.dtype!r} is not allowed; allowed: {', '.join(DTYPES)}")


def kinds_are_named(model: ModelSpec) -> Iterator[Problem]:
    """A profile is looked up by kind."""
    for path, block in _blocks(model):
        if not block.kind.strip():
            yield Problem(f"{path}.kind", "is empty; give the block a kind, like layer")


def sizes_are_not_negative(model: ModelSpec) -> Iterator[Problem]:
    """Sizes, FLOPs and counts may be 0."""
    fields = ("activation_bytes", "output_bytes", "tied_parameters", "tp_collectives", *_ALIKE)
    for path, block in _blocks(model):
        yield from not_negative({f"{path}.{field}": getattr(block, field) for field in fields})


def bytes_per_parameter_can_be(model: ModelSpec) -> Iterator[Problem]:
    """A weight takes a byte or more; gradient and optimizer may take none."""
    sizes = model.bytes_per_parameter
    yield from at_least(1, {"$.bytes_per_parameter.weight": sizes.weight})
    rest = {"gradient": sizes.gradient, "optimizer": sizes.optimizer}
    yield from at_least(0, {f"$.bytes_per_parameter.{field}": size for field, size in rest.items()})


def kinds_are_alike(model: ModelSpec) -> Iterator[Problem]:
    """Blocks of one kind cost the same, so they have the same parameters, FLOPs and experts."""
    first: dict[str, int] = {}
    for b, block in enumerate(model.blocks):
        like = first.setdefault(block.kind, b)
        for field in _ALIKE:
            here, there = getattr(block, field), getattr(model.blocks[like], field)
            if here != there and min(here, there) >= 0:
                message = f"is {here}, but block {like}, of the same kind {said(block.kind)}, has {there}"
                yield Problem(f"$.blocks[{b}].{field}", message)


def experts_are_part_of_the_block(model: ModelSpec) -> Iterator[Problem]:
    """Routed experts hold some of a block's parameters and FLOPs, and a token meets some of them."""
    for path, block in _blocks(model):
        if block.experts == 0:
            for field in ("expert_parameters", "expert_flops", "experts_per_token"):
                value = getattr(block, field)
                if value > 0:
                    yield Problem(f"{path}.{field}", f"is {value}, but the block has no experts")
            continue
        for field, limit in (
            ("expert_parameters", "parameters"),
            ("expert_flops", "flops"),
            ("experts_per_token", "experts"),
        ):
            value, most = getattr(block, field), getattr(block, limit)
            if value > most >= 0:
                yield Problem(f"{path}.{field}", f"is {value}, but {limit} is {most}")


def ties_point_at_an_earlier_block(model: ModelSpec) -> Iterator[Problem]:
    """The owner of a tied parameter is the first block that holds it."""
    for b, block in enumerate(model.blocks):
        if block.tied_to is not None and not 0 <= block.tied_to < b:
            message = f"is {block.tied_to}, which is no block before block {b}"
            yield Problem(f"$.blocks[{b}].tied_to", message)


def ties_share_parameters(model: ModelSpec) -> Iterator[Problem]:
    """``tied_to`` and ``tied_parameters`` are given together."""
    for path, block in _blocks(model):
        if block.tied_to is None and block.tied_parameters > 0:
            yield Problem(
                f"{path}.tied_parameters", f"is {block.tied_parameters}, but tied_to names no block"
            )
        if block.tied_to is not None and block.tied_parameters == 0:
            yield Problem(f"{path}.tied_parameters", f"is 0, but the block is tied to block {block.tied_to}")


def tied_parameters_fit(model: ModelSpec) -> Iterator[Problem]:
    """Both blocks hold what they share."""
    for b, block in enumerate(model.blocks):
        if block.tied_to is None or not 0 <= block.tied_to < b:
            continue
        for holder in (b, block.tied_to):
            have = model.blocks[holder].parameters
            if block.tied_parameters > have >= 0:
                message = f"is {block.tied_parameters}, but block {holder} has {have} parameters"
                yield Problem(f"$.blocks[{b}].tied_parameters", message)


MODEL_RULES: tuple[Callable[[ModelSpec], Iterator[Problem]], ...] = (
    is_named,
    has_blocks,
    sequence_is_positive,
    dtype_is_known,
    kinds_are_named,
    sizes_are_not_negative,
    bytes_per_parameter_can_be,
    kinds_are_alike,
    experts_are_part_of_the_block,
    ties_point_at_an_earlier_block,
    ties_share_parameters,
    tied_parameters_fit,
)


def _blocks(model: ModelSpec) -> Iterator[tuple[str, BlockSpec]]:
    for b, block in enumerate(model.blocks):
        yield f"$.blocks[{b}]", block
