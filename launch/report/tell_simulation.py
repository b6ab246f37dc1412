"""What ``arachne simulate`` tells: the price of a plan as things are, against what its file predicts."""

from collections.abc import Iterator

from arachne_runtime.plan.files import digest
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Bytes, Seconds, format_bytes, format_seconds
from planner.request import Request

from .answers import Answer, MisfitAnswer, PriceAnswer
from .tell_price import breakdown_lines, misfit_lines, price_lines, replicas_of

OF_NOTE = 1e-9
"""Relative difference below which two predictions are the same figure, rounded in a file."""


class Against(Answer, frozen=True, kw_only=True):
    """A prediction in a plan's file beside the price now."""

    predicted_s: Seconds
    now_s: Seconds
    ratio: float
    """Now over predicted."""
    more_bytes: dict[str, Bytes]
    """By device, where the peak is another one: now less predicted."""
    changed: tuple[str, ...]
    """Inputs with another digest than the plan was made from."""


class SimulationAnswer(Answer, frozen=True, kw_only=True):
    """Everything that ``arachne simulate --json`` prints."""

    file: str
    assumed: tuple[str, ...]
    """What was set on the command line instead of the files' figures."""
    price: PriceAnswer | None
    infeasible: MisfitAnswer | None
    against: Against | None
    """None where the plan predicts nothing, or does not fit."""


def simulation_answer(
    file: str,
    plan: Plan,
    request: Request,
    assumed: tuple[str, ...],
    price: PriceAnswer | None,
    misfit: MisfitAnswer | None,
) -> SimulationAnswer:
    """All of it; ``request``: with the inputs' own figures, whatever is assumed."""
    against = _against(plan, request, price) if price is not None else None
    return SimulationAnswer(file=file, assumed=assumed, price=price, infeasible=misfit, against=against)


def _against(plan: Plan, request: Request, price: PriceAnswer) -> Against | None:
    if plan.predicted is None:
        return None
    peaks = plan.predicted.peak_bytes
    more = {device: peak - peaks[device] for device, peak in price.peak_bytes.items() if device in peaks}
    return Against(
        predicted_s=plan.predicted.iteration_s,
        now_s=price.iteration_s,
        ratio=price.iteration_s / plan.predicted.iteration_s,
        more_bytes={device: bytes_ for device, bytes_ in more.items() if bytes_},
        changed=tuple(_changed(plan, request)),
    )


def _changed(plan: Plan, request: Request) -> Iterator[str]:
    if plan.made_by is None:
        return
    now = {"cluster": request.cluster, "model": request.model, "profile": request.profile}
    for name, document in now.items():
        if getattr(plan.made_by, name) != digest(document):
            yield name


def simulation_text(answer: SimulationAnswer, plan: Plan, request: Request) -> str:
    """For a person."""
    lines = [f"{answer.file}: {plan.model} on {len(plan.devices)} devices, global batch {plan.global_batch}"]
    lines += [f"  assumed: {what}" for what in answer.assumed]
    if answer.price is not None:
        lines += price_lines(answer.price)
        lines += breakdown_lines(answer.price, replicas_of(plan, request.cluster))
    if answer.infeasible is not None:
        lines += misfit_lines(answer.infeasible)
    if answer.against is not None:
        lines += _against_lines(answer.against)
    elif answer.price is not None:
        lines.append("the plan's file predicts nothing")
    return "\n".join(lines)


def _against_lines(against: Against) -> Iterator[str]:
    seconds = format_seconds(against.predicted_s)
    if abs(against.ratio - 1) < OF_NOTE:
        yield f"as predicted in the plan's file: {seconds}"
    else:
        now, percent = format_seconds(against.now_s), 100 * (against.ratio - 1)
        yield f"predicted in the plan's file: {seconds}; now {now}, {percent:+.1f} %"
    if against.more_bytes:
        device = max(against.more_bytes, key=lambda d: abs(against.more_bytes[d]))
        more = against.more_bytes[device]
        sign = "+" if more > 0 else "-"
        yield f"  memory differs, most on {device}: {sign}{format_bytes(abs(more))}"
    if against.changed:
        yield f"  made from another {' and another '.join(against.changed)}"


def assumed_network(inter_GBps: float | None, latency_us: float | None) -> tuple[str, ...]:
    """What was given instead of the files' figures, in words."""
    given = ((inter_GBps, "GB/s"), (latency_us, "µs"))
    return tuple(f"{value:g} {unit} between nodes" for value, unit in given if value is not None)
