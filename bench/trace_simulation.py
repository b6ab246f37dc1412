"""Samples trained while devices go and come: ours against an oracle that changes for free, and baselines.

``python -m bench.trace_simulation``. Simulated by ``launch.simulation``, whose costs are measured elsewhere;
nothing trains. Every figure follows from files and seeds, so that a run on another machine gives the same.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.report import Options, Result, at_least, run_bench
from bench.trace_cases import CASES, Case
from launch.simulation.outcome import Outcome, Replayed
from launch.simulation.policies import OURS
from launch.simulation.replay import replay

EQUAL = 1 - 1e-9
"""Two policies that do the same differ by rounding at most."""


def measure(options: Options) -> Iterator[Result]:
    for case in CASES:
        if case.quick or not options.quick:
            replayed = replay(case.trace(case.request().cluster), case.request(), case.costs)
            print(_table(case, replayed), flush=True)
            _draw(case, replayed, options.out)
            yield from _results(case, replayed)


def _results(case: Case, replayed: Replayed) -> Iterator[Result]:
    """Of the oracle's samples, and against the best of the other policies."""
    _, ours, *others = replayed.outcomes
    assert ours.policy == OURS.name
    best = max(others, key=lambda outcome: outcome.samples)
    yield at_least(
        f"{case.name}-of-oracle",
        ours.of_oracle,
        "of the oracle's samples",
        case.bound,
        hours=replayed.duration_s / 3600,
        losses=replayed.losses,
        joins=replayed.joins,
        searches=replayed.searches,
        outcomes=[_figures(outcome) for outcome in replayed.outcomes],
    )
    ratio = ours.samples / best.samples
    yield at_least(f"{case.name}-of-best-baseline", ratio, "of its samples", EQUAL, baseline=best.policy)


def _figures(outcome: Outcome) -> dict[str, object]:
    return {
        "policy": outcome.policy,
        "samples": outcome.samples,
        "of_oracle": outcome.of_oracle,
        "changes": len(outcome.changes),
        "seconds": outcome.seconds,
    }


def _table(case: Case, replayed: Replayed) -> str:
    from launch.report.replay.text import ReplayAnswer, replay_text

    return replay_text(ReplayAnswer(plan="", file=case.name, out=None, replayed=replayed))


def _draw(case: Case, replayed: Replayed, out: Path | None) -> None:
    if out is not None:
        from launch.report.replay.picture import draw_replay

        draw_replay(replayed, out / f"trace_simulation-{case.name}.png")


if __name__ == "__main__":
    raise SystemExit(run_bench("trace_simulation", measure))
