"""One block of each kind, with the inputs it meets in the model, ready to be run as the engine runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..data.batch import StepBatch, as_step_batch
from ..model.parts import ModelParts
from ..model.sharing import ALONE, Sharing
from ..model.stage import StageModule
from ..model.vocabulary import over_shard
from ..model.workload import Workload

SEED = 0
"""Seed of the values; they do not matter to dense blocks."""


@dataclass(slots=True)
class Probe:
    """A block that stands for all of its kind."""

    kind: str
    block: int
    stage: StageModule
    inputs: tuple[Tensor, ...]
    """What crosses the boundary before it, for the largest number of samples."""
    batch: StepBatch
    is_first: bool
    loss: Callable[[Any, Any], Tensor] | None
    """Of the last block only."""
    context_of: Callable[[Any], Mapping[str, Tensor]] | None

    def passes(self, samples: int) -> "Passes":
        """Forward and backward for that many samples."""
        device = self.inputs[0].device
        rows = self.batch.rows(range(samples))
        batch = tree_map_only(Tensor, lambda t: t.to(device, copy=True), rows)  # not a view of all samples
        context = self.context_of(batch) if self.context_of else {}
        return Passes(self, tuple(x[:samples].clone() for x in self.inputs), batch, context)


@dataclass(slots=True)
class Passes:
    """Forward and backward of one block on one micro-batch, detached at its boundaries as a stage is."""

    probe: Probe
    inputs: tuple[Tensor, ...]
    batch: Any
    context: Mapping[str, Tensor]
    _outputs: tuple[Tensor, ...] = ()
    _gradients: list[Tensor] = field(default_factory=list)

    def forward(self) -> tuple[Tensor, ...]:
        """Run the block; the last one also computes the loss, which is then the only output."""
        wanted = not self.probe.is_first
        taken = tuple(x.detach().requires_grad_(wanted and x.is_floating_point()) for x in self.inputs)
        outputs: tuple[Tensor, ...] = self.probe.stage(taken, self.context)
        if self.probe.loss is not None:
            outputs = (self.probe.loss(outputs[0] if len(outputs) == 1 else outputs, self.batch),)
        self._outputs = outputs
        return outputs

    def backward(self) -> None:
        """Run the backward of the last forward; gradients add up in the parameters' ``.grad``."""
        outputs = [out for out in self._outputs if out.requires_grad]
        if self.probe.loss is not None:
            torch.autograd.backward(outputs)
        elif outputs:
            if not self._gradients:
                self._gradients = [torch.randn_like(out).mul_(1e-3) for out in outputs]
            torch.autograd.backward(outputs, self._gradients)
        self._outputs = ()

    def forget(self) -> None:
        """Drop the graph of a forward that gets no backward, and the gradients that backwards were given."""
        self._outputs, self._gradients = (), []


def find_probes(
    parts: ModelParts,
    workload: Workload,
    samples: int,
    *,
    device: torch.device,
    sharing: Sharing = ALONE,
) -> tuple[Probe, ...]:
    """One probe for each kind (see ``kinds_by_cost``), with inputs for ``samples`` samples.

    Only one block of each kind is built and run to see what comes behind it. Where blocks are shared out, all
    devices of the replica call this, and run the same passes, together.
    """
    batch = as_step_batch(workload.batch(samples))
    whole = tree_map_only(Tensor, lambda t: t.to(device), batch.rows(range(samples)))
    context_of = parts.context_on(device)
    context = context_of(whole) if context_of else {}
    flowing = workload.inputs(whole)
    probes: dict[str, Probe] = {}
    behind: dict[str, tuple[Tensor, ...]] = {}
    for block, kind in enumerate(kinds_by_cost(parts.kinds)):
        is_last = block == parts.num_blocks - 1
        if kind not in probes:
            stage = parts.stage(range(block, block + 1), device=device, seed=SEED, sharing=sharing)
            probes[kind] = Probe(
                kind=kind,
                block=block,
                stage=stage,
                inputs=flowing,
                batch=batch,
                is_first=block == 0,
                loss=over_shard(workload.loss, sharing.logits) if is_last else None,
                context_of=context_of,
            )
            if not is_last:
                with torch.no_grad():
                    behind[kind] = stage(flowing, context)
        flowing = behind.get(kind, ())
    return tuple(probes.values())


def kinds_by_cost(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kind of every block, where equal kinds also cost the same.

    The first block computes no gradient of its input, and the last computes the loss: where they are built
    like others, they still become kinds of their own, ``layer@first`` and ``layer@last``.
    """
    named = list(kinds)
    for place, suffix in ((0, "@first"), (len(kinds) - 1, "@last")):
        if kinds.count(kinds[place]) > 1:
            named[place] = kinds[place] + suffix
    return tuple(named)
