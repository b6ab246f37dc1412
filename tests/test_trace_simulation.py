"""Simulated jobs against arithmetic by hand: what is trained, what is lost, which policy is best."""

from math import floor

import msgspec
import pytest

from launch.simulation.calm import REMEMBERED, Calm
from launch.simulation.costs import Costs
from launch.simulation.document import Drawn
from launch.simulation.drawn import drawn_trace
from launch.simulation.holders import holdings, state_bytes
from launch.simulation.pace import pace_of
from launch.simulation.plans import PlanTable
from launch.simulation.policies import POLICIES
from launch.simulation.replay import replay
from launch.simulation.trace import Event, Trace
from planner.search.migrate import change_seconds
from tests.traces import FREE, GLOBAL_BATCH, HOURS_S, outcomes, played, request, trace

GONE_S, BACK_S = 1003.0, 2000.0
LIVE = [policy.name for policy in POLICIES if policy.way == "live" and not policy.keeps_shape]


@pytest.fixture(scope="module")
def table() -> PlanTable:
    """With plans for four and for three nodes."""
    made = PlanTable.of(request())
    made.search((4,))
    made.search((3,))
    return made


def rate(table: PlanTable, nodes: int) -> float:
    return table.best_rate((nodes,))


def rate_of_three() -> float:
    made = PlanTable.of(request())
    made.search((3,))
    return rate(made, 3)


def changed(costs: Costs, **other: float) -> Costs:
    return msgspec.structs.replace(costs, **other)


# --- closed forms


def test_without_events_every_policy_trains_at_the_rate_of_the_best_plan(table):
    for outcome in played(trace()).values():
        assert outcome.samples == pytest.approx(rate(table, 4) * HOURS_S, rel=1e-12)
        assert outcome.seconds["training"] == pytest.approx(HOURS_S, rel=1e-12)
        assert outcome.changes == ()


def test_checkpoints_take_their_part_of_every_step(table):
    costs = changed(FREE, copy_s_per_GB=1.0)
    (fastest, *_) = table.fitting((4,))
    held = holdings(table.on(fastest, ["n-0", "n-1", "n-2", "n-3"]), table.request)
    pace = pace_of(
        fastest.step_s, held, 4, state_bytes(request()), costs,
        to_node_loss_s=4 * 3600.0, to_checkpoint_s=3600.0, snapshots=True,
    )  # fmt: skip
    copy_s = state_bytes(request()) / 4 / 1e9
    assert pace.checkpoint_s == pytest.approx(copy_s)
    assert pace.checkpoint_every == round((2 * copy_s * 3600.0) ** 0.5 / fastest.step_s)
    ours = played(trace(), costs)["ours"]
    assert ours.samples == pytest.approx(
        HOURS_S / (fastest.step_s + copy_s / pace.checkpoint_every) * GLOBAL_BATCH, rel=1e-12
    )


def test_one_loss_costs_the_step_that_was_under_way_and_the_stop(table):
    costs = changed(FREE, detect_s=2.0, plan_s=0.2, recover_s=0.35)
    found = played(trace(Event(at_s=GONE_S, goes=("n-3",))), costs)
    four, three = rate(table, 4), rate(table, 3)
    assert found["oracle"].samples == pytest.approx(four * GONE_S + three * (HOURS_S - GONE_S), rel=1e-12)
    step_s = GLOBAL_BATCH / four
    steps = floor(GONE_S / step_s)
    ours = found["ours"]
    (change,) = ours.changes
    moved_s = change.standstill_s - 2.55
    assert 0 <= moved_s <= state_bytes(request()) / 12.5e9  # no more than the whole model into one node
    again_s = GONE_S + change.standstill_s
    assert ours.samples == pytest.approx(steps * GLOBAL_BATCH + three * (HOURS_S - again_s), rel=1e-9)
    assert ours.seconds["redone"] == pytest.approx(GONE_S - steps * step_s)
    assert change.redone_steps == pytest.approx(GONE_S / step_s - steps)


def test_a_restart_goes_back_to_the_checkpoint_and_reads_it(table):
    costs = changed(FREE, detect_s=2.0, plan_s=0.2, restart_s=9.0, load_s_per_GB=1.0)
    restart = played(trace(Event(at_s=GONE_S, goes=("n-3",))), costs)["restart"]
    step_s = GLOBAL_BATCH / rate(table, 4)
    steps = floor(GONE_S / step_s)  # a checkpoint costs nothing here, and is taken at every step
    (change,) = restart.changes
    loaded_s = holdings(table.fitting((3,))[0].plan, table.request).most_bytes / 1e9
    assert change.standstill_s == pytest.approx(2.2 + 9.0 + loaded_s)
    expected = steps * GLOBAL_BATCH + rate(table, 3) * (HOURS_S - GONE_S - change.standstill_s)
    assert restart.samples == pytest.approx(expected, rel=1e-9)


def test_who_never_changes_waits_for_the_lost_device(table):
    costs = changed(FREE, detect_s=2.0, plan_s=0.5, start_s=10.0)
    events = Event(at_s=GONE_S, goes=("n-3",)), Event(at_s=BACK_S, comes=("n-3",))
    never = played(trace(*events), costs)["never change"]
    assert never.seconds["waiting"] == pytest.approx(BACK_S + 10.0 + 0.5 - (GONE_S + 2.5))
    (change,) = never.changes
    assert (change.source, change.nodes) == ("living holders", 4)
    assert change.at_s >= BACK_S + 10.5


def test_who_never_changes_waits_to_the_end(table):
    never = played(trace(Event(at_s=GONE_S, goes=("n-3",))))["never change"]
    assert never.samples == pytest.approx(floor(GONE_S * rate(table, 4) / GLOBAL_BATCH) * GLOBAL_BATCH)
    assert never.curve[-1] == (HOURS_S, never.samples)


def test_a_notice_saves_the_step_that_is_under_way():
    costs = changed(FREE, detect_s=2.0, plan_s=0.2, recover_s=0.35)
    told = Event(at_s=GONE_S, goes=("n-3",), notice_s=120.0)
    untold = played(trace(Event(at_s=GONE_S, goes=("n-3",))), costs)
    found = played(trace(told), costs)
    for name in (*LIVE, "restart"):
        assert untold[name].seconds["redone"] > 0
        assert found[name].seconds["redone"] == 0
        assert GONE_S - 120 < found[name].changes[0].at_s < GONE_S


def test_a_member_that_was_told_works_until_the_last_step_that_ends_in_time(table):
    costs = changed(FREE, pause_s=0.45)
    found = played(trace(Event(at_s=GONE_S, goes=("n-3",), notice_s=120.0)), costs)
    (change,) = found["ours"].changes
    step_s = GLOBAL_BATCH / rate(table, 4)
    assert step_s < 60  # so that several steps end within the notice
    stopped_s = change.at_s - change.standstill_s
    assert stopped_s == pytest.approx(floor((GONE_S - change.standstill_s) / step_s) * step_s)


def test_a_change_that_does_not_pay_at_first_pays_when_nothing_happens():
    """A joiner in a burst is left idle by ours while a stop of 60 s seems too long, and taken in later."""
    costs = changed(FREE, pause_s=60.0)
    burst = (
        Event(at_s=100.0 + 20 * n, goes=("n-3",)) if n % 2 else Event(at_s=100.0 + 20 * n, comes=("n-3",))
        for n in range(1, 20)
    )
    ours = played(trace(*burst, Event(at_s=480.0, comes=("n-3",))), costs)["ours"]
    last = ours.changes[-1]
    assert last.nodes == 4
    assert last.at_s - last.standstill_s > 480.0 + GLOBAL_BATCH / rate_of_three()


def test_a_joiner_is_used_when_it_is_ready_and_the_step_ends(table):
    costs = changed(FREE, start_s=7.0, plan_s=0.3)
    events = Event(at_s=10.0, goes=("n-3",)), Event(at_s=GONE_S, comes=("n-3",))
    always = played(trace(*events), costs)["always change"]
    change = always.changes[-1]
    step_s = GLOBAL_BATCH / rate(table, 3)
    begun_s = always.changes[0].at_s
    weighed_s = GONE_S + 7.3
    stopped_s = begun_s + step_s * -(-(weighed_s - begun_s) // step_s)
    assert change.at_s - change.standstill_s == pytest.approx(stopped_s)
    assert change.redone_steps == 0
    moved_s = state_bytes(request()) / 12.5e9  # it comes without any state
    assert change.standstill_s == pytest.approx(moved_s)


def test_a_node_that_comes_back_has_lost_its_state(table):
    """Of one name and another life: the change to it moves what a node that was never there needs."""
    first, second = (table.on(table.fitting((n,))[0], ["n-0", "n-1", "n-2", "n-3"][:n]) for n in (3, 4))
    fresh_s = change_seconds(first, second, table.request) - table.request.migration_pause_s
    events = Event(at_s=10.0, goes=("n-3",)), Event(at_s=10.5, comes=("n-3",))
    found = played(trace(*events), changed(FREE, start_s=30.0))
    assert found["always change"].changes[-1].standstill_s == pytest.approx(fresh_s)
    waited_s = 10.5 + 30.0 - 10.0  # since it went, until it has joined
    assert found["never change"].changes[-1].standstill_s == pytest.approx(waited_s + fresh_s)


# --- state that a loss takes along


def test_the_only_holder_s_state_comes_from_its_buddy_s_snapshot():
    """A pipeline of stages on a node each: every node is the only holder of its blocks."""
    big = request(5, "gpt-neo-2.7b", "V100-16")
    table = PlanTable.of(big)
    table.search((5,))
    (known, *_) = table.fitting((5,))
    held = holdings(known.plan, table.request)
    lost = held.nodes[1]
    assert lost in held.exposed
    assert not held.are_alive(set(held.nodes) - {lost})
    assert held.are_copied(set(held.nodes) - {lost})
    assert not held.are_copied(set(held.nodes) - {lost, held.nodes[2]})  # with its buddy
    assert held.are_copied(set(held.nodes) - {lost, held.nodes[3]})


def test_a_loss_of_the_only_holder_costs_the_steps_since_the_snapshot():
    big = request(9, "gpt-neo-2.7b", "V100-16")
    lost_s, costs = 9000.0, changed(Costs(), copy_s_per_GB=20.0)
    gone = trace(Event(at_s=lost_s, goes=("n-0",)), nodes=9, duration_s=20000.0)
    first, *_ = played(gone, costs, big)["ours"].changes
    table = PlanTable.of(big)
    table.search((9,))
    (known, *_) = table.fitting((9,))
    held = holdings(known.plan, table.request)
    assert "n-0" in held.exposed
    pace = pace_of(
        known.step_s, held, len(known.plan.devices), state_bytes(big), costs,
        to_node_loss_s=9 * 3600.0, to_checkpoint_s=3600.0, snapshots=True,
    )  # fmt: skip
    assert pace.snapshot_every is not None
    assert pace.snapshot_every > 1
    steps = lost_s / pace.whole_step_s
    assert first.source == "snapshot"
    assert first.redone_steps == pytest.approx(steps - steps // pace.snapshot_every * pace.snapshot_every)


def test_a_loss_of_snapshots_too_means_the_checkpoint():
    most = Event(at_s=9000.0, goes=("n-0", "n-1", "n-2", "n-3"))
    gone = trace(most, nodes=9, duration_s=20000.0)
    first, *_ = played(gone, Costs(), request(9, "gpt-neo-2.7b", "V100-16"))["ours"].changes
    assert first.source == "checkpoint"
    assert first.redone_steps > 0


# --- all policies on random traces


def random_trace(seed: int, notice_s: float = 0.0):
    drawn = Drawn(
        seed=seed, mean_to_loss_s=7200, mean_repair_s=900, mean_to_preemption_s=5000, mean_absence_s=600,
        notice_s=notice_s,
    )  # fmt: skip
    return drawn_trace("drawn", drawn, HOURS_S, trace().here)


@pytest.mark.parametrize("seed", range(4))
def test_seconds_add_up_and_nobody_beats_the_oracle(seed):
    followed = random_trace(seed, notice_s=30.0 * (seed % 3))
    found = replay(followed, request(), Costs())
    assert found.losses > 3
    for outcome in found.outcomes:
        assert sum(outcome.seconds.values()) == pytest.approx(HOURS_S, rel=1e-9)
        assert min(outcome.seconds.values()) >= -1e-6
        assert 0 < outcome.of_oracle <= 1
        assert [at_s for at_s, _ in outcome.curve] == sorted(at_s for at_s, _ in outcome.curve)
        assert outcome.curve[-1] == (pytest.approx(HOURS_S), pytest.approx(outcome.samples))
    assert outcomes(found)["ours"].samples >= outcomes(found)["never change"].samples


def test_the_same_trace_gives_the_same_figures():
    first, second = (msgspec.json.encode(replay(random_trace(1), request(), Costs())) for _ in range(2))
    assert first == second
    assert random_trace(1).events != random_trace(2).events


def test_more_nodes_never_have_a_slower_plan(table):
    rates = [rate(table, nodes) for nodes in range(1, 5)]
    assert rates == sorted(rates)
    assert rates[0] == 0  # nothing was searched for, and nothing known fits


def test_calm_is_the_mean_of_the_last_times_and_grows_while_nothing_happens():
    calm = Calm(600.0)
    assert calm.expected_s(0.0) == 600.0
    calm.see(100.0)
    assert calm.expected_s(100.0) == (600.0 + 100.0) / 2
    calm.see(100.0)  # of one moment
    calm.see(150.0)
    assert calm.expected_s(150.0) == (600.0 + 150.0) / 3
    assert calm.expected_s(450.0) == (600.0 + 150.0 + 300.0) / 3
    for number in range(REMEMBERED):
        calm.see(1000.0 + 10 * number)
    assert calm.expected_s(1070.0) == pytest.approx((600.0 + 850.0 + 7 * 10.0) / (1 + REMEMBERED))


def test_a_job_that_begins_without_devices_waits_for_them(table):
    nobody = Trace(
        name="test",
        duration_s=HOURS_S,
        here=(),
        events=(Event(at_s=500.0, comes=("n-0", "n-1", "n-2", "n-3")),),
    )
    found = played(nobody, changed(FREE, start_s=20.0, plan_s=0.5, pause_s=0.45))
    assert found["oracle"].samples == pytest.approx(rate(table, 4) * (HOURS_S - 500.0))
    ours = found["ours"]
    assert ours.seconds["waiting"] == pytest.approx(520.5)
    assert ours.changes[0].source == "nothing yet"
    assert ours.samples == pytest.approx(rate(table, 4) * (HOURS_S - 520.95))
