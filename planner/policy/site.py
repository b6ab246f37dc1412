"""One planning problem by the measured behaviour of its devices: what a policy sees of it, never a name."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.errors import NotMeasuredError

from ..cost.links import Link
from ..request import Request
from ..search.network import Network
from ..search.supply import Supply
from .decision import MOST_STAGES, Ints
from .measured import Measured

Reals = NDArray[np.float64]
Bools = NDArray[np.bool_]

MANY = 1 << 40
"""Places where a limit is none."""

SHARES = 3
"""A device's speed is looked at for a share of 1, of 4 and of the most samples that leave room for states."""

MIDDLE_SHARE = 4
ROOM_FOR_SAMPLES = 0.5
"""Part of a device's memory up to which the largest share fills it. A choice."""


@dataclass(frozen=True)
class Site:
    """Arrays by pool (P), TP degree (T) and limit (L); what differs between two problems is in here."""

    degrees: tuple[int, ...]
    """``[T]``: of any pool, ascending."""
    usable: Bools
    """``[P, T]``: measured for a share that the request allows, and held by some node."""
    places: Ints
    """``[P, L]``: of each limit of ``Supply``; ``MANY`` behind a pool's last one."""
    takes: Ints
    """``[P, T, L]``: places that one group takes; 0 where the limit doesn't count it."""
    devices: Ints
    """``[P]``"""
    node_size: Ints
    """``[P]``: devices of the usual node."""
    least_share: Ints
    """``[P, T]``: samples that were measured at the least."""
    speed: Reals
    """``[P, T, SHARES]``: samples a second of the whole model on one group, over the mean device's best."""
    holds: Reals
    """``[P, T]``: parts of the model's states that one device of a group holds beside its activations."""
    holds_states: Reals
    """``[P, T]``: the most that can be, with all that saves memory and experts spread over the whole pool."""
    room: Reals
    """``[P]``: memory of a device over that of the mean one."""
    reduction: Reals
    """``[P, T]``: seconds to reduce all gradients between nodes, over an ideal iteration."""
    reduction_inside: Reals
    """``[P, T]``: the same within a node."""
    hop: Reals
    """``[P, P]``: seconds of one sample's boundary between two nodes, over those of one block."""
    hop_inside: Reals
    """``[P]``: the same within a node."""
    exchange: Reals
    """``[P, 2]``: seconds in which one device sends what a sample sends to experts, inside a node and to
    another, over those of the whole model; 0 where there are none."""
    global_batch: int
    most_micro_batch: int
    num_blocks: int
    num_alike: int
    """Blocks of the commonest kind."""
    heaviest: float
    """Seconds of the heaviest block over those of all."""
    experts: float
    """Part of the parameters that are routed experts'."""
    kept: float
    """What one sample keeps for the backward over the states of all parameters."""
    fills: float
    """States of all parameters over the memory of all devices."""
    max_zero: int

    @classmethod
    def of(cls, request: Request, supply: Supply) -> "Site":
        """Of a request and what its cluster offers; NotMeasuredError where nothing of it can be used."""
        return _Maker(request, supply).site()

    @property
    def num_pools(self) -> int:
        """P"""
        return len(self.devices)

    @cached_property
    def best_speed(self) -> Reals:
        """``[P]``: of one device, at its best TP degree and share."""
        each = self.speed / np.asarray(self.degrees, float)[None, :, None]
        return np.asarray(np.where(self.usable[:, :, None], each, 0).max(axis=(1, 2)))

    @cached_property
    def least(self) -> Ints:
        """``[P]``: index of the smallest usable degree: no other makes more groups."""
        return np.asarray(self.usable.argmax(axis=1), np.int64)

    @cached_property
    def greatest(self) -> Ints:
        """``[P]``: index of the largest usable degree."""
        return np.asarray(len(self.degrees) - 1 - self.usable[:, ::-1].argmax(axis=1), np.int64)

    @cached_property
    def most_stages(self) -> int:
        """Of any template."""
        return min(MOST_STAGES, self.num_blocks)

    def groups(self, left: Ints) -> Ints:
        """``[A, P, T]``: groups of each degree that ``left`` places ``[A, P, L]`` hold."""
        each = np.where(self.takes > 0, left[:, :, None, :] / np.maximum(1, self.takes), MANY)
        return np.where(self.usable, np.floor(each.min(axis=3)), 0).astype(np.int64)


class _Maker:
    """Works a site out; its steps share the measurements."""

    def __init__(self, request: Request, supply: Supply) -> None:
        self.request = request
        self.supply = supply
        self.measured = Measured(request)
        self.network = Network(request, supply)
        self.degrees = supply.degrees
        self.shape = len(supply.pools), len(self.degrees)
        self.ranges = [
            [request.tables.samples_range(p.device, t) if t in p.degrees else None for t in self.degrees]
            for p in supply.pools
        ]
        size = request.model.bytes_per_parameter
        blocks = request.model.blocks
        self.parameters = request.tables.parameters(0, len(blocks))
        self.expert_parameters = request.tables.expert_parameters[-1]
        self.bytes_each = size.weight + size.gradient + size.optimizer
        # what ZeRO divides among many replicas comes near to nothing (stages 1 to 3: docs/cost-model.md)
        undivided = (size.optimizer, size.gradient, size.weight)[request.max_zero :]
        self.least_bytes_each = sum(undivided)
        self.gradient_bytes = self.parameters * size.gradient
        self.boundary_bytes = float(np.median([float(b.output_bytes) for b in blocks[:-1]] or [0.0]))

    def site(self) -> Site:
        usable = self._usable()
        seconds, shares, kept = self._whole(usable)
        devices = np.array([pool.num_devices for pool in self.supply.pools], np.int64)
        rate = np.where(usable[:, :, None], shares / seconds, 0.0)
        best = (rate / np.asarray(self.degrees, float)[None, :, None]).max(axis=(1, 2))
        mean = float((best * devices).sum() / devices.sum())
        ideal_s = self.request.global_batch / float((best * devices).sum())
        room = np.array([pool.room_bytes for pool in self.supply.pools], float)
        states = max(1.0, self.parameters * self.bytes_each)
        block_s = 1 / mean / len(self.request.model.blocks)
        places, takes = self._limits(usable)
        first = tuple(np.argwhere(usable)[0])
        return Site(
            degrees=self.degrees,
            usable=usable,
            places=places,
            takes=takes,
            devices=devices,
            node_size=np.array([pool.node_size for pool in self.supply.pools], np.int64),
            least_share=np.array([[r[0] if r else 1 for r in row] for row in self.ranges], np.int64),
            speed=rate / mean,
            holds=self._holds(kept, room),
            holds_states=self._holds_states(room),
            room=room / float((room * devices).sum() / devices.sum()),
            reduction=self._reductions(inside=False) / ideal_s,
            reduction_inside=self._reductions(inside=True) / ideal_s,
            hop=self._hops() / block_s,
            hop_inside=np.array([self._hop(p, p, inside=True) for p in range(self.shape[0])]) / block_s,
            exchange=self._exchanges() * mean,
            global_batch=self.request.global_batch,
            most_micro_batch=self.request.most_micro_batch,
            num_blocks=len(self.request.model.blocks),
            num_alike=self.measured.num_alike,
            heaviest=self._heaviest(usable, devices),
            experts=self.expert_parameters / max(1, self.parameters),
            kept=float(kept[first]) * self.degrees[first[1]] / states,
            fills=states / float((room * devices).sum()),
            max_zero=self.request.max_zero,
        )

    def _usable(self) -> Bools:
        most = self.request.most_micro_batch
        usable = np.array([[r is not None and r[0] <= most for r in row] for row in self.ranges], bool)
        if not usable.any():
            raise NotMeasuredError(
                f"profile of {self.request.profile.model}: no device type of the cluster was measured for "
                f"{self.request.most_micro_batch} samples or fewer; "
                f"run `arachne profile` with smaller --samples"
            )
        return usable

    def _limits(self, usable: Bools) -> tuple[Ints, Ints]:
        of_pool = [[x for x in self.supply.limits if x.pool == p] for p in range(self.shape[0])]
        size = max(map(len, of_pool))
        places = np.full((self.shape[0], size), MANY, np.int64)
        takes = np.zeros((*self.shape, size), np.int64)
        for p, limits in enumerate(of_pool):
            for at, limit in enumerate(limits):
                places[p, at] = limit.places
                takes[p, :, at] = [limit.taken(tp) for tp in self.degrees]
        return places, np.where(usable[:, :, None], takes, 0)

    def _whole(self, usable: Bools) -> tuple[Reals, Reals, Reals]:
        """``[P, T, SHARES]`` seconds and samples, and ``[P, T]`` bytes kept a sample of the least share."""
        seconds, shares = np.ones((*self.shape, SHARES)), np.ones((*self.shape, SHARES))
        kept = np.zeros(self.shape)
        for p, t in np.argwhere(usable).tolist():
            pool, tp = self.supply.pools[p], self.degrees[t]
            link = self.network.link(p, p, inside=True)
            low, high = self.ranges[p][t] or (1, 1)
            one = self.measured.whole(pool.device, link, tp, low)
            kept[p, t] = one.kept_bytes / low
            fitting = int(ROOM_FOR_SAMPLES * pool.room_bytes / max(1.0, kept[p, t]))
            most = min(high, self.request.most_micro_batch)
            for k, wanted in enumerate((low, MIDDLE_SHARE, 1 << max(0, fitting.bit_length() - 1))):
                share = int(np.clip(wanted, low, most))
                shares[p, t, k] = share
                whole = one if share == low else self.measured.whole(pool.device, link, tp, share)
                seconds[p, t, k] = max(whole.seconds, 1e-12)
        return seconds, shares, kept

    def _holds(self, kept: Reals, room: Reals) -> Reals:
        each = self.parameters * self.bytes_each / np.asarray(self.degrees, float)
        return np.asarray(np.maximum(room[:, None] - kept, 0.0) / np.maximum(1.0, each), float)

    def _holds_states(self, room: Reals) -> Reals:
        """No plan holds more: the price adds activations, and cuts along blocks."""
        tp = np.asarray(self.degrees, float)
        count = np.array([[pool.num_devices] for pool in self.supply.pools], float)
        dense = self.parameters - self.expert_parameters
        each = dense / tp + self.expert_parameters / np.maximum(tp, count)
        return np.asarray(
            np.maximum(room, 0.0)[:, None] / np.maximum(1.0, each * self.least_bytes_each), float
        )

    def _reductions(self, *, inside: bool) -> Reals:
        """A ring of two for each device of a group at once: larger rings take at most twice as long."""
        found = np.zeros(self.shape)
        for p, pool in enumerate(self.supply.pools):
            for t, tp in enumerate(self.degrees):
                if tp in pool.degrees:
                    found[p, t] = self._ring(p, tp, inside) * self.gradient_bytes / tp
        return found

    def _ring(self, pool: int, senders: int, inside: bool) -> float:
        one = np.array([pool]), np.array([2]), np.array([inside]), np.array([senders])
        return float(self.network.rings(*one)[0])

    def _hops(self) -> Reals:
        size = self.shape[0]
        return np.array([[self._hop(a, b, inside=False) for b in range(size)] for a in range(size)])

    def _hop(self, a: int, b: int, *, inside: bool) -> float:
        link: Link = self.network.link(a, b, inside)
        return link.seconds(int(self.boundary_bytes))

    def _exchanges(self) -> Reals:
        """There and back, in both directions of a micro-batch."""
        routed = 4 * float(sum(self.request.tables.routed_bytes))
        each = [
            [self.network.per_byte(p, inside=inside, senders=1) for inside in (True, False)]
            for p in range(self.shape[0])
        ]
        return np.array(each) * routed

    def _heaviest(self, usable: Bools, devices: Ints) -> float:
        """Mean over devices."""
        found = 0.0
        for p, pool in enumerate(self.supply.pools):
            if usable[p].any():
                t = int(usable[p].argmax())
                low, _ = self.ranges[p][t] or (1, 1)
                found += float(devices[p]) * self.measured.heaviest(pool.device, self.degrees[t], low)
        return found / float(devices.sum())
