"""Features of pools and of the whole site, for rollouts that stand at different points.

All are ratios, or logarithms to base 2, of measured behaviour, so that one network serves every device type,
model and size of cluster; each line says what a planner needs it for. A changed list needs another
``FEATURES_VERSION``.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .decision import Bools, Floats
from .progress import Progress
from .site import Site

FEATURES_VERSION = 1
"""Of all features of pools, sites and options: weights of another one are stale."""

NUM_POOL_FEATURES = 56
"""FP"""

NUM_OVERALL_FEATURES = 32
"""FG"""

SLOTS = (1, 2, 4, 8)
"""TP degrees up to which a pool's largest one is described; those above the last are with it."""

LEAST, MOST = 2.0**-10, 2.0**10
"""Ratios are cut off here: an extreme site is seen as the farthest one known."""

LEAST_MISSING = 0.02
"""Part of the model that stages to come are taken to hold at the least: nearly all held is as good as all."""

Column: TypeAlias = NDArray[np.generic] | float
Ratio: TypeAlias = tuple[Column, float]
"""Values whose logarithm counts, and what it is divided by so that most lie within -1 and 1."""


def stacked(shape: tuple[int, ...], ratios: Sequence[Ratio], plain: Sequence[Column]) -> Floats:
    """``[*shape, F]``: logarithms to base 2 of ratios, then the others; all broadcast to ``shape``."""
    found = np.empty((*shape, len(ratios) + len(plain)), np.float32)
    for at, (values, _) in enumerate(ratios):
        found[..., at] = values
    logs = found[..., : len(ratios)]
    np.maximum(logs, LEAST, out=logs)
    np.minimum(logs, MOST, out=logs)
    np.log2(logs, out=logs)
    logs /= np.array([divisor for _, divisor in ratios], np.float32)
    for at, column in enumerate(plain, len(ratios)):
        found[..., at] = column
    return found


def pool_constants(site: Site) -> Floats:
    """``[P, F]``: what no step changes."""
    devices, speed, room = site.devices, site.best_speed, site.room
    others = site.hop.sum(axis=1) - site.hop.diagonal()
    slots = zip((0, *SLOTS[:-1]), (*SLOTS[:-1], 1 << 20), strict=True)
    of_slots = [_slot(site, above, most) for above, most in slots]
    ratios: list[Ratio] = [
        (speed, 2),  # fast ones take more blocks, or narrower stages
        (room, 2),  # large ones suit early stages, which hold most activations
        (devices, 8),  # absolute size: what divides it
        (site.node_size, 3),  # TP and cheap reductions end at the node
        (site.hop.diagonal(), 6),  # hops between nodes against a block's compute
        (site.hop_inside, 6),  # the same inside: pipelines within a node are cheap
        (others / max(1, len(devices) - 1), 6),  # to other pools
        (site.exchange[:, 0], 8),  # exchanges with experts against compute, inside a node
        (site.exchange[:, 1], 8),  # and between nodes: wide stages need them
        *(ratio for of_slot, _ in of_slots for ratio in of_slot),
    ]
    plain: list[Column] = [
        devices / devices.sum(),  # share of the cluster: how many stages it should get
        devices * speed / (devices * speed).sum(),  # share of its speed: how many blocks
        devices * room / (devices * room).sum(),  # share of its memory
        devices % np.maximum(1, site.node_size) > 0,  # nodes of unlike sizes
        *(there for _, there in of_slots),  # degrees that may be chosen
    ]
    return stacked((site.num_pools,), ratios, plain)


def _slot(site: Site, above: int, most: int) -> tuple[list[Ratio], Bools]:
    """The largest TP degree above ``above``, up to ``most``: ratios of 1 where there is none."""
    degrees = np.asarray(site.degrees)
    inside: Bools = site.usable & (degrees > above) & (degrees <= most)
    there: Bools = np.asarray(inside.any(axis=1))
    at = len(degrees) - 1 - inside[:, ::-1].argmax(axis=1)
    pool = np.arange(site.num_pools)
    each = site.speed[pool, at] / (degrees[at] * np.maximum(site.best_speed, 1e-9))[:, None]
    columns: list[Ratio] = [
        *((column, 1) for column in each.T),  # what TP costs, at a small, middle and large share
        (site.holds[pool, at], 6),  # how deep a pipeline must be
        (site.holds_states[pool, at], 6),  # the same with every way to save memory
        (site.reduction[pool, at], 8),  # reductions: deep and narrow saves them
        (site.reduction_inside[pool, at], 8),  # or wide inside a node
    ]
    return [(np.where(there, values, 1.0), divisor) for values, divisor in columns], there


def site_constants(site: Site) -> Floats:
    """``[F]``: size, shares, unevenness, and the model against the devices."""
    devices = site.devices
    total = int(devices.sum())
    share = devices / total
    there = site.best_speed > 0
    unlike = [values[there].max() / max(values[there].min(), 1e-6) for values in (site.best_speed, site.room)]
    holds = np.where(site.usable, site.holds, 0).max(axis=1)
    reduction = np.where(there, site.reduction[np.arange(site.num_pools), site.least], 0)
    ratios: list[Ratio] = [
        (total, 8),  # small clusters are puzzles, large ones a matter of proportions
        (site.global_batch, 10),  # bubbles
        (site.global_batch / total, 5),  # samples a device: how much there is to overlap
        (site.num_blocks, 6),  # depth ends here
        (site.num_alike / site.num_blocks, 1),  # half-layer blocks, models with many kinds
        (site.heaviest * site.num_blocks, 3),  # a heavy head fills a stage by itself
        (site.fills, 5),  # how tight memory is altogether
        (site.kept, 8),  # activations against states: whether depth helps memory
        (unlike[0], 3),  # composition: how unlike in speed
        (unlike[1], 3),  # and in memory
        ((share * site.node_size).sum(), 3),  # usual node
        ((site.hop.diagonal() * share).sum(), 6),  # network against compute: hops
        ((reduction * share).sum(), 8),  # and reductions
        ((holds * share).sum(), 6),  # stages that the model needs on the usual device
    ]
    plain: list[Column] = [
        len(devices) / 4,  # composition: how many pools
        float(-(share * np.log2(np.maximum(share, 1e-9))).sum()) / 2,  # and how even
        site.experts,  # mixture of experts: width spreads its states
        site.most_micro_batch < site.global_batch,  # limited micro-batches
        site.max_zero > 0,  # ZeRO saves memory where stages are wide
    ]
    return stacked((), ratios, plain)


def pool_features(site: Site, constants: Floats, now: Progress) -> Floats:
    """``[A, P, FP]``: what no step changes, and what is left."""
    num, size = len(now.depth), site.num_pools
    pool = np.arange(size)
    here, start = now.left[:, :, 0], np.maximum(1, now.start[:, :, 0])
    groups = site.groups(now.left)
    least = groups[:, pool, site.least]
    stages = np.maximum(1, now.stages_left)[:, None]
    speed = here * site.best_speed
    used = (now.start[:, :, 0] - here) / start
    begun = now.run[:, None] > 0
    ratios: list[Ratio] = [
        (here, 8),  # what divides it
        (least / stages, 6),  # stages that it could take over those that are left
        (groups[:, pool, site.greatest] / stages, 6),  # the same at its largest TP degree
    ]
    plain: list[Column] = [
        here / site.devices,  # what is left of it
        here / np.maximum(1, here.sum(axis=1, keepdims=True)),  # and its part of all that is left
        speed / np.maximum(1e-9, speed.sum(axis=1, keepdims=True)),  # the same in speed
        least > 0,  # whether it can take a stage at all
        used,  # taken by one copy
        np.minimum(now.runs_of, 2) / 2,  # runs on it in this template: rarely more than one
        now.last[:, :1] == pool,  # the last stage's: neighbours may share nodes
        begun * (1 - now.copies[:, None] * used),  # what the copies that fit leave of it: it should be little
    ]
    found = np.empty((num, size, NUM_POOL_FEATURES), np.float32)
    found[:, :, : constants.shape[1]] = constants
    found[:, :, constants.shape[1] :] = stacked((num, size), ratios, plain)
    return found


def overall_features(site: Site, constants: Floats, now: Progress) -> Floats:
    """``[A, FG]``: the site, and how far the rollout is."""
    num = len(now.depth)
    devices = now.left[:, :, 0]
    inside, begun = now.depth > 0, now.run > 0
    depth = np.maximum(1, now.depth)
    placed = np.maximum(1, now.depth - now.stages_left)
    mean = now.speeds[:, 0] / placed
    missing = np.maximum(LEAST_MISSING, 1 - now.held) / np.maximum(1, now.stages_left)
    ratios: list[Ratio] = [
        (depth, 4),  # how deep the template is
        (np.where(inside, missing, 1), 6),  # part of the model that each stage left must hold
        (np.where(begun, now.copies, 1), 6),  # copies that the stages so far allow
        (np.where(begun, mean, 1), 4),  # mean speed of a stage so far
        (np.where(begun, mean / np.maximum(1e-9, now.speeds[:, 1]), 1), 1),  # how unlike they are
        (np.maximum(1, now.before), 4),  # depth of the template before
    ]
    plain: list[Column] = [
        np.minimum(now.position, 3) / 2,  # later templates take what is left
        devices.sum(axis=1) / site.devices.sum(),  # how much that is
        (devices * site.best_speed).sum(axis=1) / (site.devices * site.best_speed).sum(),  # is it worth it?
        now.samples_left / site.global_batch,  # what no pipeline takes yet
        now.stages_left / depth,  # how far the template is
        np.minimum(now.run, 4) / 4,  # in how many runs so far
        inside * np.minimum(now.held, 4) / 2,  # memory collected so far: it must reach 1
    ]
    found = np.empty((num, NUM_OVERALL_FEATURES), np.float32)
    found[:, : len(constants)] = constants
    found[:, len(constants) :] = stacked((num,), ratios, plain)
    return found
