"""Sums gradients over all ranks that hold a parameter, packed in flat buffers that gradients are views of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..backends.protocol import refuse_thawed
from ..errors import ModelError, UsageError
from ..mesh import Mesh
from ..model import StageModule
from ..plan.order import Reduction
from ..plan.shards import Atom, ParameterForm, held
from ..units import Bytes
from .bucket import Bucket, Piece, pack


@dataclass(slots=True)
class Gradients:
    """The gradients of one rank, of all stages that it holds, and their sums."""

    buckets: dict[Reduction, list[Bucket]]
    parameters: Sequence[nn.Parameter]
    """Those that take a gradient."""
    counted: Sequence[Piece]
    """Those whose norm this rank contributes: each element of the model is counted on one rank."""
    frozen: Sequence[nn.Parameter]
    """Those that take none."""
    stages: Sequence[StageModule]
    held: Sequence[nn.Parameter]
    """All that the stages held when this was made."""
    starts: frozenset[int]
    """Blocks behind which a sum with other ranks may start; alike on all ranks of a replica."""
    lowest: Mapping[Reduction, Sequence[int]]
    """Of each sum with other ranks, the lowest block of each stage here that holds a part of it."""
    _incomplete: set[int] = field(default_factory=set, init=False)
    """Blocks whose gradients may still grow in this step."""
    _unsettled: list[nn.Parameter] = field(default_factory=list, init=False)
    """Parameters that have no gradient yet in this step."""

    @classmethod
    def of(cls, stages: Sequence[StageModule], mesh: Mesh) -> "Gradients":
        """Pack the parameters of the stages by reduction and dtype, in descending block order."""
        buckets: dict[Reduction, list[Bucket]] = {}
        pieces: list[Piece] = []
        named = _named(stages)
        for reduction in mesh.reductions:
            mine = [_piece(named, form, atom, reduction, mesh) for form, atom in reduction.atoms]
            pieces += mine
            if len(reduction.members) > 1:
                buckets[reduction] = list(pack(mine, mesh.groups[reduction.members]))
        parameters = tuple({id(piece.parameter): piece.parameter for piece in pieces}.values())
        held = _all_parameters(stages)
        return cls(
            buckets,
            parameters,
            counted=[piece for piece in pieces if piece.counts],
            frozen=[p for p in held if not p.requires_grad],
            stages=stages,
            held=held,
            starts=mesh.starts,
            lowest={reduction: _lowest(stages, reduction) for reduction in buckets},
        )

    def begin(self) -> None:
        """Forget the gradients of the last step; UsageError where a parameter is new, or was frozen."""
        self._refuse_changes()
        refuse_thawed(self.frozen)
        self._incomplete = {block for stage in self.stages for block in stage.block_range}
        self._unsettled = list(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def _refuse_changes(self) -> None:
        now = _all_parameters(self.stages)
        if len(now) == len(self.held) and all(a is b for a, b in zip(now, self.held, strict=True)):
            return
        old, new = ({id(p) for p in parameters} for parameters in (self.held, now))
        named = (pair for stage in self.stages for pair in stage.named_parameters())
        added = [name for name, p in named if id(p) not in old]
        told = (
            f"{added[0]} was put into the stage" if added else f"{len(old - new)} were taken out of the stage"
        )
        raise UsageError(
            f"parameters changed after the engine was made ({told}), so none of its optimizer and its sums "
            "knows them; change the model where it is made (adapters too), or make a new engine"
        )

    def enter(self) -> None:
        """A backward begins: autograd leaves its gradients with the parameters."""

    def settle(self, sent: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
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
        return tuple(
            t.clone() if t is not None and t.untyped_storage().data_ptr() in taken else t for t in sent
        )

    def passed(self, blocks: range) -> None:
        """The last backward of the step has passed ``blocks``."""
        self._incomplete.difference_update(blocks)

    def pieces(self, stage: StageModule) -> tuple[range, ...]:
        """Runs of blocks of a stage, ascending, behind each of which a sum with other ranks may start."""
        blocks = stage.block_range
        edges = sorted({blocks.start, *self.starts.intersection(blocks), blocks.stop})
        return tuple(range(a, b) for a, b in pairwise(edges))

    def start(self, reduction: Reduction) -> bool:
        """Start a sum, once the last backward has passed all its blocks that this rank holds."""
        if not self._incomplete.isdisjoint(self.lowest[reduction]):
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
        """Sum of squares over what this rank counts."""
        used = (piece for piece in self.counted if piece.parameter.grad is not None)
        grads = [gradient for piece in used for gradient in piece.gradients()]
        return float(torch.nn.utils.get_total_norm(grads).double().square()) if grads else 0.0

    def clip(self, norm: float, limit: float) -> None:
        """Scale down by ``limit / norm`` where the norm is above the limit, as PyTorch does."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, torch.tensor(norm, dtype=torch.float64))

    def close(self) -> None:
        """Let go of the groups; nothing can be summed any more."""
        self.buckets.clear()

    def _all(self) -> Iterable[Bucket]:
        return (bucket for buckets in self.buckets.values() for bucket in buckets)


def _named(stages: Sequence[StageModule]) -> dict[str, nn.Parameter]:
    """By global name, or by the name of the tie."""
    named = {name: p for stage in stages for b in stage.block_range for name, p in stage.block_parameters(b)}
    return named | {name: p for stage in stages for name, p in stage.tied_parameters()}


def _piece(
    named: Mapping[str, nn.Parameter], form: ParameterForm, atom: Atom, reduction: Reduction, mesh: Mesh
) -> Piece:
    """A part of a parameter of this rank."""
    parameter = named[form.tie or form.name]
    whole = held(form, mesh.position_at(reduction.blocks))
    assert tuple(parameter.shape) == tuple(sum(map(len, runs)) for runs in whole), (
        f"{form.name} has shape {tuple(parameter.shape)} here, {whole} of {form.shape} are expected"
    )
    return Piece.of(parameter, atom, whole, mesh.rank)


def _all_parameters(stages: Sequence[StageModule]) -> tuple[nn.Parameter, ...]:
    """Each once, though stages may share it."""
    return tuple({id(p): p for stage in stages for p in stage.parameters()}.values())


def _lowest(stages: Sequence[StageModule], reduction: Reduction) -> tuple[int, ...]:
    """The backward goes down block by block, so that the lowest of a stage is complete last."""
    held = ([block for block in reduction.blocks if block in stage.block_range] for stage in stages)
    return tuple(min(blocks) for blocks in held if blocks)
