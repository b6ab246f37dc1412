"""Features of each option of each head: what choosing it would mean for this rollout.

Logarithms are to base 2 and divided so that most values lie within -1 and 1.
"""

import numpy as np
from numpy.typing import NDArray

from .decision import WIDTHS, Floats, Head, Ints
from .features import copies_of, log2, stacked
from .progress import Progress, Reals
from .site import Site

Column = NDArray[np.generic] | float

NUM_OPTION_FEATURES: dict[Head, int] = {
    Head.DEPTH: 18,
    Head.POOL: 12,
    Head.TP: 16,
    Head.WIDTH: 19,
    Head.LENGTH: 16,
}
"""FH of each head."""


def depth_options(site: Site, now: Progress, most: int) -> Floats:
    """``[A, most + 1, FH]``: stopping, and each number of stages."""
    num = len(now.depth)
    depth = np.arange(1, most + 1)[None]
    here = now.left[:, :, 0]
    devices = np.maximum(1, here.sum(axis=1, keepdims=True))
    speed = here * site.best_speed
    of_speed = speed / np.maximum(1e-9, speed.sum(axis=1, keepdims=True))
    of_devices = here / devices
    pool = np.arange(site.num_pools)
    narrow, wide = (_mean(site.holds[pool, at], of_devices) for at in (site.least, site.greatest))
    tightest = np.where(here > 0, site.holds[pool, site.greatest], np.inf).min(axis=1)[:, None]
    groups = site.groups(now.left)
    largest = np.maximum(1, groups[:, pool, site.greatest].sum(axis=1, keepdims=True))
    samples = np.maximum(1, now.samples_left)[:, None]
    columns: list[Column] = [
        0.0,  # not stopping
        log2(depth) / 3,
        depth / site.num_blocks,  # blocks of a stage: granularity
        log2(devices / depth) / 5,  # devices of a stage
        log2(depth * narrow) / 5,  # whether the model fits: without TP,
        log2(depth * wide) / 5,  # with the most,
        log2(depth * tightest) / 5,  # and on the tightest pool
        log2((depth - 1) * devices / (samples * depth) + 2**-7) / 5,  # bubbles at one device a stage
        log2((depth - 1) * largest / (samples * depth) + 2**-7) / 5,  # and at groups as large as they get
        -(-site.num_alike // depth) * depth / site.num_alike - 1,  # what unequal cuts of alike blocks lose
        np.maximum(0, site.heaviest * depth - 1),  # what the heaviest block loses
        log2(_mean(site.reduction[pool, site.least], of_devices) / depth) / 8,  # reductions of a stage
        log2(_mean(site.hop.diagonal(), of_devices) * depth / site.num_blocks) / 6,  # hops against a stage
        devices % depth / devices,  # devices left over
        largest % depth / largest,  # groups left over
        _uneven(of_speed, depth),  # whether stages can be dealt out by speed,
        _uneven(of_devices, depth),  # and by devices
        log2(depth / np.maximum(1, now.before[:, None]))
        / 3
        * (now.position[:, None] > 0),  # like the last one
    ]
    found = stacked(columns, (num, most))
    stop = np.zeros((num, 1, found.shape[2]), np.float32)
    stop[:, :, 0] = 1
    return np.concatenate([stop, found], axis=1)


def _mean(of_pool: Reals, weights: Reals) -> Reals:
    """``[A, 1]``"""
    return np.asarray((of_pool * weights).sum(axis=1, keepdims=True))


def _uneven(share: Reals, depth: Ints) -> Reals:
    """``[A, D]``: how far each pool's share of the stages is from a whole number, together."""
    stages = share[:, :, None] * depth
    return np.asarray(np.abs(stages - np.round(stages)).sum(axis=1))


def pool_options(site: Site, now: Progress) -> Floats:
    """``[A, P, FH]``, beside the features that pools have anyway."""
    num, size = len(now.depth), site.num_pools
    pool = np.arange(size)
    last = now.last[:, 0]
    follows = (last >= 0)[:, None]
    at = np.maximum(last, 0)
    here = now.left[:, :, 0]
    speed = here * site.best_speed
    stages = np.maximum(1, now.stages_left)[:, None]
    of_speed = speed / np.maximum(1e-9, speed.sum(axis=1, keepdims=True))
    least = site.groups(now.left)[:, pool, site.least]
    missing = np.maximum(0.02, 1 - now.held)[:, None]
    same = follows & (last[:, None] == pool)
    columns: list[Column] = [
        same,  # one more run there
        follows & (now.runs_of > 0) & ~same,  # back to a pool
        follows,
        log2(site.best_speed / np.maximum(1e-9, site.best_speed[at])[:, None]) / 2 * follows,  # faster?
        log2(site.room / site.room[at][:, None]) / 2 * follows,  # more memory? late stages need less
        log2(site.hop[at]) / 6 * follows,  # the hop to it
        of_speed * stages / 8,  # stages that its part of the speed deserves
        log2(of_speed * stages) / 4,
        log2(least / stages) / 5,  # copies if it took all that is left
        log2(site.holds[pool, site.greatest] * stages / missing) / 5,  # whether all that is left fits there
        log2(site.holds[pool, site.least] * stages / missing) / 5,
        stages >= 2,
    ]
    return stacked(columns, (num, size))


def tp_options(site: Site, now: Progress, pool: Ints) -> Floats:
    """``[A, T, FH]``"""
    num, size = len(now.depth), len(site.degrees)
    degree = np.asarray(site.degrees, float)
    own = np.arange(num)
    groups = site.groups(now.left)[own, pool]
    stages = np.maximum(1, now.stages_left)[:, None]
    missing = np.maximum(0.02, 1 - now.held)[:, None]
    best = np.maximum(1e-9, site.best_speed[pool])[:, None]
    node = site.node_size[pool][:, None]
    follows = now.last[:, :1] >= 0
    last_degree = degree[np.maximum(now.last[:, 1:2], 0)]
    here = np.maximum(1, now.left[own, pool, 0])[:, None]
    each = site.speed[pool] / degree[None, :, None] / best[:, :, None]
    depth = np.maximum(1, now.depth)[:, None]
    columns: list[Column] = [
        log2(degree) / 3,
        *(log2(each[:, :, k]) for k in range(each.shape[2])),  # what it costs, by share
        log2(site.holds[pool] * stages / missing) / 5,  # whether the stages left can hold what is missing
        log2(site.holds_states[pool] * stages / missing) / 5,
        log2(groups / stages) / 5,  # copies if all stages left were such
        1 - groups * degree / here,  # devices that no group of this degree uses
        np.where(groups > 0, groups % stages / np.maximum(1, groups), 1.0),  # groups left over
        log2(degree / node) / 3,
        degree == node,  # a group is a node
        node % degree > 0,  # groups leave something of a node
        log2(site.reduction[pool] / depth) / 8,  # reductions of a stage between nodes
        follows & (now.last[:, :1] == pool[:, None]) & (last_degree == degree),  # as before
        log2(degree / last_degree) / 3 * follows,
        _against(site.speed[pool].max(axis=2), now.speeds[:, 2:3]) * follows,  # against the last stage
    ]
    return stacked(columns, (num, size))


def _against(speed: Reals, other: Reals) -> Reals:
    """Half the logarithm of their ratio."""
    return log2(speed / np.maximum(1e-9, other)) / 2


def width_options(site: Site, now: Progress, pool: Ints, tp: Ints, *, most: int) -> Floats:
    """``[A, most, FH]``: the first ``most`` of ``WIDTHS``."""
    num = len(now.depth)
    own = np.arange(num)
    width = np.asarray(WIDTHS[:most])[None]
    degree = np.asarray(site.degrees)[tp][:, None]
    groups = np.maximum(1, site.groups(now.left)[own, pool, tp])[:, None]
    at_start = np.maximum(1, site.groups(now.start)[own, pool, tp])[:, None]
    stages = np.maximum(1, now.stages_left)[:, None]
    node = site.node_size[pool][:, None]
    follows = now.last[:, :1] >= 0
    last = np.maximum(1, now.last[:, 2:3])
    one = site.speed[pool, tp].max(axis=1)[:, None]
    placed = np.maximum(1, now.depth - now.stages_left)[:, None]
    before = copies_of(now)[:, None]
    copies = np.where(follows, np.minimum(before, at_start // width), at_start // width)
    devices = width * degree
    # the even stage of this template if it stands as often as now and all that is left shares in it
    even = (now.left[:, :, 0] * site.best_speed).sum(axis=1)[:, None] / stages
    columns: list[Column] = [
        log2(width) / 4,
        width == 1,
        log2(degree) / 3,
        log2(groups / (width * stages)) / 5,  # copies if all stages left were such
        1 - groups // width * width / groups,  # groups left over,
        1 - groups // (width * stages) * (width * stages) / groups,  # also with all stages left
        log2(copies) / 6,  # copies of the template at the most
        log2(np.maximum(copies, 0.5) / np.maximum(before, 0.5))
        / 3
        * follows,  # fewer than the stages so far allow?
        log2(copies * width / at_start) / 3,  # part of the pool that they use for this stage
        _against(width * one, now.speeds[:, 2:3]) * follows,  # speed against the last stage,
        _against(width * one, now.speeds[:, 0:1] / placed) * follows,  # the mean stage,
        _against(width * one * copies, even),  # and an even share of what is left
        log2(width / last) / 3 * follows,
        follows & (width == last),
        follows & ((width % last == 0) | (last % width == 0)),  # shares of neighbours divide each other
        log2(devices / node) / 4,  # whether its reduction stays within a node
        node % np.minimum(devices, node) == 0,  # and nodes divide evenly
        log2(site.global_batch / (np.maximum(copies, 1) * width)) / 6,  # micro-batches at one sample each
        log2(site.reduction_inside[pool, tp] / np.maximum(1, now.depth))[:, None] / 8,
    ]
    return stacked(columns, (num, width.shape[1]))


def length_options(site: Site, now: Progress, pool: Ints, tp: Ints, width: Ints, *, most: int) -> Floats:
    """``[A, most, FH]``: one stage to ``most`` of them."""
    num = len(now.depth)
    own = np.arange(num)
    length = np.arange(1, most + 1)[None]
    stages = np.maximum(1, now.stages_left)[:, None]
    depth = np.maximum(1, now.depth)[:, None]
    start, left = now.start[own, pool], now.left[own, pool]
    more = (length * width[:, None])[:, :, None] * site.takes[pool, tp][:, None]
    used = (start - left)[:, None] + more
    with np.errstate(divide="ignore", invalid="ignore"):
        here = np.floor(np.where(used > 0, start[:, None] / used, np.inf).min(axis=2))
    follows = now.last[:, :1] >= 0
    before = np.where(follows, copies_of(now)[:, None], here)
    copies = np.minimum(before, here)
    deserved = _deserved(site, now)[own, pool][:, None]
    groups = np.maximum(1, site.groups(now.left)[own, pool, tp])[:, None]
    others = now.left[:, :, 0].sum(axis=1)[:, None] - left[:, :1]
    rest = stages - length
    held = now.held[:, None] + length * site.holds[pool, tp][:, None]
    degree = np.asarray(site.degrees)[tp][:, None]
    columns: list[Column] = [
        length / stages,
        rest == 0,  # the template is complete
        log2(length) / 4,
        log2(copies) / 6,  # copies of the template at the most
        log2(np.maximum(copies, 0.5) / np.maximum(before, 0.5)) / 3,  # fewer than the stages so far allow?
        copies * used[:, :, 0] / np.maximum(1, start[:, :1]),  # part of the pool that they use
        1 - groups // (length * width[:, None]) * (length * width[:, None]) / groups,  # groups left over
        length * width[:, None] == groups,  # all of the pool
        (length - deserved) / depth,  # against the stages that its speed deserves
        np.abs(length - deserved) < 0.5,
        log2(held) / 4,  # part of the model that all stages so far hold
        log2(np.maximum(0.02, 1 - held) / np.maximum(1, rest)) / 6 * (rest > 0),  # what each other must hold
        log2(np.maximum(others, 0.5) / np.maximum(1, rest)) / 5 * (rest > 0),  # other devices for the others
        log2(width)[:, None] / 4,
        log2(degree) / 3,
        (now.runs_of > 0).sum(axis=1)[:, None] / 3,  # pools in use: the more, the likelier all that is left
    ]
    return stacked(columns, (num, length.shape[1]))


def _deserved(site: Site, now: Progress) -> Reals:
    """``[A, P]``: stages of the template, if they were dealt out by speed."""
    speed = now.start[:, :, 0] * site.best_speed
    return np.asarray(speed / np.maximum(1e-9, speed.sum(axis=1, keepdims=True)) * now.depth[:, None])
