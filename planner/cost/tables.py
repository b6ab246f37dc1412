"""Costs of any run of blocks on any device type in constant time, from prefix sums made once a request.

Seconds are exact sums of the profile's figures up to rounding (a prefix sum subtracts: relative 1e-12).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.profile import Profile, TpCommunication, WorkingBytes
from arachne_runtime.units import GB, Seconds

from ..catalog import DeviceType, collectives
from ..catalog.collectives import num_collectives, summed_bytes
from .amounts import Amount, Bound, larger
from .backward import BackwardPeaks
from .fleet import Fleet
from .links import Link
from .tiling import WHOLE_EXPERTS, Tiling

UPDATE_PASSES = 3.0
"""How often an unfused Adam step walks over weight, gradient and moments, where no step was measured.

OPT-350M, A100-40 (the catalog's profile): 2.94 ms for a layer of 12.6 M parameters of 16 bytes = 23 passes,
of which most is launching kernels; a fused step needs about 1.5. Three is between, marked as not measured."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that several blocks share: held once by a stage, summed over every holder of any block."""

    blocks: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Prefix sums over blocks for one device type, TP degree and number of samples (length: blocks + 1)."""

    forward_s: tuple[Seconds, ...]
    backward_s: tuple[Seconds, ...]
    activation_bytes: tuple[float, ...]
    backward: BackwardPeaks | None
    """None where bytes of backwards were not measured of every kind of block."""
    again: BackwardPeaks | None
    """The same with recomputation, where what the loss keeps is not among what is kept."""
    owing: BackwardPeaks | None = None
    """Of backwards that leave out gradients of weights; None where they were not measured."""
    owed: tuple[float, ...] | None = None
    """Bytes that such a backward leaves behind, prefix sums as above."""
    owed_gradients: tuple[float, ...] | None = None
    """Bytes of the weights whose gradients it leaves out, prefix sums too."""
    paying: tuple[float, ...] = ()
    """Most that computing these gradients holds beside what is owed, by kind of block."""
    first_paying: tuple[float, ...] = ()
    """The same of the first of them, those that are made counted."""
    last_paying: tuple[float, ...] = ()
    """The same in a stage where this block comes last, beside its gradients and what was owed for all."""


class Tables:
    """What every price of one request shares."""

    def __init__(self, model: ModelSpec, profile: Profile, fleet: Fleet) -> None:
        self.model = model
        self.profile = profile
        self.fleet = fleet
        self.num_blocks = len(model.blocks)
        self.ties = ties_of(model.blocks)
        tied = [sum(t.parameters for t in self.ties if i in t.blocks) for i in range(self.num_blocks)]
        self.own_parameters = tuple(
            accumulate((b.parameters - t for b, t in zip(model.blocks, tied, strict=True)), initial=0)
        )
        """Prefix sums of parameters that no other block shares; those of routed experts are among them."""
        self.expert_parameters = tuple(accumulate((b.expert_parameters for b in model.blocks), initial=0))
        """Prefix sums of parameters of routed experts."""
        self.routed_bytes = tuple(b.output_bytes * b.experts_per_token for b in model.blocks)
        """Bytes a sample that a block sends to its experts: each token as often as routed; 0 if dense."""
        self.input_bytes = (model.blocks[0].activation_bytes, *(b.output_bytes for b in model.blocks[:-1]))
        """Bytes a sample that enter each block; the first block's input is within its activations."""
        self.output_bytes = tuple(b.output_bytes for b in model.blocks)
        self._costs: dict[tuple[str, int, int, Tiling], StageCosts] = {}
        self._updates: dict[tuple[str, int], tuple[Seconds, ...]] = {}
        self._temporary: dict[tuple[str, int], tuple[float, ...] | None] = {}
        self._beyond: dict[tuple[str, int], tuple[float, ...] | None] = {}
        self._largest_kept: dict[tuple[str, int, int], tuple[float, ...]] = {}
        self.dense_by_kind = self.by_kind([b.parameters - b.expert_parameters for b in model.blocks])
        self.experts_by_kind = self.by_kind([b.expert_parameters for b in model.blocks])
        self.output_by_kind = self.by_kind(self.output_bytes)
        self.routed_by_kind = self.by_kind(self.routed_bytes)
        self._arrays: dict[int, tuple[tuple[float, ...], NDArray[np.float64]]] = {}
        """Arrays of the values above by their identity, which the values beside each keep alive."""

    def costs(self, device: str, tp: int, samples: int, tiling: "Tiling | None" = None) -> StageCosts:
        """Prefix sums for a replica of ``tp`` devices that takes ``samples`` of a micro-batch.

        With a ``tiling`` bytes are those of a device that shares experts out. NotMeasuredError where the
        profile does not reach.
        """
        key = (device, tp, samples, tiling or WHOLE_EXPERTS)
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._sum_costs(*key)
        return found

    def stage_seconds(
        self, start: int, stop: int, device: str, tp: int, samples: int, recompute: bool = False
    ) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of blocks ``start..stop-1``; recomputation adds one more forward."""
        costs = self.costs(device, tp, samples)
        forward = costs.forward_s[stop] - costs.forward_s[start]
        backward = costs.backward_s[stop] - costs.backward_s[start]
        return forward, backward + forward if recompute else backward

    def activations(self, start: Bound, stop: Bound, device: str, tp: int, samples: int) -> Amount:
        """Bytes a micro-batch that blocks ``start..stop-1`` keep for the backward on each device."""
        return self.between(self.costs(device, tp, samples).activation_bytes, start, stop)

    def largest_activations(self, start: Bound, stop: Bound, device: str, tp: int, samples: int) -> Amount:
        """The most that one of blocks ``start..stop-1`` keeps, alike blocks taken as one."""
        key = device, tp, samples
        most = self._largest_kept.get(key)
        if most is None:
            kept = self.costs(device, tp, samples).activation_bytes
            most = self._largest_kept[key] = self.by_kind([b - a for a, b in pairwise(kept)])
        return self.largest(most, start, stop)

    def by_kind(self, values: Sequence[float]) -> tuple[float, ...]:
        """The largest of the values of the blocks of each kind."""
        return tuple(
            max(v for v, (c, d) in zip(values, pairwise(count), strict=True) if d > c)
            for count in self.of_kind
        )

    def largest(self, by_kind: tuple[float, ...], start: Bound, stop: Bound) -> Amount:
        """The largest of the values of blocks ``start..stop-1``; blocks of one kind are taken as alike."""
        found: Amount = 0.0
        for most, count in zip(by_kind, self.of_kind, strict=True):
            if most > 0:
                found = larger(found, most * (self.between(count, start, stop) > 0))
        return found

    def parameters(self, start: int, stop: int) -> int:
        """Parameters that a stage holds; one tied within it is held once."""
        return int(self.parameters_of(start, stop))

    def parameters_of(self, start: Bound, stop: Bound) -> Amount:
        """The same, for many stages too."""
        held = self.between(self.own_parameters, start, stop)
        for tie in self.ties:
            held = held + tie.parameters * _holds(tie, start, stop)
        return held

    def beyond_even(self, start: Bound, stop: Bound, device: str, tp: int) -> Amount:
        """Parameters that a device of a tensor-parallel group holds beyond an even part, experts left out.

        Norms, biases and what else the group does not divide; 0 where the profile does not tell.
        """
        prefix = self.beyond_prefix(device, tp)
        return 0.0 if prefix is None else self.between(prefix, start, stop)

    def beyond_prefix(self, device: str, tp: int) -> tuple[float, ...] | None:
        """The same before each boundary; None where the profile does not tell."""
        key = (device, tp)
        if key not in self._beyond:
            blocks = self.model.blocks
            held = [self.profile.held_parameters(b.kind, device, tp) for b in blocks]
            told = [
                mine - (b.parameters - b.expert_parameters) / tp
                for b, mine in zip(blocks, held, strict=True)
                if mine is not None
            ]
            self._beyond[key] = _prefix(told) if len(told) == len(blocks) else None
        return self._beyond[key]

    def whole_parameters(self, start: Bound, stop: Bound, device: str, tp: int) -> Amount:
        """Parameters that every device of a tensor-parallel group holds, experts left out."""
        return self.beyond_even(start, stop, device, tp) * tp / (tp - 1) if tp > 1 else 0.0

    def between(self, prefix: tuple[float, ...], start: Bound, stop: Bound) -> Amount:
        """Sum over blocks ``start..stop-1`` of what ``prefix`` sums up."""
        return self.at(prefix, stop) - self.at(prefix, start)

    def at(self, values: tuple[float, ...], index: Bound) -> Amount:
        """One of these values, or an array of them for an array of indices."""
        if isinstance(index, int):
            return values[index]
        key = id(values)
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = values, np.asarray(values, float)
        return found[1][index]

    def update_seconds(self, start: int, stop: int, device: str, tp: int) -> Seconds:
        """Seconds of the optimizer step of blocks ``start..stop-1``."""
        key = (device, tp)
        found = self._updates.get(key)
        if found is None:
            found = self._updates[key] = _prefix(self._update(b, device, tp) for b in self.model.blocks)
        return found[stop] - found[start]

    def temporary_bytes(self, start: Bound, stop: Bound, device: str, tp: int) -> Amount | None:
        """Bytes that the optimizer allocates for blocks ``start..stop-1``; None where none were measured."""
        key = (device, tp)
        if key not in self._temporary:
            rows = [self.profile.temporary_bytes(b.kind, device, tp) for b in self.model.blocks]
            known = [float(row) for row in rows if row is not None]
            self._temporary[key] = _prefix(known) if len(known) == len(rows) else None
        found = self._temporary[key]
        return None if found is None else self.between(found, start, stop)

    def samples_range(self, device: str, tp: int) -> tuple[int, int] | None:
        """Smallest and largest share that every kind of block was measured for, or None."""
        ranges = [self.profile.samples_range(kind, device, tp) for kind in self._kinds]
        known = [r for r in ranges if r is not None]
        if len(known) < len(ranges):
            return None
        low, high = max(r[0] for r in known), min(r[1] for r in known)
        return (low, high) if low <= high else None

    def tp_degrees(self, device: str) -> tuple[int, ...]:
        """TP degrees at which every kind of block was measured on a device type, ascending."""
        degrees = sorted({t.tp for t in self.profile.timings if t.device == device})
        return tuple(tp for tp in degrees if self.samples_range(device, tp))

    @cached_property
    def not_measured(self) -> tuple[str, ...]:
        """What every price of this request has to estimate, one sentence each."""
        kinds = {(u.kind, u.device) for u in self.profile.updates}
        types = dict.fromkeys(node.device.name for node in self.fleet.nodes.values())
        without = [d for d in types if any((k, d) not in kinds for k in self._kinds)]
        notes = list(self.profile.estimated(types))
        notes += [f"optimizer step on {d}: from its memory bandwidth" for d in without]
        if not self.profile.links:
            notes.append("links: from the cluster file and the catalog")
        return tuple(notes)

    @cached_property
    def of_kind(self) -> tuple[tuple[int, ...], ...]:
        """For each kind, how many of its blocks stand before each boundary."""
        kinds = [block.kind for block in self.model.blocks]
        return tuple(tuple(accumulate((k == kind for k in kinds), initial=0)) for kind in self._kinds)

    @cached_property
    def _kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b.kind for b in self.model.blocks))

    def _sum_costs(self, device: str, tp: int, samples: int, tiling: Tiling) -> StageCosts:
        by_kind = {kind: self.profile.block(kind, device, tp, samples) for kind in self._kinds}
        blocks = self.model.blocks
        rows = [by_kind[b.kind] for b in blocks]
        timed = list(zip(rows, self._tp_communication(device, tp, samples), strict=True))
        kept = _prefix(
            float(row.activation_bytes) if row.activation_bytes is not None else self._kept(i, tp, samples)
            for i, row in enumerate(rows)
        )
        working = [row.working for row in rows if row.working is not None]
        known = len(working) == len(rows)
        if known and tiling != WHOLE_EXPERTS:
            routed = [size * samples / tp for size in self.routed_bytes]
            rows_of = [b.experts_per_token * self.model.sequence * samples / tp for b in blocks]
            of_blocks = [b - a for a, b in pairwise(kept)]
            kept = _prefix(tiling.kept(*of) for of in zip(of_blocks, routed, rows_of, strict=True))
            sizes = [b.expert_parameters * self.model.bytes_per_parameter.gradient for b in blocks]
            working = [tiling.working(*of) for of in zip(working, routed, sizes, strict=True)]
        return StageCosts(
            _prefix(row.forward_s + summing_s for row, summing_s in timed),
            _prefix(row.backward_s + summing_s for row, summing_s in timed),
            kept,
            *(
                BackwardPeaks.both(self, kept, working, device, tp, samples, tiling.tile)
                if known
                else (None, None)
            ),
            **(self._in_halves(kept, working, device, tp, samples) if known else {}),
        )

    def _in_halves(
        self, kept: tuple[float, ...], working: Sequence[WorkingBytes], device: str, tp: int, samples: int
    ) -> dict[str, Any]:
        """What backwards in halves need, where that was measured."""
        if any(row.owing_backward is None for row in working):
            return {}
        owed = _prefix(float(row.owed) for row in working)
        return {
            "owing": BackwardPeaks.owing(self, kept, owed, working, device, tp, samples),
            "owed": owed,
            "owed_gradients": _prefix(float(row.owed_gradients) for row in working),
            "paying": self.by_kind([float(row.paying) for row in working]),
            "first_paying": self.by_kind([float(row.first_paying) for row in working]),
            "last_paying": self.by_kind(
                [float(row.first_paying - row.owed_gradients + row.owed) for row in working]
            ),
        }

    def _kept(self, block: int, tp: int, samples: int) -> float:
        """The model's figure: a tensor-parallel group shards what a block keeps, but not its input.

        Of a layer in halves, each keeps half of an input whole: the plan needs the same memory either way.
        """
        whole = self.model.blocks[block].activation_bytes
        halves = 2 if self.model.blocks[block].tp_collectives == 1 else 1
        replicated = min(whole, self.input_bytes[block] / halves) if tp > 1 else whole
        return samples * (replicated + (whole - replicated) / tp)

    def _tp_communication(self, device: str, tp: int, samples: int) -> tuple[Seconds, ...]:
        """Seconds that the collectives of each block add to each direction."""
        if tp == 1 or self.profile.tp_communication is TpCommunication.INCLUDED:
            return (0.0,) * len(self.model.blocks)
        link = self._slowest_intra(device)
        each = {size: ring_seconds(link, samples * size, tp) for size in set(self._summed)}
        return tuple(n * each[size] for n, size in zip(self._collectives, self._summed, strict=True))

    @cached_property
    def _summed(self) -> tuple[int, ...]:
        return tuple(summed_bytes(self.model, i) for i in range(self.num_blocks))

    @cached_property
    def _collectives(self) -> tuple[int, ...]:
        return tuple(num_collectives(self.model, i) for i in range(self.num_blocks))

    def _slowest_intra(self, device: str) -> Link:
        links = [
            self.fleet.link(n.name, n.name) for n in self.fleet.nodes.values() if n.device.name == device
        ]
        return max(links, key=lambda link: link.seconds(2**20))

    def _update(self, block: BlockSpec, device: str, tp: int) -> Seconds:
        measured = self.profile.update(block.kind, device, tp)
        if measured is not None:
            return measured
        held = block.parameters * self.model.bytes_per_parameter.total / tp
        return UPDATE_PASSES * held / (self._memory_bandwidth(device) * GB)

    def _memory_bandwidth(self, device: str) -> float:
        types: list[DeviceType] = [n.device for n in self.fleet.nodes.values() if n.device.name == device]
        if not types or types[0].memory_GBps is None:
            raise NotMeasuredError(
                f"profile of {self.profile.model}: the optimizer step on {device} was not measured and the "
                f"catalog does not know that type; run `arachne profile` on it"
            )
        return types[0].memory_GBps


def ring_seconds(link: Link, size: float, members: int, senders: int = 1) -> Seconds:
    """Ring all-reduce of ``size`` bytes whose every message goes over ``link``, in whole bytes."""
    return collectives.ring_seconds(lambda part: link.seconds(ceil(part), senders), size, members)


def ties_of(blocks: Iterable[BlockSpec]) -> tuple[Tie, ...]:
    """Groups of blocks that share parameters, by owner."""
    found: dict[int, Tie] = {}
    for i, block in enumerate(blocks):
        if block.tied_to is not None:
            old = found.get(block.tied_to, Tie((block.tied_to,), 0))
            found[block.tied_to] = Tie((*old.blocks, i), max(old.parameters, block.tied_parameters))
    return tuple(found.values())


def _holds(tie: Tie, start: Bound, stop: Bound) -> Bound:
    if isinstance(start, int) and isinstance(stop, int):
        return any(start <= b < stop for b in tie.blocks)
    holds: NDArray[Any] = np.zeros((), bool)
    for b in tie.blocks:
        holds = holds | ((start <= b) & (b < stop))
    return holds


def _prefix(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0))
