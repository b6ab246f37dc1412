"""Runs the modules of a block on shards of their parameters, by torch's DTensor, in one replica's group.

The parameters of a module stay plain tensors, each rank's own part: the engine, its sums and any optimizer
need not know. Inside a forward they are seen as parts of a distributed tensor, of which DTensor derives what
is exchanged. That tensor is the shards one behind the other: not the user's weight where q, k and v are fused
or heads are repeated, which matters to nobody.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..errors import ModelError
from ..measure.collectives import collective, recording
from ..plan.shards import even_part
from . import vocabulary
from .exchange import Peers
from .layout import Block
from .rules import Rules, modules_of
from .styles import Colwise, Rowwise, Style, Vocabulary

Forward = Callable[..., Tensor]


class TensorGroup:
    """The devices of one replica, of which this rank is one."""

    def __init__(self, peers: Peers, device_type: str) -> None:
        """Hold a group that is used for nothing else, so that its exchanges keep one order."""
        self.peers = peers
        self.degree = len(peers)
        # DTensor keeps meshes that equal this one, of groups that may be gone: the name makes it unlike
        name = f"tensor_{peers.group.group_name}"
        self.mesh = DeviceMesh.from_group(peers.group, device_type, mesh_dim_names=(name,))
        self.logits: vocabulary.Shard | None = None
        """The words of the head whose logits stay apart, if one was shared out so."""

    def shard_of(self, length: int) -> vocabulary.Shard:
        """How a vocabulary of ``length`` words is shared out here."""
        sizes = tuple(len(even_part(length, index, self.degree)) for index in range(self.degree))
        return vocabulary.Shard(sizes, self.peers)

    def split(self, tensor: Tensor, placement: Placement) -> DTensor:
        """The part of this rank as one of a distributed tensor."""
        return DTensor.from_local(tensor, self.mesh, [placement], run_check=False)

    def replicated(self, tensor: Tensor) -> DTensor:
        """What all ranks hold alike, as a distributed tensor; their gradients of it are summed."""
        summed: Tensor = _SumOfGradients.apply(tensor, self)  # type: ignore[no-untyped-call]
        return DTensor.from_local(
            summed, self.mesh, [Replicate()], run_check=False, grad_placements=[Partial()]
        )

    def whole(self, tensor: DTensor) -> Tensor:
        """The whole tensor, summed over the ranks."""
        with collective("tensor all_reduce", sent_bytes=tensor.to_local().nbytes):
            return tensor.redistribute(self.mesh, [Replicate()]).to_local()


class _SumOfGradients(torch.autograd.Function):
    """Nothing forwards. DTensor would sum too, but not say how long it waited."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.timer = group.peers.group, recording()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        with collective("tensor all_reduce", sent_bytes=summed.nbytes, to=ctx.timer):
            dist.all_reduce(summed, group=ctx.group)
        return summed, None


def share_out(block: Block, whole: Block, rules: Rules, tensor: TensorGroup, *, keeps_logits: bool) -> None:
    """Make the modules of ``block``, whose parameters are this rank's shards, run together with the group's.

    Args:
        block: Copies, with shards.
        whole: The block as it was constructed.
        rules: Of the model.
        tensor: The replica's devices.
        keeps_logits: Leave the words of the head where they are, for a loss that takes them so.

    Raises:
        ModelError: A rule that does not fit its module.

    """
    originals = dict(modules_of(whole))
    for path, module in modules_of(block):
        place = block.global_name(path).removesuffix(".")
        style = rules.styles.get((block.index, path))
        if style is not None and (
            made := _forward(module, originals[path], style, tensor, keeps_logits, place)
        ):
            module.forward = made
        for name in rules.divided.get((block.index, path), ()):
            setattr(module, name, max(1, getattr(module, name) // tensor.degree))


def _forward(
    module: nn.Module, whole: nn.Module, style: Style, tensor: TensorGroup, keeps_logits: bool, place: str
) -> Forward | None:
    """What the module runs instead; None: the same, on its own part."""
    match style:
        case Colwise():
            return _colwise(module, tensor, 1 if style.transposed else 0)
        case Rowwise():
            return _rowwise(module, tensor, 0 if style.transposed else 1)
        case Vocabulary() if isinstance(module, nn.Embedding):
            return _embedding(module, tensor.shard_of(_rows(whole, place)), tensor)
        case Vocabulary():
            return _head(module, tensor.shard_of(_rows(whole, place)), tensor, keeps_logits)
        case _:
            return None


def _colwise(module: nn.Module, tensor: TensorGroup, dim: int) -> Forward:
    """Whole inputs → this rank's features; the gradients of the inputs are summed."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        with _distributed(module, tensor, {2: Shard(dim), 1: Shard(0)}):
            found: DTensor = inner(tensor.replicated(x))
        return found.to_local()

    return forward


def _rowwise(module: nn.Module, tensor: TensorGroup, dim: int) -> Forward:
    """The features of this rank → whole outputs."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        with _distributed(module, tensor, {2: Shard(dim), 1: Replicate()}):
            found: DTensor = inner(tensor.split(x, Shard(x.dim() - 1)))
        return tensor.whole(found)

    return forward


def _head(module: nn.Module, shard: vocabulary.Shard, tensor: TensorGroup, keeps_logits: bool) -> Forward:
    """Whole inputs → logits of all words, or of this rank's."""
    inner = _colwise(module, tensor, 0)
    if keeps_logits:
        tensor.logits = shard
        return inner
    return lambda x: vocabulary.gather_last(inner(x), shard)


def _embedding(module: nn.Embedding, shard: vocabulary.Shard, tensor: TensorGroup) -> Forward:
    """Words → rows, of which each rank looks up its own."""
    inner = module.forward
    if module.padding_idx is not None:
        mine = module.padding_idx in shard.words
        module.padding_idx = module.padding_idx - shard.words.start if mine else None

    def forward(words: Tensor) -> Tensor:
        own, others = vocabulary.own_words(words, shard.words)
        rows = inner(own).masked_fill(others[..., None], 0)
        return tensor.whole(tensor.split(rows, Partial()))

    return forward


@contextmanager
def _distributed(
    module: nn.Module, tensor: TensorGroup, placements: Mapping[int, Placement]
) -> Iterator[None]:
    """Inside, the module's own parameters are parts of distributed ones, placed by their number of dims."""
    held = dict(module._parameters)
    try:
        for name, parameter in held.items():
            if parameter is not None:
                module._parameters[name] = tensor.split(parameter, placements[parameter.dim()])  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(held)


def _rows(whole: nn.Module, place: str) -> int:
    weight: Any = getattr(whole, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(
            f"{place} is {type(whole).__name__} without a weight of (words, width), which the style "
            "'vocabulary' needs; name the embedding or the head itself"
        )
    return weight.shape[0]
