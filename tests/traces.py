"""A small cluster whose plans take no time to find, and traces for it."""

from functools import cache

from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from launch.simulation.costs import Costs
from launch.simulation.outcome import Outcome, Replayed
from launch.simulation.replay import replay
from launch.simulation.trace import Event, Trace
from planner import catalog
from planner.request import Request

GLOBAL_BATCH = 256
HOURS_S = 4 * 3600.0
FREE = Costs(
    detect_s=0, recover_s=0, pause_s=0, plan_s=0, start_s=0, restart_s=0, copy_s_per_GB=0, save_s_per_GB=0,
    load_s_per_GB=0,
)  # fmt: skip
"""Nothing takes time but bytes over links."""


@cache
def request(nodes: int = 4, model: str = "opt-350m", device: str = "A100-40", gbps: float = 12.5) -> Request:
    """Nodes of one device each."""
    entry = NodeEntry(name="n", device=device, gpus=1, count=nodes)
    spec = catalog.model(model)
    return Request(
        cluster=Cluster(node=(entry,), network=Network(inter_GBps=gbps)),
        model=spec,
        profile=catalog.profile_for(spec, [device]),
        global_batch=GLOBAL_BATCH,
    )


def trace(*events: Event, nodes: int = 4, duration_s: float = HOURS_S) -> Trace:
    """All nodes are there at the start."""
    here = tuple(f"n-{number}" for number in range(nodes))
    return Trace(name="test", duration_s=duration_s, here=here, events=events)


def outcomes(found: Replayed) -> dict[str, Outcome]:
    """By policy."""
    return {outcome.policy: outcome for outcome in found.outcomes}


def played(followed: Trace, costs: Costs = FREE, of: Request | None = None) -> dict[str, Outcome]:
    """Every policy's outcome."""
    return outcomes(replay(followed, of or request(), costs))
