"""Clusters, models and traces of bench.trace_simulation: two published traces, and drawn ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from launch.simulation.costs import Costs
from launch.simulation.document import Drawn
from launch.simulation.drawn import all_nodes, drawn_trace
from launch.simulation.reading import counted_trace
from launch.simulation.trace import Trace
from planner import catalog
from planner.request import Request

DATA = Path(__file__).parent / "data" / "traces"

P3_GBPS = 1.25
"""Of a p3.2xlarge: up to 10 Gbit/s (AWS, "Amazon EC2 P3 instances")."""
NIC_GBPS = 12.5
"""One NIC of 100 Gbit/s a node."""
SPOT_NOTICE_S = 120.0
"""AWS tells spot instances two minutes before it takes them ("Spot Instance interruption notices")."""

MEASURED = Costs()
GOAL = 0.95
NO_NOTICE = 0.92
"""Steps of 40 to 70 s, half of which is lost with every node that goes untold: 4.8 % of the time, which no
policy can save. With the cloud's notice the same case reaches the goal."""
LONG_STOPS = 0.90
"""110 changes of 20 s take 6 % of the time; it shows what each second of a change is worth."""

HOUR_S = 3600.0
DRAWN = Drawn(
    seed=0,
    mean_to_loss_s=240 * HOUR_S,
    mean_repair_s=HOUR_S,
    mean_to_preemption_s=12 * HOUR_S,
    mean_absence_s=HOUR_S / 2,
    notice_s=SPOT_NOTICE_S,
)
"""A node is lost in ten days, and preempted in twelve hours: a seventh as often as Parcae's (167 in 269 hours
of an instance)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    model: str
    nodes: tuple[tuple[str, int], ...]
    """Device type and number of nodes."""
    gpus: int
    global_batch: int
    inter_GBps: float
    trace: Callable[[Cluster], Trace]
    costs: Costs = MEASURED
    bound: float = GOAL
    """Part of the oracle's samples that ours must reach; lower where the reason of the case says why."""
    quick: bool = False
    """Whether it is of the quick run."""

    def request(self) -> Request:
        spec = catalog.model(self.model)
        return Request(
            cluster=Cluster(
                node=tuple(
                    NodeEntry(name=device.lower(), device=device, gpus=self.gpus, count=count)
                    for device, count in self.nodes
                ),
                network=Network(inter_GBps=self.inter_GBps),
            ),
            model=spec,
            profile=catalog.profile_for(spec, [device for device, _ in self.nodes]),
            global_batch=self.global_batch,
        )


def published(file: str, notice_s: float = 0.0) -> Callable[[Cluster], Trace]:
    """A published trace; ``notice_s`` where the cloud gives one and the file says nothing of it."""

    def trace(cluster: Cluster) -> Trace:
        return counted_trace(DATA / file, cluster, notice_s=notice_s)

    return trace


def drawn(hours: float, what: Drawn = DRAWN) -> Callable[[Cluster], Trace]:
    return lambda cluster: drawn_trace("drawn", what, hours * HOUR_S, all_nodes(cluster))


PARCAE, SAILOR = "spot_availability_p3.csv", "availability_trace_a100.json"
SLOW_CHANGES = Costs(recover_s=20.0, pause_s=20.0, restart_s=Costs().restart_s + 20.0)
"""A change takes 20 s beside its bytes, as Arachne publishes (19 to 21 s, arXiv 2609.34244), a restart 20 s
more than here."""

SMALL = Case(
    name="parcae-opt-350m",
    model="opt-350m",
    nodes=(("V100-16", 32),),
    gpus=1,
    global_batch=256,
    inter_GBps=P3_GBPS,
    trace=published(PARCAE),
    quick=True,
)
LARGE = replace(SMALL, name="parcae-gpt-neo-2.7b", model="gpt-neo-2.7b", bound=NO_NOTICE, quick=False)

CASES = (
    SMALL,
    LARGE,
    replace(LARGE, name="parcae-gpt-neo-2.7b-notice", trace=published(PARCAE, SPOT_NOTICE_S), bound=GOAL),
    replace(SMALL, name="parcae-opt-350m-slow-changes", costs=SLOW_CHANGES, bound=LONG_STOPS, quick=False),
    Case(
        name="sailor-opt-350m",
        model="opt-350m",
        nodes=(("A100-40", 4),),
        gpus=1,
        global_batch=256,
        inter_GBps=NIC_GBPS,
        trace=published(SAILOR),
        quick=True,
    ),
    Case(
        name="drawn-16-devices",
        model="opt-350m",
        nodes=(("A100-40", 4),),
        gpus=4,
        global_batch=256,
        inter_GBps=NIC_GBPS,
        trace=drawn(48),
        quick=True,
    ),
    Case(
        name="drawn-64-devices-2-types",
        model="llama-3-8b",
        nodes=(("A100-40", 8), ("H100", 8)),
        gpus=4,
        global_batch=1024,
        inter_GBps=NIC_GBPS,
        trace=drawn(24),
    ),
    Case(
        name="drawn-256-devices-3-types",
        model="llama-3-8b",
        nodes=(("A100-40", 20), ("A6000", 20), ("H100", 24)),
        gpus=4,
        global_batch=1024,
        inter_GBps=NIC_GBPS,
        trace=drawn(8),
    ),
    Case(
        name="drawn-1024-devices-4-types",
        model="llama-3-8b",
        nodes=(("A100-40", 64), ("A6000", 64), ("H100", 64), ("V100-16", 64)),
        gpus=4,
        global_batch=2048,
        inter_GBps=NIC_GBPS,
        trace=drawn(2),
    ),
)
