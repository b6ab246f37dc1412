"""The answer of a search as a document and as text: plan, price, rivals, runners-up, what if."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

import msgspec

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.alike import alike
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.plan import Plan, Stage
from arachne_runtime.plan.text import describe
from arachne_runtime.units import Seconds, format_seconds
from planner import Found
from planner.cost import Estimate
from planner.explain import Gain, Idle, Losses, PlanChange, change_of, idle_devices, losses_of
from planner.request import Request
from planner.search import Missing, what_is_missing

from .answers import Answer, PriceAnswer, price_answer, raw
from .tell_price import price_lines, why_slower


class SearchAnswer(Answer, frozen=True, kw_only=True):
    """What the search did."""

    evaluations: int
    seconds: Seconds
    proven: bool
    notes: tuple[str, ...]
    """What it had to do without."""


class OtherAnswer(Answer, frozen=True, kw_only=True):
    """A rival's plan or a runner-up."""

    name: str
    """Of the strategy, or the plan's shape in words."""
    iteration_s: Seconds | None
    """None where a rival has no plan."""
    ratio: float | None
    """Its iteration over the best one's."""
    reason: str
    """Why it loses, or why it has no plan."""
    losses: Losses | None
    plan: msgspec.Raw | None


class FoundAnswer(Answer, frozen=True, kw_only=True):
    """Everything that ``arachne plan --json`` prints."""

    file: str | None
    plan: msgspec.Raw
    price: PriceAnswer
    search: SearchAnswer
    rivals: tuple[OtherAnswer, ...]
    runners_up: tuple[OtherAnswer, ...]
    idle: tuple[Idle, ...]
    one_more: tuple[Gain, ...]
    change: PlanChange | None
    """From the running plan; None where none was given."""
    dtype_source: str | None
    """Why a model that is a config.json is trained in its dtype; None for any other model."""


def found_answer(
    plan: Plan,
    found: Found,
    request: Request,
    gains: tuple[Gain, ...],
    *,
    file: str | None,
    dtype_source: str | None,
) -> FoundAnswer:
    """All of it; ``plan``: the one that was found, signed, and written to ``file``."""
    price = price_answer(found.plan, found.estimate, request)
    others = [(r.plan, r.estimate) for r in found.rivals if r.plan and r.estimate]
    others += [(r.plan, r.estimate) for r in found.runners_up]
    return FoundAnswer(
        file=file,
        plan=raw(plan),
        price=price,
        search=SearchAnswer(
            evaluations=found.evaluations, seconds=found.seconds, proven=found.proven, notes=found.notes
        ),
        rivals=tuple(
            _other(r.name, r.plan, r.estimate, r.reason, price.losses, request) for r in found.rivals
        ),
        runners_up=tuple(_runners_up(found, price.losses, request)),
        idle=idle_devices(found.plan, found.estimate, others, request),
        one_more=gains,
        change=change_of(found, request),
        dtype_source=dtype_source,
    )


def _other(
    name: str, plan: Plan | None, estimate: Estimate | None, reason: str, best: Losses, request: Request
) -> OtherAnswer:
    if plan is None or estimate is None:
        return OtherAnswer(name=name, iteration_s=None, ratio=None, reason=reason, losses=None, plan=None)
    losses = losses_of(plan, estimate, request)
    return OtherAnswer(
        name=name,
        iteration_s=estimate.iteration_s,
        ratio=estimate.iteration_s / best.iteration_s,
        reason=why_slower(best, losses),
        losses=losses,
        plan=raw(plan),
    )


def _runners_up(found: Found, best: Losses, request: Request) -> Iterator[OtherAnswer]:
    """The fastest plan of each shape that is not the best one's."""
    told = {shape_of(found.plan, request.cluster)}
    for runner in found.runners_up:
        shape = shape_of(runner.plan, request.cluster)
        if shape not in told:
            told.add(shape)
            yield _other(shape, runner.plan, runner.estimate, "", best, request)


def shape_of(plan: Plan, cluster: Cluster) -> str:
    """``2 pipelines of 8 x 4 over 2 A100-40, 1 V100-16 (2 stages)``: replicas of each stage.

    The most alike ones first, so that plans whose pipelines stand in another order have one shape.
    """
    counts = Counter[str]()
    for group in alike(plan, cluster):
        pipeline = group.first
        stages = [
            f"{words} ({many} stages)" if (many := len(list(run))) > 1 else words
            for words, run in groupby(_stage_words(stage, cluster) for stage in pipeline.stages)
        ]
        work = f"{pipeline.micro_batches} x {pipeline.micro_batch}"
        counts[f"{work} over {', '.join(stages)}"] += len(group.pipelines)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{count} pipeline{'s' * (count > 1)} of {words}" for words, count in ordered)


def _stage_words(stage: Stage, cluster: Cluster) -> str:
    """``4 A100-40``, or with the degree ``4 A100-40 TP 2``."""
    kind = "+".join(dict.fromkeys(cluster.device_type(d) for d in stage.devices))
    degrees = sorted({len(replica.devices) for replica in stage.replicas})
    tensor = f" TP {'/'.join(map(str, degrees))}" if degrees != [1] else ""
    return f"{len(stage.replicas)} {kind}{tensor}"


class NothingAnswer(Answer, frozen=True, kw_only=True):
    """What ``arachne plan --json`` prints where there is no plan."""

    reason: str
    missing: Missing | None
    """None where plans fit, but none keeps the limits of the objective."""


def nothing_answer(error: NoFeasiblePlanError, request: Request) -> NothingAnswer:
    """What is missing, beside the error's text."""
    missing = what_is_missing(request)
    return NothingAnswer(reason=str(error), missing=missing if missing.over_bytes > 0 else None)


def found_text(answer: FoundAnswer, plan: Plan, cluster: Cluster) -> str:
    """For a person."""
    lines = [describe(plan, cluster), "", *price_lines(answer.price)]
    if answer.dtype_source is not None:
        lines.append(f"  dtype: {answer.price.dtype}, {answer.dtype_source}")
    if answer.change is not None:
        lines.append(f"  {answer.change}")
    lines += [f"  idle: {idle}" for idle in answer.idle]
    search = answer.search
    lines.append(
        f"search: {search.evaluations} plans priced in {format_seconds(search.seconds)}; {_verdict(search)}"
    )
    lines += [f"  {note}" for note in search.notes]
    lines += _table("rivals", answer.rivals)
    lines += _table("runners-up (micro-batches x samples, replicas of each stage)", answer.runners_up)
    lines += [f"{gain}" for gain in answer.one_more]
    if answer.file is not None:
        lines.append(f"written to {answer.file}")
    return "\n".join(lines)


def _verdict(search: SearchAnswer) -> str:
    if search.proven:
        return "no plan is faster (proven)"
    return "a faster plan is not ruled out: see --time-budget"


def _table(title: str, rows: tuple[OtherAnswer, ...]) -> Iterator[str]:
    if not rows:
        yield f"{title}: none"
        return
    yield f"{title}:"
    width = max(len(row.name) for row in rows)
    for row in rows:
        if row.iteration_s is None or row.ratio is None:
            yield f"  {row.name:<{width}}  {row.reason}"
        else:
            seconds = format_seconds(row.iteration_s)
            yield f"  {row.name:<{width}}  {seconds:>8}  {row.ratio:.3f}x  {row.reason}"
