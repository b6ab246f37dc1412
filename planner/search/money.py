"""What a plan costs by the hour, under a request."""

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..cost.money import HOUR_S, traffic_price
from ..request import Request


def price_per_hour(plan: Plan, iteration_s: Seconds, request: Request) -> float:
    """Devices in use and traffic of a plan; nodes without a price count nothing."""
    nodes = request.fleet.nodes
    devices = sum(nodes[node_of(device)].price_per_hour or 0.0 for device in plan.devices)
    return devices + traffic_price(plan, request.tables) * HOUR_S / iteration_s
