"""Synthetic traces: each node is lost, repaired, preempted with notice and given back, as a seed draws."""

import random
from collections.abc import Iterator

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.units import Seconds

from .document import Drawn
from .trace import Event, Trace


def drawn_trace(name: str, drawn: Drawn, duration_s: Seconds, nodes: tuple[str, ...]) -> Trace:
    """Exponential times between what happens to a node; the same seed gives each node the same fate."""
    events = sorted(
        (event for node in nodes for event in _fate(node, drawn, duration_s)),
        key=lambda event: (event.at_s, event.goes, event.comes),
    )
    return Trace(name=name, duration_s=duration_s, here=nodes, events=tuple(events))


def _fate(node: str, drawn: Drawn, duration_s: Seconds) -> Iterator[Event]:
    rng, at_s = random.Random(f"{drawn.seed} {node}"), 0.0
    while True:
        loss_s = _exponential(rng, drawn.mean_to_loss_s)
        preemption_s = _exponential(rng, drawn.mean_to_preemption_s)
        lost = loss_s <= preemption_s
        before_s, at_s = at_s, at_s + min(loss_s, preemption_s)
        if at_s >= duration_s:
            return
        notice_s = 0.0 if lost else min(drawn.notice_s, at_s - before_s)
        yield Event(at_s=at_s, goes=(node,), notice_s=notice_s)
        at_s += _exponential(rng, drawn.mean_repair_s if lost else drawn.mean_absence_s)
        if at_s >= duration_s:
            return
        yield Event(at_s=at_s, comes=(node,))


def _exponential(rng: random.Random, mean_s: Seconds | None) -> Seconds:
    return float("inf") if mean_s is None else rng.expovariate(1 / mean_s)


def all_nodes(cluster: Cluster) -> tuple[str, ...]:
    """Names, in the order of the file."""
    return tuple(node.name for node in cluster.nodes)
