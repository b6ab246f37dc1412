"""Which of alike devices does what: those of a new plan take over what they, or their node, hold already.

Nodes that nothing but their names tells apart change places, then devices of a node: the price stays the
same, fewer bytes move.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Stage

from ..request import Request
from .migrate import Migration, Role, Roles, migration, roles_of
from .supply import likeness

Floats = NDArray[np.float64]


def realigned(plan: Plan, old: Plan, request: Request) -> Plan:
    """The plan on other devices of the same kind, where a change from ``old`` moves less; else itself."""
    change, roles = migration(old, request), roles_of(plan.pipelines)
    work: dict[str, dict[str, tuple[Role, ...]]] = {}
    for device, held in roles.items():
        work.setdefault(node_of(device), {})[device] = held
    names: dict[str, str] = {}
    for of, node in _matched_nodes(work, change):
        names |= _matched_devices(work[of], node, change)
    moved = _renamed(plan, names)
    return moved if _cost(roles_of(moved.pipelines), change) < _cost(roles, change) else plan


def _cost(roles: Roles, change: Migration) -> tuple[float, float, float]:
    """Bytes into the node that waits for most of them, into all nodes, and between devices of a node."""
    entering = change.entering(roles)
    kept = sum(_held_already(held, change.roles.get(device, ()), change) for device, held in roles.items())
    return float(entering.max()), float(entering.sum()), -kept


def _matched_nodes(work: Mapping[str, Roles], change: Migration) -> list[tuple[str, str]]:
    """Nodes of the plan, and the node that does the work of each.

    The squares of bytes are least together: their sum matters, and the node that waits longest.
    """
    found = []
    for alike in _alike_nodes(change.request):
        busy = [name for name in alike if name in work]
        if busy:
            entering = _entering_each([work[name] for name in busy], alike, change)
            rows, columns = linear_sum_assignment(entering**2)
            found += [(busy[r], alike[c]) for r, c in zip(rows.tolist(), columns.tolist(), strict=True)]
    return found


def _alike_nodes(request: Request) -> list[list[str]]:
    """Names of nodes that are alike in all but their names, in the order of the cluster file."""
    found: dict[object, list[str]] = {}
    for node in request.cluster.nodes:
        key = likeness(request.cluster, node, request.fleet.node(node.name)), node.entry.gpus
        found.setdefault(key, []).append(node.name)
    return list(found.values())


def _entering_each(works: Sequence[Roles], names: Sequence[str], change: Migration) -> Floats:
    """``[works, names]``: bytes that would enter each of these nodes if it did each of these works."""
    numbers = np.array([change.node_number[name] for name in names])
    known: dict[tuple[Role, ...], Floats] = {}
    rows = []
    for work in works:
        roles = tuple(sorted(role for held in work.values() for role in held))
        if roles not in known:  # most nodes do what others do
            total = np.zeros(len(names))
            for role in roles:
                missing = change.missing(role.shard, role.of)
                total += missing[numbers, role.stop] - missing[numbers, role.start]
            known[roles] = total
        rows.append(known[roles])
    return np.stack(rows)


def _matched_devices(work: Roles, node: str, change: Migration) -> Mapping[str, str]:
    """Which device of ``node`` does what each device of ``work`` does: the one that holds most of it."""
    devices = change.request.cluster.nodes_by_name[node].devices
    kept = [[_held_already(held, change.roles.get(d, ()), change) for d in devices] for held in work.values()]
    rows, columns = linear_sum_assignment(np.array(kept), maximize=True)
    names = list(work)
    return {names[r]: devices[c] for r, c in zip(rows.tolist(), columns.tolist(), strict=True)}


def _held_already(new: Sequence[Role], old: Sequence[Role], change: Migration) -> float:
    """Bytes of a device's new roles that its old ones hold."""
    return sum(
        float(change.state_bytes[max(a.start, b.start) : min(a.stop, b.stop)].sum()) / a.of
        for a in new
        for b in old
        if (a.shard, a.of) == (b.shard, b.of)
    )


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with other devices in their places."""

    def stage_with(stage: Stage) -> Stage:
        return replace(
            stage,
            replicas=tuple(replace(r, devices=tuple(names[d] for d in r.devices)) for r in stage.replicas),
        )

    def pipeline_with(pipeline: Pipeline) -> Pipeline:
        return replace(pipeline, stages=tuple(map(stage_with, pipeline.stages)))

    return replace(plan, pipelines=tuple(map(pipeline_with, plan.pipelines)))
