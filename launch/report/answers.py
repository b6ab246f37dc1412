"""What ``--json`` prints: documents whose every field is there, so that a script finds what it looks for."""

import msgspec

from arachne_runtime.plan.files import encode
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Bytes, Seconds
from planner.cost import Breakdown, Estimate, Infeasible, price
from planner.explain import Binding, Figures, Losses, Repair, figures_of, losses_of, repairs, what_binds
from planner.request import Request


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all answers."""


class PriceAnswer(Answer, frozen=True, kw_only=True):
    """The price of a plan that fits."""

    iteration_s: Seconds
    samples_per_s: float
    price_per_hour: float | None
    """Of the devices in use and of traffic, as price limits count; None where a device has no price."""
    traffic_per_hour: float
    """What bytes over links with a price have of it."""
    cost_per_sample: float | None
    currency: str
    """Of all prices: the cluster file's."""
    list_priced: tuple[str, ...]
    """Device types whose price is the catalog's, since the cluster file states none."""
    limits: str
    """One sentence: what sets the pace."""
    binds: tuple[Binding, ...]
    losses: Losses
    share_of_ideal: float
    dtype: str
    """Of the model."""
    figures: tuple[Figures, ...]
    """Where the seconds of each device type come from."""
    not_measured: tuple[str, ...]
    peak_bytes: dict[str, Bytes]
    breakdown: dict[str, Breakdown]


def price_answer(plan: Plan, estimate: Estimate, request: Request) -> PriceAnswer:
    """All that is known of a price."""
    losses = losses_of(plan, estimate, request)
    return PriceAnswer(
        iteration_s=estimate.iteration_s,
        samples_per_s=estimate.samples_per_s,
        price_per_hour=estimate.price_per_hour,
        traffic_per_hour=estimate.traffic_per_hour,
        cost_per_sample=estimate.cost_per_sample,
        currency=estimate.currency,
        list_priced=tuple(name for name in request.fleet.list_priced if name in _types(plan, request)),
        limits=estimate.limits,
        binds=what_binds(plan, estimate, losses, request),
        losses=losses,
        share_of_ideal=losses.share_of_ideal,
        dtype=request.model.dtype,
        figures=figures_of(plan, request),
        not_measured=estimate.not_measured,
        peak_bytes=dict(estimate.peak_bytes),
        breakdown=dict(estimate.breakdown),
    )


def _types(plan: Plan, request: Request) -> set[str]:
    return {request.cluster.device_type(device) for device in plan.devices}


class MisfitAnswer(Answer, frozen=True, kw_only=True):
    """Why a plan has no price."""

    pipeline: int
    stage: int
    device: str
    needed_bytes: Bytes
    available_bytes: Bytes
    reason: str
    would_fit: tuple[Repair, ...]
    """Changes of the plan with which it fits, the fastest first."""


def misfit_answer(plan: Plan, misfit: Infeasible, request: Request) -> MisfitAnswer:
    """A plan that does not fit, as an answer."""
    return MisfitAnswer(
        pipeline=misfit.pipeline,
        stage=misfit.stage,
        device=misfit.device,
        needed_bytes=misfit.needed_bytes,
        available_bytes=misfit.available_bytes,
        reason=misfit.reason,
        would_fit=repairs(plan, misfit, request),
    )


def price_or_misfit(plan: Plan, request: Request) -> tuple[PriceAnswer | None, MisfitAnswer | None]:
    """One of the two."""
    found = price(plan, request)
    if isinstance(found, Infeasible):
        return None, misfit_answer(plan, found, request)
    return price_answer(plan, found, request), None


def raw(plan: Plan) -> msgspec.Raw:
    """A plan inside an answer: the same JSON as in its file."""
    return msgspec.Raw(encode(plan))


def as_json(answer: Answer) -> str:
    """Indented, fields in the order of the class."""
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
