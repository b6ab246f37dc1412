"""Features of pools and of the whole site, for rollouts that stand at different points.

All are ratios, or logarithms to base 2, of measured behaviour, so that one network serves every device type,
model and size of cluster; each line says what a planner needs it for. A changed list needs another
``FEATURES_VERSION``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .decision import Bools, Floats
from .progress import Progress, Reals
from .site import Site

FEATURES_VERSION = 1
"""Of all features of pools, sites and options: weights of another one are stale."""

NUM_POOL_FEATURES = 54
"""FP"""

NUM_OVERALL_FEATURES = 32
"""FG"""

SLOTS = (1, 2, 4, 8)
"""TP degrees up to which a pool's largest one is described; those above the last are with it."""

WIDEST_LOG = 10.0
"""Logarithms stay within this, so that an extreme site is seen as the farthest one known."""


def log2(values: NDArray[np.generic] | float) -> Reals:
    """To base 2, within ``WIDEST_LOG`` of 0; of nothing the least."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log2(np.maximum(values, 0.0))
    return np.clip(found, -WIDEST_LOG, WIDEST_LOG)


def stacked(columns: Sequence[NDArray[np.generic] | float], shape: tuple[int, ...]) -> Floats:
    """``[*shape, F]`` of F features that broadcast to ``shape``."""
    found = np.empty((*shape, len(columns)), np.float32)
    for at, column in enumerate(columns):
        found[..., at] = column
    return found


def pool_constants(site: Site) -> Floats:
    """``[P, F]``: what no step changes."""
    devices = site.devices
    mean_devices = devices.sum()
    speed = site.best_speed
    columns: list[NDArray[np.generic] | float] = [
        devices / mean_devices,  # share of the cluster: how many stages it should get
        devices * speed / (devices * speed).sum(),  # share of its speed: how many blocks
        devices * site.room / (devices * site.room).sum(),  # share of its memory
        log2(speed) / 2,  # fast ones take more blocks, or narrower stages
        log2(site.room) / 2,  # large ones suit early stages, which hold most activations
        log2(devices) / 8,  # absolute size: what divides it
        log2(site.node_size) / 3,  # TP and cheap reductions end at the node
        site.places[:, 0] % np.maximum(1, site.node_size) > 0,  # nodes of unlike sizes
        log2(site.hop.diagonal()) / 6,  # hops between nodes against a block's compute
        log2(site.hop_inside) / 6,  # the same inside: pipelines within a node are cheap
        log2((site.hop.sum(axis=1) - site.hop.diagonal()) / max(1, len(devices) - 1)) / 6,  # to other pools
    ]
    for below, slot in zip((0, *SLOTS[:-1]), SLOTS, strict=True):
        columns += _slot(site, below, slot if slot < SLOTS[-1] else 1 << 20)
    return stacked(columns, (site.num_pools,))


def _slot(site: Site, below: int, most: int) -> list[NDArray[np.generic] | float]:
    """The largest TP degree above ``below``, up to ``most``: zeros where there is none."""
    degrees = np.asarray(site.degrees)
    inside: Bools = site.usable & (degrees > below) & (degrees <= most)
    there: Bools = np.asarray(inside.any(axis=1))
    at = len(degrees) - 1 - inside[:, ::-1].argmax(axis=1)
    pool = np.arange(site.num_pools)
    each = site.speed[pool, at] / degrees[at][:, None] / np.maximum(site.best_speed, 1e-9)[:, None]
    columns: list[NDArray[np.generic] | float] = [
        there,  # whether it may be chosen at all
        *np.where(there[:, None], log2(each), 0).T,  # what TP costs, at a small, middle and large share
        log2(site.holds[pool, at]) / 6 * there,  # how deep a pipeline must be
        log2(site.holds_states[pool, at]) / 6 * there,  # the same with every way to save memory
        log2(site.reduction[pool, at]) / 8 * there,  # reductions: deep and narrow saves them
        log2(site.reduction_inside[pool, at]) / 8 * there,  # or wide inside a node
    ]
    return columns


def site_constants(site: Site) -> Floats:
    """``[F]``: size, shares, unevenness, and the model against the devices."""
    devices = site.devices
    total = int(devices.sum())
    share = devices / total
    speeds, rooms = site.best_speed, site.room
    there = speeds > 0
    spread_speed, spread_room = (
        float(np.log2(values[there].max() / max(values[there].min(), 1e-6))) for values in (speeds, rooms)
    )
    holds = np.where(site.usable, site.holds, 0).max(axis=1)
    columns: list[NDArray[np.generic] | float] = [
        log2(total) / 8,  # small clusters are puzzles, large ones a matter of proportions
        log2(site.global_batch) / 10,  # bubbles
        log2(site.global_batch / total) / 5,  # samples a device: how much there is to overlap
        log2(site.num_blocks) / 6,  # depth ends here
        log2(site.num_alike / site.num_blocks),  # half-layer blocks, models with many kinds
        log2(site.heaviest * site.num_blocks) / 3,  # a heavy head fills a stage by itself
        log2(site.fills) / 5,  # how tight memory is altogether
        log2(site.kept) / 8,  # activations against states: whether depth helps memory
        site.experts,  # mixture of experts: width spreads its states
        len(devices) / 4,  # composition: how many pools
        float(-(share * np.log2(np.maximum(share, 1e-9))).sum()) / 2,  # and how even
        spread_speed / 3,  # composition: how unlike in speed
        spread_room / 3,  # and in memory
        log2((share * site.node_size).sum()) / 3,  # usual node
        log2((site.hop.diagonal() * share).sum()) / 6,  # network against compute: hops
        log2((site.reduction[:, 0] * share).sum()) / 8,  # and reductions
        log2((holds * share).sum()) / 6,  # stages that the model needs on the usual device
        site.most_micro_batch < site.global_batch,  # limited micro-batches
        site.max_zero > 0,  # ZeRO saves memory where stages are wide
    ]
    return stacked(columns, ())


def pool_features(site: Site, constants: Floats, now: Progress) -> Floats:
    """``[A, P, FP]``: what no step changes, and what is left."""
    num, size = len(now.depth), site.num_pools
    pool = np.arange(size)
    here, others = now.left[:, :, 0], site.places[:, 0]
    devices = np.where(site.places[None, :, 0] > 0, here / np.maximum(1, others), 0)
    groups = site.groups(now.left)
    least = groups[:, pool, site.least]
    stages = np.maximum(1, now.stages_left)[:, None]
    total = np.maximum(1, here.sum(axis=1, keepdims=True))
    used = now.start[:, :, 0] - here
    own = now.last[:, :1] == pool
    speed = here * site.best_speed
    columns: list[NDArray[np.generic] | float] = [
        devices,  # what is left of it
        here / total,  # and its part of all that is left
        speed / np.maximum(1e-9, speed.sum(axis=1, keepdims=True)),  # the same in speed
        log2(here) / 8,  # what divides it
        least > 0,  # whether it can take a stage at all
        log2(least / stages) / 6,  # stages that it could take over those that are left
        log2(groups[:, pool, site.greatest] / stages) / 6,  # the same at its largest TP degree
        np.where(now.depth[:, None] > 0, used / np.maximum(1, now.start[:, :, 0]), 0),  # taken by one copy
        np.minimum(now.runs_of, 2) / 2,  # runs on it in this template: rarely more than one
        own,  # the last stage's: neighbours may share nodes
        spare_of(now),  # what as many copies as fit leave of it: it should be little
    ]
    varying = stacked(columns, (num, size))
    fixed = np.broadcast_to(constants, (num, *constants.shape))
    return np.concatenate([fixed, varying], axis=2)


def spare_of(now: Progress) -> Reals:
    """``[A, P]``: part of each pool that stays idle beside as many copies of the runs so far as fit."""
    copies = copies_of(now)[:, None]
    used = now.start[:, :, 0] - now.left[:, :, 0]
    begun: Bools = now.run[:, None] > 0
    idle = 1 - copies * used / np.maximum(1, now.start[:, :, 0])
    return np.where(begun, idle, 0.0)


def copies_of(now: Progress) -> Reals:
    """``[A]``: copies of the runs so far that what was left when the template began holds; of none 1."""
    used = now.start - now.left
    with np.errstate(divide="ignore", invalid="ignore"):
        often = np.where(used > 0, now.start / used, np.inf).min(axis=(1, 2))
    return np.where(np.isfinite(often), np.floor(often), 1.0)


def overall_features(site: Site, constants: Floats, now: Progress) -> Floats:
    """``[A, FG]``: the site, and how far the rollout is."""
    num = len(now.depth)
    devices = now.left[:, :, 0]
    speed = (devices * site.best_speed).sum(axis=1) / (site.devices * site.best_speed).sum()
    inside = now.depth > 0
    stages = np.maximum(1, now.stages_left)
    placed = np.maximum(1, now.depth - now.stages_left)
    missing = np.maximum(0.02, 1 - now.held)
    copies = copies_of(now)
    columns: list[NDArray[np.generic] | float] = [
        np.minimum(now.position, 3) / 2,  # later templates take what is left
        devices.sum(axis=1) / site.devices.sum(),  # how much that is
        speed,  # and whether it is worth a pipeline
        now.samples_left / site.global_batch,  # what no pipeline takes yet
        inside * (now.stages_left / np.maximum(1, now.depth)),  # how far the template is
        log2(np.maximum(1, now.depth)) / 4,  # how deep
        np.minimum(now.run, 4) / 4,  # in how many runs so far
        np.minimum(now.held, 4) / 2 * inside,  # memory collected so far: it must reach 1
        log2(missing / stages) / 6 * inside,  # part of the model that each stage left must hold
        log2(copies) / 6 * (now.run > 0),  # copies that the stages so far allow
        log2(now.speeds[:, 0] / placed) / 4 * (now.run > 0),  # mean speed of a stage so far
        log2(now.speeds[:, 0] / placed / np.maximum(1e-9, now.speeds[:, 1])) * (now.run > 0),  # how unlike
        log2(np.maximum(1, now.before)) / 4,  # depth of the template before
    ]
    fixed = np.broadcast_to(constants, (num, len(constants)))
    return np.concatenate([fixed, stacked(columns, (num,))], axis=1)
