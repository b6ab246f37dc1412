"""One trace under every policy, and the oracle that they are held against."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from arachne_runtime.errors import NoFeasiblePlanError, UsageError
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds
from planner.request import Request

from .availability import Presence, moments, sets_of
from .costs import Costs
from .job import Job
from .ledger import Spent
from .options import Pricer
from .outcome import Outcome, Replayed
from .plans import EVALUATIONS, Known, PlanTable
from .policies import ORACLE, POLICIES, Policy
from .trace import Trace


def replay(
    trace: Trace,
    request: Request,
    costs: Costs,
    *,
    given: Plan | None = None,
    policies: Sequence[Policy] = POLICIES,
    evaluations: int = EVALUATIONS,
    on_progress: Callable[[float], None] | None = None,
) -> Replayed:
    """What each policy makes of the trace, the oracle first.

    ``request``: all nodes of the cluster. ``given``: a plan that runs first where nothing faster is known,
    and by the policy that never changes wherever its nodes are there. ``on_progress`` hears the part of
    plans that are found. Raises NoFeasiblePlanError where no plan fits the devices of any moment.
    """
    table = PlanTable.of(request, evaluations)
    known = _given(table, given)
    _search_all(table, trace, costs, on_progress)
    best = oracle(trace, table)
    if not best.samples:
        raise NoFeasiblePlanError(
            f"no plan fits the devices that {trace.name} has at any moment; give larger ones"
        )
    pricer = Pricer.of(table, costs)
    first = _first(trace, table, known)
    return Replayed(
        trace=trace.name,
        duration_s=trace.duration_s,
        model=request.model.name,
        global_batch=request.global_batch,
        most_devices=max(number for _, number in _devices(trace, table)),
        losses=sum(len(event.goes) for event in trace.events),
        joins=sum(len(event.comes) for event in trace.events),
        searches=table.searches,
        costs={name: getattr(costs, name) for name in Costs.__struct_fields__},
        devices=tuple(_devices(trace, table)),
        outcomes=(best, *(_outcome(trace, pricer, policy, first, best.samples) for policy in policies)),
    )


def _search_all(
    table: PlanTable, trace: Trace, costs: Costs, on_progress: Callable[[float], None] | None
) -> None:
    """Before any policy runs, so that all of them, and the oracle, know the same plans."""
    sets = list(dict.fromkeys(table.counts(nodes) for nodes in sets_of(trace, costs.start_s)))
    for number, counts in enumerate(sets):
        table.search(counts)
        if on_progress is not None:
            on_progress((number + 1) / len(sets))


def _given(table: PlanTable, plan: Plan | None) -> Known | None:
    if plan is None:
        return None
    if any(stage.zero for pipeline in plan.pipelines for stage in pipeline.stages):
        raise UsageError("a plan with ZeRO cannot lose devices in this version; simulate one whose zero is 0")
    return table.add(plan)


def _first(trace: Trace, table: PlanTable, given: Known | None) -> Known | None:
    """Of the policy that never changes: the given plan if its nodes are there, else the best at the start."""
    fitting = table.fitting(table.counts(trace.here))
    return given if given in fitting else next(iter(fitting), None)


def _outcome(trace: Trace, pricer: Pricer, policy: Policy, first: Known | None, of: float) -> Outcome:
    job = Job(trace, pricer, policy, first)
    job.run()
    return Outcome(
        policy=policy.name,
        samples=job.ledger.samples,
        of_oracle=job.ledger.samples / of,
        seconds={spent.value: seconds for spent, seconds in job.ledger.spent_s.items()},
        changes=tuple(job.changes),
        curve=tuple(job.ledger.curve),
    )


def oracle(trace: Trace, table: PlanTable) -> Outcome:
    """The best known plan for what is there, every moment; no policy has more, as none has other plans."""
    samples, training_s, curve = 0.0, 0.0, [(0.0, 0.0)]
    for (from_s, here), (to_s, _) in pairwise([*_present(trace), (trace.duration_s, frozenset())]):
        rate = table.best_rate(table.counts(here))
        samples += rate * (to_s - from_s)
        training_s += to_s - from_s if rate else 0.0
        curve.append((to_s, samples))
    waiting_s = trace.duration_s - training_s
    seconds = {spent.value: 0.0 for spent in Spent}
    seconds |= {Spent.TRAINING.value: training_s, Spent.WAITING.value: waiting_s}
    return Outcome(
        policy=ORACLE, samples=samples, of_oracle=1.0, seconds=seconds, changes=(), curve=tuple(curve)
    )


def _present(trace: Trace) -> Iterator[tuple[Seconds, frozenset[str]]]:
    now = Presence.at_start(trace)
    yield 0.0, frozenset(now.here)
    for moment in moments(trace, 0.0):
        now.turn(moment)
        yield moment.at_s, frozenset(now.here)


def _devices(trace: Trace, table: PlanTable) -> Iterator[tuple[Seconds, int]]:
    sizes = {node.name: node.entry.gpus for node in table.request.cluster.nodes}
    before = None
    for at_s, here in _present(trace):
        number = sum(sizes[name] for name in here)
        if number != before:
            yield at_s, number
        before = number
