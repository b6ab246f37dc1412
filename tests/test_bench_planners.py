"""The planners' benchmark: its cells, what it concludes from records, how it goes on where it stopped."""

from dataclasses import replace

import msgspec
import pytest

from arachne_runtime.plan.plan import ScheduleKind
from bench.grid import Cell, Nodes, full, quick
from bench.planners import judged, kept_in, measured
from bench.planners_records import Figures, Outcome, Planned, Searched, write
from planner.peers import PEERS

SMALL = Cell(group="small", model="llama-3.2-1b", nodes=(Nodes(device="A100-40", gpus=2, count=2),))


def record(ours: float | None, larger: float | None = None, **peers: float | None) -> Outcome:
    planned = Planned(
        cpu_s=1.0,
        evaluations=9,
        same_as=(),
        schedule=ScheduleKind.ONE_F_ONE_B,
        pipelines=1,
        idle=0,
        iteration_s=4.0,
        ideal_s=3.0,
        losses_s={"bubbles": 0.75, "synchronisation": 0.25},
        in_larger=ours,
    )
    return Outcome(
        cell=f"cell of {ours}",
        group="some",
        peers={p.name: Figures(samples_per_s=peers.get(p.name), seconds=0.1) for p in PEERS},
        found=Searched(samples_per_s=ours, seconds=1.0, planned=planned if ours else None),
        larger=Searched(samples_per_s=larger, seconds=1.0),
    )


def verdict(*outcomes: Outcome) -> dict[str, tuple[float, bool]]:
    return {result.name: (result.figure, result.holds) for result in judged(outcomes)}


def test_the_grid_is_the_issues():
    cells = list(full())
    assert len(cells) == len({cell.name for cell in cells}) == 32
    sizes = {
        group: sorted({sum(c.devices.values()) for c in cells if c.group == group})
        for group in dict.fromkeys(cell.group for cell in cells)
    }
    assert sizes == {
        "two types": [64, 160, 256],
        "three types": [128, 256, 512],
        "unlike nodes": [52, 104, 160, 256, 416],
        "four types": [48, 96, 192],
        "64B": [128, 256, 512],
        "experts": [64, 160, 256, 512],
    }
    assert {cell.name for cell in quick()} <= {cell.name for cell in cells}


def test_never_below_the_best_peer():
    found = verdict(record(12.0, 13.2, amp=8.0, metis=10.0), record(9.0, amp=6.0))
    assert found["planners-worst-ratio"] == (pytest.approx(1.2), True)
    assert found["planners-median-ratio"] == (pytest.approx(1.35), True)
    assert found["planners-median-gain-of-larger-space"] == (pytest.approx(1.05), True)
    assert found["planners-losses-add-up"][1]
    assert record(10.0, 9.0, amp=5.0).gain == 1.0  # our plan is in the larger space too
    below = verdict(record(12.0, metis=10.0), record(9.9, sailor=10.0))
    assert below["planners-worst-ratio"] == (pytest.approx(0.99), False)


def test_no_plan_where_a_peer_has_one_is_a_loss_and_no_plan_of_any_peer_is_none():
    lost = verdict(record(None, amp=1.0))
    assert not lost["planners-cells-with-a-plan"][1]
    assert not lost["planners-worst-ratio"][1]
    alone = verdict(record(5.0), record(5.0, amp=5.0))
    assert alone["planners-worst-ratio"] == (1.0, True)


def test_losses_that_do_not_add_up_are_told():
    outcome = record(5.0, amp=5.0)
    less = msgspec.structs.replace(outcome.found.planned, losses_s={"bubbles": 0.5, "synchronisation": 0.25})
    outcome = replace(outcome, found=msgspec.structs.replace(outcome.found, planned=less))
    assert not verdict(outcome)["planners-losses-add-up"][1]


def test_a_cell_goes_on_where_it_stopped(tmp_path):
    first = measured(SMALL, 1.0, tmp_path)
    file = tmp_path / f"{SMALL.name}.json"
    assert kept_in(file) == first
    assert first.ours.samples_per_s > 0
    assert Outcome.of(first).ratio >= 1 - 1e-9
    # half-layer blocks are dearer in the price by their own boundaries' activations at most
    assert first.ours.planned.in_larger == pytest.approx(first.ours.samples_per_s, rel=0.05)
    amp = Figures(samples_per_s=123.0, seconds=0.0)
    write(msgspec.structs.replace(first, ours=None, peers={**first.peers, "amp": amp}), file)
    again = measured(SMALL, 1.0, tmp_path)
    assert again.peers["amp"] == amp
    assert again.ours.samples_per_s > 0
    write(msgspec.structs.replace(again, code="another"), file)
    assert kept_in(file) is None
    file.write_text('{"cell": "of another form"}')
    assert kept_in(file) is None
