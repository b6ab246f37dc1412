"""The same problem under another network, for asking what would be."""

from dataclasses import replace
from math import inf

from msgspec.structs import replace as changed

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import NetworkPair
from arachne_runtime.plan.profile import LinkScope

from ..request import Request


def with_network(
    request: Request, *, inter_GBps: float | None = None, latency_us: float | None = None
) -> Request:
    """``request`` with every link between nodes so; None: as it was. UsageError for what no network has.

    What was measured between nodes is left out: it would keep a faster link as slow as it was.
    """
    if inter_GBps is None and latency_us is None:
        return request
    if inter_GBps is not None and not inter_GBps > 0:
        raise UsageError(f"bandwidth between nodes {inter_GBps:g} GB/s is not above 0")
    if latency_us is not None and not 0 <= latency_us < inf:
        raise UsageError(f"latency between nodes {latency_us:g} µs is not a number from 0 on")
    old = request.cluster.network

    def so(link: NetworkPair) -> NetworkPair:
        return changed(
            link,
            inter_GBps=link.inter_GBps if inter_GBps is None else inter_GBps,
            latency_us=link.latency_us if latency_us is None else latency_us,
        )

    network = changed(
        old,
        inter_GBps=old.inter_GBps if inter_GBps is None else inter_GBps,
        latency_us=old.latency_us if latency_us is None else latency_us,
        pair=tuple(so(pair) for pair in old.pair),
    )
    links = tuple(link for link in request.profile.links if link.scope is LinkScope.INTRA)
    cluster, profile = changed(request.cluster, network=network), changed(request.profile, links=links)
    return replace(request, cluster=cluster, profile=profile, running=None)
