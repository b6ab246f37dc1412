"""Peaks of devices whose actions are played, by hand; and how many tokens experts of a device may get."""

from dataclasses import replace

import pytest

from arachne_runtime.plan.plan import Replica, ScheduleKind, Stage
from arachne_runtime.plan.profile import WorkingBytes
from arachne_runtime.plan.schedule import Action, row_actions
from planner.cost.played import ActionBytes, played_peak
from planner.cost.tiling import IMBALANCE, WHOLE_EXPERTS, tiling_of

STAGE = ActionBytes(
    always=1000, gradients=200, fresh=0, kept=50, again=0, received=3, sent=7, first=40, later=30
)
HALVES = {"owed": 20.0, "owing": 10.0, "paying": 5.0, "first_paying": 60.0, "owed_gradients": 150.0}


def actions(text):
    return [Action.parse(word) for word in text.split()]


def test_one_micro_batch_is_kept_and_its_first_backward_comes_on_top():
    assert played_peak({0: STAGE}, actions("0F0 0B0")) == 1000 + 200 + 50 + 40


def test_a_gradient_without_a_buffer_is_there_once_it_was_made():
    alone = replace(STAGE, fresh=200, first=240, sent=0, received=0)
    assert played_peak({0: alone}, actions("0F0 0B0")) == 1000 + 50 + 240
    assert played_peak({0: alone}, actions("0F0 0F1 0B0 0B1")) == 1000 + 2 * 50 + 240
    later = replace(alone, later=500)
    assert played_peak({0: later}, actions("0F0 0B0 0F1 0B1")) == 1000 + 200 + 50 + 500


def test_the_next_input_is_asked_for_and_gradients_are_under_way():
    middle = actions("1F0 1F1 1B0 1F2 1B1 1B2")
    level, first, later = 1200 + 2 * 50, 40, 30
    by_hand = max(level + first + 3, level + later + 7 + 3, level - 50 + later + 2 * 3)
    assert played_peak({1: STAGE}, middle) == by_hand


def test_stages_of_one_device_hand_over_in_memory():
    both = {stage: STAGE.within() if stage else replace(STAGE, received=0).within() for stage in (0, 1)}
    found = played_peak(both, actions("0F0 1F0 1B0 0B0"))
    assert found == 2 * 1200 + 50 + 47 + 40  # the second's input is the first's output
    waiting = played_peak(both, actions("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"))
    assert waiting == 2 * 1200 + 2 * 50 + 2 * 47 + 40


def test_the_last_micro_batch_keeps_what_enters_its_pieces_until_they_go_down():
    plain, cut = {0: STAGE, 1: STAGE}, {0: replace(STAGE, between=1_000), 1: STAGE}
    alone = actions("0F0 1F0 1B0 0B0")
    assert played_peak(cut, alone) - played_peak(plain, alone) == 1_000
    not_last = [*alone, *actions("0F1")]
    assert played_peak(cut, not_last) == played_peak(plain, not_last)


def test_what_is_owed_stays_until_it_is_paid():
    halves = replace(STAGE, sent=0, received=0, **HALVES)
    paid = played_peak({0: halves}, actions("0F0 0I0 0W0"))
    assert paid == max(1200 + 50 + 10 + 50, 1200 + 20 + 60)
    twice = played_peak({0: halves}, actions("0F0 0I0 0F1 0I1 0W0 0W1"))
    assert twice == max(1200 + 50 + 10 + 50, 1200 + 50 + 20 + 10, 1200 + 2 * 20 + 60)


def test_more_owed_or_kept_never_makes_a_peak_smaller():
    for schedule, rows in ((ScheduleKind.ZERO_BUBBLE, 2), (ScheduleKind.INTERLEAVED, 1)):
        played = row_actions(schedule, 0, rows, 2, 4)
        stages = {action.stage: replace(STAGE, **HALVES) for action in played}
        base = played_peak(stages, played)
        for field in ("kept", "owed", "first", "later", "paying", "always", "sent"):
            more = {s: replace(of, **{field: getattr(of, field) + 100}) for s, of in stages.items()}
            assert played_peak(more, played) >= base, field


def stage(ep, etp, *replicas):
    made, index = [], 0
    for num_devices, share in replicas:
        made.append(Replica(devices=tuple(f"a:{index + i}" for i in range(num_devices)), share=share))
        index += num_devices
    return Stage(layers=(0, 3), expert_parallel=ep, expert_tensor=etp, replicas=tuple(made))


def test_a_small_share_among_large_ones_gets_their_tokens():
    spread = stage(2, 1, (1, 1), (1, 3))
    small, large = (tiling_of(spread, replica).load for replica in spread.replicas)
    assert small == pytest.approx(IMBALANCE * 2 / 1)
    assert large == pytest.approx(max(1.0, IMBALANCE * 2 / 3))
    assert tiling_of(stage(1, 1, (1, 1), (1, 3)), spread.replicas[0]) == WHOLE_EXPERTS


def test_parts_of_an_expert_get_every_token_of_all_its_devices():
    parts = stage(1, 2, (2, 4))
    tiling = tiling_of(parts, parts.replicas[0])
    assert (tiling.tile, tiling.tensor, tiling.load) == (2, 2, 1.0)
    assert tiling.kept(1000.0, routed=100.0, rows=2.0) == 1000 + 100 + 2 * 8 * 2 * 2
    assert tiling.kept(1000.0, routed=0.0, rows=0.0) == 1000
    row = WorkingBytes(backward=500, first_backward=700, forward=10)
    needed = tiling.working(row, routed=100.0, expert_gradients=100.0)
    assert needed.backward == 500 + 200
    assert needed.first_backward == 700 + 200 - 50  # gradients of its own parts only
    assert tiling.working(row, routed=0.0, expert_gradients=0.0) == row
