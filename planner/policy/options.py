"""Features of each option of each head: what choosing it would mean for this rollout."""

import numpy as np

from .decision import WIDTHS, Floats, Head, Ints
from .features import LEAST_MISSING, Column, Ratio, stacked
from .progress import Progress, Reals
from .site import MANY, Site

NUM_OPTION_FEATURES: dict[Head, int] = {
    Head.DEPTH: 21,
    Head.POOL: 12,
    Head.TP: 16,
    Head.WIDTH: 20,
    Head.LENGTH: 16,
}
"""FH of each head."""


def depth_options(site: Site, now: Progress, most: int) -> Floats:
    """``[A, most + 1, FH]``: stopping, and each number of stages."""
    num = len(now.depth)
    depth = np.arange(1, most + 1)[None]
    here = now.left[:, :, 0]
    total = np.maximum(1, here.sum(axis=1, keepdims=True))
    speed = here * site.best_speed
    of_speed = speed / np.maximum(1e-9, speed.sum(axis=1, keepdims=True))
    of_devices = here / total
    pool = np.arange(site.num_pools)
    groups = site.groups(now.left)[:, pool, site.greatest]
    all_groups = np.maximum(1, groups.sum(axis=1, keepdims=True))
    pipelines = np.maximum(1, now.samples_left)[:, None] * depth
    bubbles = (depth - 1) / pipelines
    hop = _mean(site.hop.diagonal(), of_devices)
    ratios: list[Ratio] = [
        (depth, 3),
        (total / depth, 5),  # devices of a stage
        *_fitting(site, here, depth),  # whether the model fits
        (bubbles * total + 2**-7, 5),  # bubbles at one device a stage
        (bubbles * all_groups + 2**-7, 5),  # and at groups as large as they get
        (_mean(site.reduction[pool, site.least], of_devices) / depth, 8),  # reductions of a stage
        (hop * depth / site.num_blocks, 6),  # hops against a stage
        (np.where(now.position[:, None] > 0, depth / np.maximum(1, now.before[:, None]), 1), 3),  # as before
    ]
    plain: list[Column] = [
        0.0,  # not stopping
        depth / site.num_blocks,  # blocks of a stage: granularity
        -(-site.num_alike // depth) * depth / site.num_alike - 1,  # what unequal cuts of alike blocks lose
        np.maximum(0, site.heaviest * depth - 1),  # what the heaviest block loses
        total % depth / total,  # devices left over
        all_groups % depth / all_groups,  # groups left over
        _uneven(of_speed, depth),  # whether stages can be dealt out by speed,
        _uneven(of_devices, depth),  # by devices,
        _uneven(groups / all_groups, depth),  # and by groups
        _idle(here, total, depth),  # devices left over if each pool is in every copy alike
        _idle(groups, all_groups, depth),  # and groups
    ]
    found = np.zeros((num, most + 1, NUM_OPTION_FEATURES[Head.DEPTH]), np.float32)
    found[:, 1:] = stacked((num, most), ratios, plain)
    found[:, 0, len(ratios)] = 1
    return found


def _fitting(site: Site, here: Ints, depth: Ints) -> list[Ratio]:
    """What stages hold on average, without TP and with the most, and on the tightest pool."""
    pool = np.arange(site.num_pools)
    share = here / np.maximum(1, here.sum(axis=1, keepdims=True))
    narrow, wide = (_mean(site.holds[pool, at], share) for at in (site.least, site.greatest))
    tightest = np.where(here > 0, site.holds[pool, site.greatest], np.inf).min(axis=1)[:, None]
    return [(depth * narrow, 5), (depth * wide, 5), (depth * tightest, 5)]


def _mean(of_pool: Reals, weights: Reals) -> Reals:
    """``[A, 1]``"""
    return np.asarray((of_pool * weights).sum(axis=1, keepdims=True))


def _uneven(share: Reals, depth: Ints) -> Reals:
    """``[A, D]``: how far each pool's share of the stages is from a whole number, together."""
    stages = share[:, :, None] * depth
    return np.asarray(np.abs(stages - np.rint(stages)).sum(axis=1))


def _idle(counts: Ints, total: Ints, depth: Ints) -> Reals:
    """``[A, D]``: part of all that is idle where as many copies as there can be take the same of a pool."""
    copies = np.maximum(1, total // depth)
    return np.asarray((counts[:, :, None] % copies[:, None]).sum(axis=1) / total)


def pool_options(site: Site, now: Progress) -> Floats:
    """``[A, P, FH]``, beside the features that pools have anyway."""
    num, size = len(now.depth), site.num_pools
    pool = np.arange(size)
    follows = now.last[:, :1] >= 0
    at = np.maximum(now.last[:, 0], 0)
    here = now.left[:, :, 0]
    speed = here * site.best_speed
    stages = np.maximum(1, now.stages_left)[:, None]
    deserved = speed / np.maximum(1e-9, speed.sum(axis=1, keepdims=True)) * stages
    least = site.groups(now.left)[:, pool, site.least]
    each = stages / np.maximum(LEAST_MISSING, 1 - now.held)[:, None]
    same = now.last[:, :1] == pool
    ratios: list[Ratio] = [
        (
            np.where(follows, site.best_speed / np.maximum(1e-9, site.best_speed[at])[:, None], 1),
            2,
        ),  # faster?
        (np.where(follows, site.room / site.room[at][:, None], 1), 2),  # more memory? late stages need less
        (np.where(follows, site.hop[at], 1), 6),  # the hop to it
        (deserved, 4),  # stages that its part of the speed deserves
        (least / stages, 5),  # copies if it took all that is left
        (site.holds[pool, site.greatest] * each, 5),  # whether all that is missing fits there
        (site.holds[pool, site.least] * each, 5),
    ]
    plain: list[Column] = [
        same,  # one more run there
        follows & (now.runs_of > 0) & ~same,  # back to a pool
        follows,
        np.minimum(deserved, 16) / 8,
        stages >= 2,
    ]
    return stacked((num, size), ratios, plain)


def tp_options(site: Site, now: Progress, pool: Ints) -> Floats:
    """``[A, T, FH]``"""
    num, size = len(now.depth), len(site.degrees)
    degree = np.asarray(site.degrees, float)[None]
    own = np.arange(num)
    groups = site.groups(now.left)[own, pool]
    stages = np.maximum(1, now.stages_left)[:, None]
    each = stages / np.maximum(LEAST_MISSING, 1 - now.held)[:, None]
    best = np.maximum(1e-9, site.best_speed[pool])[:, None]
    node = site.node_size[pool][:, None]
    follows = now.last[:, :1] >= 0
    before = degree[0, np.maximum(now.last[:, 1:2], 0)]
    here = np.maximum(1, now.left[own, pool, 0])[:, None]
    speed = site.speed[pool]
    cost = speed / (degree * best)[:, :, None]
    last = np.maximum(1e-9, now.speeds[:, 2:3])
    ratios: list[Ratio] = [
        (degree, 3),
        *((cost[:, :, k], 1) for k in range(cost.shape[2])),  # what it costs, by share
        (site.holds[pool] * each, 5),  # whether the stages left can hold what is missing
        (site.holds_states[pool] * each, 5),
        (groups / stages, 5),  # copies if all stages left were such
        (degree / node, 3),
        (site.reduction[pool] / np.maximum(1, now.depth)[:, None], 8),  # reductions of a stage between nodes
        (np.where(follows, degree / before, 1), 3),
        (np.where(follows, speed.max(axis=2) / last, 1), 2),  # against the last stage
    ]
    plain: list[Column] = [
        1 - groups * degree / here,  # devices that no group of this degree uses
        np.where(groups > 0, groups % stages / np.maximum(1, groups), 1.0),  # groups left over
        degree == node,  # a group is a node
        node % degree > 0,  # groups leave something of a node
        (now.last[:, :1] == pool[:, None]) & (before == degree),  # as before
    ]
    return stacked((num, size), ratios, plain)


def width_options(site: Site, now: Progress, pool: Ints, tp: Ints, *, most: int) -> Floats:
    """``[A, most, FH]``: the first ``most`` of ``WIDTHS``."""
    num = len(now.depth)
    width = np.asarray(WIDTHS[:most])[None]
    degree = np.asarray(site.degrees)[tp][:, None]
    groups = np.maximum(1, _groups(site, now.left, pool, tp))[:, None]
    at_start = np.maximum(1, _groups(site, now.start, pool, tp))[:, None]
    stages = np.maximum(1, now.stages_left)[:, None]
    node = site.node_size[pool][:, None]
    follows = now.last[:, :1] >= 0
    last = np.maximum(1, now.last[:, 2:3])
    speed = width * site.speed[pool, tp].max(axis=1)[:, None]
    before = now.copies[:, None]
    here = at_start // width
    copies = np.where(follows, np.minimum(before, here), here)
    devices = width * degree
    ratios: list[Ratio] = [
        (width, 4),
        (degree, 3),
        (groups / (width * stages), 5),  # copies if all stages left were such
        (copies, 6),  # copies of the template at the most
        (np.where(follows, np.maximum(copies, 0.5) / np.maximum(before, 0.5), 1), 3),  # fewer than so far?
        (copies * width / at_start, 3),  # part of the pool that they use for this stage
        *_speeds(site, now, speed, copies),
        (np.where(follows, width / last, 1), 3),
        (devices / node, 4),  # whether its reduction stays within a node
        (site.global_batch / (np.maximum(copies, 1) * width), 6),  # micro-batches at one sample each
        (site.reduction_inside[pool, tp][:, None] / np.maximum(1, now.depth)[:, None], 8),
    ]
    plain: list[Column] = [
        width == 1,
        groups % width / groups,  # groups left over,
        groups % (width * stages) / groups,  # also with all stages left
        width == now.last[:, 2:3],
        follows & ((width % last == 0) | (last % width == 0)),  # shares of neighbours divide each other
        node % np.minimum(devices, node) == 0,  # nodes divide evenly
    ]
    return stacked((num, width.shape[1]), ratios, plain)


def _speeds(site: Site, now: Progress, speed: Reals, copies: Reals) -> list[Ratio]:
    """A stage's against the last one, the mean, an even part of what is left, the fastest device left."""
    follows = now.last[:, :1] >= 0
    placed = np.maximum(1, now.depth - now.stages_left)[:, None]
    left = now.left[:, :, 0]
    # the even stage if this template stands as often as now and all that is left shares in it
    all_left = (left * site.best_speed).sum(axis=1) / np.maximum(1, now.stages_left)
    even = np.maximum(1e-9, all_left)[:, None]
    fastest = np.where(left > 0, site.best_speed, 1e-9).max(axis=1)[:, None]  # narrow stages go there
    last, mean = np.maximum(1e-9, now.speeds[:, 2:3]), np.maximum(1e-9, now.speeds[:, :1] / placed)
    return [
        (np.where(follows, speed / last, 1), 2),
        (np.where(follows, speed / mean, 1), 2),
        (speed * copies / even, 2),
        (speed / fastest, 3),
    ]


def _groups(site: Site, places: Ints, pool: Ints, tp: Ints) -> Ints:
    """``[A]``: of one pool and degree each."""
    takes = site.takes[pool, tp]
    each = np.where(takes > 0, places[np.arange(len(pool)), pool] / np.maximum(1, takes), MANY)
    return np.asarray(np.floor(each.min(axis=1)), np.int64)


def length_options(site: Site, now: Progress, pool: Ints, tp: Ints, width: Ints, *, most: int) -> Floats:
    """``[A, most, FH]``: one stage to ``most`` of them."""
    num = len(now.depth)
    own = np.arange(num)
    length = np.arange(1, most + 1)[None]
    stages = np.maximum(1, now.stages_left)[:, None]
    depth = np.maximum(1, now.depth)[:, None]
    start, left = now.start[own, pool], now.left[own, pool]
    taken = length * width[:, None]
    used = (start - left)[:, None] + taken[:, :, None] * site.takes[pool, tp][:, None]
    here = np.floor(np.where(used > 0, start[:, None] / np.maximum(1, used), MANY).min(axis=2))
    follows = now.last[:, :1] >= 0
    before = np.where(follows, now.copies[:, None], here)
    copies = np.minimum(before, here)
    speed = now.start[:, :, 0] * site.best_speed
    deserved = (speed[own, pool] / np.maximum(1e-9, speed.sum(axis=1)) * now.depth)[:, None]
    groups = np.maximum(1, _groups(site, now.left, pool, tp))[:, None]
    is_last = length >= stages
    ratios: list[Ratio] = [
        (length, 4),
        (copies, 6),  # copies of the template at the most
        (np.maximum(copies, 0.5) / np.maximum(before, 0.5), 3),  # fewer than the stages so far allow?
        *_rest(site, now, pool, tp, length),
        (width[:, None], 4),
        (np.asarray(site.degrees)[tp][:, None], 3),
    ]
    plain: list[Column] = [
        length / stages,
        is_last,  # the template is complete
        copies * used[:, :, 0] / np.maximum(1, start[:, :1]),  # part of the pool that the copies use
        groups % taken / groups,  # groups left over
        taken == groups,  # all of the pool
        (length - deserved) / depth,  # against the stages that its speed deserves
        np.abs(length - deserved) < 0.5,
        (now.runs_of > 0).sum(axis=1)[:, None] / 3,  # pools in use: the more, the likelier all that is left
    ]
    return stacked((num, length.shape[1]), ratios, plain)


def _rest(site: Site, now: Progress, pool: Ints, tp: Ints, length: Ints) -> list[Ratio]:
    """Part of the model that all stages so far hold, what each other must hold, other devices for each."""
    own = np.arange(len(pool))
    rest = np.maximum(1, now.stages_left)[:, None] - length
    some, is_last = np.maximum(1, rest), rest <= 0
    others = (now.left[:, :, 0].sum(axis=1) - now.left[own, pool, 0])[:, None]
    held = now.held[:, None] + length * site.holds[pool, tp][:, None]
    missing = np.maximum(LEAST_MISSING, 1 - held)
    return [
        (held, 4),
        (np.where(is_last, 1, missing / some), 6),
        (np.where(is_last, 1, np.maximum(others, 0.5) / some), 5),
    ]
