"""The map of the cluster: every node a box, every device a square in the colour of its stage."""

from arachne_runtime.plan.cluster import Cluster, Node, NodeEntry
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import format_bytes
from planner.request import Request

from ..answers import PriceAnswer
from ..markup import Markup, joined, tag
from .lanes import colours_of


def cluster_map(plan: Plan, price: PriceAnswer, request: Request) -> Markup:
    """Every node as a box of devices, by entry of the cluster file."""
    seats = _seats(plan, request.cluster)
    boxes: dict[str, list[Markup]] = {}
    for node in request.cluster.nodes:
        boxes.setdefault(node.entry.name, []).append(_node(node, seats, price, request))
    return joined(
        tag("div", tag("h3", _entry(entry)), tag("div", boxes[entry.name], class_="nodes"), class_="entry")
        for entry in request.cluster.node
    )


def _entry(entry: NodeEntry) -> str:
    nodes = f"{entry.count} nodes" if entry.count > 1 else "1 node"
    zone = f", zone {entry.zone}" if entry.zone else ""
    return f"{entry.name}: {nodes} of {entry.gpus} {entry.device}{zone}"


def _node(node: Node, seats: dict[str, tuple[str, str]], price: PriceAnswer, request: Request) -> Markup:
    room = format_bytes(request.fleet.node(node.name).memory_bytes)
    squares = []
    for device in node.devices:
        if device in seats:
            colour, where = seats[device]
            words = f"{device}: {where}, {format_bytes(price.peak_bytes[device])} of {room}"
            squares.append(tag("i", class_="dev", style=f"background:{colour}", title=words))
        else:
            squares.append(tag("i", class_="dev idle", title=f"{device}: idle"))
    return tag("div", tag("small", node.name), tag("div", squares), class_="node")


def _seats(plan: Plan, cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Colour and place of every device in use."""
    colours = colours_of(plan, cluster)
    found = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for r, replica in enumerate(stage.replicas):
                tensor = f", TP {len(replica.devices)}" if len(replica.devices) > 1 else ""
                where = f"pipeline {p}, stage {s}, replica {r}{tensor}"
                found.update(dict.fromkeys(replica.devices, (colours[p][s], where)))
    return found
