"""Peak bytes of a device under a plan: what it holds always, and the larger of its two phases.

Predicts high rather than low: an out-of-memory is worse than a plan a few percent slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.limits import PENDING_SENDS
from arachne_runtime.plan.model import ParameterBytes
from arachne_runtime.plan.order import REDUCTION_BYTES
from arachne_runtime.plan.schedule import in_flight
from arachne_runtime.units import Bytes

from ..catalog.devices import is_cpu
from .amounts import Amount, Bound, larger
from .played import ActionBytes
from .tables import StageCosts, Tables
from .tiling import Tiling

GATHERED = 2
"""Blocks whose weights ZeRO-3 holds whole: the one in use and the one being gathered."""

SUM_BYTES: Bytes = REDUCTION_BYTES
"""DeepSpeed's buffer for gradients that it sums, as the runtime sets it for ZeRO-2 and 3."""

PREFETCHED = 50_000_000
"""Parameters that ZeRO-3 gathers ahead (stage3_prefetch_bucket_size, DeepSpeed 0.19.8's default)."""

__all__ = ["StageMemory", "in_flight", "stage_memory", "together"]

SMALL_BYTES: Bytes = 2**14
"""Scalars of a step: losses, norms, the commit word, how many ranks have a gradient, steps of an optimizer.
Stages of the example's GPT held up to 1.6 kB beyond what is counted (python -m bench.memory, 2026-11-30)."""

BACKWARD_OF_KEPT = 2.0
"""Bytes that a block's backward allocates at its peak, over those that it kept from its forward.

Fitted on peaks of OPT-350M on GH200 (bench/data/sailor_runs.json): with 2, what is left over is the same
4.1 to 5.1 GB for micro-batches of 1 to 8, with and without the head; with 1 it grows from 4.5 to 6.9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one device of a stage; or of many stages, in arrays."""

    weights: Amount
    gradients: Amount
    optimizer: Amount
    activations: Amount
    """Of all micro-batches in flight, their outputs included."""
    late: Amount = 0.0
    """Messages of collectives that have ended, of which the transport has yet to let go."""
    buffers: Amount
    """Received inputs and gradients, and what is being sent."""
    backward: Amount
    """What a backward allocates at its peak: gradients of what was kept, and temporaries."""
    adoption: Amount
    """What the first has beyond that: gradients as autograd allocates them, less what it frees meanwhile."""
    optimizer_temporaries: Amount
    """After the last backward."""
    fresh: Amount = 0.0
    """Of the gradients: what is not there before the first backward, as no buffer for sums holds it."""
    later: Amount | None = None
    """Activations and buffers in the backwards behind the first; None: as many as in the first."""
    by_action: ActionBytes | None = None
    """For schedules that are played, where all was measured."""

    @property
    def total(self) -> Bytes:
        """The peak without the reserve of the device type."""
        return int(self._peak) + 1

    @property
    def totals(self) -> NDArray[Any]:
        """The same for many stages."""
        peak: NDArray[Any] = np.floor(np.asarray(self._peak)) + 1
        return peak

    @property
    def _peak(self) -> Amount:
        held = self.weights + self.gradients + self.optimizer + self.late
        first = self.activations + self.buffers + self.backward + self.adoption - self.fresh
        peak = larger(first, self.optimizer_temporaries)
        later = self.activations + self.buffers if self.later is None else self.later
        return held + larger(peak, later + self.backward)


def together(stages: Sequence[StageMemory]) -> Bytes:
    """The peak of a device that holds these stages (several if interleaved), without its type's reserve."""
    if len(stages) == 1:
        return stages[0].total
    held = sum(m.weights + m.gradients + m.optimizer + m.activations for m in stages)
    held += max(m.late for m in stages)
    working = sum(m.buffers for m in stages) + max(m.backward + larger(0.0, m.adoption) for m in stages)
    kept = sum(m.activations for m in stages)
    return int(held + larger(working, sum(m.optimizer_temporaries for m in stages) - kept)) + 1


def stage_memory(
    tables: Tables,
    *,
    start: Bound,
    stop: Bound,
    device: str,
    tp: int,
    samples: int,
    held: Bound,
    recompute: bool | NDArray[Any] = False,
    zero: Bound = 0,
    width: Bound = 1,
    deferred: Bound = 0,
    expert_parallel: Bound = 1,
    expert_tensor: Bound = 1,
    micro_batches: int | None = None,
    summed: bool = True,
    apart: float = 0.0,
    pieces: int | None = None,
    tiling: Tiling | None = None,
) -> StageMemory:
    """Memory of a device of a replica that takes ``samples`` and has ``held`` micro-batches in flight.

    ``width``: the stage's replicas, among which ZeRO divides. ``deferred``: how many more micro-batches were
    computed again (``schedule.deferred``). All but ``device``, ``tp`` and ``samples`` may be arrays.
    ``micro_batches`` of a step, and whether gradients are ``summed`` with other replicas, make it less where
    they are known and the profile has measured bytes of backwards; ``held`` is one number then. ``apart`` of
    the gradients are parameters whose sums have buffers that these are no views of. Recomputed, the last
    micro-batch goes down in ``pieces`` (None: as many as there may be of this stage's own). ``tiling``: how
    experts are shared out, and how unequally they may be loaded.
    """
    sizes = tables.model.bytes_per_parameter
    held_of = _Parameters.of(tables, start, stop, device, tp, width, expert_parallel * expert_tensor)
    entering = tables.at(tables.input_bytes, start) * samples
    leaving = tables.at(tables.output_bytes, stop - 1) * samples
    costs = tables.costs(device, tp, samples, tiling)
    whole = tables.between(costs.activation_bytes, start, stop)
    gradients = held_of.sharded(zero, 2) * sizes.gradient
    routed = tables.largest(tables.routed_by_kind, start, stop) * samples / tp
    measured, recomputed = costs.backward, costs.again
    loss = 0.0 if measured is None else tables.between(measured.loss_bytes, start, stop)

    between: Amount = 0.0
    if measured is not None and (summed or pieces is not None):
        between = _between(tables, start, stop, samples, gradients, pieces)

    def activations(held: Bound) -> Amount:
        """Recomputed, the last of ``held`` has none of its loss left once the blocks are computed again."""
        again = held * (entering + loss) - loss + (1 + deferred) * (whole - loss) + between
        return _where(recompute, again, held * whole) + held * leaving

    temporaries = tables.temporary_bytes(start, stop, device, tp)
    memory = StageMemory(
        weights=(held_of.sharded(zero, 3) + _where(zero >= 3, GATHERED * held_of.largest, 0)) * sizes.weight,
        gradients=gradients,
        optimizer=held_of.sharded(zero, 1) * sizes.optimizer,
        activations=activations(held),
        buffers=_buffers(entering * _where(start > 0, 1, 0), leaving)
        + _where(expert_parallel * expert_tensor > 1, 2 * routed, 0),
        backward=BACKWARD_OF_KEPT * tables.largest_activations(start, stop, device, tp, samples),
        adoption=larger(0.0, gradients - whole),
        optimizer_temporaries=held_of.sharded(zero, 1) * sizes.weight if temporaries is None else temporaries,
    )
    if measured is None or recomputed is None:
        return memory
    received = entering * _where(start > 0, 1, 0)
    early = larger(recomputed.forward(start, stop), recomputed.at_loss(start, stop))
    early -= (1 + deferred) * (whole - loss)  # nothing is computed again yet
    backward = _where(recompute, larger(recomputed.later(start, stop), early), measured.later(start, stop))
    first = _where(recompute, larger(recomputed.first(start, stop), early), measured.first(start, stop))
    memory = replace(
        memory,
        late=_late(tables, start, stop, device, tp, samples, loss),
        buffers=_asked_for(start, held, received, leaving) + PENDING_SENDS * received + SMALL_BYTES,
        backward=backward,
        adoption=first - backward,
    )
    if micro_batches is None:
        return memory
    assert isinstance(held, int)
    if isinstance(zero, int) and zero and width > 1:
        memory = _split(memory, held_of, zero, sizes, costs, micro_batches)
    steady = micro_batches > held
    still = held if steady else held - 1
    under_way = _under_way(start, still, micro_batches - held, received, leaving)
    fresh = 0.0 if summed else gradients - _whole_gradients(tables, start, stop, device, tp)
    return replace(
        memory,
        buffers=SMALL_BYTES + (received if steady and start > 0 else _asked_for(start, held, 0.0, leaving)),
        fresh=fresh,
        later=activations(still) + under_way + apart + SMALL_BYTES if still else 0.0,
        optimizer_temporaries=memory.optimizer_temporaries + apart,
        by_action=ActionBytes(
            always=float(memory.weights + memory.optimizer),
            late=float(memory.late),
            gradients=float(gradients),
            fresh=float(fresh),
            kept=float((entering + loss if recompute else whole) + leaving),
            again=float(whole - 2 * loss if recompute else 0.0),
            between=float(between if recompute else 0.0),
            received=float(received),
            sent=float(leaving),
            first=float(first),
            later=float(backward),
            temporaries=float(memory.optimizer_temporaries),
            **_halves(tables, costs, start, stop, backward if recompute else -np.inf),
        ),
    )


def _late(
    tables: Tables, start: Bound, stop: Bound, device: str, tp: int, samples: int, loss: Amount
) -> Amount:
    """Two messages of a tensor-parallel group, the largest: each of gloo's two threads may hold one.

    A thread tells that a collective has ended, and drops its tensors when it runs again: on a loaded machine
    operations later. In 13 of 106 steps beside six busy processes one was there at the peak (2026-11-30).
    """
    if tp == 1 or not is_cpu(device):
        return 0.0
    rows = samples * larger(
        tables.largest(tables.output_by_kind, start, stop), tables.at(tables.input_bytes, stop - 1)
    )
    logits = loss * (1 + 1 / tp)  # a part, and those of all: what a loss keeps is as large as its logits
    return rows + larger(rows, logits)


def _split(
    memory: StageMemory,
    held_of: "_Parameters",
    zero: int,
    sizes: ParameterBytes,
    costs: StageCosts,
    micro_batches: int,
) -> StageMemory:
    """What DeepSpeed holds beside a part of the states: its own copy of the part's weights, and buffers."""
    own = held_of.sharded(1, 1) * sizes.weight
    memory = replace(
        memory,
        optimizer=memory.optimizer + own,
        optimizer_temporaries=memory.optimizer_temporaries + own,  # its gradients side by side
    )
    if zero == 1:
        return memory
    whole = held_of.sharded(0, 1) * sizes.gradient
    overhang = held_of.largest * sizes.gradient  # a part ends within a parameter, whose gradient is whole
    summing = SUM_BYTES + min(SUM_BYTES, float(whole)) + overhang
    adoption = memory.adoption + SUM_BYTES
    if zero == 2 and micro_batches > 1:  # sums of this micro-batch beside those of the ones before
        summing += memory.gradients + overhang
        adoption += overhang
    elif zero == 2:
        adoption -= memory.gradients
    return replace(
        memory,
        weights=memory.weights + _gathered(held_of, sizes) if zero == 3 else memory.weights,
        adoption=adoption,
        optimizer_temporaries=larger(memory.optimizer_temporaries, summing),
    )


def _gathered(held_of: "_Parameters", sizes: ParameterBytes) -> Amount:
    """ZeRO-3 gathers ahead: twice there, in the message and apart; two blocks are counted already."""
    ahead = larger(held_of.sharded(0, 1), 0.0)
    there = min(float(ahead), PREFETCHED + GATHERED * float(held_of.largest))
    return (2 * there - GATHERED * held_of.largest) * sizes.weight


def _whole_gradients(tables: Tables, start: Bound, stop: Bound, device: str, tp: int) -> Amount:
    """Of what all devices of a tensor-parallel group hold: it is summed among them, in a buffer."""
    return tables.whole_parameters(start, stop, device, tp) * tables.model.bytes_per_parameter.gradient


def _halves(tables: Tables, costs: StageCosts, start: Bound, stop: Bound, least: Amount) -> dict[str, float]:
    """Of backwards in halves, where they were measured; the first half takes ``least`` at least."""
    if costs.owing is None or costs.owed is None or costs.owed_gradients is None:
        return {}
    swapped = tables.between(costs.owed_gradients, start, stop) - tables.between(costs.owed, start, stop)
    at_the_last = tables.largest(costs.last_paying, start, stop) + swapped
    return {
        "first_paying": float(larger(tables.largest(costs.first_paying, start, stop), at_the_last)),
        "owed": float(tables.between(costs.owed, start, stop)),
        "owing": float(larger(least, costs.owing.later(start, stop))),
        "owed_gradients": float(tables.between(costs.owed_gradients, start, stop)),
        "paying": float(tables.largest(costs.paying, start, stop)),
    }


def _between(
    tables: Tables, start: Bound, stop: Bound, samples: int, gradients: Amount, pieces: int | None
) -> Amount:
    """Of the last micro-batch: what enters each of the pieces that are computed again on their own.

    Behind a piece a sum of gradients may start: at a cut of another pipeline, and where there are
    ``REDUCTION_BYTES`` of them, which is all that can be told of a stage alone.
    """
    borders: Amount
    if pieces is None:
        borders = np.minimum(np.floor_divide(gradients, REDUCTION_BYTES), np.subtract(stop, start) - 1)
    else:
        borders = pieces - 1
    return borders * tables.largest(tables.output_by_kind, start, stop) * samples


def _under_way(start: Bound, held: int, more: int, entering: Amount, leaving: Amount) -> Amount:
    """Messages during a backward behind the first with as many in flight, of ``more`` such backwards.

    Each has sent a gradient. Behind the last of them the next input is a gradient, else an output.
    """
    if start == 0:
        return _asked_for(start, held, entering, leaving)
    if more == 0:  # the second backward of all, and one less in flight
        return entering + leaving
    last = min(PENDING_SENDS, more) * entering + leaving
    return larger(last, min(PENDING_SENDS, more - 1) * entering + entering)


def _asked_for(start: Bound, held: Bound, entering: Amount, leaving: Amount) -> Amount:
    """Receives that are posted ahead: the next one; at the first stage, which sends no gradients, all."""
    return _where(start > 0, larger(entering, leaving), larger(0.0, (held - 1) * leaving))


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters on a device: its part of what is not expert, and its experts."""

    dense: Amount
    experts: Amount
    dense_sharers: Bound
    expert_sharers: Amount
    """Devices that hold the same ones, among which ZeRO divides."""
    largest: Amount
    """Of one block."""

    @classmethod
    def of(
        cls, tables: Tables, start: Bound, stop: Bound, device: str, tp: int, width: Bound, tile: Bound
    ) -> "_Parameters":
        """A tensor-parallel group divides all but the experts, a tile of experts (EP x ETP) divides those."""
        experts = tables.between(tables.expert_parameters, start, stop)
        dense = tables.parameters_of(start, stop) - experts
        own = tables.largest(tables.dense_by_kind, start, stop)
        routed = tables.largest(tables.experts_by_kind, start, stop)
        sharers = larger(1, width * tp / tile)
        part = dense / tp + tables.beyond_even(start, stop, device, tp)
        return cls(part, experts / tile, width, sharers, own / tp + routed / tile)

    def sharded(self, zero: Bound, level: int) -> Amount:
        """What is left of them on a device where ZeRO divides from ``level`` on."""
        shared = zero >= level
        return self.dense / _where(shared, self.dense_sharers, 1) + self.experts / _where(
            shared, self.expert_sharers, 1
        )


def _buffers(entering: Amount, leaving: Amount) -> Amount:
    """The gradient in use, the receive posted ahead, and gradients that are being sent."""
    return leaving + larger(entering, leaving) + (PENDING_SENDS + 1) * entering


def _where(condition: bool | NDArray[Any], a: Amount, b: Amount) -> Amount:
    """``a if condition else b``, element by element where the condition is an array."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, a, b)
    return a if condition else b
