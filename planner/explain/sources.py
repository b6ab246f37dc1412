"""Where the figures of a price come from: measured, interpolated or analytic."""

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Source

from ..request import Request

_WORST_FIRST = (Source.ANALYTIC, Source.INTERPOLATED, Source.MEASURED)


class Figures(Document, frozen=True, kw_only=True):
    """The seconds of blocks on one device type, as far as a plan uses them."""

    device: str
    """Device type."""
    source: Source
    """The least certain of them."""
    kinds: tuple[str, ...]
    """Kinds of block with that source."""


def figures_of(plan: Plan, request: Request) -> tuple[Figures, ...]:
    """One entry for each device type of a plan, in order of first appearance."""
    used: dict[str, dict[Source, dict[str, None]]] = {}
    for key in dict.fromkeys(_lookups(plan, request)):
        device, tp, share, kind = key
        source = request.profile.block(kind, device, tp, share).source
        used.setdefault(device, {}).setdefault(source, {})[kind] = None
    return tuple(
        Figures(device=device, source=source, kinds=tuple(by_source[source]))
        for device, by_source in used.items()
        for source in [next(s for s in _WORST_FIRST if s in by_source)]
    )


def _lookups(plan: Plan, request: Request) -> list[tuple[str, int, int, str]]:
    """(device type, TP degree, share, block kind) of every cost that the plan asks for."""
    kinds = [block.kind for block in request.model.blocks]
    return [
        (request.cluster.device_type(replica.devices[0]), len(replica.devices), replica.share, kind)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for kind in dict.fromkeys(kinds[slice(*stage.layers)])
    ]
