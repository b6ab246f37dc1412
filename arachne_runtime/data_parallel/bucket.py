"""One message of whole gradients, weighed by their rank's part of the batch; parameters keep views of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ModelError, UsageError
from ..plan.limits import BUCKET_BYTES
from ..units import Bytes

FIRST_BYTES: Bytes = 2**20
"""The first bucket is closed early, so that the network starts early: DDP's default."""


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype and device whose gradients are summed in one message."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor
    """All gradients one behind the other, then ``tail``."""
    views: Sequence[Tensor]
    """The parts of ``flat``, laid out in memory as the parameters are."""
    tail: Tensor
    """For each parameter how many ranks have a gradient, then how many ranks have failed."""
    whole_tail: Tensor
    """What a rank with all gradients has there."""
    given: list[bool]
    """Whether each parameter's gradient of this backward is in the buffer."""
    num_waiting: int = 0
    """Parameters whose gradient is not there yet in this backward."""
    is_whole: bool = False
    """Whether every parameter has a gradient on this rank, so that the counts need not be read."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> "Bucket":
        """An empty bucket."""
        like = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes) + len(sizes) + 1, dtype=like.dtype, device=like.device)
        *parts, tail = torch.split(flat, [*sizes, len(sizes) + 1])
        whole = torch.ones_like(tail)
        whole[-1] = 0
        views = [_laid_out(*pair) for pair in zip(parts, parameters, strict=True)]
        return cls(parameters, flat, views, tail, whole, [False] * len(sizes))

    def open(self) -> None:
        """A backward begins."""
        self.num_waiting = len(self.parameters)
        self.given = [False] * self.num_waiting

    def take(self, index: int, gradient: Tensor | None, factor: Tensor) -> None:
        """Take over a parameter's gradient, times ``factor``; the parameter then holds the view.

        At once, while the gradient is in the processor's cache: 25 MB later they were read from memory again.

        Raises:
            ModelError: The gradient is sparse.
            UsageError: It is the second one in this backward.

        """
        if self.given[index]:
            raise UsageError(
                f"a parameter of shape {tuple(self.parameters[index].shape)} got two gradients in one "
                "backward, the second after the first may have been summed; use "
                "torch.utils.checkpoint(..., use_reentrant=False), or call the backward under no_sync()"
            )
        self.num_waiting -= 1
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise ModelError(
                f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, which is not "
                "summed over ranks; make its embedding with sparse=False"
            )
        view = self.views[index]
        torch.mul(gradient.detach() if gradient.requires_grad else gradient, factor, out=view)
        self.parameters[index].grad = view
        self.given[index] = True

    def close(self) -> None:
        """All gradients of this rank have been taken: the message is ready."""
        self.is_whole = all(self.given)
        self.tail.copy_(self.whole_tail)
        if not self.is_whole:
            self.tail[:-1] = torch.tensor(self.given, dtype=self.tail.dtype)
            for view, given in zip(self.views, self.given, strict=True):
                if not given:
                    view.zero_()

    def give_nothing(self) -> None:
        """Join the sum with zeros, and the word that this rank has failed."""
        self.flat.zero_()
        self.tail[-1] = 1
        self.is_whole = False

    def start(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """Send the sum on its way."""
        return None if group is None else group.allreduce([self.flat])

    def squared_norm(self) -> Tensor:
        """Of all gradients that are in the buffer now, in float64."""
        norm: Tensor = torch.linalg.vector_norm(self.flat[: -len(self.tail)], dtype=torch.float64)
        return norm.square()

    def num_failed(self) -> float:
        """After the sum: ranks that gave nothing because they have failed."""
        return float(self.tail[-1])

    def finish(self) -> None:
        """After the sum: what got a gradient on any rank has it on every rank, the rest stays None."""
        if self.is_whole:
            return
        counts = self.tail[:-1].tolist()
        for parameter, view, count in zip(self.parameters, self.views, counts, strict=True):
            parameter.grad = view if count else None


def cut(parameters: Iterable[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
    """Cut an order of parameters into buckets of one dtype and device, in the order in which they fill."""
    unfilled: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    limit = FIRST_BYTES
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        waiting = unfilled.setdefault(key, [])
        waiting.append(parameter)
        if parameter.nbytes >= limit or sum(p.nbytes for p in waiting) >= limit:
            yield unfilled.pop(key)
            limit = BUCKET_BYTES
    yield from unfilled.values()


def _laid_out(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """With a dense parameter's strides (channels last too), so that a gradient is copied straight through."""
    by_stride = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    numel = 1
    for stride, size in by_stride:
        if size != 1 and stride != numel:
            return part.view(parameter.shape)
        numel *= size
    return part.as_strided(parameter.shape, parameter.stride())
