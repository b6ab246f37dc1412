"""Sums gradients over all ranks that hold a parameter, packed in flat buffers that gradients are views of."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ModelError, UsageError
from ..mesh import Mesh
from ..model import StageModule
from ..plan.limits import BUCKET_BYTES
from ..plan.order import Reduction
from ..units import Bytes


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype that are summed in one message."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor
    """All gradients one behind the other, then for each parameter how many ranks have a gradient."""
    views: Sequence[Tensor]
    group: dist.ProcessGroup
    work: dist.Work | None = None
    complete: bool = False
    """Whether every parameter has a gradient on this rank, so that the counts need not be read."""

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> "Bucket":
        """An empty bucket for parameters of one dtype and device."""
        parameters = [p for _, p in named]
        sizes = [p.numel() for p in parameters]
        like = parameters[0]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        *parts, _ = torch.split(flat, [*sizes, len(sizes)])
        views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        return cls(parameters, flat, views, group)

    def adopt(self) -> None:
        """Move gradients that autograd allocated into the buffer; later ones are added there in place."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient is not view:
                view.copy_(gradient)
                parameter.grad = view

    def start(self) -> None:
        """Send the sums on their way."""
        self.adopt()
        have = [p.grad is not None for p in self.parameters]
        self.complete = all(have)
        for view, mine in zip(self.views, have, strict=True):
            if not mine:
                view.zero_()
        self.flat[-len(have) :] = torch.tensor(have, dtype=self.flat.dtype)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait; a parameter that got a gradient on any rank has the sum on every rank, others stay None."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        if not self.complete:
            counts = self.flat[-len(self.parameters) :].tolist()
            for parameter, view, count in zip(self.parameters, self.views, counts, strict=True):
                parameter.grad = view if count else None


@dataclass(slots=True)
class Gradients:
    """The gradients of one stage, and their sums."""

    buckets: dict[Reduction, list[Bucket]]
    parameters: Sequence[nn.Parameter]
    """Those that take a gradient."""
    counted: Sequence[nn.Parameter]
    """Those whose norm this rank contributes: each parameter of the model is counted on one rank."""
    frozen: Sequence[nn.Parameter]
    """Those that take none."""
    stage: StageModule
    held: Sequence[nn.Parameter]
    """All that the stage held when this was made."""
    _passed: int = field(default=0, init=False)
    """Lowest block whose gradients are complete."""
    _unsettled: list[nn.Parameter] = field(default_factory=list, init=False)
    """Parameters that have no gradient yet in this step."""

    @property
    def blocks(self) -> range:
        """Of the stage."""
        return self.stage.block_range

    @classmethod
    def of(cls, stage: StageModule, mesh: Mesh) -> "Gradients":
        """Pack the parameters of a stage by reduction and dtype, in descending block order."""
        buckets: dict[Reduction, list[Bucket]] = {}
        parameters: list[nn.Parameter] = []
        counted: list[nn.Parameter] = []
        for reduction in mesh.reductions:
            named = [(n, p) for n, p in _parameters(stage, reduction) if p.requires_grad]
            parameters += [p for _, p in named]
            if reduction.members[0] == mesh.place.rank:
                counted += [p for _, p in named]
            if len(reduction.members) > 1:
                buckets[reduction] = list(_pack(named, mesh.groups[reduction.members]))
        frozen = [p for p in stage.parameters() if not p.requires_grad]
        return cls(buckets, parameters, counted, frozen, stage, tuple(stage.parameters()))

    def begin(self) -> None:
        """Forget the gradients of the last step; UsageError where a parameter is new, or was frozen."""
        self._refuse_changes()
        if thawed := [tuple(p.shape) for p in self.frozen if p.requires_grad]:
            raise UsageError(
                f"a parameter of shape {thawed[0]} was frozen when the engine was made, so no rank sums its "
                "gradient; make the engine with it trainable and freeze it afterwards, or make a new engine"
            )
        self._passed = self.blocks.stop
        self._unsettled = list(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def _refuse_changes(self) -> None:
        now = tuple(self.stage.parameters())
        if len(now) == len(self.held) and all(a is b for a, b in zip(now, self.held, strict=True)):
            return
        old, new = ({id(p) for p in parameters} for parameters in (self.held, now))
        added = [name for name, p in self.stage.named_parameters() if id(p) not in old]
        told = (
            f"{added[0]} was put into the stage" if added else f"{len(old - new)} were taken out of the stage"
        )
        raise UsageError(
            f"parameters changed after the engine was made ({told}), so none of its optimizer and its sums "
            "knows them; change the model where it is made (adapters too), or make a new engine"
        )

    def settle(self, sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """After a backward: take over the gradients that autograd has just made, apart from those to send.

        Autograd may give a parameter memory that it shares with a gradient of the input (``x + p[None]`` for
        one row), and add to it in the next backward while the gradient is still being sent.
        """
        fresh = [p.grad for p in self._unsettled if p.grad is not None]
        if not fresh:
            return sent
        sparse = next((gradient for gradient in fresh if gradient.is_sparse), None)
        if sparse is not None:
            raise ModelError(
                f"a parameter of shape {tuple(sparse.shape)} has a sparse gradient, which is not summed over "
                "ranks; make its embedding with sparse=False"
            )
        self._unsettled = [p for p in self._unsettled if p.grad is None]
        for bucket in self._all():
            bucket.adopt()
        taken = {gradient.untyped_storage().data_ptr() for gradient in fresh}
        return tuple(t.clone() if t.untyped_storage().data_ptr() in taken else t for t in sent)

    def passed(self, block: int) -> None:
        """The last backward of the step has passed ``block``."""
        self._passed = block

    def pieces(self) -> tuple[range, ...]:
        """Runs of blocks of the stage, ascending, behind each of which a sum with other ranks may start."""
        starts = {min(b for b in r.blocks if b in self.blocks) for r in self.buckets if r.tie is None}
        edges = sorted({self.blocks.start, *starts, self.blocks.stop})
        return tuple(range(a, b) for a, b in pairwise(edges))

    def start(self, reduction: Reduction) -> bool:
        """Start a sum, once the last backward has passed all its blocks that this rank holds."""
        if min(block for block in reduction.blocks if block in self.blocks) < self._passed:
            return False
        for bucket in self.buckets[reduction]:
            bucket.start()
        return True

    def finish(self, reduction: Reduction) -> None:
        """Wait for one sum."""
        for bucket in self.buckets[reduction]:
            bucket.finish()

    def bytes_of(self, reduction: Reduction) -> Bytes:
        """Bytes of one sum."""
        return sum(bucket.flat.nbytes for bucket in self.buckets[reduction])

    def kept(self) -> Iterator[Tensor]:
        """The tensors that hold gradients between steps."""
        yield from (bucket.flat for bucket in self._all())
        yield from (p.grad for p in self.parameters if p.grad is not None)

    def squared_norm(self) -> float:
        """Sum of squares over the parameters that this rank counts."""
        grads = [p.grad for p in self.counted if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads).double().square()) if grads else 0.0

    def clip(self, norm: float, limit: float) -> None:
        """Scale down by ``limit / norm`` where the norm is above the limit, as PyTorch does."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, torch.tensor(norm, dtype=torch.float64))

    def close(self) -> None:
        """Let go of the groups; nothing can be summed any more."""
        self.buckets.clear()

    def _all(self) -> Iterable[Bucket]:
        return (bucket for buckets in self.buckets.values() for bucket in buckets)


def _parameters(stage: StageModule, reduction: Reduction) -> list[tuple[str, nn.Parameter]]:
    if reduction.tie is not None:
        return [(name, p) for name, p in stage.tied_parameters() if name == reduction.tie]
    return [pair for block in reversed(reduction.blocks) for pair in reversed(stage.block_parameters(block))]


def _pack(named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> Iterable[Bucket]:
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        waiting = by_dtype.setdefault(parameter.dtype, [])
        waiting.append((name, parameter))
        if sum(p.nbytes for _, p in waiting) >= BUCKET_BYTES:
            yield Bucket.of(by_dtype.pop(parameter.dtype), group)
    for waiting in by_dtype.values():
        yield Bucket.of(waiting, group)
