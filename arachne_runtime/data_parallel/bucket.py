"""One message of whole gradients, weighed by their rank's part of the batch; parameters keep views of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ModelError
from ..plan.limits import BUCKET_BYTES
from ..units import Bytes

FIRST_BYTES: Bytes = 2**20
"""The first bucket is closed early, so that the network starts early: DDP's default."""


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype and device whose gradients are summed in one message."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor
    """All gradients one behind the other, then for each parameter how many ranks have a gradient."""
    views: Sequence[Tensor]
    """The parts of ``flat``, laid out in memory as the parameters are."""
    num_waiting: int = 0
    """Parameters whose gradient is not there yet in this backward."""
    is_whole: bool = False
    """Whether every parameter has a gradient on this rank, so that the counts need not be read."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> "Bucket":
        """An empty bucket."""
        like = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        *parts, _ = torch.split(flat, [*sizes, len(sizes)])
        return cls(parameters, flat, [_laid_out(*pair) for pair in zip(parts, parameters, strict=True)])

    def pack(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Take over this rank's gradients, times ``weight``; the parameters then hold the views.

        Raises:
            ModelError: A gradient is sparse.

        """
        for parameter, view, gradient in zip(self.parameters, self.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
                continue
            if gradient.layout is not torch.strided:
                raise ModelError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which is not "
                    "summed over ranks; make its embedding with sparse=False"
                )
            torch.mul(gradient, weight, out=view)
            parameter.grad = view
        self._count([gradient is not None for gradient in gradients])

    def give_nothing(self) -> None:
        """Join the sum with zeros."""
        self.flat.zero_()
        self.is_whole = False

    def start(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """Send the sum on its way."""
        return None if group is None else dist.all_reduce(self.flat, group=group, async_op=True)

    def squared_norm(self) -> Tensor:
        """Of all gradients that are in the buffer now, in float64."""
        norm: Tensor = torch.linalg.vector_norm(self.flat[: -len(self.views)], dtype=torch.float64)
        return norm.square()

    def finish(self) -> None:
        """After the sum: what got a gradient on any rank has it on every rank, the rest stays None."""
        if self.is_whole:
            return
        counts = self.flat[-len(self.views) :].tolist()
        for parameter, view, count in zip(self.parameters, self.views, counts, strict=True):
            parameter.grad = view if count else None

    def _count(self, given: Sequence[bool]) -> None:
        self.is_whole = all(given)
        tail = self.flat[-len(given) :]
        if self.is_whole:
            tail.fill_(1)
        else:
            tail.copy_(torch.tensor(given, dtype=tail.dtype))


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
